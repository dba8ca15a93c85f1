"""Sessions of somebody else's agent: rounds, budgets, the evidence file, what is written to disk."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from endstop.agent.gate import Verifies
from endstop.agent.guard import Guard, Session, summary
from endstop.agent.hooks import Answer, HookEvent
from endstop.agent.task import Task
from endstop.agent.tree import Trees
from endstop.protocol.errors import EndstopError
from endstop.sandbox.settings import SandboxSettings

from .scripted_verification import ScriptedVerification

START = HookEvent("start", "SessionStart", "s")
PROMPT = HookEvent("prompt", "UserPromptSubmit", "s")
STOP = HookEvent("stop", "Stop", "s")
VERIFY = {"command": "pytest -q", "verifier": "pytest"}


@dataclass(frozen=True)
class ScriptedGuard(Guard):
    """The file `verdict` of the workspace says what the check finds; `seconds` is how long it takes."""

    seconds: float = 0.0

    def _verification(self, session: Session, task: Task, trees: Trees) -> Verifies | None:
        if session.verify is None:
            return None
        time.sleep(self.seconds)
        return ScriptedVerification(trees)


class Place:
    """A workspace, its guard, and an agent that edits and stops."""

    def __init__(self, place: Path, headless: bool = False, seconds: float = 0.0, **task: Any) -> None:
        self.root = (place / "workspace").resolve()
        self.state = place / "state"
        (self.root / "tests").mkdir(parents=True)
        self.write("verdict", "VERIFY_FAILED")
        self.write("tests/test_calc.py", "def test_add(): ...\n")
        self.task = Task(**{"task": "make the tests pass", "verify": VERIFY, **task})
        self.guard = ScriptedGuard(self.root, self.state, SandboxSettings(), None, headless, seconds)

    def load(self) -> tuple[Task, str]:
        return self.task, "task.yaml"

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)

    def ask(self, **request: Any) -> None:
        self.write(".endstop/evidence.json", json.dumps(request))

    def start(self, event: HookEvent = START, **more: Any) -> str:
        return self.guard.start(event, self.load, **more)

    def stop(self, event: HookEvent = STOP) -> Answer:
        return self.guard.check(event, self.load)

    @property
    def session(self) -> dict[str, Any]:
        return summary(self.guard.sessions()[0])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    place.start()
    return place


def test_a_failing_check_sends_the_agent_back_and_a_passing_one_lets_it_go(place: Place) -> None:
    answer = place.stop()
    assert (answer.kind, answer.outcome) == ("go_on", None)
    assert answer.message.startswith("Not accepted (1 of 5): VERIFY_FAILED.")
    assert "assert -1 == 5" in answer.message
    assert "to stop is to submit" in answer.message
    place.write("verdict", "PASS")
    answer = place.stop()
    assert (answer.kind, answer.outcome) == ("stop", "verified")
    assert answer.message.startswith("endstop gate: verified. `pytest -q` passes")
    assert place.session["codes"] == ["VERIFY_FAILED", "END verified"]


def test_a_diligent_agent_is_let_go_at_the_budget_and_told_apart_from_a_success(place: Place) -> None:
    answers = []
    for number in range(12):
        place.write("calc.py", str(number))
        answers.append(place.stop())
    kinds = [(answer.kind, answer.outcome) for answer in answers]
    assert kinds[:4] == [("go_on", None)] * 4
    assert kinds[4:] == [("stop", "refusal_budget")] * 8
    assert "(VERIFY_FAILED, tests/test_calc.py::test_add). The agent was let go" in answers[4].message
    assert "ended as refusal_budget; its work is not verified. No stop is judged" in answers[5].message
    assert place.session["refusals"] == "5 of 5"
    assert place.session["gate_runs"] == 10


def test_an_idle_agent_is_let_go_after_two(place: Place) -> None:
    assert place.stop().kind == "go_on"
    answer = place.stop()
    assert (answer.kind, answer.outcome) == ("stop", "refused_no_progress")
    assert "(NO_CHANGE_SINCE_REFUSAL). The agent was let go; its work is not verified." in answer.message
    # The check passing later changes nothing: the session has ended, until a start.
    place.write("verdict", "PASS")
    assert place.stop().outcome == "refused_no_progress"


def test_only_a_start_gives_a_session_that_has_ended_a_new_budget(place: Place) -> None:
    place.stop()
    assert place.start(PROMPT) == ""
    assert place.session["refusals"] == "1 of 5"
    place.stop()
    assert place.start(HookEvent("start", "SessionStart", "s", compacted=True)) != ""
    assert place.stop().outcome == "refused_no_progress"
    assert "A gate judges every stop" in place.start(PROMPT)
    assert (place.session["round"], place.session["refusals"], place.session["outcome"]) == (
        2,
        "0 of 5",
        None,
    )
    place.write("verdict", "PASS")
    assert place.stop().outcome == "verified"


def test_verified_files_are_not_checked_again_and_other_files_are(place: Place) -> None:
    place.write("verdict", "PASS")
    place.stop()
    runs = place.session["gate_runs"]
    answer = place.stop()
    assert (answer.outcome, answer.message) == (
        "verified",
        "endstop gate: verified, nothing has changed since.",
    )
    assert place.session["gate_runs"] == runs
    place.write("verdict", "VERIFY_FAILED")
    assert place.stop().kind == "go_on"
    # The budget is still the same one.
    for number in range(4):
        place.write("calc.py", str(number))
        answer = place.stop()
    assert answer.outcome == "refusal_budget"


def test_changed_tests_are_found_with_the_baseline_of_the_start(place: Place) -> None:
    place.write("verdict", "PASS")
    place.write("tests/test_calc.py", "def test_add(): assert True\n")
    # A resumed session takes no new baseline.
    place.start()
    answer = place.stop()
    assert answer.kind == "go_on"
    assert "PROTECTED_CHANGED" in answer.message
    place.start(anew=True)
    assert place.stop().outcome == "verified"
    assert "baseline_anew" in place.session["history"][-2]


def test_without_a_start_nothing_is_ever_verified(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.stop().kind == "go_on"
    place.write("verdict", "PASS")
    answer = place.stop()
    assert (answer.kind, answer.outcome) == ("stop", "unverified")
    assert "the session had no start" in answer.message
    assert place.session["outcome"] == "unverified"
    assert place.session["codes"][-1] == "END unverified"
    assert "nothing can be verified" in place.session["notes"][0]
    # A prompt gives a new round, and still no baseline of before.
    place.start(PROMPT)
    assert place.stop().outcome == "unverified"


def test_without_a_check_of_the_project_a_stop_is_unverified(tmp_path: Path) -> None:
    place = Place(tmp_path, verify={})
    for file in (place.root / "tests").iterdir():
        file.unlink()
    (place.root / "tests").rmdir()
    told = place.start()
    assert "No check of the project was found" in told
    answer = place.stop()
    assert (answer.kind, answer.outcome) == ("stop", "unverified")
    assert "no verifier" in answer.message


def test_evidence_stands_in_a_file_that_is_no_part_of_the_tree(tmp_path: Path) -> None:
    place = Place(tmp_path, checklist=[{"id": "add", "text": "add() adds"}])
    assert "- add: add() adds" in place.start()
    place.write("verdict", "PASS")
    answer = place.stop()
    assert answer.message.startswith("Not accepted (1 of 5): CHECKLIST_INCOMPLETE.")
    assert '{"summary": "...", "checklist": {"add": ' in answer.message
    place.ask(summary="fixed", checklist={"add": "test_add"})
    assert place.stop().outcome == "verified"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "evidence.json is not used: Invalid JSON"),
        (
            '{"checklist": ["add"]}',
            "evidence.json is not used: checklist: Input should be an object.",
        ),
        ('{"tests": "pass"}', "evidence.json is not used: tests: Extra inputs are not permitted."),
        ("x" * 70_000, "evidence.json is not used: it is larger than 65536 bytes."),
    ],
)
def test_a_broken_evidence_file_is_named_and_gives_no_evidence(
    tmp_path: Path, content: str, why: str
) -> None:
    place = Place(tmp_path, checklist=[{"id": "add"}])
    place.start()
    place.write("verdict", "PASS")
    place.write(".endstop/evidence.json", content)
    message = place.stop().message
    assert message.startswith("Not accepted (1 of 5): CHECKLIST_INCOMPLETE.")
    assert why in message


def test_an_evidence_file_that_is_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    place = Place(tmp_path, checklist=[{"id": "add"}])
    place.start()
    secret = tmp_path / "secret.json"
    secret.write_text('{"checklist": {"add": "test_add"}}')
    (place.root / ".endstop").mkdir()
    (place.root / ".endstop/evidence.json").symlink_to(secret)
    assert "evidence.json is not used: " in place.stop().message
    (place.root / ".endstop/evidence.json").unlink()
    os.mkfifo(place.root / ".endstop/evidence.json")
    place.write("calc.py", "1")
    assert "evidence.json is not used: it is no regular file." in place.stop().message


def test_a_give_up_in_the_file(place: Place) -> None:
    place.ask(give_up={"reason": "no network", "evidence": "curl says so"})
    answer = place.stop()
    assert answer.kind == "go_on"
    assert "BLOCKED_TRY_ONCE_MORE" in answer.message
    answer = place.stop()
    assert (answer.kind, answer.outcome) == ("stop", "blocked")
    assert "no network. Observed: curl says so" in answer.message
    # It ended a round; left in the file it is not heard again.
    place.start(PROMPT)
    place.write("verdict", "PASS")
    assert place.stop().outcome == "verified"


def test_a_question_in_the_file_goes_to_the_user_once(place: Place) -> None:
    place.ask(ask_user="ints only?")
    answer = place.stop()
    assert (answer.kind, answer.outcome) == ("stop", "needs_user")
    assert "ints only?" in answer.message
    assert place.stop().kind == "go_on"


def test_a_question_with_nobody_there(tmp_path: Path) -> None:
    place = Place(tmp_path, headless=True)
    place.start()
    place.ask(ask_user="ints only?")
    answers = [place.stop() for _ in range(3)]
    assert [answer.kind for answer in answers] == ["go_on", "go_on", "stop"]
    assert "NO_USER_AVAILABLE" in answers[0].message
    assert answers[2].outcome == "needs_user"


def test_the_task_of_the_start_holds(place: Place) -> None:
    place.stop()
    place.task = Task(task="make the tests pass", verify={"command": "true"})
    answer = place.stop()
    assert answer.outcome == "refused_no_progress"
    assert answer.message.endswith("task.yaml is not as it was at the start; what was recorded then holds.")


def test_stops_that_are_not_judged_leave_no_trace(place: Place) -> None:
    before = place.session
    assert place.stop(HookEvent("other", "SubagentStop", "s")) == Answer("silent")
    assert place.stop(HookEvent("stop", "stop", "s", not_judged="the turn was aborted")) == Answer("silent")
    assert place.session == before


def test_sessions_and_workspaces_are_apart(tmp_path: Path) -> None:
    one, other = Place(tmp_path / "one"), Place(tmp_path / "other")
    other.guard = ScriptedGuard(other.root, one.state, SandboxSettings())
    one.start()
    other.start()
    one.stop()
    assert one.stop().kind == "stop"
    assert other.stop().kind == "go_on"
    assert one.stop(HookEvent("stop", "Stop", "second")).kind == "go_on"
    assert len(one.guard.sessions()) == 2
    assert len(other.guard.sessions()) == 1


def test_the_state_is_private_and_outside_of_the_workspace(place: Place) -> None:
    (directory,) = place.state.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    inside = ScriptedGuard(place.root, place.root / ".state", SandboxSettings())
    with pytest.raises(EndstopError, match="must not lie in the workspace"):
        inside.check(STOP, place.load)
    assert not (place.root / ".state").exists()


def test_a_session_of_another_version_is_refused_in_a_sentence(place: Place) -> None:
    (file,) = place.state.glob("*/session-*.json")
    file.write_text(json.dumps({"version": 99}))
    with pytest.raises(EndstopError, match="another version of endstop; remove it"):
        place.stop()


@pytest.mark.parametrize(
    ("value", "keys", "says"),
    [
        (None, [], "all of it: "),
        (5, ["task"], "task: "),
        ({}, ["task"], "task: Field required"),
        (5, ["heard"], "heard: "),
        ("x", ["round"], "round: "),
        ("x", ["gate", "refusals"], "the saved state of the gate is damaged: refusals: "),
        ({"t": 5}, ["gate", "findings"], "the saved state of the gate is damaged: findings.t: "),
        ({"command": 5}, ["verify"], "command: "),
    ],
)
def test_a_session_that_was_tampered_with_is_an_error_and_no_verdict(
    place: Place, value: Any, keys: list[str], says: str
) -> None:
    (file,) = place.state.glob("*/session-*.json")
    data = json.loads(file.read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    if keys:
        inner[keys[-1]] = value
    file.write_text(json.dumps(data if keys else value))
    with pytest.raises(EndstopError) as error:
        place.stop()
    assert str(error.value).startswith(f"{file} cannot be used: {says}")
    assert str(error.value).endswith("; remove it to begin anew")


def test_a_session_that_is_no_file_is_not_waited_for(place: Place) -> None:
    (file,) = place.state.glob("*/session-*.json")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(EndstopError, match="it is no regular file; remove it"):
        place.stop()
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(EndstopError, match=r"cannot be used: .*; remove it"):
        place.stop()
    file.unlink()
    file.write_text("[" * 100_000)
    with pytest.raises(EndstopError, match=r"cannot be used: .*; remove it"):
        place.stop()


def test_the_state_of_a_session_is_bounded(place: Place) -> None:
    """Many starts and stops: a file of a few kilobytes."""
    for _ in range(300):
        place.guard.start(START, place.load, anew=True)
        for _ in range(4):
            place.stop()
    (file,) = place.state.glob("*/session-*.json")
    assert file.stat().st_size < 40_000
    assert len(json.loads(file.read_text())["history"]) == 100


def in_threads(work: Callable[[], Answer], count: int) -> list[Answer]:
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_a_hook_that_is_configured_twice_judges_one_stop_once(tmp_path: Path) -> None:
    place = Place(tmp_path, seconds=0.5)
    place.start()
    answers = in_threads(place.stop, 3)
    assert answers[0].kind == "go_on"
    assert answers == answers[:1] * 3
    assert place.session["refusals"] == "1 of 5"


@pytest.mark.parametrize("sent_back", range(3))
def test_any_saved_state_goes_on_as_it_was(tmp_path: Path, sent_back: int) -> None:
    """Every stop is a process of its own, so a session is nothing but its file."""
    place = Place(tmp_path)
    place.start()
    for number in range(sent_back):
        place.write("calc.py", str(number))
        assert place.stop().kind == "go_on"
    place.guard = ScriptedGuard(place.root, place.state, SandboxSettings())
    place.write("calc.py", "last")
    assert f"Not accepted ({sent_back + 1} of 5)" in place.stop().message
