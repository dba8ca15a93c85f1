"""The window: counting, bounded outputs, compaction, the state that is repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop.agent.context import ContextBudget, Estimate, shorten
from endstop.agent.settings import ContextSettings
from endstop.agent.trajectory import Trajectory
from endstop.agent.turns import Turn
from endstop.protocol.toolcalls import ToolCall
from endstop.runtime.results import CompletionOutput, Usage

STATE = "STATE: task, checklist, last verification, tree"


def words(messages, tools):
    """One token a word."""
    return sum(len(json.dumps(message).split()) for message in messages)


def trajectory_of(path: Path, turns: int, size: int) -> Trajectory:
    """A run of `turns` turns, each with one call whose result has `size` words."""
    trajectory = Trajectory(path / "trajectory.json", "run")
    trajectory.say("system", "You work.", "system")
    trajectory.say("user", "The task.", "task")
    for number in range(turns):
        add_turn(trajectory, number, size)
    return trajectory


def add_turn(trajectory: Trajectory, number: int, size: int) -> None:
    call = ToolCall("read_file", json.dumps({"path": f"file{number}"}), "")
    output = CompletionOutput(
        0, "", [], "tool_calls", "tool_end", content=f"step {number}", tool_calls=(call,)
    )
    trajectory.add_turn(Turn(output, Usage(1, 1)))
    for open_call in trajectory.open_calls():
        trajectory.answer(open_call, "word " * size, True)


def budget(window, **settings) -> ContextBudget:
    return ContextBudget(window, words, 100, ContextSettings(**{"answer": 20, **settings}))


def test_without_a_window_nothing_is_left_out(tmp_path):
    trajectory = trajectory_of(tmp_path, 20, 100)
    assert budget(None).make_room(trajectory, lambda: STATE) == 100
    assert len(trajectory.prompt()) == 2 + 40


def test_the_state_is_repeated_once_when_the_window_is_nearly_full(tmp_path):
    trajectory = trajectory_of(tmp_path, 2, 150)
    used = words(trajectory.prompt(), [])
    full = budget(int(used / 0.72) + 60)
    assert full.window * 0.7 > used  # not yet
    assert full.make_room(trajectory, lambda: STATE) == 100
    assert STATE not in [message["content"] for message in trajectory.prompt()]
    add_turn(trajectory, 3, 40)
    assert full.make_room(trajectory, lambda: STATE) is not None
    assert full.make_room(trajectory, lambda: STATE) is not None
    contents = [message["content"] for message in trajectory.prompt()]
    assert contents.count(STATE) == 1
    assert contents[-1] == STATE


def test_compaction_keeps_task_state_and_the_newest_turns(tmp_path):
    trajectory = trajectory_of(tmp_path, 30, 40)
    small = budget(1000)
    room = small.make_room(trajectory, lambda: STATE)
    assert room == 100
    prompt = trajectory.prompt()
    assert words(prompt, []) <= 500
    assert [message["content"] for message in prompt[:2]] == ["You work.", "The task."]
    assert STATE in prompt[2]["content"]
    assert "read_file: ok" in prompt[2]["content"]
    assert prompt[-1]["content"].startswith("word")
    assert prompt[-2]["tool_calls"][0]["function"]["arguments"] == '{"path": "file29"}'
    # Whole turns only: every result has its call.
    calls = {call["id"] for message in prompt for call in message.get("tool_calls", ())}
    assert {message["tool_call_id"] for message in prompt if message["role"] == "tool"} == calls
    # The record keeps everything.
    assert sum(message["role"] == "assistant" for message in trajectory.messages) == 30


def test_compaction_may_happen_again_and_the_old_note_goes(tmp_path):
    trajectory = trajectory_of(tmp_path, 30, 40)
    small = budget(1000)
    for number in range(30, 80):
        assert small.make_room(trajectory, lambda: STATE) is not None
        add_turn(trajectory, number, 40)
    assert small.make_room(trajectory, lambda: STATE) is not None
    notes = [m for m in trajectory.prompt() if STATE in m["content"]]
    assert 1 <= len(notes) <= 2  # the note, and the state once more when the window filled again
    assert "earlier ones are not listed" in notes[0]["content"]
    assert small.count(trajectory.prompt(), []) + 20 <= 1000


def test_a_window_that_the_task_alone_fills_leaves_no_room(tmp_path):
    trajectory = Trajectory(tmp_path / "t.json", "run")
    trajectory.say("user", "word " * 300, "task")
    assert budget(256).make_room(trajectory, lambda: STATE) is None
    trajectory = trajectory_of(tmp_path, 3, 80)
    assert budget(256).make_room(trajectory, lambda: "word " * 300) is None


def test_outputs_are_bounded_by_the_window():
    assert budget(None).output_bytes == 16_000
    assert budget(8192).output_bytes == 3072
    assert budget(1_000_000).output_bytes == 16_000


@given(st.text(max_size=400), st.integers(min_value=10, max_value=300))
def test_shortened_texts_keep_both_ends(text, limit):
    short = shorten(text, limit)
    if len(text.encode()) <= limit:
        assert short == text
    else:
        head, mark, tail = short.partition("\n[... ")
        assert mark
        tail = tail.partition(" ...]\n")[2]
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len(head.encode()) + len(tail.encode()) <= limit


def test_an_estimate_learns_from_usage():
    estimate = Estimate()
    messages = [{"role": "user", "content": "x" * 4000}]
    before = estimate(messages, [])
    assert before > 1000
    estimate.learn(messages, [], 1000)
    assert estimate(messages, []) == pytest.approx(1000, abs=2)
    estimate.learn(messages, [], 0)  # a server that reports nothing
    assert estimate(messages, []) == pytest.approx(1000, abs=2)
