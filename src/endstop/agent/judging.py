"""From what a run left to a verdict: the rules, in their order, with nothing to run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from endstop.agent.decisions import TestReport, VerdictCode, VerifierRun
from endstop.agent.report import find_tests, has_passed, without_parameters
from endstop.agent.task import VerifySettings

# What runners exit with when they found no test (pytest, unittest since 3.12).
_NO_TESTS = 5
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a run, or `PASS`. The fields are those of a Verdict."""

    code: VerdictCode
    details: tuple[str, ...] = ()
    problem: str = ""
    would_pass: str = ""


PASSED = Finding("PASS")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the baseline ran.

    Attributes:
        tests: executed ones by id, those that could not be loaded left out.
        executed: their count as the report gives it. timed_out: it was stopped, so that nothing is known.
        group: what ids have in common that may come and go together: parameters, subtests.
        without_skips: files that could not be loaded; some test of each must run now, and none be skipped.
    """

    tests: frozenset[str]
    executed: int
    timed_out: bool = False
    group: Callable[[str], str] = without_parameters
    without_skips: Collection[str] = ()


def judge(run: VerifierRun, settings: VerifySettings, expected: Expected | None, *, weak: bool) -> Finding:
    """The first rule that a run breaks. `weak`: only the exit code is to be had; `expected` is None for the
    baseline itself."""
    if run.timed_out:
        return _timeout(settings, expected)
    if weak:
        return PASSED if run.exit_code == 0 else _failed(run)
    if run.report is None:
        return _no_report(run)
    if run.report.executed == 0 and run.exit_code in (0, _NO_TESTS):
        return Finding(
            "NO_TESTS_RAN",
            problem=f"the command exited with {run.exit_code} and executed no test"
            + (f"; {len(run.report.skipped)} were skipped" if run.report.skipped else ""),
            would_pass="a run that executes the tests, all of which pass",
        )
    if run.report.failed or run.exit_code != 0:
        return _failed(run)
    return _required(settings, run.report) or _fewer(expected, run.report) or PASSED


def _timeout(settings: VerifySettings, expected: Expected | None) -> Finding:
    problem = f"the command did not end within {settings.timeout:g} s and was stopped"
    if expected is not None and expected.timed_out:
        problem += "; so it was before any change, so the time limit may be too short for this project"
    return Finding(
        "VERIFY_TIMEOUT",
        problem=problem,
        would_pass=f"the command ends within {settings.timeout:g} s and its tests pass",
    )


def _no_report(run: VerifierRun) -> Finding:
    would_pass = "the runner itself writes its report and all tests pass"
    if run.exit_code == 0:
        return Finding(
            "NO_TESTS_RAN",
            problem=f"the command exited with 0 but left no report of tests: {run.report_problem}",
            would_pass=would_pass,
        )
    return Finding(
        "VERIFY_FAILED",
        problem=f"{_ending(run)} without a report of tests: {run.report_problem}",
        would_pass=would_pass,
    )


def _failed(run: VerifierRun) -> Finding:
    failed = sorted(run.report.failed) if run.report else []
    if failed:
        problem = (
            f"{len(failed)} of {run.report.executed if run.report else 0} tests failed: {listed(failed)}"
        )
    else:
        problem = f"{_ending(run)}, though no test failed" if run.report else _ending(run)
    return Finding("VERIFY_FAILED", tuple(failed), problem, "the command exits with 0 and no test fails")


def _ending(run: VerifierRun) -> str:
    if run.exit_code is None:
        return "the command was stopped" + (f" ({run.report_problem})" if run.report_problem else "")
    return f"the command exited with {run.exit_code}"


def _required(settings: VerifySettings, report: TestReport) -> Finding | None:
    missing = [wanted for wanted in settings.required if not has_passed(wanted, report)]
    if not missing:
        return None
    told = []
    for wanted in missing:
        results = sorted(set(find_tests(wanted, report).values()))
        told.append(f"{wanted} ({'/'.join(results) or 'not run'})")
    return Finding(
        "REQUIRED_NOT_PASSED",
        tuple(missing),
        f"required tests have not passed: {listed(told)}",
        "these tests are executed and pass",
    )


def _fewer(expected: Expected | None, report: TestReport) -> Finding | None:
    if expected is None:
        return None
    report = _as_called_before(expected, report)
    # By id: one that ran before may not be skipped now. By group: one that ran before must run in some form.
    skipped = expected.tests & report.skipped
    groups = {expected.group(test) for test in report.passed | report.failed}
    gone = {test for test in expected.tests if expected.group(test) not in groups} - skipped
    for path in expected.without_skips:
        skipped |= {test for test in report.skipped if test == path or test.startswith(f"{path}::")}
        if not any(test.startswith(f"{path}::") for test in report.passed | report.failed | skipped):
            gone.add(path)
    if not skipped and not gone and report.executed >= expected.executed:
        return None
    parts = []
    if report.executed < expected.executed:
        parts.append(f"{report.executed} tests were executed, {expected.executed} before any change")
    if gone:
        parts.append(f"no longer executed: {listed(sorted(gone))}")
    if skipped:
        parts.append(f"skipped now: {listed(sorted(skipped))}")
    return Finding(
        "FEWER_TESTS",
        tuple(sorted(gone | skipped)),
        "; ".join(parts),
        f"every test that ran before any change is executed again, {expected.executed} or more in all",
    )


def _as_called_before(expected: Expected, report: TestReport) -> TestReport:
    """The report with tests called as the baseline calls them. Runners call them from a directory that they
    find by files such as pyproject.toml: where one is added, all are called from further out or in."""
    before = {_file(test) for test in expected.tests} | set(expected.without_skips)
    now = {_file(test) for test in report.passed | report.failed | report.skipped}
    if not before or before & now:
        return report
    first = min(before)
    for path in sorted(now):
        out, into = path.removesuffix(f"/{first}"), first.removesuffix(f"/{path}")
        if out != path and all(f"{out}/{other}" in now for other in before):
            return _renamed(report, f"{out}/", "")
        if into != first and all(
            other.startswith(f"{into}/") and other.removeprefix(f"{into}/") in now for other in before
        ):
            return _renamed(report, "", f"{into}/")
    return report


def _file(test: str) -> str:
    return test.partition("::")[0]


def _renamed(report: TestReport, before: str, after: str) -> TestReport:
    """With other words at the beginning of every id."""
    kinds = (report.passed, report.failed, report.skipped)
    return TestReport(*(frozenset(after + test.removeprefix(before) for test in tests) for tests in kinds))


def flaky(tests: Collection[str]) -> Finding:
    return Finding(
        "FLAKY",
        tuple(sorted(tests)),
        f"on the same files these tests once failed and once passed: {listed(sorted(tests))}"
        if tests
        else "on the same files the command once failed and once passed",
        "the tests pass every time they are run on the same files",
    )


def listed(names: Collection[str]) -> str:
    """The first few of many names."""
    shown = list(names)[:_NAMED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
