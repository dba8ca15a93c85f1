"""What evidence for a checklist item is worth."""

from __future__ import annotations

import pytest

from endstop.agent.checklist import Checklist, flaw
from endstop.agent.decisions import TestReport
from endstop.agent.task import ChecklistItem

REPORT = TestReport(
    passed=frozenset(
        {
            "tests/test_calc.py::test_add",
            "tests/test_calc.py::TestZero::test_zero[0, 0]",
            "adds two numbers",
            "TestSum/negative",
            "calc::tests::adds",
        }
    ),
    failed=frozenset({"tests/test_calc.py::test_sub", "tests/test_other.py::test_both"}),
    skipped=frozenset({"tests/test_calc.py::test_windows"}),
)
PATHS = {"README.md": "1", "docs/use.md": "2", "tests/test_calc.py": "3", "Makefile": "4"}
HOLDS = [
    "test_add",
    "tests/test_calc.py::test_add",
    "`tests/test_calc.py::test_add`",
    "test_zero",
    "TestZero::test_zero",
    "test_zero[0, 0]",
    "adds two numbers",
    "negative",
    "TestSum/negative",
    "adds",
    "README.md",
    "./README.md",
    "/workspace/docs/use.md:12",
    "docs",
    "docs/",
    "Makefile",
    "see README.md.",
    "wrote docs/use.md and README.md",
    "test_add, README.md",
    "pytest tests/test_calc.py::test_add -q",
    "python -m  pytest -q",
]
FLAWS = {
    "": "there is no evidence",
    "   ": "there is no evidence",
    "test_sub": "the test tests/test_calc.py::test_sub failed",
    "test_add test_sub": "the test tests/test_calc.py::test_sub failed",
    "test_windows": "the test tests/test_calc.py::test_windows was skipped",
    "tests/test_calc.py::test_mul": "no test tests/test_calc.py::test_mul ran",
    "NOTES.md": "there is no path NOTES.md",
    "README.md, NOTES.md": "there is no path NOTES.md",
    "wrote docs/more.md": "there is no path docs/more.md",
    "../README.md": "there is no path ../README.md",
    "/etc/passwd.txt": "there is no path /etc/passwd.txt",
    "all tests pass": "it names neither a test that passed nor a path that is there",
    "I updated the docs": "it names neither a test that passed nor a path that is there",
    "oracle agreed": "it names neither a test that passed nor a path that is there",
    "cargo test": "it names neither a test that passed nor a path that is there",
    "est_add": "it names neither a test that passed nor a path that is there",
}


@pytest.mark.parametrize("evidence", HOLDS)
def test_evidence_that_holds(evidence: str) -> None:
    assert flaw(evidence, REPORT, PATHS, ("python -m pytest -q",)) == ""


@pytest.mark.parametrize(("evidence", "why"), FLAWS.items())
def test_evidence_that_does_not(evidence: str, why: str) -> None:
    assert flaw(evidence, REPORT, PATHS, ("python -m pytest -q",)) == why


def test_without_a_report_a_path_still_counts_and_a_test_does_not() -> None:
    assert flaw("README.md", None, PATHS) == ""
    assert flaw("tests/test_calc.py::test_add", None, PATHS) == "no test tests/test_calc.py::test_add ran"


def test_where_the_items_stand() -> None:
    checklist = Checklist([ChecklistItem(id="add", text="adds"), ChecklistItem(id="docs")])
    assert [row.line for row in checklist.status({})] == ["add (adds): open", "docs: open"]
    evidence = {"add": " test_add ", "docs": ""}
    assert [row.line for row in checklist.status(evidence)] == [
        "add (adds): attached by test_add",
        "docs: open",
    ]
    evidence["docs"] = "NOTES.md"
    unproven = checklist.unproven(evidence, REPORT, PATHS)
    assert unproven == {"docs": "there is no path NOTES.md"}
    assert [row.state for row in checklist.status(evidence, unproven)] == ["proven", "unproven"]
    assert checklist.missing({"add": "x"}) == ("docs",)
    assert checklist.unknown({"add": "x", "more": "y"}) == ("more",)
