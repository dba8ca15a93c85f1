"""Dependencies are told apart from what they were at the start, and a virtualenv in the workspace is one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from endstop.agent.dependencies import Dependencies
from endstop.agent.run import run_agent
from endstop.agent.settings import make_settings
from endstop.agent.task import Task
from endstop.protocol.errors import EndstopError

from . import small_repository as small


def installed(root: Path) -> Path:
    place = root / "vendor"
    (place / "lib" / "__pycache__").mkdir(parents=True)
    (place / "lib" / "a.py").write_text("1")
    (place / "lib" / "b.py").write_text("2")
    return place


def test_what_changed(tmp_path: Path) -> None:
    place = installed(tmp_path)
    watched = Dependencies({"web/vendor": place}, tmp_path / "state" / "dependencies.json")
    assert watched.changed() == []
    watched.remember()
    assert watched.changed() == []
    # What tools write that only use it does not count.
    (place / "lib" / "__pycache__" / "a.pyc").write_text("x")
    (place / ".cache").mkdir()
    (place / ".cache" / "x").write_text("x")
    assert watched.changed() == []
    # Neither size nor time of a file has to change.
    state = (place / "lib" / "a.py").stat()
    (place / "lib" / "a.py").write_text("9")
    os.utime(place / "lib" / "a.py", ns=(state.st_atime_ns, state.st_mtime_ns))
    (place / "new.py").symlink_to("lib/b.py")
    (place / "lib" / "b.py").unlink()
    told = ["web/vendor/lib/a.py", "web/vendor/lib/b.py", "web/vendor/new.py"]
    assert watched.changed() == told
    # A run that is resumed compares with the start.
    again = Dependencies({"web/vendor": place}, tmp_path / "state" / "dependencies.json")
    again.remember()
    assert again.changed() == told


def test_a_place_that_moves_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    place = installed(tmp_path / "web")
    watched = Dependencies({"web/vendor": place}, tmp_path / "dependencies.json")
    watched.remember()
    (tmp_path / "web").rename(tmp_path / "old")
    assert watched.changed() == ["web/vendor", "web/vendor/lib/a.py", "web/vendor/lib/b.py"]
    (tmp_path / "old").rename(tmp_path / "web")
    assert watched.changed() == []


@pytest.mark.parametrize("kept", ["", "{", "[]", '{"a": 1}'])
def test_damaged_stamps_are_no_stamps(kept: str, tmp_path: Path) -> None:
    (tmp_path / "dependencies.json").write_text(kept)
    watched = Dependencies({"vendor": installed(tmp_path)}, tmp_path / "dependencies.json")
    with pytest.raises(EndstopError, match="is damaged; start the run anew"):
        watched.remember()


def test_a_dependency_that_is_one_file_or_none(tmp_path: Path) -> None:
    (tmp_path / "lib.py").write_text("1")
    watched = Dependencies({"lib.py": tmp_path / "lib.py"}, tmp_path / "dependencies.json")
    watched.remember()
    assert watched.changed() == []
    (tmp_path / "lib.py").write_text("22")
    assert watched.changed() == ["lib.py"]
    none = Dependencies({}, tmp_path / "none.json")
    none.remember()
    assert (none.changed(), (tmp_path / "none.json").exists()) == ([], False)


def test_a_path_has_one_name() -> None:
    task = Task(task="x", dependencies=("./web//vendor/", "node_modules"))
    assert task.dependencies == ("web/vendor", "node_modules")


@pytest.mark.parametrize(
    ("command", "codes"),
    [
        ("echo > .venv/bin/check; check; true", ["VERIFY_FAILED", "NO_CHANGE_SINCE_REFUSAL"]),
        ("sed -i s/-/+/ calc.py", []),
    ],
)
def test_a_virtualenv_in_the_workspace_is_only_read(tmp_path: Path, command: str, codes: list[str]) -> None:
    workspace = tmp_path / "project"
    (workspace / ".venv" / "bin").mkdir(parents=True)
    (workspace / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    check = workspace / ".venv" / "bin" / "check"
    check.write_text("#!/bin/sh\nexec python3 -c 'from calc import add; assert add(2, 3) == 5'\n")
    check.chmod(0o755)
    turns = [{"calls": [{"bash": {"command": command}}]}, small.submit()]
    settings = make_settings(
        {
            "task": {"task": "Fix add().", "verify": {"command": "check"}},
            "model": {"name": small.script(tmp_path / "script.json", turns, "repeat")},
            "sandbox": {"mode": "bubblewrap", "virtualenv": str(workspace / ".venv")},
            "state": str(tmp_path / "state"),
        }
    )
    result = run_agent(settings, workspace)
    assert result.outcome == ("refused_no_progress" if codes else "verified")
    assert json.loads((tmp_path / "state" / "trajectory.json").read_text())["gate"]["codes"][:2] == (
        codes or ["END verified"]
    )
    assert result.unprotected == (".venv",)
    assert check.read_text().startswith("#!/bin/sh")
