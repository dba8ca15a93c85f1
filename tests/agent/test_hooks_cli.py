"""The stop hook as a process: JSON in, JSON out, with the real check of a real project."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="hooks and their sandbox are for Linux and macOS")

SOURCE = Path(__file__).parents[2] / "src"
RIGHT, WRONG = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"
TESTS = (
    "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n\n\ndef test_zero():\n"
    "    assert add(0, 0) == 0\n"
)
TASK = """\
task: make the tests pass without changing them
verify: {command: python -m pytest -q, timeout: 60}
"""


class Project:
    """A small project, and an agent's harness that calls the hooks in it."""

    def __init__(self, place: Path) -> None:
        self.root = place / "project"
        (self.root / "tests").mkdir(parents=True)
        self.state = place / "state"
        self.write("calc.py", WRONG)
        self.write("tests/test_calc.py", TESTS)
        self.write(
            "conftest.py", "import pathlib, sys\n\nsys.path.insert(0, str(pathlib.Path(__file__).parent))\n"
        )
        self.write("task.yaml", TASK)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ENDSTOP_")}
        self.environment = {
            **kept,
            "PYTHONPATH": str(SOURCE),
            "VIRTUAL_ENV": sys.prefix,
            "XDG_STATE_HOME": str(self.state),
            "NO_COLOR": "1",
        }

    def write(self, path: str, text: str) -> None:
        (self.root / path).write_text(text)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "endstop.cli", "gate", *arguments]

    def run(self, *arguments: str, event: Any = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            input="" if event is None else json.dumps(event),
            capture_output=True,
            text=True,
            cwd=self.root,
            env=self.environment,
            timeout=300,
        )

    def hook(self, name: str, **more: Any) -> Any:
        """Call Claude Code's hook of that name; gives what it printed as JSON."""
        event = {
            "session_id": "abc",
            "transcript_path": str(self.root.parent / "abc.jsonl"),
            "cwd": str(self.root),
            "permission_mode": "acceptEdits",
            "hook_event_name": name,
            **more,
        }
        verb = "check" if name == "Stop" else "start"
        done = self.run(verb, "--format", "claude-code", event=event)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout) if done.stdout else None

    def status(self) -> Any:
        return json.loads(self.run("status", "--json").stdout)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_claude_codes_hooks_from_a_red_start_to_verified(project: Project) -> None:
    told = project.hook("SessionStart", source="startup")["hookSpecificOutput"]
    assert told["hookEventName"] == "SessionStart"
    assert "`python -m pytest -q`, run by the gate in a clean copy" in told["additionalContext"]

    answer = project.hook("Stop", stop_hook_active=False, last_assistant_message="All tests pass. Done!")
    assert answer["decision"] == "block"
    for part in ("Not accepted (1 of 5): VERIFY_FAILED.", "assert -1 == 5", "Exit 1.", "4 refusals left"):
        assert part in answer["reason"]

    project.write("calc.py", RIGHT)
    answer = project.hook("Stop", stop_hook_active=True)
    assert list(answer) == ["systemMessage"]
    assert answer["systemMessage"].startswith("endstop gate: verified. `python -m pytest -q` passes")

    (session,) = project.status()
    assert (session["session"], session["outcome"], session["codes"]) == (
        "abc",
        "verified",
        ["VERIFY_FAILED", "END verified"],
    )
    # Nothing was left in the project.
    assert sorted(path.name for path in project.root.iterdir()) == [
        "calc.py",
        "conftest.py",
        "task.yaml",
        "tests",
    ]


@pytest.mark.slow
def test_a_hook_that_is_never_satisfied_lets_go_and_does_not_call_it_a_success(project: Project) -> None:
    project.hook("SessionStart")
    assert project.hook("Stop")["decision"] == "block"
    for _ in range(2):
        answer = project.hook("Stop", stop_hook_active=True)
        assert list(answer) == ["systemMessage"]
        assert "refused_no_progress" in answer["systemMessage"]
        assert "not verified" in answer["systemMessage"]


@pytest.mark.slow
def test_forged_tests_are_blocked_before_anything_runs(project: Project) -> None:
    project.hook("UserPromptSubmit", prompt="fix it")
    project.write("tests/test_calc.py", "def test_add():\n    pass\n\n\ndef test_zero():\n    pass\n")
    answer = project.hook("Stop")
    assert "PROTECTED_CHANGED. Protected paths were changed: tests/test_calc.py." in answer["reason"]


