"""Any command, by a contract: a JUnit report that it writes, or its exit code alone, which is weak."""

from __future__ import annotations

from collections.abc import Mapping

from endstop.agent.decisions import TestReport
from endstop.agent.report import UnreadableReport, read_junit
from endstop.agent.task import VerifySettings
from endstop.agent.verifiers import node, pytest
from endstop.agent.verifiers.verifier import Canary, Finished, Place, Prepared, Verifier, command_of

PROTECTED = (
    *dict.fromkeys((*pytest.PROTECTED, *node.JEST.protected)),
    *("spec/*", "*_test.go", "*_test.exs", "*_test.dart", "*_test.c", "*_test.cc", "*_test.cpp"),
    *("*_spec.rb", "*.bats"),
    # Configuration of runners that have no verifier of their own.
    *(".mocharc*", "mocha.opts", "ava.config.*", ".taprc", "jasmine.json", "karma.conf.*"),
    *(".nycrc*", ".c8rc*"),
    *("cypress.config.*", "playwright.config.*", ".rspec", "phpunit.xml*", "phpunit.dist.xml", ".proverc"),
    *(".bazelrc", "CTestCustom.cmake", "*.runsettings", ".mvn/*"),
)


def reports(settings: VerifySettings) -> bool:
    """Whether the command writes a report: to the path that is set, or to $REPORT."""
    command = settings.command or ""
    return bool(settings.report) or "$REPORT" in command or "${REPORT" in command


def _prepare(
    settings: VerifySettings, place: Place, canary: Canary | None, variables: Mapping[str, str]
) -> Prepared:
    if settings.report:
        # One that lies there already says nothing about this run.
        path = place.within(settings.report)
        if path is not None and (path.is_symlink() or path.is_file()):
            path.unlink()
    return Prepared(command_of(settings), {})


def _read(finished: Finished) -> TestReport:
    """The report; without one an empty one, of which the caller knows that it says nothing."""
    place, settings = finished.place, finished.settings
    if not reports(settings):
        return TestReport()
    path = place.within(settings.report) if settings.report else place.report
    if path is None:
        raise UnreadableReport(f"{settings.report} leads out of the files that are checked")
    return read_junit(path, files=place.files)


COMMAND = Verifier(
    "command",
    PROTECTED,
    _prepare,
    _read,
    instead="the report's count against the baseline and required tests; without a report only the exit code",
)
