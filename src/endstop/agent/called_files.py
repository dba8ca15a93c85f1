"""Files that a command runs in the end: what a make target, a script of package.json or a shell script calls
in its turn."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from endstop.agent.protected import PART_OF_CHECK, named_by_command
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
_OPTION = re.compile(r"-([fC])\s*(\S+)|--(?:make)?file[=\s](\S+)|--directory[=\s](\S+)")
_SOURCED = re.compile(r"(?:^|[;&|]|\bthen\b|\bdo\b)\s*(?:\.|source)\s+[\"']?(?:\./)*([\w.-][\w./-]*)")
# Compilers write these, and a clean copy has none.
_WRITTEN = (".d", ".dep", ".deps")


def called_files(trees: Trees, tree: str, command: str) -> list[str]:
    """Paths of a tree, those left out that the command itself names; and what would be read if it were there:
    paths, and patterns of paths."""
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
        if depth:
            for name in _SOURCED.findall(line):
                found.setdefault(name) if not _resolved(name, paths) else None
        for pattern in patterns:
            called = re.sub(r"\[([*?[])\]", r"\1", pattern)
            for path in _resolved(called, paths):
                if depth and _is_part(path, trees.read(tree, path) or b"", line):
                    found.setdefault(path)
                if path.endswith((".sh", ".bash")) or _SHELL.match(trees.read(tree, path) or b""):
                    follow_lines(path, depth + 1)
        for arguments in _MAKE.findall(line):
            told = [
                next(filter(None, groups[1:])) for groups in _OPTION.findall(arguments) if groups[0] != "C"
            ]
            places = [groups[1] or groups[3] for groups in _OPTION.findall(arguments) if groups[0] == "C"]
            for name in told or ("GNUmakefile", "makefile", "Makefile"):
                if (name := posixpath.normpath(posixpath.join(*places[-1:], name))) in paths:
                    goals = _OPTION.sub("", arguments).split()
                    follow_make(name, goals, depth + 1)
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

    def follow_make(name: str, goals: list[str], depth: int) -> None:
        whole, queue, read = "", [name], {name}
        while queue:
            whole += text(queue.pop(0)) + "\n"
            variables = dict(_VARIABLE.findall(whole))
            for names in _INCLUDE.findall(whole):
                for included in _put_in(names, variables).replace("$(wildcard ", "").replace(")", "").split():
                    included = included.removeprefix("./")
                    if (
                        "$" not in included
                        and not included.startswith("/")
                        and not included.endswith(_WRITTEN)
                    ):
                        found.setdefault(included)
                    fitting = [path for path in paths if fnmatchcase(path, included)]
                    queue += [path for path in fitting if path not in read]
                    read.update(fitting)
                    found.update(dict.fromkeys(fitting))
        for line in _recipes(whole, goals):
            if line not in seen:
                seen.add(line)
                follow(line, depth)

    seen: set[str] = set()
    follow(command, 0)
    return sorted(found)


def _resolved(called: str, paths: dict[str, str]) -> list[str]:
    """One from the top begins with a slash; another may be anywhere."""
    if called.startswith("/../"):
        called = called.replace("/..", "").removeprefix("/")  # from a directory that was gone to
    if called.startswith("/"):
        return [called[1:]] if called[1:] in paths else []
    return [path for path in paths if path == called or path.endswith(f"/{called}")]


def _is_part(path: str, content: bytes, line: str) -> bool:
    sourced = re.search(rf"(?:^|[;&|]\s*|\s)(?:\.|source)\s+\S*{re.escape(path.rpartition('/')[2])}", line)
    return bool(sourced or PART_OF_CHECK.search(path) or _SHELL.match(content))


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
            line = _put_in(line, variables)
            if line.strip():
                yield line.strip().lstrip("@-+")


def _put_in(line: str, variables: Mapping[str, str]) -> str:
    for _ in range(3):
        line = _USE.sub(lambda use: variables.get(use.group(1), use.group(1).lower()), line)
    return line


def _scripts(package: str) -> dict[str, str]:
    try:
        scripts = json.loads(package or "{}").get("scripts", {})
        return {name: command for name, command in scripts.items() if isinstance(command, str)}
    except (ValueError, AttributeError, RecursionError):
        return {}
