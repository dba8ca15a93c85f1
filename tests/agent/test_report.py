"""Reports: ids as people write them, and files that are no reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop.agent.decisions import TestReport
from endstop.agent.report import UnreadableReport, find_tests, has_passed, names_test, read_junit

TESTS = """\
import unittest
import pytest


class TestX:
    @pytest.mark.parametrize("v", ["a", "b[1]", "x::y"])
    def test_p(self, v):
        pass


class TestCase(unittest.TestCase):
    def test_u(self):
        self.fail()


@pytest.fixture
def bad():
    yield
    raise ValueError


def test_teardown(bad):
    pass


@pytest.mark.xfail
def test_expected():
    assert 0


@pytest.mark.xfail(strict=True)
def test_unexpected():
    pass


def test_skipped():
    pytest.skip()
"""


@pytest.mark.parametrize("family", ["xunit1", "xunit2"])
def test_ids_are_those_that_pytest_prints(tmp_path: Path, family: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)
    (tmp_path / "tests" / "test_b.py").write_text("import nothing_here\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\njunit_family = {family}\n")
    options = ["-q", "--junitxml=report.xml", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
    )
    report = read_junit(tmp_path / "report.xml", files=["tests/test_a.py", "tests/test_b.py"])
    assert report.passed == {
        "tests/test_a.py::TestX::test_p[a]",
        "tests/test_a.py::TestX::test_p[b[1]]",
        "tests/test_a.py::TestX::test_p[x::y]",
    }
    assert report.failed == {
        "tests/test_a.py::TestCase::test_u",
        "tests/test_a.py::test_teardown",  # passed, and its teardown did not
        "tests/test_a.py::test_unexpected",
        "tests/test_b.py",
    }
    assert report.skipped == {"tests/test_a.py::test_expected", "tests/test_a.py::test_skipped"}
    assert report.executed == 7


ID = "tests/test_calc.py::TestX::test_add[1-2]"


@pytest.mark.parametrize(
    "wanted",
    [
        ID,
        "tests/test_calc.py::TestX::test_add",
        "test_calc.py::TestX::test_add",
        "TestX::test_add",
        "test_add",
        " test_add[1-2] ",
        "tests.test_calc.TestX.test_add",
        "test_calc.TestX.test_add",
        "TestX.test_add",
        "tests/test_calc.py",
        "tests/test_calc.py::TestX",
    ],
)
def test_what_people_write_for_an_id(wanted: str) -> None:
    assert names_test(wanted, ID) or ID.startswith(wanted)


@pytest.mark.parametrize(
    "wanted", ["", " ", "add", "test", "_add", "test_ad", "tests", "calc.py::TestX", "py", "]"]
)
def test_what_is_no_id(wanted: str) -> None:
    assert not names_test(wanted, ID)


def test_all_of_a_name_must_have_passed() -> None:
    report = TestReport(
        passed=frozenset(["a.py::test_add[1]", "b.py::test_other"]),
        failed=frozenset(["a.py::test_add[2]"]),
        skipped=frozenset(["b.py::test_late"]),
    )
    assert find_tests("test_add", report) == {"a.py::test_add[1]": "passed", "a.py::test_add[2]": "failed"}
    assert not has_passed("test_add", report)
    assert has_passed("a.py::test_add[1]", report)
    assert has_passed("test_other", report)
    assert not has_passed("test_late", report)
    assert not has_passed("test_absent", report)
    assert not has_passed("", report)


LAUGHS = b"""<?xml version="1.0"?><!DOCTYPE t [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]>
<testsuite><testcase classname="a" name="&b;"/></testsuite>"""


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"not xml", "no whole XML file"),
        (b"<testsuite><testcase name='a'/>", "no whole XML file"),
        (b"<html></html>", "no JUnit report"),
        (LAUGHS, "document type or entities"),
        (LAUGHS.decode().encode("utf-16"), "document type or entities"),
        (b"<testsuite>" + b"<a>" * 300 + b"</a>" * 300 + b"</testsuite>", "nested too deeply"),
        (b'<?xml version="1.0" encoding="nonsense"?><testsuite/>', "XML"),
        (b"\xff\xfe\x00", "XML"),
    ],
)
def test_files_that_are_no_reports(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "report.xml"
    path.write_bytes(content)
    with pytest.raises(UnreadableReport, match=why):
        read_junit(path)


def test_places_where_no_report_is(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    with pytest.raises(UnreadableReport, match="there is none"):
        read_junit(path)
    path.symlink_to("/etc/passwd")
    with pytest.raises(UnreadableReport, match="no regular file"):
        read_junit(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnreadableReport, match="no regular file"):
        read_junit(path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnreadableReport, match="larger than"):
        read_junit(path)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    for whole in (content, b"<testsuite>" + content + b"</testsuite>"):
        try:
            report = read_junit(whole)
        except UnreadableReport:
            continue
        # Nothing here is a test that ran, so nothing may count as one.
        assert report.executed == 0


def test_one_that_comes_twice_counts_as_its_worse_result() -> None:
    report = read_junit(
        b'<testsuites><testsuite><testcase classname="a" name="t"><failure/></testcase>'
        b'<testcase classname="a" name="t"/></testsuite></testsuites>'
    )
    assert report == TestReport(failed=frozenset(["a::t"]))
