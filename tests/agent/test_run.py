"""Whole runs on a small real project: the model claims first and fixes later; the command line; resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from endstop.agent.replay import replay
from endstop.agent.result import AgentResult
from endstop.agent.run import resume_agent, run_agent
from endstop.agent.settings import (
    AgentSettings,
    ModelSettings,
    SandboxSection,
    ToolSettings,
    make_settings,
)
from endstop.agent.trajectory import Trajectory
from endstop.agent.workplace import secret_values
from endstop.outcomes import EXIT_CODES
from endstop.protocol.errors import EndstopError

from . import small_repository as small

SOURCE = Path(__file__).parents[2] / "src"
SCHEMA = json.loads(files("endstop.agent").joinpath("trajectory.schema.json").read_text())
# A check that takes no time, where the test is about something else.
QUICK = {"command": "grep -q 'sum(self' src/shelf/stock.py", "verifier": "command"}
READ = {"calls": [{"read_file": {"path": "src/shelf/stock.py"}}]}
FIX = {"text": "The total must add up counts.", "calls": [small.FIX]}


@pytest.fixture
def project(tmp_path):
    return small.make(tmp_path / "shelf")


@pytest.fixture
def settings(tmp_path):
    def make(turns, task=None, **more) -> AgentSettings:
        given = {"task": "Make the tests pass without changing them.", "verify": {"command": small.VERIFY}}
        return make_settings(
            {
                "task": {**given, **(task or {})},
                "model": {"name": small.script(tmp_path / "script.json", turns)},
                "sandbox": {"virtualenv": small.virtualenv()},
                "state": str(tmp_path / "state"),
                **more,
            }
        )

    return make


def record(result: AgentResult) -> dict:
    data = json.loads(result.trajectory.read_text())
    jsonschema.validate(data, SCHEMA)
    return data


def test_a_run_that_claims_and_then_fixes(project, settings):
    result = run_agent(settings([small.CLAIM, small.submit(), READ, FIX, small.submit()]), project)
    assert (result.outcome, result.exit_code, result.steps) == ("verified", 0, 5)
    data = record(result)
    codes = [
        message["meta"]["decision"]["code"] for message in data["messages"] if "decision" in message["meta"]
    ]
    assert codes == ["NO_SUBMIT", "VERIFY_FAILED", "verified"]
    assert result.changed == ("src/shelf/stock.py",)
    assert "+        return sum(self.items.values())" in result.diff
    assert "sum(self.items.values())" in (project / "src/shelf/stock.py").read_text()
    # Nothing else has come into the project, and its history is as it was.
    status = subprocess.run(["git", "status", "--short"], cwd=project, capture_output=True, text=True)
    assert status.stdout == " M src/shelf/stock.py\n"
    assert data["outcome"]["best_verified_tree"] == result.tree
    assert (result.trajectory.parent / "changes.diff").read_text() == result.diff
    system = data["messages"][0]["content"]
    for named in ("Linux", "bash", "edit_file", small.VERIFY, "no change needed", "/workspace"):
        assert named in system or (named == "/workspace" and "bubblewrap" not in result.sandbox)


def test_a_replay_comes_to_the_same_decisions(project, settings):
    result = run_agent(settings([small.CLAIM, small.submit(), READ, FIX, small.submit()]), project)
    again = replay(result.trajectory)
    assert again.same, again.difference
    assert again.replayed == ((1, "NO_SUBMIT"), (2, "VERIFY_FAILED"), (5, "verified"))
    # The workspace of the run was not touched, and a record that says otherwise is found out.
    data = json.loads(result.trajectory.read_text())
    data["messages"] = [m for m in data["messages"] if m.get("name") != "edit_file" and not _edits(m)]
    result.trajectory.write_text(json.dumps(data))
    other = replay(result.trajectory)
    assert not other.same
    assert "NO_CHANGE_SINCE_REFUSAL" in other.difference or "refused_no_progress" in other.difference


def _edits(message) -> bool:
    calls = message.get("tool_calls") or ()
    return any(call["function"]["name"] == "edit_file" for call in calls)


def test_nothing_to_do_is_a_success(project, settings):
    (project / "src/shelf/stock.py").write_text(
        (project / "src/shelf/stock.py").read_text().replace("len(self.items)", "sum(self.items.values())")
    )
    result = run_agent(settings([small.submit()]), project)
    assert (result.outcome, result.warnings, result.diff) == ("verified", ("EMPTY_DIFF",), "")


def test_limits_keep_the_best_tree(project, settings):
    """Verified but refused for its checklist, broken later: the limit names the tree that was good."""
    checklist = {
        "checklist": [{"id": "docs", "text": "CHANGES.md says what changed"}],
        "bounds": {"steps": 4},
    }
    broken = {"calls": [{"edit_file": {"path": "src/shelf/stock.py", "old": "sum(", "new": "max("}}]}
    turns = [FIX, small.submit(evidence={"docs": "CHANGES.md"}), broken, READ]
    result = run_agent(settings(turns, task=checklist), project)
    assert (result.outcome, result.exit_code) == ("limit:steps", EXIT_CODES["limit:steps"])
    assert result.codes[0] == "CHECKLIST_EVIDENCE"
    assert result.best_verified_tree not in (None, result.tree)
    assert "+        return sum(" in result.best_diff
    assert "+        return max(" in result.diff
    assert (result.trajectory.parent / "best.diff").read_text() == result.best_diff


def test_a_project_without_a_check_ends_at_best_unverified(tmp_path, settings):
    place = tmp_path / "notes"
    place.mkdir()
    (place / "notes.txt").write_text("nothing to run here\n")
    result = run_agent(settings([small.submit()], task={"verify": {}}), place)
    assert (result.outcome, result.exit_code, result.verify) == ("unverified", 10, "")


def test_the_check_is_found_and_shown(project, settings):
    seen = []
    result = run_agent(
        settings([FIX, small.submit()], task={"verify": {}}),
        project,
        watch=lambda kind, data: seen.append((kind, data)),
    )
    assert result.outcome == "verified"
    assert result.verify == "python -m pytest"
    shown = dict(seen)["verify"]
    assert (shown.command, shown.verifier) == ("python -m pytest", "pytest")


def test_a_check_that_runs_no_test_is_refused_at_the_start(project, settings):
    with pytest.raises(EndstopError, match="test"):
        run_agent(
            settings([small.submit()], task={"verify": {"command": "python -m pytest --collect-only"}}),
            project,
        )


def test_a_secret_enters_neither_sandbox_nor_record(project, settings, monkeypatch):
    monkeypatch.setenv("A_KEY", "hunter2")
    show = {"calls": [{"bash": {"command": "env; echo A_KEY is $A_KEY; echo hunter2"}}]}
    result = run_agent(settings([show, FIX, small.submit()], {"verify": QUICK}, secrets=["A_KEY"]), project)
    assert result.outcome == "verified"
    text = result.trajectory.read_text()
    assert "hunter2" not in text
    assert "A_KEY is\\n" in text
    with pytest.raises(EndstopError, match="A_KEY is a secret"):
        run_agent(
            settings([show], sandbox={"pass_env": ["A_KEY"]}, state=str(project.parent / "two")), project
        )


def test_secrets_in_the_settings_themselves_are_asked_for_again(project, settings):
    headers = {"Authorization": "Bearer hunter2", "X-Plain": "plain"}
    given = settings([READ])
    values = secret_values(
        given.model_copy(
            update={
                "tools": ToolSettings(mcp={"one": {"url": "http://localhost:1/mcp", "headers": headers}}),
                "model": ModelSettings(name="m", base_url="http://me:hunter3@localhost:1/v1"),
                "sandbox": SandboxSection(environment={"A_TOKEN": "hunter4", "LANG": "C.UTF-8"}),
            }
        )
    )
    assert set(values) == {"Bearer hunter2", "hunter3", "hunter4"}
    allowed = {"environment": {"A_TOKEN": "hunter4"}, "allow_secrets": ["A_TOKEN"], "virtualenv": "none"}
    show = {"calls": [{"bash": {"command": "echo $A_TOKEN"}}]}
    quick = settings([show, show], sandbox=allowed, unverified=True, task={"bounds": {"steps": 1}})
    result = run_agent(quick, project)
    assert "hunter4" not in result.trajectory.read_text()
    assert "[redacted]\\n[exit code 0" in result.trajectory.read_text()
    more = {"task": {"bounds": {"steps": 2}}}
    with pytest.raises(EndstopError, match=r"-c sandbox\.environment\.A_TOKEN="):
        resume_agent(result.trajectory.parent, changes=more)
    again = {**more, "sandbox": {"environment": {"A_TOKEN": "hunter4"}}}
    assert resume_agent(result.trajectory.parent, changes=again).steps == 2


def test_a_run_is_started_once_and_ended_once(project, settings, tmp_path):
    given = settings([FIX, small.submit()], {"verify": QUICK})
    run_agent(given, project)
    with pytest.raises(EndstopError, match="already holds a run"):
        run_agent(given, project)
    with pytest.raises(EndstopError, match="has ended as verified, and that is final"):
        resume_agent(tmp_path / "state")
    with pytest.raises(EndstopError, match="must not lie in the workspace"):
        run_agent(given.model_copy(update={"state": project / ".state"}), project)


def test_a_limit_can_be_raised(project, settings):
    task = {"bounds": {"steps": 1}, "verify": QUICK}
    result = run_agent(settings([READ, FIX, small.submit()], task), project)
    assert result.outcome == "limit:steps"
    later = resume_agent(result.trajectory.parent, changes={"task": {"bounds": {"steps": 9}}})
    assert (later.outcome, later.steps) == ("verified", 3)
    data = record(later)
    assert [one["after"] for one in data["resumed"]] == ["limit:steps"]


def test_a_question_waits_for_its_answer(project, settings):
    ask = {"calls": [{"ask_user": {"question": "pieces or kinds?"}}]}
    result = run_agent(settings([ask, FIX, small.submit()], {"verify": QUICK}, interactive=True), project)
    assert (result.outcome, result.exit_code) == ("needs_user", 12)
    with pytest.raises(EndstopError, match="pieces or kinds"):
        resume_agent(result.trajectory.parent)
    later = resume_agent(result.trajectory.parent, answer="pieces")
    assert later.outcome == "verified"
    answers = [message["content"] for message in record(later)["messages"] if message["role"] == "tool"]
    assert answers[0] == "The user says: pieces"


def test_files_that_changed_meanwhile_are_named(project, settings):
    task = {"bounds": {"steps": 1}, "verify": QUICK}
    result = run_agent(settings([READ, FIX, small.submit()], task), project)
    (project / "NOTES.md").write_text("somebody was here\n")
    later = resume_agent(result.trajectory.parent, changes={"task": {"bounds": {"steps": 9}}})
    assert later.outcome == "verified"
    told = [m["content"] for m in record(later)["messages"] if m["meta"].get("kind") == "resumed"]
    assert "NOTES.md" in told[0]


def test_a_prompt_of_ones_own(project, settings, tmp_path):
    mine = tmp_path / "mine.jinja"
    mine.write_text("Shell {{ shell }} in {{ directory }}. Check: {{ verify }}.")
    quick = {"unverified": True, "task": {"bounds": {"steps": 1}}}
    result = run_agent(settings([READ], prompts={"system": str(mine)}, **quick), project)
    assert record(result)["messages"][0]["content"].startswith("Shell bash in ")
    mine.write_text("{{ nothing_of_the_kind }}")
    with pytest.raises(EndstopError, match=r"mine\.jinja: 'nothing_of_the_kind' is undefined; it may use"):
        run_agent(
            settings([READ], prompts={"system": str(mine)}, state=str(tmp_path / "two"), **quick), project
        )


@pytest.mark.parametrize(
    "text",
    [
        "- docs: write a README\n- add\n",
        "docs: write a README\nadd: add\n",
        "- {id: docs, text: write a README}\n- {id: add, text: add}\n",
        "# To do\n\n- [ ] docs: write a README\n- [x] add\n",
    ],
)
def test_checklists_in_several_forms(tmp_path, text):
    from endstop.cli.agent_run import read_checklist

    path = tmp_path / "checklist"
    path.write_text(text)
    items = [(item["id"], item["text"]) for item in read_checklist(path)]
    assert items == [("docs", "write a README"), ("add", "add")]


# The command line, in processes of its own.


def command(project: Path, state: Path, *arguments: str, quick: bool = False) -> list[str]:
    check = ["-c", "task.verify.verifier=command", "--verify", QUICK["command"]]
    return [
        *(sys.executable, "-m", "endstop.cli", "agent", *arguments),
        *("--workspace", str(project), "--state", str(state)),
        *(check if quick else ("--verify", small.VERIFY)),
        *("-c", f"sandbox.virtualenv={small.virtualenv()}"),
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=300)


def test_the_command_line_shows_steps_and_ends_with_its_code(project, tmp_path):
    model = small.script(tmp_path / "script.json", [small.CLAIM, FIX, small.submit()])
    done = run(command(project, tmp_path / "state", "make the tests pass", "--model", model))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("verified: ")
    assert "src/shelf/stock.py" in done.stdout
    for shown in ("step 1", "NO_SUBMIT", "edit_file", "check: python -m pytest -q"):
        assert shown in done.stderr
    again = run([sys.executable, "-m", "endstop.cli", "agent", "run", "--replay", str(tmp_path / "state")])
    assert (again.returncode, again.stdout) == (0, "the same: 2 decisions, verified\n"), again.stderr


@pytest.mark.parametrize(
    ("turns", "outcome"),
    [
        ([small.CLAIM] * 3, "stopped_without_submit"),
        ([small.submit(), small.submit()], "refused_no_progress"),
        ([{"text": "I have", "stop_kind": "max_tokens"}] * 3, "repeated_format_error"),
        ([READ] * 4, "stuck"),
        (
            [{"calls": [{"give_up": {"reason": "no", "evidence": "two tests contradict", "hard": True}}]}],
            "blocked",
        ),
        ([READ], "error"),
    ],
)
def test_each_end_has_its_exit_code(project, tmp_path, turns, outcome):
    model = small.script(tmp_path / "script.json", turns)
    done = run([*command(project, tmp_path / "state", "x", "--model", model, quick=True), "--json", "-q"])
    assert json.loads(done.stdout)["outcome"] == outcome, done.stderr
    assert done.returncode == EXIT_CODES[outcome]


def test_wrong_settings_are_one_sentence(project, tmp_path):
    model = small.script(tmp_path / "script.json", [READ])
    done = run([*command(project, tmp_path / "state", "x", "--model", model), "-c", "task.bounds.step=3"])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "endstop: the settings: unknown key task.bounds.step; the nearest is task.bounds.steps.\n"
    )
    assert run([sys.executable, "-m", "endstop.cli", "agent", "--model", model]).returncode == 2


SLOW_COMMAND = {"calls": [{"bash": {"command": "echo begun > begun.txt; sleep 77.7; echo done > done.txt"}}]}


def started(project: Path, state: Path) -> bool:
    """Whether the slow command runs: in the workspace, or in the copy that root's commands get."""
    return any((place / "begun.txt").exists() for place in (project, state / "workspace"))


