"""Reports of test runs, as data: which tests were executed, by an id that people and runners use."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from xml.parsers import expat

from endstop.agent.decisions import TestReport

REPORT_LIMIT = 64 << 20
# Elements inside each other; a report has a handful.
_DEPTH_LIMIT = 200
_PARAMETERS = re.compile(r"\[.*\]$", re.DOTALL)

Status = Literal["passed", "failed", "skipped"]


class UnreadableReport(ValueError):
    """There is no report, or it is none; the message says why in a few words."""


def test_report(results: Iterable[tuple[str, Status]]) -> TestReport:
    """A report of tests by id. One that came twice counts as its worse result."""
    found: dict[str, Status] = {}
    order: dict[Status, int] = {"failed": 2, "passed": 1, "skipped": 0}
    for name, status in results:
        before = found.get(name)
        if before is None or order[status] > order[before]:
            found[name] = status
    by_status = {status: frozenset(name for name in found if found[name] == status) for status in order}
    return TestReport(**by_status)


test_report.__test__ = False  # type: ignore[attr-defined]  # not a test for pytest


def read_bounded(path: Path) -> bytes:
    """A report file that untrusted code may have written: a regular file of a bearable size."""
    try:
        if path.is_symlink() or not path.is_file():
            raise UnreadableReport("there is none" if not path.exists() else "it is no regular file")
        if path.stat().st_size > REPORT_LIMIT:
            raise UnreadableReport(f"it is larger than {REPORT_LIMIT >> 20} MiB")
        content = path.read_bytes()
    except OSError as error:
        raise UnreadableReport(f"it cannot be read: {error.strerror}") from error
    if not content.strip():
        raise UnreadableReport("it is empty")
    return content


def read_junit(source: Path | bytes, *, files: Collection[str] = (), suites: bool = False) -> TestReport:
    """The tests of a JUnit XML report.

    Args:
        files: paths that exist, by which a dotted class name is told apart into file and class.
        suites: ids are the names of the suites around a test and its own (node:test); tests of one name
            are numbered. Otherwise they are `file::class::name`, as pytest prints them where it can be told.

    Raises UnreadableReport.
    """
    content = read_bounded(source) if isinstance(source, Path) else source
    cases = _parse(content)
    if not suites:
        known = frozenset(files)
        return test_report((_python_style(case, known), case.status) for case in cases)
    return test_report(numbered(("::".join((*case.suites, case.name)), case.status) for case in cases))


def read_all_junit(path: Path, *, files: Collection[str] = (), suites: bool = False) -> TestReport:
    """The tests of a report and of those that were put aside for it, `path.NUMBER`: a test that is in several
    must have passed in each. Raises UnreadableReport."""
    aside = [other for other in path.parent.glob(f"{path.name}.*") if other.suffix[1:].isdecimal()]
    contents = [read_bounded(other) for other in aside]
    if path.exists() or not aside:
        contents.append(read_bounded(path))
    if sum(map(len, contents)) > REPORT_LIMIT:
        raise UnreadableReport(f"together they are larger than {REPORT_LIMIT >> 20} MiB")
    reports = [read_junit(content, files=files, suites=suites) for content in contents]
    failed = frozenset[str]().union(*(report.failed for report in reports))
    skipped = frozenset[str]().union(*(report.skipped for report in reports)) - failed
    passed = frozenset[str]().union(*(report.passed for report in reports)) - failed - skipped
    return TestReport(passed, failed, skipped)


def numbered(results: Iterable[tuple[str, Status]]) -> list[tuple[str, Status]]:
    """Where several tests share a name, all but the first carry a number, so that each counts."""
    seen: dict[str, int] = {}
    told = []
    for name, status in results:
        seen[name] = seen.get(name, 0) + 1
        told.append((name if seen[name] == 1 else f"{name}#{seen[name]}", status))
    return told


def without_parameters(test: str) -> str:
    return _PARAMETERS.sub("", test)


def names_test(wanted: str, test: str) -> bool:
    """Whether a person may mean this test by `wanted`: its id or the end of it, with or without parameters,
    with dots or slashes; or the file or class that it is in."""
    wanted = wanted.strip()
    if not wanted:
        return False
    if test.startswith(wanted + "::"):
        return True
    plain = without_parameters(test)
    for form in {test, plain}:
        if form == wanted or form.endswith("::" + wanted):
            return True
        if "::" in form and wanted.endswith("/" + form):
            return True  # as it is called from the top, by a runner further in
        dotted, want = _dotted(form), _dotted(wanted)
        if dotted == want or ("::" in form and dotted.endswith("." + want)):
            return True
    return False


def find_tests(wanted: str, report: TestReport) -> dict[str, Status]:
    """Every test of a report that `wanted` may mean, with its result."""
    found: dict[str, Status] = {}
    for status, tests in (
        ("skipped", report.skipped),
        ("passed", report.passed),
        ("failed", report.failed),
    ):
        found.update({test: status for test in tests if names_test(wanted, test)})  # type: ignore[misc]
    return found


def has_passed(wanted: str, report: TestReport) -> bool:
    """Whether there is such a test and all of that name passed."""
    found = find_tests(wanted, report)
    return bool(found) and all(status == "passed" for status in found.values())


def _dotted(name: str) -> str:
    return name.replace(".py::", ".").replace("::", ".").replace("/", ".").removesuffix(".py")


@dataclass(slots=True)
class _Case:
    name: str
    classname: str
    file: str
    suites: tuple[str, ...]
    status: Status = "passed"
    todo: bool = False


@dataclass(slots=True)
class _Reading:
    cases: list[_Case] = field(default_factory=list)
    suites: list[str] = field(default_factory=list)
    case: _Case | None = None
    depth: int = 0


def _parse(content: bytes) -> list[_Case]:
    reading = _Reading()

    def start(tag: str, attributes: dict[str, str]) -> None:
        reading.depth += 1
        if reading.depth == 1 and tag not in ("testsuites", "testsuite"):
            raise UnreadableReport(f"it is no JUnit report: its element is {tag[:40]}")
        if reading.depth > _DEPTH_LIMIT:
            raise UnreadableReport("its elements are nested too deeply")
        if tag == "testsuite":
            reading.suites.append(attributes.get("name", ""))
        elif tag == "testcase":
            reading.case = _Case(
                attributes.get("name", ""),
                attributes.get("classname", ""),
                attributes.get("file", ""),
                tuple(reading.suites),
            )
        elif reading.case is not None and tag in ("failure", "error"):
            if not reading.case.todo:
                reading.case.status = "failed"
        elif reading.case is not None and tag == "skipped":
            # node:test reports why a test failed that is marked as one to be done.
            reading.case.todo = attributes.get("type") == "todo"
            if reading.case.status == "passed":
                reading.case.status = "skipped"

    def end(tag: str) -> None:
        reading.depth -= 1
        if tag == "testsuite":
            reading.suites.pop()
        elif tag == "testcase" and reading.case is not None:
            reading.cases.append(reading.case)
            reading.case = None

    def refuse(*_: object) -> None:
        raise UnreadableReport("it declares a document type or entities")

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise UnreadableReport(f"it is no whole XML file: {error}") from error
    except UnreadableReport:
        raise
    except (ValueError, LookupError, TypeError) as error:
        # Of encodings that are none, or none for text.
        raise UnreadableReport(f"it is no XML file: {error}") from error
    return reading.cases


def _python_style(case: _Case, files: Collection[str]) -> str:
    parts = case.classname.split(".") if case.classname else []
    path = case.file.replace("\\", "/").removeprefix("./")
    if path.endswith(".py"):
        module = path.removesuffix(".py").split("/")
        if not parts and case.name in (".".join(module), path):
            return path  # it could not be collected
        # Where names are made from another directory than paths are, only their ends agree.
        while module and parts[: len(module)] != module:
            module = module[1:]
        return "::".join((path, *parts[len(module) :], case.name))
    if path:
        return "::".join(part for part in (path, case.classname, case.name) if part)
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length]) + ".py"
        if path in files:
            return "::".join((path, *parts[length:], case.name))
    path = case.name.replace(".", "/") + ".py"
    if not parts and path in files:
        return path  # it could not be collected
    return "::".join(part for part in (case.classname, case.name) if part)
