from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
COMMAND = [sys.executable, "-m", "endstop.cli"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    """An environment in which nothing of this machine's caches and settings is found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ENDSTOP_", "HF_"))}
    return kept | {
        "PYTHONPATH": str(SOURCE),
        "PYTHONIOENCODING": "utf-8",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "ENDSTOP_CACHE": str(home / "cache"),
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1",
        **more,
    }


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The working directory of the commands, with nothing above it that holds settings."""
    place = tmp_path / "home"
    place.mkdir()
    return place


@pytest.fixture
def endstop(home: Path) -> Run:
    """Runs the real command in a process of its own and gives back exit code, stdout and stderr."""

    def run(
        *arguments: str, stdin: str = "", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            cwd=home,
            env=clean_environment(home, **(env or {})),
            timeout=120,
        )

    return run


@pytest.fixture(scope="session")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says ` one two three four five` in a circle and never ends by itself."""
    from endstop.testing.cycle import cycle_model

    return cycle_model(tmp_path_factory.mktemp("cycle") / "endless", context_len=4096).path


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says ` one two three` and ends its turn."""
    from endstop.testing.cycle import cycle_model

    place = tmp_path_factory.mktemp("cycle") / "three"
    return cycle_model(place, follow={" three": "<|im_end|>"}, context_len=256).path


def one_sentence(result: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """stderr of a failed command: exactly one line, no traceback, nothing on stdout."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("endstop: ")
    return lines[0]
