"""The record of a run: it is the prompt, it survives, it holds no secret."""

from __future__ import annotations

import json
import os
import stat
from importlib.resources import files

import jsonschema
import pytest

from endstop.agent.decisions import End, Refusal
from endstop.agent.trajectory import Trajectory, decision_meta
from endstop.agent.turns import Turn
from endstop.protocol.errors import EndstopError
from endstop.protocol.toolcalls import ToolCall
from endstop.runtime.results import CompletionOutput, Usage

SCHEMA = json.loads(files("endstop.agent").joinpath("trajectory.schema.json").read_text())


def turn(content="", calls=(), **fields):
    kind = "tool_end" if calls else "turn_end"
    reason = "tool_calls" if calls else "stop"
    made = tuple(ToolCall(name, json.dumps(arguments), "") for name, arguments in calls)
    output = CompletionOutput(0, content, [], reason, kind, content=content, tool_calls=made, **fields)
    return Turn(output, Usage(10, 5), 0.25)


@pytest.fixture
def trajectory(tmp_path):
    made = Trajectory(tmp_path / "trajectory.json", "run-1", "/work", "2026-01-01T00:00:00+00:00")
    made.task = {"task": "fix it"}
    made.say("system", "You work.", "system")
    made.say("user", "Fix it.", "task")
    return made


def test_the_saved_messages_are_the_prompt(trajectory):
    trajectory.add_turn(turn("I look.", [("look", {"at": 1}), ("look", {"at": 2})], reasoning="hm"))
    first, second = trajectory.open_calls()
    trajectory.answer(first, "one", True, tree="t1")
    assert trajectory.open_calls() == [second]
    trajectory.answer(second, "two", False, tree="t2")
    assert trajectory.open_calls() == []
    trajectory.save()
    again = Trajectory.load(trajectory.path)
    assert again.prompt() == trajectory.prompt()
    assert again.prompt()[2] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": f"c0000100{n}",
                "type": "function",
                "function": {"name": "look", "arguments": f'{{"at": {n + 1}}}'},
            }
            for n in (0, 1)
        ],
    }
    assert [message["content"] for message in again.prompt()[3:]] == ["one", "two"]
    assert (again.steps, again.tree) == (1, "t2")


def test_the_file_fits_its_schema(trajectory):
    trajectory.add_turn(turn("", [("look", {})]))
    refusal = decision_meta(Refusal("VERIFY_FAILED", "no", ("a::b",)))
    trajectory.answer(trajectory.open_calls()[0], "no", False, tree="t1", decision=refusal, seconds=0.1)
    trajectory.add_turn(turn("Done."))
    end = decision_meta(End("stopped_without_submit", "it stopped", ("VERIFY_FAILED",)))
    trajectory.say("user", "bye", "notice", decision=end)
    trajectory.leave_out(trajectory.messages[2:4], "left out")
    trajectory.outcome = {"outcome": "limit:steps", "message": "", "details": [], "exit_code": 20}
    trajectory.save()
    jsonschema.validate(json.loads(trajectory.path.read_text()), SCHEMA)
    assert trajectory.decisions() == [(1, "VERIFY_FAILED"), (2, "stopped_without_submit")]


def test_what_is_left_out_stays_in_the_record(trajectory):
    for number in range(3):
        trajectory.add_turn(turn(f"step {number}"))
    trajectory.leave_out(trajectory.messages[2:4], "NOTE")
    assert [message["content"] for message in trajectory.prompt()] == [
        "You work.",
        "Fix it.",
        "NOTE",
        "step 2",
    ]
    assert [m["content"] for m in trajectory.messages] == [
        "You work.",
        "Fix it.",
        "step 0",
        "step 1",
        "NOTE",
        "step 2",
    ]
    assert trajectory.steps == 3


def test_a_secret_is_written_nowhere(trajectory):
    trajectory.secrets = ("hunter2",)
    trajectory.add_turn(turn("the key is hunter2", [("bash", {"command": "echo hunter2"})]))
    trajectory.answer(trajectory.open_calls()[0], "hunter2\n", True, details={"hunter2": ["xhunter2x"]})
    trajectory.outcome = {"outcome": "error", "message": "no route to hunter2", "details": []}
    trajectory.settings = {"sandbox": {"environment": {"A": "hunter2"}}}
    trajectory.save()
    assert "hunter2" not in trajectory.path.read_text()
    # Nor is it sent again: what is saved is what is sent.
    assert Trajectory.load(trajectory.path).prompt() == trajectory.prompt()


def test_saving_is_whole_and_private(trajectory):
    trajectory.save()
    before = trajectory.path.read_text()
    assert stat.S_IMODE(os.stat(trajectory.path).st_mode) == 0o600
    trajectory.seconds = float("nan")
    with pytest.raises(ValueError, match="JSON compliant"):
        trajectory.save()
    assert trajectory.path.read_text() == before


def test_text_that_no_file_can_hold_is_replaced(trajectory):
    trajectory.add_turn(turn("half \ud800 of one"))
    trajectory.save()
    assert Trajectory.load(trajectory.path).turns[0]["content"] == "half ? of one"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot be read as a trajectory"),
        ("[]", "is not a trajectory"),
        ('{"format": "endstop.trajectory", "version": 99}', "of version 99; this endstop reads 1"),
        ('{"format": "endstop.trajectory", "version": 1}', "a broken trajectory"),
    ],
)
def test_other_files_are_refused_in_one_sentence(tmp_path, text, says):
    path = tmp_path / "trajectory.json"
    path.write_text(text)
    with pytest.raises(EndstopError, match=says):
        Trajectory.load(tmp_path)


def test_a_watcher_sees_every_message(trajectory):
    seen = []
    trajectory.watch = lambda kind, data: seen.append((kind, data["content"]))
    trajectory.add_turn(turn("Hello."))
    trajectory.say("user", "Go on.", "notice")
    assert seen == [("message", "Hello."), ("message", "Go on.")]
