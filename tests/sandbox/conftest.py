from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from endstop.sandbox import (
    CommandLimits,
    CommandResult,
    SandboxSettings,
    WorkingCopy,
    WorkspaceFiles,
    run_command,
)
from endstop.sandbox.bubblewrap import probe


@dataclass
class Place:
    """A workspace with a secret beside it, and commands in its sandbox."""

    workspace: Path
    outside: Path
    copy: WorkingCopy
    settings: SandboxSettings

    @property
    def files(self) -> WorkspaceFiles:
        return WorkspaceFiles(self.copy.root)

    def run(self, command: str | list[str], **options: object) -> CommandResult:
        return run_command(command, self.copy.root, self.settings, **options)  # type: ignore[arg-type]

    def python(self, code: str, **options: object) -> CommandResult:
        return self.run([sys.executable, "-c", code], **options)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Under bubblewrap, with the interpreter that runs the tests."""
    probed = probe()
    if not probed.available:
        pytest.skip(probed.reason)
    workspace, outside = tmp_path / "workspace", tmp_path / "outside"
    for directory in (workspace, outside):
        directory.mkdir()
    (outside / "secret").write_text("SECRET")
    (workspace / "file.txt").write_text("mine\n")
    settings = SandboxSettings(
        mode="bubblewrap",
        limits=CommandLimits(seconds=20),
        read_only=(Path(sys.prefix), Path(sys.base_prefix)),
    )
    with WorkingCopy.open(workspace, tmp_path / "state", settings) as copy:
        yield Place(workspace, outside, copy, settings)
