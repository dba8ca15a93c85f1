"""Which runner a command starts: by itself, or by a script of package.json or a make target that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from endstop.agent.task import VerifierName

# What stands before a program's name and says nothing about it.
_BEFORE = r"(?:^|[;&|(]\s*|\s)(?:\S*/)?"
_COMMANDS: tuple[tuple[VerifierName, str], ...] = (
    ("unittest", r"-m\s+unittest\b"),
    ("pytest", rf"(?:{_BEFORE}|-m\s+)(?:pytest|py\.test)(?:\s|$)"),
    ("vitest", rf"{_BEFORE}vitest(?:\s|$)"),
    ("jest", rf"{_BEFORE}jest(?:\s|$)"),
    ("node", rf"{_BEFORE}node\s(?:.*\s)?--test(?:\s|$)"),
    ("go", rf"{_BEFORE}go\s+test(?:\s|$)"),
    ("cargo", rf"{_BEFORE}cargo\s+(?:\+\S+\s+)?(?:test|t)(?:\s|$)"),
)
_SCRIPT = re.compile(r"(?:^|\s)(?:npm|pnpm|yarn|bun)\s+(?:run(?:-script)?\s+)?([\w:.-]+)")
_MAKE = re.compile(r"(?:^|[;&|]\s*)make(?:\s+([\w.-]+))?(?:\s|$)")


class Started(NamedTuple):
    """A runner, and the text that starts it: the command itself, or the script or recipe that it names."""

    verifier: VerifierName
    text: str
    by: str = "command"


def started_by(command: str, workspace: Path) -> Started | None:
    for name, pattern in _COMMANDS:
        if re.search(pattern, command):
            return Started(name, command)
    if script := _SCRIPT.search(command):
        inner = scripts(workspace).get("test" if script.group(1) in ("test", "t") else script.group(1), "")
        # A script that calls itself is no script.
        found = started_by(inner, workspace) if inner and not _SCRIPT.search(inner) else None
        return found._replace(by="script") if found else None
    if make := _MAKE.search(command):
        recipe = _recipe(workspace, make.group(1))
        found = started_by(recipe, workspace) if recipe and not _MAKE.search(recipe) else None
        return found._replace(by="recipe") if found else None
    return None


def scripts(workspace: Path) -> dict[str, str]:
    try:
        found = json.loads(text_of(workspace / "package.json") or "{}").get("scripts", {})
        return {name: command for name, command in found.items() if isinstance(command, str)}
    except (ValueError, AttributeError, RecursionError):
        return {}


def text_of(path: Path) -> str:
    """The beginning of a file, "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return ""


def _recipe(workspace: Path, target: str | None) -> str:
    """The lines of a make target; without a name those of the first."""
    for name in ("GNUmakefile", "makefile", "Makefile"):
        text = text_of(workspace / name)
        wanted = re.escape(target) if target else r"[\w.-]+"
        if found := re.search(rf"^{wanted}\s*:(?!=)[^\n]*\n((?:\t[^\n]*\n?|\s*\n)+)", text, re.MULTILINE):
            return re.sub(r"^\t[@-]*", "", found.group(1), flags=re.MULTILINE)
    return ""