def sleeping() -> bool:
    return "sleep 77.7" in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_run_goes_on(project, tmp_path, number):
    state = tmp_path / "state"
    model = small.script(tmp_path / "script.json", [small.CLAIM, SLOW_COMMAND, FIX, small.submit()])
    argv = command(project, state, "make the tests pass", "--model", model, quick=number != signal.SIGKILL)
    process = subprocess.Popen(
        argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 60
        while not started(project, state):
            assert time.monotonic() < until, process.stderr.read()
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(30)
    finally:
        process.kill()
        out, err = process.communicate()
    saved = Trajectory.load(state)
    if number == signal.SIGKILL:
        assert saved.outcome is None
    else:
        assert process.returncode == EXIT_CODES["interrupted"], err
        assert out.startswith("interrupted: ")
        assert "--resume" in err
        assert saved.outcome["outcome"] == "interrupted"
    assert [call["function"]["name"] for call in saved.open_calls()] == ["bash"]
    until = time.monotonic() + 10
    while sleeping():  # its commands die with it
        assert time.monotonic() < until
        time.sleep(0.1)
    resumed = [sys.executable, "-m", "endstop.cli", "agent", "run", "--resume", str(state), "--json", "-q"]
    done = run(resumed)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["outcome"], result["steps"]) == ("verified", 4)
    data = json.loads((state / "trajectory.json").read_text())
    jsonschema.validate(data, SCHEMA)
    interrupted = [m for m in data["messages"] if m["meta"].get("interrupted")]
    assert [message["role"] for message in interrupted] == ["assistant", "tool"]
    assert interrupted[1]["content"].startswith("INTERRUPTED")
    assert not (project / "done.txt").exists()
    # The step that was interrupted names what it left: its file, where it worked in the workspace itself.
    left = interrupted[0]["meta"]["interrupted"]["changed"]
    assert left == (["begun.txt"] if (project / "begun.txt").exists() else [])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_runs_killed_again_and_again_come_to_their_end(project, tmp_path):
    """kill -9 at any moment: the record is whole, and the run goes on from it."""
    state = tmp_path / "state"
    round_of_work = [READ, FIX, {"calls": [{"bash": {"command": "python -m pytest -q | tail -3"}}]}]
    turns = [small.CLAIM, *round_of_work, *[FIX, small.submit()] * 4]
    model = small.script(tmp_path / "script.json", turns, "repeat")
    argv = command(project, state, "make the tests pass", "--model", model, "-q")
    seconds = 0.6
    for _ in range(25):
        process = subprocess.Popen(
            argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        out, err = process.communicate()
        if process.returncode != -signal.SIGKILL:
            break
        seconds *= 1.3
        if (state / "trajectory.json").exists():
            jsonschema.validate(json.loads((state / "trajectory.json").read_text()), SCHEMA)
            argv = [sys.executable, "-m", "endstop.cli", "agent", "run", "--resume", str(state), "-q"]
    assert process.returncode == 0, (out, err)
    assert Trajectory.load(state).outcome["outcome"] == "verified"
