"""What the tools of a run work on."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from endstop.agent.tool import OUTPUT_BYTES
from endstop.sandbox.files import PathRefused, WorkspaceFiles
from endstop.sandbox.settings import SandboxSettings
from endstop.sandbox.workspace import WorkingCopy

# Directories that are named but not walked into: what is in them is made or fetched, and without end.
LEFT_OUT = frozenset(
    {".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", "node_modules", "__pycache__"}
    | {".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis"}
)


@dataclass(frozen=True, slots=True)
class ToolContext:
    """A workspace as its tools see it.

    Attributes:
        root: where commands and file tools work. files: reads and writes that cannot leave it.
        working: the copy that is brought back into the workspace after what changes files.
        bind: path in the workspace -> host path that commands see there, read-only (dependencies).
        output_bytes: of a result that the model is shown; the middle, or the rest, of more is left out.
    """

    root: Path
    files: WorkspaceFiles
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    working: WorkingCopy | None = None
    bind: dict[str, Path] = field(default_factory=dict)
    output_bytes: int = OUTPUT_BYTES

    def leads_to(self, path: str) -> Literal["file", "directory"] | None:
        """What a path leads to, links that stay inside followed. Raises PathRefused."""
        kind = self.files.kind(path)
        if kind == "link":
            try:
                self.files.list(path)
            except PathRefused:
                self.files.read(path, 0)
                return "file"
            return "directory"
        return kind if kind in ("file", "directory") else None

    def is_bound(self, path: str) -> bool:
        """Whether only commands see a path: a dependency that is bound for them."""
        path = posixpath.normpath(path)
        places = map(posixpath.normpath, self.bind)
        return any(path == place or path.startswith(f"{place}/") for place in places)

    def bring_back(self) -> str:
        """What a tool changed goes to the workspace; a line for the model where that is not possible."""
        if self.working is None:
            return ""
        known = len(self.working.conflicts)
        self.working.sync_back()
        left = self.working.conflicts[known:]
        if not left:
            return ""
        return f"\n[not brought to the workspace, where something else stands now: {', '.join(left[:10])}]"


def readable_size(size: int) -> str:
    """`1,234 bytes`."""
    return f"{size:,} byte{'s' * (size != 1)}"
