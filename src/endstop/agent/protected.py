"""Files that decide what "the tests pass" means: compared with the baseline, and laid over every export."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from fnmatch import translate
from functools import cached_property

from endstop.agent.object_store import Entry
from endstop.agent.runner_tables import is_shared, same_for_runner
from endstop.agent.rust_tests import changed_tests
from endstop.agent.shadows import comes_before_the_runner, protected_modules, stands_before
from endstop.agent.task import Task, VerifySettings
from endstop.agent.tree import Trees
from endstop.agent.verifiers import VERIFIERS
from endstop.protocol.errors import EndstopError

_MAKEFILES = ("Makefile", "makefile", "GNUmakefile", "*.mk")
# Started with a script that stands in the project.
_INTERPRETERS = re.compile(
    r"(?:ba|da|z|k)?sh|python[\d.]*|node|deno|bun|tsx|ts-node|ruby|perl|php|Rscript|source|\."
)
# Behind these comes code, or what a runner finds by itself.
_GIVEN_CODE = ("-c", "-e", "-p", "--eval", "--print", "--test")
# Behind these a file that is loaded, and what is none.
_LOADED = ("-r", "--require", "--import", "--loader", "--experimental-loader", "--rcfile", "--init-file")
_VALUED = ("-o", "+o", "-O", "+O", "-W", "-X", "-C", "--conditions")
# Before the program that a command really runs.
_WRAPPERS = re.compile(
    r"env|exec|time|nice|ionice|xvfb-run|timeout|stdbuf|setsid|nohup|command|builtin|sudo|run|dlx|uv|poetry|pdm"
    r"|pipenv|hatch|rye|pixi|npx|bunx|bundle|conda|mamba|micromamba|if|then|else|elif|while|until|do|[!{]"
)
_SET = re.compile(r"\w+=.*", re.DOTALL)
_OF_WRAPPER = re.compile(r"-.*|[\d.]+[smhd]?", re.DOTALL)
# What looks like a part of the check by its name, and such a directory.
PART_OF_CHECK = re.compile(
    r"\.(?:sh|bash|mk)$|(?:^|[/_.-])(?:tests?|specs?|checks?|verify|ci|scripts?|tools)(?:[/_.-]|$)"
)
_CHECKS = re.compile(r"checks?|tests?|e2e|ci|verify|verification|specs?|acceptance", re.IGNORECASE)
_BUILDERS = {
    "make": _MAKEFILES,
    "tox": ("tox.ini", "tox.toml"),
    "nox": ("noxfile.py",),
    "just": ("justfile", "Justfile", ".justfile"),
    "task": ("Taskfile*.yml", "Taskfile*.yaml"),
    "inv": ("tasks.py", "invoke.yaml"),
    "invoke": ("tasks.py", "invoke.yaml"),
    "poe": ("poe_tasks.*",),
    "deno": ("deno.json*",),
    "mvn": (".mvn/*",),
    "ctest": ("CTestCustom.cmake", "CTestTestfile.cmake"),
    "phpunit": ("phpunit.xml*", "phpunit.dist.xml"),
    "rspec": (".rspec",),
    "npm": ("package.json", ".npmrc"),
    "pnpm": ("package.json", ".npmrc", "pnpm-workspace.yaml", ".pnpmfile.*"),
    "yarn": ("package.json", ".yarnrc*", ".yarn/releases/*"),
    "bun": ("package.json", "bunfig.toml"),
    "rake": ("Rakefile",),
}
_FILE_OPTION = re.compile(
    r"(?:-[fct]|--(?:file|makefile|justfile|noxfile|taskfile|rakefile|conf|config|configuration))(?:=(.+))?"
)
# Where a command goes to before it runs anything, or imports from.
_DIRECTORY = re.compile(
    r"(?:\b(?:cd|pushd)\s+|\bPYTHONPATH=)[\"']?(?:\./)*([\w.-][\w./-]*?)/?(?=[\"':;&|\s)]|$)"
)
# Opened only by a pattern that names them: they change how every test is read.
_CONFIGURATION = re.compile(
    r"conftest\.py|(?:site|user)customize\.py|\.?pytest\.(?:ini|toml)|tox\.ini|noxfile\.py|setup\.cfg|pyproject\.toml"
    r"|package\.json|cargo\.toml|(?:gnu)?makefile|(?:jest|vitest|vite|babel)\.(?:config|setup).*|entry_points\.txt"
    r"|pyvenv\.cfg|.*\.pth|\.npmrc|\.coveragerc",
    re.IGNORECASE,
)


class Protected:
    """What an agent may not change.

    A pattern without a slash is a file's name, anywhere; one with a slash a path, anywhere unless it begins
    with a slash; `*` stands for any characters, slashes too. Letters' case does not count. pyproject.toml,
    setup.cfg, package.json, Cargo.toml and the entry points of an installed package are held only in what the
    runner reads of them, unless a pattern with a slash names them.

    Attributes:
        allow: patterns that are opened again. Runner configuration is opened only by a pattern whose last
            part is its name, and a file of a listed test not at all.
        listed: required tests, by id.
        python: whether modules that come before the runner's own, or before a protected one, are looked for.
        tops: directories from which modules are imported, besides the top and src.
        rust: whether tests are looked for inside of the code; a changed one is told by its id.
        watched: tells what changed outside of the trees and counts like a protected path.
    """

    def __init__(
        self,
        patterns: Iterable[str],
        allow: Iterable[str] = (),
        *,
        listed: Iterable[str] = (),
        python: bool = False,
        tops: Iterable[str] = (),
        rust: bool = False,
        watched: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.patterns = tuple(dict.fromkeys(patterns))
        self.allow = tuple(dict.fromkeys(allow))
        self.listed = tuple(dict.fromkeys(listed))
        self.python = python
        self.tops = tuple(dict.fromkeys(tops))
        self.rust = rust
        self.watched = watched

    @classmethod
    def of(
        cls,
        task: Task,
        settings: VerifySettings | None = None,
        watched: Callable[[], Sequence[str]] = tuple,
    ) -> Protected:
        """What a task protects, with its verifier and its command filled in."""
        settings = settings or task.verify
        patterns = list(task.protected)
        if settings.verifier is not None:
            patterns += VERIFIERS[settings.verifier].protected
        if settings.command is not None:
            patterns += named_by_command(settings.command)
        return cls(
            patterns,
            task.allow,
            listed=settings.required,
            python=settings.verifier in ("pytest", "unittest", "command"),
            tops=_DIRECTORY.findall(settings.command or ""),
            rust=settings.verifier == "cargo",
            watched=watched,
        )

    def widened(
        self,
        files: Iterable[str],
        listed: Iterable[str],
        patterns: Iterable[str] = (),
    ) -> Protected:
        """The same with the files in which the baseline's tests are, the ids of the required ones, and with
        patterns of what the command calls."""
        more = [path for path in files if not self._matches(path)]
        return Protected(
            [*self.patterns, *("/" + _escaped(path) for path in more), *patterns],
            self.allow,
            listed=[*self.listed, *listed],
            python=self.python,
            tops=self.tops,
            rust=self.rust,
            watched=self.watched,
        )

    def matching(self, paths: Iterable[str]) -> list[str]:
        """The patterns that hold some of these paths, in their order."""
        known = list(paths)
        compiled = ((pattern, _compiled([pattern])) for pattern in self.patterns)
        return [pattern for pattern, form in compiled if any(map(form.match, known))]

    def holds(self, path: str) -> bool:
        """Whether a path is protected, opened ones not counted."""
        return self._matches(path)

    def changed(self, trees: Trees, baseline: str, tree: str) -> tuple[list[str], list[str]]:
        """Protected paths that differ between two trees: those that may not, and those that were opened."""
        before, after = trees.entries(baseline), trees.entries(tree)
        closed: list[str] = []
        opened: list[str] = []
        modules = protected_modules(before, self._matches) if self.python else set()
        for path in trees.changed(baseline, tree):
            differs = self._differs(trees, baseline, tree, path, before.get(path), after.get(path))
            if self.rust and not differs and path.endswith(".rs") and path in before and path in after:
                told = changed_tests(trees.read(baseline, path) or b"", trees.read(tree, path) or b"")
                (opened if self._opened(path) else closed).extend(f"{path}::{name}" for name in told)
            new_module = self.python and path not in before and not self._matches(path)
            if differs or (
                new_module and (comes_before_the_runner(path, self.tops) or stands_before(path, modules))
            ):
                (opened if self._opened(path) else closed).append(path)
        return [*closed, *self.watched()], opened

    def overlaid(self, trees: Trees, baseline: str, tree: str) -> str:
        """The tree with the baseline's protected files in it, and without protected ones that were added."""
        closed, _ = self.changed(trees, baseline, tree)
        if not closed:
            return tree
        before, entries = trees.entries(baseline), trees.entries(tree)
        for path in closed:
            entries.pop(path, None)
        for path in closed:
            if path in before:
                _make_room(entries, path)
                entries[path] = before[path]
        return trees.tree_of(entries)

    def _differs(
        self, trees: Trees, baseline: str, tree: str, path: str, before: Entry | None, after: Entry | None
    ) -> bool:
        if before == after:
            return False
        modes = {entry.mode for entry in (before, after) if entry is not None}
        if before and after and before.object_id == after.object_id and modes <= {"100644", "100755"}:
            return False  # only executable or no longer so
        if not self._matches(path):
            return "120000" in modes and self._directories.match(path) is not None
        if is_shared(path) and "120000" not in modes and not self._names_whole(path):
            old = trees.read(baseline, path) if before else None
            new = trees.read(tree, path) if after else None
            return not same_for_runner(path, old, new)
        return True

    def _matches(self, path: str) -> bool:
        return self._protected.match(path) is not None

    def _names_whole(self, path: str) -> bool:
        return self._paths.match(path) is not None

    def _opened(self, path: str) -> bool:
        if any(test == path or test.startswith(path + "::") for test in self.listed):
            return False
        name = path.rpartition("/")[2]
        patterns = self.allow
        if _CONFIGURATION.fullmatch(name):
            patterns = tuple(
                pattern for pattern in patterns if pattern.rpartition("/")[2].lower() == name.lower()
            )
        return _compiled(patterns).match(path) is not None

    @cached_property
    def _protected(self) -> re.Pattern[str]:
        return _compiled(self.patterns)

    @cached_property
    def _directories(self) -> re.Pattern[str]:
        """Names of directories in which something is protected: a link may stand for one."""
        return _compiled([p.rpartition("/")[0] for p in self.patterns if p.strip("/").count("/")])

    @cached_property
    def _paths(self) -> re.Pattern[str]:
        return _compiled([p for p in self.patterns if "/" in p and is_shared(p) and not p.startswith("*.")])


