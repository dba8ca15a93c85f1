"""Files that a command runs in the end: what a make target, a script of package.json or a shell script calls
in its turn."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from endstop.agent.protected import named_by_command
from endstop.agent.tree import Trees
from endstop.protocol.errors import EndstopError

_DEPTH_LIMIT = 5
_MAKE = re.compile(r"(?:^|[;&|]\s*|\s)make\b((?:\s+[^\s;&|]+)*)")
_SCRIPT = re.compile(r"(?:^|\s)(?:npm|pnpm|yarn|bun)\s+(?:run(?:-script)?\s+)?([\w:.-]+)")
_RULE = re.compile(r"^([^\s#:=][^:=\n]*):(?![:=])([^=\n]*)\n((?:\t[^\n]*\n|[ \t]*\n)*)", re.MULTILINE)
_VARIABLE = re.compile(r"^[ ]*(\w+)[ ]*[:?+]?=[ ]*(.*)$", re.MULTILINE)
_USE = re.compile(r"\$[({](\w+)[)}]")
_INCLUDE = re.compile(r"^-?s?include[ ]+(.+)$", re.MULTILINE)
_SHELL = re.compile(rb"#!.*\b(?:ba|da|z|k)?sh\b")
# What a script runs may well be the program under test: only what looks like a part of the check is one.
_PART_OF_CHECK = re.compile(
    r"\.(?:sh|bash|mk)$|(?:^|[/_.-])(?:tests?|specs?|checks?|verify|ci|scripts?|tools)(?:[/_.-]|$)"
)


def called_files(trees: Trees, tree: str, command: str) -> list[str]:
    """Paths of a tree, those left out that the command itself names."""
    paths = trees.paths(tree)
    found: dict[str, None] = {}

    def text(path: str) -> str:
        return (trees.read(tree, path) or b"").decode("utf-8", "replace")

    def follow(line: str, depth: int) -> None:
        if depth > _DEPTH_LIMIT:
            return
        try:
            patterns = named_by_command(line)
        except EndstopError:
            return  # half of a line
        for pattern in patterns:
            called = re.sub(r"\[([*?[])\]", r"\1", pattern)
            for path in _resolved(called, paths):
                if depth and _is_part(path, trees.read(tree, path) or b"", line):
                    found.setdefault(path)
                if path.endswith((".sh", ".bash")) or _SHELL.match(trees.read(tree, path) or b""):
                    follow_lines(path, depth + 1)
        for goals in _MAKE.findall(line):
            for name in ("GNUmakefile", "makefile", "Makefile"):
                if name in paths:
                    follow_make(text(name), goals.split(), depth + 1)
                    break
        for name in _SCRIPT.findall(line):
            script = _scripts(text("package.json")).get("test" if name == "t" else name)
            if script and "package.json" in paths:
                follow(script, depth + 1)

    def follow_lines(path: str, depth: int) -> None:
        key = f"lines of {path}"
        if key not in seen:
            seen.add(key)
            for line in text(path).replace("\\\n", " ").splitlines():
                if not line.lstrip().startswith("#"):
                    follow(line, depth)

    def follow_make(makefile: str, goals: list[str], depth: int) -> None:
        whole = [makefile]
        for names in _INCLUDE.findall(makefile):
            for name in names.split():
                if name in paths:
                    found.setdefault(name)
                    whole.append(text(name))
        for line in _recipes("\n".join(whole) + "\n", goals):
            if line not in seen:
                seen.add(line)
                follow(line, depth)

    seen: set[str] = set()
    follow(command, 0)
    return sorted(found)


def _resolved(called: str, paths: dict[str, str]) -> list[str]:
    """One from the top begins with a slash; another may be anywhere."""
    if called.startswith("/"):
        return [called[1:]] if called[1:] in paths else []
    return [path for path in paths if path == called or path.endswith(f"/{called}")]


def _is_part(path: str, content: bytes, line: str) -> bool:
    sourced = re.search(rf"(?:^|[;&|]\s*|\s)(?:\.|source)\s+\S*{re.escape(path.rpartition('/')[2])}", line)
    return bool(sourced or _PART_OF_CHECK.search(path) or _SHELL.match(content))


def _recipes(makefile: str, goals: list[str]) -> Iterator[str]:
    """The lines that make runs for some goals, or for the first one, with variables put in."""
    variables = dict(_VARIABLE.findall(makefile))
    rules: dict[str, tuple[list[str], str]] = {}
    for targets, needs, lines in _RULE.findall(makefile):
        for target in targets.split():
            before = rules.get(target, ([], ""))
            rules[target] = (before[0] + needs.split(), before[1] + lines)
    wanted = [goal for goal in goals if not goal.startswith("-") and "=" not in goal]
    wanted = wanted or [target for target in rules if not target.startswith(".")][:1]
    done: set[str] = set()
    while wanted:
        target = wanted.pop()
        if target in done or target not in rules:
            continue
        done.add(target)
        wanted += rules[target][0]
        for line in rules[target][1].replace("\\\n", " ").splitlines():
            for _ in range(3):
                line = _USE.sub(lambda use: variables.get(use.group(1), use.group(1).lower()), line)
            if line.strip():
                yield line.strip().lstrip("@-+")


def _scripts(package: str) -> dict[str, str]:
    try:
        scripts = json.loads(package or "{}").get("scripts", {})
        return {name: command for name, command in scripts.items() if isinstance(command, str)}
    except (ValueError, AttributeError, RecursionError):
        return {}
