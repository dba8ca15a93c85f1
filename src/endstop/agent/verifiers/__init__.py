"""Test runners that the gate can read, and which one a command or a project has."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from endstop.agent.task import VerifierName, VerifySettings
from endstop.agent.verifiers.cargo import CARGO
from endstop.agent.verifiers.command import COMMAND
from endstop.agent.verifiers.go import GO
from endstop.agent.verifiers.node import JEST, NODE, VITEST
from endstop.agent.verifiers.pytest import PYTEST
from endstop.agent.verifiers.unittest import UNITTEST
from endstop.agent.verifiers.verifier import Verifier

VERIFIERS: Mapping[VerifierName, Verifier] = {
    verifier.name: verifier for verifier in (PYTEST, UNITTEST, NODE, JEST, VITEST, GO, CARGO, COMMAND)
}

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
_DIRECTORY_LIMIT = 5000


def resolved(settings: VerifySettings, workspace: Path) -> VerifySettings:
    """The settings with command and verifier filled in, from the command or from the project.

    A project in which nothing is found gives settings without a command: it cannot be verified.
    """
    if settings.command is None:
        found = find_verifier(workspace)
        if found is None:
            return settings
        return settings.model_copy(
            update={"command": found.command, "verifier": settings.verifier or found.verifier}
        )
    if settings.verifier is not None:
        return settings
    name: VerifierName = "command"
    if settings.report is None:
        name = verifier_of(settings.command, workspace) or "command"
    return settings.model_copy(update={"verifier": name})


def verifier_of(command: str, workspace: Path) -> VerifierName | None:
    """Which runner a command starts, by itself or by a script or a make target that it names."""
    for name, pattern in _COMMANDS:
        if re.search(pattern, command):
            return name
    if script := _SCRIPT.search(command):
        inner = _scripts(workspace).get("test" if script.group(1) in ("test", "t") else script.group(1), "")
        # A script that calls itself is no script.
        return verifier_of(inner, workspace) if inner and not _SCRIPT.search(inner) else None
    if make := _MAKE.search(command):
        recipe = _recipe(workspace, make.group(1))
        return verifier_of(recipe, workspace) if recipe and not _MAKE.search(recipe) else None
    return None


def find_verifier(workspace: Path) -> VerifySettings | None:
    """The command that this project's tests are most likely run with. None where nothing points to one."""
    finders: tuple[Callable[[Path], VerifySettings | None], ...] = (_cargo, _go, _javascript, _python)
    for find in finders:
        if found := find(workspace):
            return found
    return None


def _cargo(workspace: Path) -> VerifySettings | None:
    if (workspace / "Cargo.toml").is_file():
        return VerifySettings(command="cargo test", verifier="cargo")
    return None


def _go(workspace: Path) -> VerifySettings | None:
    if (workspace / "go.mod").is_file():
        return VerifySettings(command="go test ./...", verifier="go")
    return None


def _javascript(workspace: Path) -> VerifySettings | None:
    scripts = _scripts(workspace)
    if "test" in scripts and (name := verifier_of("npm test", workspace)):
        return VerifySettings(command="npm test", verifier=name)
    if not (workspace / "package.json").is_file():
        return None
    for name in ("vitest", "jest"):
        if any(workspace.glob(f"{name}.config.*")):
            command = "npx vitest run" if name == "vitest" else "npx jest"
            return VerifySettings(command=command, verifier="vitest" if name == "vitest" else "jest")
    if _has(workspace, lambda path: re.search(r"[.-]test\.[cm]?js$", path.name) is not None):
        return VerifySettings(command="node --test", verifier="node")
    return None


def _python(workspace: Path) -> VerifySettings | None:
    def is_test(path: Path) -> bool:
        return path.suffix == ".py" and (path.stem.startswith("test_") or path.stem.endswith("_test"))

    tests = [path for path in _files(workspace) if is_test(path)]
    if any(
        (workspace / name).is_file() for name in ("pytest.ini", "conftest.py", "tests/conftest.py")
    ) or _names_pytest(workspace):
        return VerifySettings(command="python -m pytest", verifier="pytest") if tests else None
    if not tests:
        return None
    text = "".join(_text(path) for path in tests[:50])
    if re.search(r"^\s*(?:import|from) unittest\b", text, re.MULTILINE) and not re.search(
        r"^\s*(?:import|from) pytest\b|^(?:async )?def test_", text, re.MULTILINE
    ):
        return VerifySettings(command="python -m unittest discover", verifier="unittest")
    return VerifySettings(command="python -m pytest", verifier="pytest")


def _names_pytest(workspace: Path) -> bool:
    try:
        if "pytest" in tomllib.loads(_text(workspace / "pyproject.toml")).get("tool", {}):
            return True
    except (tomllib.TOMLDecodeError, AttributeError):
        pass
    return "[tool:pytest]" in _text(workspace / "setup.cfg") or "[pytest]" in _text(workspace / "tox.ini")


def _scripts(workspace: Path) -> dict[str, str]:
    try:
        scripts = json.loads(_text(workspace / "package.json") or "{}").get("scripts", {})
        return {name: command for name, command in scripts.items() if isinstance(command, str)}
    except (ValueError, AttributeError, RecursionError):
        return {}


def _recipe(workspace: Path, target: str | None) -> str:
    """The lines of a make target; without a name those of the first."""
    for name in ("GNUmakefile", "makefile", "Makefile"):
        text = _text(workspace / name)
        wanted = re.escape(target) if target else r"[\w.-]+"
        if found := re.search(rf"^{wanted}\s*:(?!=)[^\n]*\n((?:\t[^\n]*\n?|\s*\n)+)", text, re.MULTILINE):
            return re.sub(r"^\t[@-]*", "", found.group(1), flags=re.MULTILINE)
    return ""


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return ""


def _has(workspace: Path, wanted: Callable[[Path], bool]) -> bool:
    return any(wanted(path) for path in _files(workspace))


def _files(workspace: Path) -> list[Path]:
    """Files near the top, without those of dependencies."""
    left_out = {"node_modules", "venv", "site-packages", "target", "dist", "build"}
    found: list[Path] = []
    queue = [(workspace, 0)]
    while queue and len(found) < _DIRECTORY_LIMIT:
        directory, depth = queue.pop(0)
        try:
            inside = sorted(directory.iterdir())
        except OSError:
            continue
        for path in inside:
            if path.name.startswith(".") or path.is_symlink():
                continue
            if path.is_dir():
                if depth < 4 and path.name not in left_out:
                    queue.append((path, depth + 1))
            else:
                found.append(path)
    return found
