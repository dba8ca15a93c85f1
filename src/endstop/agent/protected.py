"""Files that decide what "the tests pass" means: compared with the baseline, and laid over every export."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from fnmatch import translate
from functools import cached_property

from endstop.agent.object_store import Entry
from endstop.agent.runner_tables import is_shared, same_for_runner
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
# Behind these comes code, a module or what a runner finds by itself.
_GIVEN_CODE = ("-c", "-m", "-e", "-p", "--eval", "--print", "--test")
_BUILDERS = {
    "make": _MAKEFILES,
    "tox": ("tox.ini",),
    "nox": ("noxfile.py",),
    "just": ("justfile", "Justfile", ".justfile"),
    "task": ("Taskfile.yml", "Taskfile.yaml"),
    "npm": ("package.json", ".npmrc"),
    "pnpm": ("package.json", ".npmrc"),
    "yarn": ("package.json", ".yarnrc*"),
    "bun": ("package.json", "bunfig.toml"),
    "rake": ("Rakefile",),
}
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
    """

    def __init__(
        self,
        patterns: Iterable[str],
        allow: Iterable[str] = (),
        *,
        listed: Iterable[str] = (),
        python: bool = False,
        tops: Iterable[str] = (),
    ) -> None:
        self.patterns = tuple(dict.fromkeys(patterns))
        self.allow = tuple(dict.fromkeys(allow))
        self.listed = tuple(dict.fromkeys(listed))
        self.python = python
        self.tops = tuple(dict.fromkeys(tops))

    @classmethod
    def of(cls, task: Task, settings: VerifySettings | None = None) -> Protected:
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
        )

    def widened(self, files: Iterable[str], listed: Iterable[str]) -> Protected:
        """The same with the files in which the baseline's tests are, and the ids of the required ones."""
        more = [path for path in files if not self._matches(path)]
        return Protected(
            [*self.patterns, *("/" + _escaped(path) for path in more)],
            self.allow,
            listed=[*self.listed, *listed],
            python=self.python,
            tops=self.tops,
        )

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
            new_module = self.python and path not in before and not self._matches(path)
            if differs or (
                new_module and (comes_before_the_runner(path, self.tops) or stands_before(path, modules))
            ):
                (opened if self._opened(path) else closed).append(path)
        return closed, opened

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
    first, interpreter = True, ""
    for word in words:
        name = word.rpartition("/")[2]
        if set(word) <= set("();<>|&"):
            first, interpreter = not set(word) <= set("<>"), ""
        elif first and re.fullmatch(r"\w+=.*", word):
            continue
        elif first:
            found += _BUILDERS.get(name, ())
            if "/" in word and not word.startswith("/"):
                found.append(top + _escaped(_plain(word)))
            interpreter = name if _INTERPRETERS.fullmatch(name) else ""
            first = name in ("env", "exec", "time", "nice", "xvfb-run")
        elif interpreter:
            if word in _GIVEN_CODE and not (interpreter.endswith("sh") and word != "-c"):
                interpreter = ""
            elif not word.startswith("-"):
                found.append(top + _escaped(_plain(word)))
                interpreter = ""
    return found


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
