"""A command may start its runner several times: every run counts, but not one that a test of it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from endstop.agent.decisions import TestReport
from endstop.agent.report import UnreadableReport, read_all_junit
from endstop.sandbox.settings import SandboxSettings
from tests.agent.projects import BUG, FIX, project

MORE = "from calc import add\n\n\ndef test_more():\n    assert add(1, 1) == 2\n"
BOTH = BUG | {"more/test_more.py": MORE}
PYTEST = "python -m pytest -q -p no:cacheprovider"
ALL = ("more/test_more.py::test_more", "tests/test_calc.py::test_add", "tests/test_calc.py::test_zero")


def written(path: Path, **cases: str) -> None:
    body = "".join(f'<testcase name="{name}">{inner}</testcase>' for name, inner in cases.items())
    path.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")


def test_the_worst_of_several_reports_counts(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    written(tmp_path / "report.xml.1", a="", b="", c="<skipped/>", d="<failure/>", e="")
    written(tmp_path / "report.xml.10", a="", b="<skipped/>", c="", d="", e="<failure/>")
    # Nothing of ours.
    written(tmp_path / "report.xml.old", f="")
    written(tmp_path / "reports.xml.2", f="")
    expected = TestReport(frozenset("a"), frozenset("de"), frozenset("bc"))
    assert read_all_junit(path) == expected
    written(path, g="")
    assert read_all_junit(path) == TestReport(expected.passed | {"g"}, expected.failed, expected.skipped)


@pytest.mark.parametrize("text", ["", "<testsuite>", "x"])
def test_every_report_must_be_whole(tmp_path: Path, text: str) -> None:
    written(tmp_path / "report.xml", a="")
    assert read_all_junit(tmp_path / "report.xml").passed == {"a"}
    (tmp_path / "report.xml.1").write_text(text)
    with pytest.raises(UnreadableReport):
        read_all_junit(tmp_path / "report.xml")


def test_no_report(tmp_path: Path) -> None:
    with pytest.raises(UnreadableReport, match="there is none"):
        read_all_junit(tmp_path / "report.xml")


@pytest.mark.parametrize(
    ("command", "makefile"),
    [
        (f"{PYTEST} tests && {PYTEST} more", ""),
        (f"for d in tests more; do {PYTEST} $d || failed=1; done; test -z $failed", ""),
        (f"(cd . && {PYTEST} tests); set -euo pipefail; (cd . && {PYTEST} more)", ""),
        ("make test", f"test:\n\tfor d in tests more; do {PYTEST} $$d || exit 1; done\n"),
        ("make test", f"test:\n\t{PYTEST} tests\n\t{PYTEST} more\n"),
    ],
)
def test_pytest_several_times(tmp_path: Path, command: str, makefile: str) -> None:
    made = project(tmp_path, BOTH | ({"Makefile": makefile} if makefile else {}), command)
    assert made.verification.start().failed[-1:] == ("tests/test_calc.py::test_add",)
    verdict = made.verify(dict(FIX))
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")
    assert verdict.runs[0].report == TestReport(frozenset(ALL))
    # Every one of them counts.
    only = {"calc.py": "def add(a, b):\n    return 2 if a == 1 else a - b\n"}
    assert made.verify(dict(only)).details == ("tests/test_calc.py::test_add",)


def test_what_a_shell_remembers_stays(tmp_path: Path) -> None:
    """Where the command goes to, its exit code, its own traps."""
    command = (
        f'mkdir -p made && cd "$_" && cd .. && trap "echo left" EXIT; false || code=$?; '
        f'{PYTEST} tests; code="$? $code"; test "$code" = "0 1" || exit 9'
    )
    made = project(tmp_path, BUG, command)
    assert made.verification.start().exit_code == 9
    verdict = made.verify(dict(FIX))
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")
    assert verdict.runs[0].output.endswith("left\n")


def test_a_run_inside_of_a_test_is_not_the_projects(tmp_path: Path) -> None:
    inner = (
        "import subprocess\nimport sys\n\n\ndef test_inner(tmp_path):\n"
        "    (tmp_path / 'test_fails.py').write_text('def test_fails():\\n    assert False\\n')\n"
        "    run = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', str(tmp_path)]\n"
        "    assert subprocess.run(run).returncode == 1\n"
    )
    made = project(tmp_path, BUG | {"tests/test_inner.py": inner}, PYTEST)
    assert made.verification.start().failed == ("tests/test_calc.py::test_add",)
    assert made.verify(dict(FIX)).code == "PASS"


def test_unittest_several_times(tmp_path: Path) -> None:
    test = (
        "import unittest\n\nfrom calc import add\n\n\nclass TestAdd(unittest.TestCase):\n"
        "    def test_{0}(self):\n        self.assertEqual(add(2, 3), 5)\n"
    )
    files = {"calc.py": BUG["calc.py"], "a/test_a.py": test.format("a"), "b/test_b.py": test.format("b")}
    made = project(tmp_path, files, "python -m unittest discover -s a && python -m unittest discover -s b")
    assert made.verification.start().tests == ("a/test_a.py::TestAdd::test_a",)
    verdict = made.verify(dict(FIX))
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")
    assert verdict.runs[0].report == TestReport(
        frozenset({"a/test_a.py::TestAdd::test_a", "b/test_b.py::TestAdd::test_b"})
    )


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_node_several_times(tmp_path: Path) -> None:
    test = (
        "const assert = require('node:assert');\nconst { add } = require('../calc.js');\n"
        "require('node:test')('adds in NAME', () => assert.strictEqual(add(2, 3), 5));\n"
    )
    files = {
        "calc.js": "exports.add = (a, b) => a - b;\n",
        "a/a.test.js": test.replace("NAME", "a"),
        "b/b.test.js": test.replace("NAME", "b"),
    }
    command = "node --test a/*.js && node --test b/*.js"
    made = project(tmp_path, files, command, sandbox=SandboxSettings())
    assert made.verification.start().tests == ("adds in a",)
    verdict = made.verify({"calc.js": "exports.add = (a, b) => a + b;\n"})
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")
    assert verdict.runs[0].report == TestReport(frozenset({"adds in a", "adds in b"}))


@pytest.mark.parametrize(
    "command", ["cd sub && {} --junitxml=out/own.xml", "(cd 'sub'; {} --junit-xml=own.xml)"]
)
def test_a_report_of_the_commands_own_further_in(tmp_path: Path, command: str) -> None:
    made = project(tmp_path, {f"sub/{name}": text for name, text in BUG.items()}, command.format(PYTEST))
    assert made.verification.start().failed == ("tests/test_calc.py::test_add",)
    verdict = made.verify({"sub/calc.py": FIX["calc.py"]})
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")