@pytest.mark.slow
def test_plain_and_its_exit_codes(project: Project) -> None:
    done = project.run("start")
    assert (done.returncode, done.stderr) == (0, "")
    done = project.run("check")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Not accepted (1 of 5): VERIFY_FAILED.")
    assert project.run("check").returncode == 14
    project.run("start")
    project.write("calc.py", RIGHT)
    done = project.run("check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "endstop gate: verified." in done.stdout
    shown = project.run("status").stdout
    assert shown.startswith("default: verified, round 2\n")


def test_a_toolchain_is_shown_by_a_file_of_settings(project: Project, tmp_path: Path) -> None:
    tool = tmp_path / "tools" / "bin" / "has-plus"
    tool.parent.mkdir(parents=True)
    tool.write_text('#!/bin/sh\ngrep -q "$SIGN" calc.py\n')
    tool.chmod(0o755)
    project.write("task.yaml", "task: x\nverify: {command: has-plus, verifier: command}\n")
    config = tmp_path / "settings.json"
    sandbox = {
        "read_only": [str(tool.parent)],
        "path": [str(tool.parent)],
        "environment": {"SIGN": "+"},
        "virtualenv": "nowhere",
    }
    config.write_text(json.dumps({"sandbox": sandbox}))
    given = ("--config", str(config), "--virtualenv", "none")
    project.run("start", *given)
    assert "VERIFY_FAILED" in project.run("check", *given).stderr
    project.write("calc.py", RIGHT)
    assert project.run("check", *given).returncode == 0
    # Without the flag the file's own virtualenv counts, relative to the workspace.
    failed = project.run("check", "--config", str(config))
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr == f"endstop: {project.root / 'nowhere'} is no virtualenv: it has no bin.\n"
    config.write_text(json.dumps({"sandbox": {"pathh": []}}))
    assert "unknown key sandbox.pathh" in project.run("check", *given).stderr


def test_errors_exit_1_so_that_no_harness_takes_them_for_a_block(project: Project) -> None:
    (project.root / "task.yaml").unlink()
    event = {"session_id": "abc", "hook_event_name": "Stop", "cwd": str(project.root)}
    done = project.run("check", "--format", "codex", event=event)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"endstop: there is no task file {project.root / 'task.yaml'}.\n"
    for arguments in (("chek",), ("check", "--fromat", "codex"), ("check", "--format", "vim"), ("--bad",)):
        assert project.run(*arguments, event=event).returncode == 1
    done = subprocess.run(
        project.command("check", "--format", "codex"),
        input="not json",
        capture_output=True,
        text=True,
        cwd=project.root,
        env=project.environment,
    )
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.slow
def test_a_check_that_runs_no_test_on_the_baseline_is_an_error_and_not_a_pass(project: Project) -> None:
    project.write("task.yaml", "task: x\nverify: {command: python -m pytest -q --collect-only}\n")
    done = project.run("start")
    assert done.returncode == 1
    assert "before any change" in done.stderr
    assert project.run("start", "--no-baseline").returncode == 0
    assert project.run("check").returncode == 1


@pytest.mark.slow
def test_a_check_that_is_killed_leaves_a_session_that_goes_on(project: Project) -> None:
    project.write("slow.py", "")
    project.write("tests/test_slow.py", "import slow\n\n\ndef test_slow():\n    pass\n")
    project.run("start")
    project.run("check")
    project.write("slow.py", "import time\n\ntime.sleep(60)\n")
    check = subprocess.Popen(
        project.command("check"), cwd=project.root, env=project.environment, stdin=subprocess.DEVNULL
    )
    while not project.status()[0]["notes"]:
        assert check.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    check.send_signal(signal.SIGKILL)
    check.wait()
    (session,) = project.status()
    assert session["notes"] == ["A check is under way, or was killed."]
    assert session["refusals"] == "1 of 5"
    project.write("slow.py", "")
    project.write("calc.py", RIGHT)
    done = project.run("check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "The check before this one did not finish" in done.stdout


@pytest.mark.slow
def test_two_hooks_at_once_give_one_answer(project: Project) -> None:
    project.run("start")
    checks = [
        subprocess.Popen(
            project.command("check"),
            cwd=project.root,
            env=project.environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [check.communicate(timeout=300)[1] for check in checks]
    assert [check.returncode for check in checks] == [2, 2]
    assert said[0] == said[1]
    assert project.status()[0]["refusals"] == "1 of 5"


def test_status_takes_only_what_it_needs(project: Project) -> None:
    for option in ("--task", "--sandbox", "--virtualenv", "--format"):
        done = project.run("status", option, "x")
        assert (done.returncode, done.stdout) == (1, "")
        assert "No such option" in done.stderr
    assert project.run("status", "--workspace", ".", "--session", "x", "--json").stdout == "[]\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[" * 100_000,
        '{"hook_event_name": "Stop"}',
        '{"hook_event_name": "Stop", "session_id": ["a"]}',
        '{"hook_event_name": "Stop", "session_id": "a", "cwd": "/no/such/place"}',
        '{"hook_event_name": "Stop", "session_id": "a", "cwd": "a\\u0000b"}',
    ],
)
@pytest.mark.parametrize("form", ["claude-code", "codex", "cursor"])
def test_events_that_are_none_are_one_sentence_and_exit_1(project: Project, form: str, text: str) -> None:
    text = text.replace("session_id", "conversation_id") if form == "cursor" else text
    done = subprocess.run(
        project.command("check", "--format", form),
        input=text,
        capture_output=True,
        text=True,
        cwd=project.root,
        env=project.environment,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("endstop: ")
    assert done.stderr.count("\n") == 1
    assert "Unexpected" not in done.stderr


def test_a_session_of_any_name(project: Project) -> None:
    """Half of a surrogate pair, paths, control characters: a name is only a name."""
    project.write("calc.py", RIGHT)
    for name in ("\ud800", "../../x\x00y", "\x1b[31m", "é" * 10_000):
        assert "gate judges" in json.dumps(project.hook("SessionStart", session_id=name, source="startup"))
    assert len(project.status()) == 4
    shown = project.run("status").stdout
    assert "\x1b" not in shown


def test_a_runner_that_is_not_there_is_an_error_that_says_what_to_do(project: Project) -> None:
    project.environment.pop("VIRTUAL_ENV")
    done = project.run("start")
    assert done.returncode == 1
    assert "activate the project's, or name it" in done.stderr
    assert project.run("start", "--virtualenv", sys.prefix).returncode == 0
