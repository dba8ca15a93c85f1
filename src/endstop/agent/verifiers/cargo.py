"""cargo test: the lines that the standard test harness writes, checked against its own sums."""

from __future__ import annotations

import re
from collections.abc import Mapping

from endstop.agent.decisions import TestReport
from endstop.agent.report import Status, UnreadableReport, numbered, test_report
from endstop.agent.task import VerifySettings
from endstop.agent.verifiers.verifier import Canary, Finished, Place, Prepared, Verifier, command_of

# Tests inside of src/ cannot be told from the code by a path: only their names and count are held.
PROTECTED = (
    *("tests/*", "benches/*", "Cargo.toml", ".cargo/*", "rust-toolchain", "rust-toolchain.toml"),
    *("clippy.toml", ".config/nextest.toml"),
)
_TARGET = re.compile(r"^\s+(?:Running (?:unittests )?(\S+) \(|Doc-tests (\S+))")
_TEST = re.compile(r"^test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)\b")
_SUM = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored;")
_STATUS: dict[str, Status] = {"ok": "passed", "FAILED": "failed", "ignored": "skipped"}
_NOT_BUILT = re.compile(r"^error: could not compile `([^`]+)`")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_BETWEEN_COMMANDS = re.compile(r"([;&|\n]+)")
_CARGO_TEST = re.compile(r"\bcargo\s+(?:\+\S+\s+)?(?:test|t)\b")
_SHOWN_ONLY = re.compile(
    r"\s+(?:-q|--quiet|--no-?capture|--format[= ](?:terse|pretty))(?=\s|$)|\bRUST_TEST_NOCAPTURE=\S*\s+"
)
# Behind the name of a documentation's test: it moves with every edit above it.
_LINE = re.compile(r" \(line \d+\)")


def _prepare(
    settings: VerifySettings, place: Place, canary: Canary | None, variables: Mapping[str, str]
) -> Prepared:
    environment = {"CARGO_TERM_COLOR": "never", "CARGO_NET_OFFLINE": "true"}
    return Prepared(_with_names(command_of(settings)), environment)


def hides_names(command: str) -> bool:
    """Whether the options of a command leave out the tests' names, or let output come in their midst."""
    return _with_names(command) != command


def _with_names(command: str) -> str:
    """A command without the options that are only about what is shown, and hide which test passed."""
    parts = _BETWEEN_COMMANDS.split(command)
    # Commands stand at the even places, what separates them between.
    parts[::2] = [_SHOWN_ONLY.sub("", part) if _CARGO_TEST.search(part) else part for part in parts[::2]]
    return "".join(parts)


def _read(finished: Finished) -> TestReport:
    results: list[tuple[str, Status]] = []
    target, sums = "", 0
    counted: dict[Status, int] = {"passed": 0, "failed": 0, "skipped": 0}
    for line in _COLOUR.sub("", finished.output.decode("utf-8", "replace")).splitlines():
        if found := _TARGET.match(line):
            target = found.group(1) or f"documentation of {found.group(2)}"
            counted = {"passed": 0, "failed": 0, "skipped": 0}
        elif found := _TEST.match(line):
            status = _STATUS[found.group(2)]
            counted[status] += 1
            results.append((f"{target}::{_LINE.sub('', found.group(1))}", status))
        elif found := _NOT_BUILT.match(line):
            results.append((f"build of {found.group(1)}", "failed"))
        elif found := _SUM.match(line):
            told = {"passed": found.group(1), "failed": found.group(2), "skipped": found.group(3)}
            if told != {status: str(count) for status, count in counted.items()}:
                raise UnreadableReport(f"the tests of {target} do not add up to their sum `{line}`")
            sums += 1
            counted = {"passed": 0, "failed": 0, "skipped": 0}
    if not sums and not results:
        raise UnreadableReport("there is no result of Rust's test harness in the output")
    if any(counted.values()):
        raise UnreadableReport(f"the tests of {target} end without a sum")
    return test_report(numbered(results))


CARGO = Verifier(
    "cargo",
    PROTECTED,
    _prepare,
    _read,
    instead="the count of the baseline, its tests by name, and required tests",
)
