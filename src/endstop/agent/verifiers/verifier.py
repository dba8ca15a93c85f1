"""What a verifier is: how the project's command is run so that its result can be read, and read."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from endstop.agent.decisions import TestReport
from endstop.agent.task import VerifierName, VerifySettings
from endstop.protocol.errors import EndstopError

# What tests compare with, by names that are given to nothing else.
EXPECTED_DATA = (
    *("testdata/*", "test_data/*", "test-data/*", "golden/*", "goldens/*", "*.golden", "*.approved.*"),
    *("__snapshots__/*", "__image_snapshots__/*", "*.snap", "*.ambr", "__fixtures__/*", "cassettes/*"),
    *("expected/*", "*.expected", "expected*.txt", "expected*.json", "*[-_.]expected*.txt"),
    *(
        "*[-_.]expected*.json",
        "expected*.out",
        "*[-_.]expected*.out",
        "expected*.csv",
        "expected*.xml",
        "expected*.html",
    ),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one run happens.

    Attributes:
        root: the export, on the host. inside: the same as the command sees it.
        gate: a directory for the gate's own files, at its own place inside, where nothing can write to it.
        report: a file, at its own place inside, that the command writes.
        files: paths in the export.
        lenient: whether errors in loading some tests are to be passed over so that the others run (baseline).
    """

    root: Path
    inside: str
    gate: Path
    report: Path
    files: Collection[str] = ()
    lenient: bool = False

    def within(self, path: str) -> Path | None:
        """Where a path of the export is on the host; None where it, or a link on the way, leads out. The tree
        may have a link anywhere, so nothing is read or removed by a name alone."""
        whole = self.root / path
        parent = whole.parent.resolve()
        return parent / whole.name if parent.is_relative_to(self.root.resolve()) else None

    def put(self, path: Path, text: str) -> None:
        """A file of the gate's, which whoever runs the command can read."""
        if not path.parent.exists():
            path.parent.mkdir()
            path.parent.chmod(0o755)
        path.write_text(text)
        path.chmod(0o644)


@dataclass(frozen=True, slots=True)
class Canary:
    """The gate's own tests for one run: one must fail, one must pass.

    Attributes:
        mode: how it is brought in, one of the verifier's. token: random, part of its names.
        beside: a test file of the project, "" where none is known. files: all in which tests ran.
    """

    mode: str
    token: str
    beside: str = ""
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A command line with what is to be set for it."""

    command: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that has ended. `output` is whole up to a bound, as bytes."""

    exit_code: int | None
    output: bytes
    place: Place
    settings: VerifySettings
    canary: Canary | None = None


@dataclass(frozen=True, slots=True)
class Verifier:
    """One kind of test runner.

    Attributes:
        protected: patterns of what decides how tests are read, besides the tests themselves.
        prepare: may write files to the place; raises EndstopError for a command that it cannot read.
        read: raises UnreadableReport.
        canary_modes: in the order in which they are tried on the baseline; none where the runner has no
            place for one, and `instead` then says what takes its place.
        unit: from a test's id to what runs in a process of its own, where the canary is in each of them; the
            command may well leave the canary out (a filter by name), so that it is asked for only where it
            was seen, or the command is `plain`: one that leaves no test out.
        text: the output as people read it, where the command's own is for machines.
    """

    name: VerifierName
    protected: tuple[str, ...]
    prepare: Callable[[VerifySettings, Place, Canary | None, Mapping[str, str]], Prepared]
    read: Callable[[Finished], TestReport]
    canary_modes: tuple[str, ...] = ()
    instead: str = ""
    unit: Callable[[str], str] | None = None
    plain: str = ""
    text: Callable[[Finished], str] | None = None


# Sourced by a shell of the command's own, and by none that its tests start.
_KEEP = """\
unset BASH_ENV
_keep_report() {{
  [ -s {report} ] || return 0
  local number=1
  while [ -e {report}.$number ]; do number=$((number + 1)); done
  mv {report} {report}.$number
}}
set -T
trap '_keep_report "$_"' DEBUG
"""


def keeping_reports(command: str, place: Place, *, by_make: bool = False) -> Prepared:
    """A command that may start its runner several times, one run after another, all of which write the same
    report: before the shell starts anything, what is there is put aside. `by_make`: also where make does."""
    script = place.gate / "keep.bash"
    place.put(script, _KEEP.format(report=shlex.quote(str(place.report))))
    environment = {}
    if by_make:
        shell = place.gate / "sh"
        place.put(shell, f'#!/bin/bash\nBASH_ENV={shlex.quote(str(script))} exec /bin/bash "$@"\n')
        shell.chmod(0o755)
        environment["MAKEFLAGS"] = f"SHELL={shell}"
    return Prepared(f". {shlex.quote(str(script))}\n{command}", environment)


def passing(canary: Canary) -> str:
    return f"test_{canary.token}_passes"


def failing(canary: Canary) -> str:
    return f"test_{canary.token}_fails"


def command_of(settings: VerifySettings) -> str:
    if settings.command is None:
        raise EndstopError("no command to verify with is set, and none was found in the project")
    return settings.command


def last_command(command: str, why: str) -> list[str]:
    """The words of a command, or of the last of several one after another: flags can be added at its end."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        raise EndstopError(f"the command `{command}` cannot be read: {error}") from error
    operators = [place for place, word in enumerate(words) if word and set(word) <= set("();<>|&")]
    last = words[operators[-1] + 1 :] if operators else words
    chained = all(words[place] in ("&&", ";") for place in operators)
    if "\n" in command.strip() or not chained or not last:
        raise EndstopError(f"the command `{command}` must be a single one without pipes or `&&`: {why}")
    return last


def appended(variables: Mapping[str, str], name: str, value: str) -> str:
    """A variable's value behind what it was set to."""
    before = variables.get(name, "")
    return f"{before} {value}" if before else value
