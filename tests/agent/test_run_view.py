"""What a person reads while a run goes on, at its end, and where it cannot begin."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from endstop.cli.app import app

from . import small_repository as small

SPACES = {"edit_file": {"path": "new.py", "old": "", "new": "if x:\n        y = 1\n"}}


@pytest.fixture
def run(tmp_path):
    project = small.make(tmp_path / "shelf")

    def call(*turns: object, **options: str) -> Result:
        given = {
            "--workspace": str(project),
            "--state": str(tmp_path / "state"),
            "--model": small.script(tmp_path / "script.json", turns),
            "--verify": "grep -q sum src/shelf/stock.py",
            "-c": "sandbox.virtualenv=none",
            **options,
        }
        return CliRunner().invoke(
            app, ["agent", "fix it", *(part for pair in given.items() for part in pair)]
        )

    return call


def test_how_it_goes_and_ends(run, tmp_path):
    result = run({"calls": [SPACES]}, {"calls": [small.FIX]}, small.submit(), **{"--steps": "2"})
    assert result.exit_code == 20
    told = result.stderr.splitlines()
    assert told[0] == f"record: {tmp_path / 'state'}"
    assert told[2:4] == [
        "check: grep -q sum src/shelf/stock.py (read as command)",
        next(line for line in told if line.startswith("before any change: exit code 1, ")),
    ]
    # The spaces of what is written are not taken away.
    assert '"new": "if x:\\n        y = 1\\n"' in result.stderr
    assert told[-1] == f"endstop: go on with: endstop agent run --resume {tmp_path / 'state'} --steps N"
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines()[1:])
    assert result.stdout.startswith("limit:steps: The limit of 2 steps is reached.\n")
    assert rows["changed"] == "new.py, src/shelf/stock.py"
    assert rows["steps"].endswith(", 0 refusals")
    again = CliRunner().invoke(
        app, ["agent", "run", "--resume", str(tmp_path / "state"), "--steps", "3", "--quiet"]
    )
    assert (again.exit_code, again.stderr) == (0, "")
    assert "(1 run, " in again.stdout


def test_a_runner_that_is_not_there(run):
    result = run(small.submit(), **{"--verify": "no-such-runner -q", "-c": "task.verify.verifier=pytest"})
    assert result.exit_code == 1
    said = result.stderr.splitlines()[-1]
    assert "Its output ends: " in said
    assert "no-such-runner: command not found" in said
    assert "activate the project's, or name it (`-c sandbox.virtualenv=DIR`;" in said


def test_a_program_that_commands_cannot_see(run, tmp_path, monkeypatch):
    runner = tmp_path / "tools" / "bin" / "runner"
    runner.parent.mkdir(parents=True)
    runner.write_text("#!/bin/sh\nexit 0\n")
    runner.chmod(0o755)
    monkeypatch.setenv("PATH", str(runner.parent), prepend=":")
    result = run(small.submit(), **{"--verify": "runner", "-c": "task.verify.verifier=pytest"})
    assert f". runner is in {runner.parent}: name this in sandbox.path, " in result.stderr.splitlines()[-1]
