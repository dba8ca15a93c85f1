"""The rules of a verdict, one after the other, on runs as data."""

from __future__ import annotations

import pytest

from endstop.agent.decisions import TestReport, VerdictCode, VerifierRun
from endstop.agent.judging import Expected, judge
from endstop.agent.task import VerifySettings

EXPECTED = Expected(frozenset(["t.py::a", "t.py::b"]), 2)


def run(
    exit_code: int | None = 0, *, report: TestReport | None = None, timed_out: bool = False
) -> VerifierRun:
    return VerifierRun("pytest", exit_code, "", 1.0, timed_out, report, "" if report else "there is none")


def ran(passed: str = "", failed: str = "", skipped: str = "") -> TestReport:
    def ids(names: str) -> frozenset[str]:
        return frozenset(f"t.py::{name}" for name in names.split())

    return TestReport(ids(passed), ids(failed), ids(skipped))


@pytest.mark.parametrize(
    ("exit_code", "report", "code", "details"),
    [
        (0, ran("a b"), "PASS", ()),
        (0, ran("a b c"), "PASS", ()),
        (0, ran("a b[1] b[2]"), "PASS", ()),
        (1, ran("a", "b"), "VERIFY_FAILED", ("t.py::b",)),
        (0, ran("a", "b"), "VERIFY_FAILED", ("t.py::b",)),  # the exit code is no evidence
        (1, ran("a b"), "VERIFY_FAILED", ()),  # e.g. coverage below its bound
        (0, None, "NO_TESTS_RAN", ()),
        (2, None, "VERIFY_FAILED", ()),
        (None, None, "VERIFY_FAILED", ()),  # killed
        (0, ran(), "NO_TESTS_RAN", ()),
        (5, ran(), "NO_TESTS_RAN", ()),
        (0, ran(skipped="a b"), "NO_TESTS_RAN", ()),
        (3, ran(), "VERIFY_FAILED", ()),
        (0, ran("a"), "FEWER_TESTS", ("t.py::b",)),
        (0, ran("a", skipped="b"), "FEWER_TESTS", ("t.py::b",)),
        (0, ran("a c", skipped="b"), "FEWER_TESTS", ("t.py::b",)),  # as many, but not these
        (0, ran("a c d"), "FEWER_TESTS", ("t.py::b",)),
    ],
)
def test_codes(
    exit_code: int | None, report: TestReport | None, code: VerdictCode, details: tuple[str, ...]
) -> None:
    finding = judge(run(exit_code, report=report), VerifySettings(command="x"), EXPECTED, weak=False)
    assert (finding.code, finding.details) == (code, details)
    assert bool(finding.problem) == bool(finding.would_pass) == (code != "PASS")


def test_a_count_is_held_too() -> None:
    expected = Expected(frozenset(["t.py::a"]), 5)
    finding = judge(run(report=ran("a b")), VerifySettings(command="x"), expected, weak=False)
    assert finding.problem == "2 tests were executed, 5 before any change"


@pytest.mark.parametrize(
    ("required", "details"),
    [
        (("a",), ()),
        (("t.py::a", "b"), ()),
        (("t.py",), ()),
        (("a", "c"), ("c",)),
        (("b[1]",), ("b[1]",)),
    ],
)
def test_required(required: tuple[str, ...], details: tuple[str, ...]) -> None:
    settings = VerifySettings(command="x", required=required)
    finding = judge(run(report=ran("a b")), settings, EXPECTED, weak=False)
    assert (finding.code, finding.details) == ("REQUIRED_NOT_PASSED" if details else "PASS", details)


def test_a_required_test_that_was_skipped_is_named_so() -> None:
    settings = VerifySettings(command="x", required=("c",))
    finding = judge(run(report=ran("a b", skipped="c")), settings, EXPECTED, weak=False)
    assert finding.problem == "required tests have not passed: c (skipped)"


def test_timeouts_come_first() -> None:
    settings = VerifySettings(command="x", timeout=5)
    finding = judge(run(None, timed_out=True), settings, EXPECTED, weak=False)
    assert finding.code == "VERIFY_TIMEOUT"
    assert finding.problem == "the command did not end within 5 s and was stopped"
    finding = judge(run(None, timed_out=True), settings, Expected(frozenset(), 0, timed_out=True), weak=False)
    assert "so it was before any change" in finding.problem


def test_an_exit_code_alone() -> None:
    settings = VerifySettings(command="x")
    assert judge(run(0), settings, EXPECTED, weak=True).code == "PASS"
    assert judge(run(1), settings, EXPECTED, weak=True).problem == "the command exited with 1"


@pytest.mark.parametrize(
    ("report", "details"),
    [
        (ran("a b new"), ()),
        (ran("a b", skipped="new"), ("t.py::new",)),
        (ran("a b c d", skipped="new"), ("t.py::new",)),
    ],
)
def test_what_never_ran_and_cannot_skip_must_run(report: TestReport, details: tuple[str, ...]) -> None:
    expected = Expected(frozenset(), 1, without_skips=["t.py"])
    finding = judge(run(report=report), VerifySettings(command="x"), expected, weak=False)
    assert (finding.code, finding.details) == ("FEWER_TESTS" if details else "PASS", details)
    other = Expected(frozenset(), 1, without_skips=["u.py"])
    assert judge(run(report=report), VerifySettings(command="x"), other, weak=False).details == ("u.py",)


def called(top: str, *tests: str, skipped: tuple[str, ...] = ()) -> TestReport:
    return TestReport(
        frozenset(top + test for test in tests), skipped=frozenset(top + test for test in skipped)
    )


TWO = ("tests/test_a.py::a", "tests/deep/test_b.py::B::b[x/y]")


@pytest.mark.parametrize(
    ("before", "now", "code"),
    [
        # A new pyproject.toml, at the top or further in.
        ("", called("sub/", *TWO), "PASS"),
        ("sub/", called("", *TWO), "PASS"),
        ("a/b/", called("b/", *TWO), "PASS"),
        ("a/", called("a/b/", *TWO), "FEWER_TESTS"),
        ("", called("sub/", *TWO, "tests/test_c.py::c"), "PASS"),
        # All of them, or it is something else.
        ("", called("sub/", TWO[0], "tests/test_c.py::c"), "FEWER_TESTS"),
        ("", called("sub/", TWO[1], "tests/test_a.py::other"), "FEWER_TESTS"),
        ("", called("sub/", TWO[1], skipped=TWO[:1]), "FEWER_TESTS"),
        ("", TestReport(frozenset((TWO[0], f"sub/{TWO[1]}"))), "FEWER_TESTS"),
        ("", TestReport(frozenset((f"a/{TWO[0]}", f"b/{TWO[1]}"))), "FEWER_TESTS"),
    ],
)
def test_tests_that_are_called_from_another_directory(
    before: str, now: TestReport, code: VerdictCode
) -> None:
    expected = Expected(frozenset(before + test for test in TWO), 2)
    assert judge(run(report=now), VerifySettings(), expected, weak=False).code == code


def test_files_that_were_not_loaded_are_called_from_another_directory() -> None:
    expected = Expected(frozenset(), 0, without_skips={"tests/test_a.py"})
    for report, code in (
        (called("sub/", "tests/test_a.py::a"), "PASS"),
        (called("sub/", "tests/test_a.py::a", skipped=("tests/test_a.py::b",)), "FEWER_TESTS"),
        (called("sub/", "tests/test_b.py::a"), "FEWER_TESTS"),
    ):
        assert judge(run(report=report), VerifySettings(), expected, weak=False).code == code