def named_by_command(command: str) -> list[str]:
    """Patterns of files that a command runs by name: scripts, and what its builders read."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        raise EndstopError(f"the command `{command}` cannot be read: {error}") from error
    # Behind a change of directory a path is one from there.
    top = "" if "cd" in words or "pushd" in words else "/"
    found: list[str] = []
    # What the next word is: a program, an argument of a wrapper, of a builder or of an interpreter.
    first, wrapped, builder, interpreter = True, False, "", ""
    taken = 0
    for place, word in enumerate(words):
        name = word.rpartition("/")[2]
        value = words[place + 1] if place + 1 < len(words) else ""
        shell = interpreter.endswith("sh") or interpreter == "eval"
        if place < taken:
            continue
        if set(word) <= set("();<>|&"):
            redirects = set(word) <= set("<>")
            first, wrapped, builder = not redirects, False, builder if redirects else ""
            interpreter = interpreter if "<" in word else ""
        elif ((first or wrapped) and _SET.fullmatch(word)) or (
            wrapped and first and _OF_WRAPPER.fullmatch(word)
        ):
            continue
        elif first or (
            wrapped and (_INTERPRETERS.fullmatch(name) or name in _BUILDERS or _WRAPPERS.fullmatch(name))
        ):
            found += _BUILDERS.get(name, ())
            if first and "/" in word and not word.startswith("/"):
                found += _script(top, word)
            builder = name if name in _BUILDERS else ""
            interpreter = name if _INTERPRETERS.fullmatch(name) or name == "eval" else ""
            first = _WRAPPERS.fullmatch(name) is not None
            wrapped = first or (wrapped and not builder and not interpreter)
        elif builder:
            if option := _FILE_OPTION.fullmatch(word):
                found += _script(top, option.group(1) or value)
                taken = place + (1 if option.group(1) else 2)
        elif interpreter:
            if interpreter == "eval" or (shell and re.fullmatch(r"-\w*c", word)):
                found += named_by_command(word if interpreter == "eval" else value)
                interpreter = ""
            elif word == "-m":
                module = value.replace(".", "/")
                files = [f"{module}.py", f"{module}/__main__.py"] if PART_OF_CHECK.search(module) else []
                found += [top + _escaped(file) for file in files]
                interpreter = ""
            elif word in _LOADED:
                found += _script(top, value) if value.startswith((".", "/")) or "/" in value else []
                taken = place + 2
            elif word in _VALUED:
                taken = place + 2
            elif word in _GIVEN_CODE and not shell:
                interpreter = ""
            elif not word.startswith("-"):
                found += _script(top, word)
                interpreter = ""
    return found


def _script(top: str, word: str) -> list[str]:
    """A file by its path, and what lies beside it where that is a directory of checks."""
    path = _plain(word)
    directory = path.rpartition("/")[0]
    beside = [top + _escaped(directory) + "/*"] if _CHECKS.fullmatch(directory.rpartition("/")[2]) else []
    return [top + _escaped(path), *beside]


def _plain(path: str) -> str:
    while path.startswith("./"):
        path = path[2:]
    return path


def _escaped(path: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", path)


def _compiled(patterns: Sequence[str]) -> re.Pattern[str]:
    parts = []
    for pattern in patterns:
        anchored = pattern.startswith("/")
        inner = pattern.removeprefix("./").strip("/") + ("/*" if pattern.endswith("/") else "")
        # What stands in the place of a protected directory is protected too.
        forms = [inner, inner.removesuffix("/*")] if inner.endswith("/*") else [inner]
        for form in forms:
            whole = translate(form.replace("**", "*"))
            parts.append(whole if anchored else rf"(?:.*/)?{whole}")
    return re.compile("|".join(parts) or r"(?!)", re.IGNORECASE | re.DOTALL)


def _make_room(entries: dict[str, Entry], path: str) -> None:
    """Take out what stands where a file or one of the directories above it is to be."""
    parts = path.split("/")
    for length in range(1, len(parts)):
        entries.pop("/".join(parts[:length]), None)
    for other in [other for other in entries if other.startswith(path + "/")]:
        del entries[other]
