"""Test runners that the gate can read, and which one a command or a project has."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from endstop.agent.task import VerifierName, VerifySettings
from endstop.agent.verifiers.cargo import CARGO, hides_names
from endstop.agent.verifiers.command import COMMAND
from endstop.agent.verifiers.go import GO
from endstop.agent.verifiers.node import JEST, NODE, VITEST, ends_with_runner
from endstop.agent.verifiers.pytest import PYTEST
from endstop.agent.verifiers.starting import scripts, started_by, text_of
from endstop.agent.verifiers.unittest import UNITTEST
from endstop.agent.verifiers.verifier import Verifier

VERIFIERS: Mapping[VerifierName, Verifier] = {
    verifier.name: verifier for verifier in (PYTEST, UNITTEST, NODE, JEST, VITEST, GO, CARGO, COMMAND)
}

_ASKED_BY: Mapping[VerifierName, str] = {"pytest": "PYTEST_ADDOPTS", "node": "NODE_OPTIONS"}
_NO_VARIABLES = re.compile(r"\benv\s+(?:-i|--ignore-environment)\b")
_DIRECTORY_LIMIT = 5000
_PYTEST_FILES = (
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"),
    *("conftest.py", "tests/conftest.py"),
)
# What in Rust's sources is a test, or a documentation's.
_RUST_TEST = re.compile(r"#\[(?:\w+::)*\w*test\w*\b|#\[cfg\(test|^\s*//[/!]\s*```", re.MULTILINE)


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
        name = _read_as(settings.command, workspace)
    return settings.model_copy(update={"verifier": name})


def verifier_of(command: str, workspace: Path) -> VerifierName | None:
    """Which runner a command starts, by itself or by a script or a make target that it names."""
    started = started_by(command, workspace)
    return started.verifier if started else None


def _read_as(command: str, workspace: Path) -> VerifierName:
    """How a command's result can be read: `command` where a runner is started in a way that leaves no report,
    behind a script or recipe that nothing can be put into, or with the variable set by which it is asked."""
    started = started_by(command, workspace)
    if started is None:
        return "command"
    name, text, by = started
    unread: dict[VerifierName, bool] = {
        "unittest": by != "command",
        "cargo": by != "command" and hides_names(text),
        "jest": by == "recipe"
        or not (ends_with_runner(text, workspace) and ends_with_runner(command, workspace)),
    }
    unread["vitest"] = unread["jest"]
    if name in _ASKED_BY:
        variable = _ASKED_BY[name]
        own = re.search(rf"\b{variable}=(?!\S*\$\{{?{variable})", text)
        unread[name] = own is not None or _NO_VARIABLES.search(text) is not None
    return "command" if unread.get(name) else name


def find_verifier(workspace: Path) -> VerifySettings | None:
    """The command that this project's tests are most likely run with. None where nothing points to one."""
    finders: tuple[Callable[[Path], VerifySettings | None], ...] = (
        # A manifest may stand beside tests of another language: its own tests must be there.
        lambda place: _cargo(place) if _has(place, _holds_rust_test) else None,
        lambda place: _go(place) if _has(place, lambda path: path.name.endswith("_test.go")) else None,
        *(_javascript, _python, _cargo, _go),
    )
    for find in finders:
        if found := find(workspace):
            return found
    return None


def _cargo(workspace: Path) -> VerifySettings | None:
    if (workspace / "Cargo.toml").is_file():
        return VerifySettings(command="cargo test", verifier="cargo")
    return None


def _holds_rust_test(path: Path) -> bool:
    return path.suffix == ".rs" and _RUST_TEST.search(text_of(path)) is not None


def _go(workspace: Path) -> VerifySettings | None:
    if (workspace / "go.mod").is_file():
        return VerifySettings(command="go test ./...", verifier="go")
    return None


def _javascript(workspace: Path) -> VerifySettings | None:
    if "test" in scripts(workspace) and verifier_of("npm test", workspace):
        return VerifySettings(command="npm test", verifier=_read_as("npm test", workspace))
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
    if any((workspace / name).is_file() for name in _PYTEST_FILES) or _names_pytest(workspace):
        return VerifySettings(command="python -m pytest", verifier="pytest") if tests else None
    if not tests:
        return None
    text = "".join(text_of(path) for path in tests[:50])
    if (
        re.search(r"^\s*(?:import|from) unittest\b", text, re.MULTILINE)
        and not re.search(r"^\s*(?:import|from) pytest\b|^(?:async )?def test_", text, re.MULTILINE)
        and (options := _discovered(workspace, tests))
    ):
        command = " ".join(["python -m unittest discover", *options]).rstrip()
        return VerifySettings(command=command, verifier="unittest")
    return VerifySettings(command="python -m pytest", verifier="pytest")


def _discovered(workspace: Path, tests: list[Path]) -> list[str]:
    """Options with which unittest finds all of these tests; [""] for none, [] where none do. It goes only
    into directories that are packages, and takes names by one pattern."""
    if all(path.stem.startswith("test") for path in tests):
        pattern = ""
    elif all(path.stem.endswith("_test") for path in tests):
        pattern = "-p '*_test.py'"
    else:
        return []

    def reaches(top: Path) -> bool:
        between = {folder for path in tests for folder in path.relative_to(top).parents if folder.name}
        return all((top / folder / "__init__.py").is_file() for folder in between)

    if reaches(workspace):
        return [pattern]
    top = Path(os.path.commonpath([path.parent for path in tests]))
    start = f"-s {shlex.quote(top.relative_to(workspace).as_posix())}"
    return [option for option in (start, pattern) if option] if reaches(top) else []


def _names_pytest(workspace: Path) -> bool:
    try:
        if "pytest" in tomllib.loads(text_of(workspace / "pyproject.toml")).get("tool", {}):
            return True
    except (tomllib.TOMLDecodeError, AttributeError):
        pass
    return "[tool:pytest]" in text_of(workspace / "setup.cfg") or "[pytest]" in text_of(workspace / "tox.ini")


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
