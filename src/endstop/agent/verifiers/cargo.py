"""cargo test: the lines that the standard test harness writes, checked against its own sums."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from endstop.agent.decisions import TestReport
from endstop.agent.report import Status, UnreadableReport, numbered, test_report
from endstop.agent.task import VerifySettings
from endstop.agent.verifiers.verifier import (
    EXPECTED_DATA,
    Canary,
    Finished,
    Place,
    Prepared,
    Verifier,
    command_of,
    failing,
    passing,
)

# Tests inside of src/ cannot be told from the code by a path: only their names and count are held.
PROTECTED = (
    *("tests/*", "benches/*", "Cargo.toml", ".cargo/*", "rust-toolchain", "rust-toolchain.toml"),
    *("clippy.toml", ".config/nextest.toml", *EXPECTED_DATA),
)
_TARGET = re.compile(r"^\s+(?:Running (?:unittests )?(\S+) \(|Doc-tests (\S+))")
_NAME = r"test (\S+(?: - (?!should panic\b).+?)?)(?: - should panic)? \.\.\. "
_FORMS = (
    re.compile(rf"^{_NAME}(ok|FAILED|ignored)\b", re.MULTILINE),
    # What tests write around the harness, without an end of line, stands before a result or in its midst.
    re.compile(rf"{_NAME}(ok|FAILED|ignored)\b"),
    re.compile(rf"{_NAME}(?:.*?)(ok|FAILED|ignored)(?:, [^\n]*)?$", re.MULTILINE | re.DOTALL),
)
_BEGUN = re.compile(r"running (\d+) tests?")
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


# In every file with tests, since a macro of the product's may stand for an assertion there.
_CANARY = """

#[cfg(test)]
#[allow(unused_extern_crates, unused_imports, unreachable_code)]
mod canary_{token} {{
    extern crate std;

    #[test]
    fn {passes}() {{}}

    #[test]
    fn {fails}() {{
        let heard = std::panic::catch_unwind(|| assert!(false)).is_err()
            && std::panic::catch_unwind(|| assert_eq!(1, 2)).is_err()
            && std::panic::catch_unwind(|| assert_ne!(1, 1)).is_err();
        if heard {{
            std::panic::panic_any("the gate expects this test to fail");
        }}
    }}
}}
"""
_HAS_TESTS = re.compile(rb"#\[(?:\w+::)*(?:test|rstest|test_case|case)\b")
_COMMAND = re.compile(r"(\bcargo\s+(?:\+\S+\s+)?(?:test|t)\b)(?!.*--no-fail-fast)")


def _prepare(
    settings: VerifySettings, place: Place, canary: Canary | None, variables: Mapping[str, str]
) -> Prepared:
    environment = {"CARGO_TERM_COLOR": "never", "CARGO_NET_OFFLINE": "true"}
    command = _with_names(command_of(settings))
    if canary is not None:
        text = _CANARY.format(token=canary.token, passes=passing(canary), fails=failing(canary))
        for path in sorted(place.files):
            if path.endswith(".rs") and (file := place.within(path)) is not None and not file.is_symlink():
                before = file.read_bytes()
                if _HAS_TESTS.search(before):
                    file.write_bytes(before + text.encode())
        command = _COMMAND.sub(r"\1 --no-fail-fast", command)
    return Prepared(command, environment)


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
    section: list[str] = []
    for line in _COLOUR.sub("", finished.output.decode("utf-8", "replace")).splitlines():
        if found := _TARGET.match(line):
            # One whose process ended before its sum.
            results += [(f"{target}::{name}", status) for name, status in _told(section, _FORMS[0])]
            target, section = found.group(1) or f"documentation of {found.group(2)}", []
        elif found := _NOT_BUILT.match(line):
            results.append((f"build of {found.group(1)}", "failed"))
        elif found := _SUM.match(line):
            results += [(f"{target}::{name}", status) for name, status in _summed(section, found, target)]
            sums, section = sums + 1, []
        else:
            section.append(line)
    if not sums and not results:
        raise UnreadableReport("there is no result of Rust's test harness in the output")
    if _told(section, _FORMS[0]):
        raise UnreadableReport(f"the tests of {target} end without a sum")
    return test_report(numbered(results))


def _summed(section: list[str], total: re.Match[str], target: str) -> list[tuple[str, Status]]:
    """The tests of a target, read in the first way in which they add up to their sum."""
    wanted = tuple(map(int, total.groups()))
    begun = next(filter(None, map(_BEGUN.fullmatch, section)), None)
    if begun is not None and int(begun.group(1)) != sum(wanted):
        raise UnreadableReport(f"the tests of {target} do not add up to their sum `{total.string}`")
    for form in _FORMS:
        told = _told(section, form)
        counts = Counter(status for _, status in told)
        if (counts["passed"], counts["failed"], counts["skipped"]) == wanted:
            return told
    raise UnreadableReport(f"the tests of {target} do not add up to their sum `{total.string}`")


def _told(section: list[str], form: re.Pattern[str]) -> list[tuple[str, Status]]:
    """What stands before the output of single tests."""
    ends = [place for place, line in enumerate(section) if line in ("failures:", "successes:")]
    text = "\n".join(section[: ends[0]] if ends else section)
    return [(_LINE.sub("", name), _STATUS[status]) for name, status in form.findall(text)]


CARGO = Verifier(
    "cargo",
    PROTECTED,
    _prepare,
    _read,
    canary_modes=("appended",),
    unit=lambda test: test.partition("::")[0],
    plain=r"\s*cargo (?:\+\S+ )?(?:test|t)(?:\s+-\S+)*\s*",
)
