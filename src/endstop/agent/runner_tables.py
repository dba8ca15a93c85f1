"""Which part of a file that a project shares with its test runner is the runner's: the rest is the agent's.

A dependency may be added to pyproject.toml or package.json; the options of pytest, or the script that the
command runs, may not be changed there.
"""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

# Read by runners, or by what starts them.
_PYPROJECT_TOOLS = ("pytest", "coverage", "tox", "nox", "poe", "taskipy", "hatch", "pdm", "rye", "pixi")
_SETUP_SECTIONS = (
    "tool:pytest",
    "pytest",
    "aliases",
    "options.entry_points",
    "coverage:run",
    "coverage:report",
)
_PACKAGE_KEYS = ("scripts", "jest", "vitest", "mocha", "ava", "tap", "c8", "nyc", "babel")
_CARGO_TABLES = ("test", "bench", "lib", "bin", "example", "badges")


def _pyproject(content: bytes) -> Any:
    whole = tomllib.loads(content.decode())
    tools = whole.get("tool", {})
    ours = {name: tools[name] for name in tools if name in _PYPROJECT_TOOLS or name.startswith("pytest")}
    # Of these only the scripts start anything.
    for name, keys in (
        ("hatch", ("envs",)),
        ("pdm", ("scripts",)),
        ("rye", ("scripts",)),
        ("pixi", ("tasks",)),
    ):
        if name in ours:
            ours[name] = {key: ours[name][key] for key in keys if key in ours[name]}
    plugins = whole.get("project", {}).get("entry-points", {}).get("pytest11")
    return {"tools": {name: table for name, table in ours.items() if table}, "plugins": plugins}


def _setup_cfg(content: bytes) -> Any:
    text = content.decode()
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read_string(text)
    found: dict[str, Any] = {name: dict(parser[name]) for name in _SETUP_SECTIONS if parser.has_section(name)}
    # Word for word: pytest's own parser reads headers, letters' case, comments and defaults in another way.
    found |= {name: lines for name in _SETUP_SECTIONS if (lines := _section(text, name)) is not None}
    if "options.entry_points" in found:
        plugins = found.pop("options.entry_points").get("pytest11")
        found |= {"plugins": {"pytest11": plugins}} if plugins else {}
    return found


def _section(text: str, name: str) -> list[str] | None:
    """The lines of a section, or of several of that name; None for what is read in parts or not there."""
    lines, inside = [], False
    for line in text.removeprefix("\ufeff").splitlines():
        if line.startswith("["):
            inside = re.split("[#;]", line)[0].rstrip() == f"[{name}]"
        if inside and line.strip() and not line.startswith(("#", ";")):
            lines.append(line.rstrip())
    return lines if lines and name != "options.entry_points" else None


def _entry_points(content: bytes) -> Any:
    """Of an installed package's: what pytest loads by itself. Scripts are started by their name only."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    parser.read_string(content.decode())
    return {name: dict(parser[name]) for name in parser.sections() if name.startswith("pytest")}


def _package_json(content: bytes) -> Any:
    whole = json.loads(content)
    return {key: whole[key] for key in _PACKAGE_KEYS if whole.get(key)}


def _cargo_toml(content: bytes) -> Any:
    whole = tomllib.loads(content.decode())
    package = whole.get("package", {})
    found = {name: [_target(table) for table in _tables(whole.get(name))] for name in _CARGO_TABLES}
    automatic = {key: value for key, value in package.items() if key.startswith("auto")}
    return {"targets": {name: tables for name, tables in found.items() if any(tables)}, "auto": automatic}


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [value] if isinstance(value, dict) else value or []


def _target(table: Mapping[str, Any]) -> dict[str, Any]:
    """What decides whether and how a target's tests run."""
    return {key: table[key] for key in ("harness", "test", "doctest", "bench") if key in table}


_READERS: Mapping[str, Callable[[bytes], Any]] = {
    "pyproject.toml": _pyproject,
    "setup.cfg": _setup_cfg,
    "package.json": _package_json,
    "entry_points.txt": _entry_points,
    "cargo.toml": _cargo_toml,
}


def is_shared(path: str) -> bool:
    return path.rpartition("/")[2].lower() in _READERS


def same_for_runner(path: str, before: bytes | None, after: bytes | None) -> bool:
    """Whether a runner reads the same out of two versions of a shared file (None: there is none)."""
    read = _READERS[path.rpartition("/")[2].lower()]
    try:
        return bool(_or_empty(read, before) == _or_empty(read, after))
    except (ValueError, TypeError, AttributeError, KeyError, configparser.Error, RecursionError):
        return False


def _or_empty(read: Callable[[bytes], Any], content: bytes | None) -> Any:
    # A file that is not there says as much as an empty one.
    return read(content if content is not None else (b"{}" if read is _package_json else b""))
