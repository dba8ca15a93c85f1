"""The gate's own tests in a run: one must be reported as failed, or no report of that runner counts."""

from __future__ import annotations

from collections.abc import Callable

from endstop.agent.decisions import VerifierRun
from endstop.agent.verifiers.verifier import Canary, failing, passing


def others_failed(run: VerifierRun, canary: Canary) -> set[str]:
    """Tests of the project that failed in a run with the canary."""
    failed = run.report.failed if run.report is not None else frozenset()
    return {test for test in failed if canary.token not in test}


def others_missing(
    first: VerifierRun, second: VerifierRun, canary: Canary, group: Callable[[str], str]
) -> set[str]:
    """Groups of tests that passed in the first run and did not run with the canary: what it says is not
    about them."""
    before, after = first.report, second.report
    if before is None or after is None:
        return set()
    there = {group(test) for test in after.passed | after.failed | after.skipped}
    return {group(test) for test in before.passed} - there


def canary_problem(run: VerifierRun, canary: Canary, *, exit_tells: bool) -> str:
    """What is wrong with how the gate's own tests came out; "" where nothing is."""
    report = run.report
    if run.timed_out:
        return "that run did not end in time"
    if report is None:
        return f"that run left no report: {run.report_problem}"
    must_fail, must_pass = failing(canary), passing(canary)
    if any(must_fail in test for test in report.passed):
        return "the one that must fail was reported as passed"
    # In some module it may be skipped like all that is there.
    if not any(must_fail in test for test in report.failed):
        skipped = any(must_fail in test for test in report.skipped)
        return f"the one that must fail was {'reported as skipped' if skipped else 'not reported'}"
    if not any(must_pass in test for test in report.passed):
        return "the one that must pass was not reported as passed"
    if any(must_pass in test for test in report.failed | report.skipped):
        return "the one that must pass was reported otherwise"
    if exit_tells and run.exit_code == 0:
        return "the command exited with 0 in spite of it"
    return ""


def is_reported(run: VerifierRun, canary: Canary) -> bool:
    """Whether any of the gate's tests is in the report."""
    report = run.report
    tests = report.passed | report.failed | report.skipped if report is not None else ()
    return any(canary.token in test for test in tests)


def failed_in(run: VerifierRun, canary: Canary, unit: Callable[[str], str]) -> set[str]:
    """Units of the run in which the test that must fail did. Of one name each counts: `lib.rs#2`."""
    failed = run.report.failed if run.report is not None else frozenset()
    ids = [test for test in failed if failing(canary) in test]
    return {unit(test) + "".join(test.partition("#")[1:]) for test in ids}
