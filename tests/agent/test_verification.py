"""Verification on real runs: flaky tests, timeouts, commands of every shape, resuming, dependencies."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from endstop.agent.protected import Protected
from endstop.agent.verification import Verification
from endstop.protocol.errors import EndstopError
from tests.agent.projects import BUG, FIX, SANDBOX, Project, project

PASSING = {"calc.py": "def add(a, b):\n    return a + b\n", "tests/test_calc.py": BUG["tests/test_calc.py"]}


def resumed(made: Project) -> Verification:
    data = json.loads(json.dumps(made.verification.to_dict()))
    return Verification.from_dict(
        data, made.trees, made.task.verify, Protected.of(made.task), SANDBOX, made.state
    )


def test_a_test_that_fails_every_other_time_is_flaky(tmp_path: Path) -> None:
    # What differs between two runs of the same files: here a counter outside of them.
    ticks = tmp_path / "ticks"

    def set_to(count: int) -> None:
        shutil.rmtree(ticks, ignore_errors=True)
        ticks.mkdir()
        for number in range(count):
            (ticks / str(number)).touch()

    flaky = (
        "import os\n\n\ndef test_flaky():\n"
        f"    count = len(os.listdir({str(ticks)!r}))\n"
        f"    open(os.path.join({str(ticks)!r}, str(count)), 'w').close()\n"
        "    assert count % 2 == 0\n"
    )
    sandbox = replace(SANDBOX, mode="process")
    made = project(tmp_path, {**BUG, "tests/test_flaky.py": flaky}, sandbox=sandbox)
    set_to(0)
    assert made.verification.start().executed == 3
    name = "tests/test_flaky.py::test_flaky"
    set_to(1)
    verdict = made.verify(dict(FIX))  # fails, then passes
    assert (verdict.code, verdict.details) == ("FLAKY", (name,))
    assert [sorted(run.report.failed) for run in verdict.runs if run.report] == [[name], []]
    assert "once failed and once passed" in verdict.problem
    set_to(0)
    verdict = made.verification.verify(verdict.tree)  # passes, then fails beside the canary
    assert (verdict.code, verdict.details) == ("FLAKY", (name,))
    assert [name in run.report.failed for run in verdict.runs if run.report] == [False, True]


@pytest.mark.slow
def test_a_timeout_is_not_repeated(tmp_path: Path) -> None:
    made = project(tmp_path, BUG, timeout=20.0)
    made.verification.start()
    verdict = made.verify({"calc.py": "print('loading', flush=True)\nwhile True:\n    pass\n"})
    assert verdict.code == "VERIFY_TIMEOUT"
    assert len(verdict.runs) == 1
    assert (verdict.runs[0].timed_out, verdict.runs[0].exit_code) == (True, None)
    assert made.verification.runs == 2
    assert list((made.state / "runs").iterdir()) == []


@pytest.mark.slow
def test_a_baseline_that_hangs_is_noted_and_may_be_repaired(tmp_path: Path) -> None:
    files = {**BUG, "calc.py": "def add(a, b):\n    while True:\n        pass\n"}
    made = project(tmp_path, files, timeout=15.0)
    baseline = made.verification.start()
    assert baseline.timed_out
    assert baseline.notes == (
        "before any change the command does not end within 15 s",
        "whether a canary works here is not known before tests run",
    )
    verdict = made.verify({"README.md": "x"})
    assert verdict.code == "VERIFY_TIMEOUT"
    assert "so it was before any change" in verdict.problem
    verdict = made.verify(dict(FIX))
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")


COMMANDS = {
    "a path and the first failure ends it": "pytest -x tests/test_calc.py",
    "a selection": "pytest -q -k 'add or zero' -m 'not slow'",
    "its own path of imports": "PYTHONPATH=. pytest -q --maxfail=1",
    "an isolated interpreter": f"{sys.executable} -E -m pytest -q",
    "a directory further in": "cd tests && python -m pytest -q --rootdir=..",
    "make": "make test",
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in ("make", "a directory further in") else ())
        for kind in COMMANDS
    ],
)
def test_a_canary_is_brought_into_commands_of_every_shape(tmp_path: Path, kind: str) -> None:
    files = {**BUG, "Makefile": "test:\n\t@python -m pytest -q -x tests\n"}
    made = project(tmp_path, files, COMMANDS[kind])
    baseline = made.verification.start()
    own_path = "PYTHONPATH" in COMMANDS[kind] or "-E" in COMMANDS[kind]
    assert (baseline.canary, baseline.notes) == ("conftest" if own_path else "plugin", ())
    verdict = made.verify(dict(FIX))
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")
    forges = "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n"
    verdict = made.verify({"calc.py": forges + "def add(a, b): return 0\n"})
    assert (verdict.code, verdict.runs[0].exit_code) == ("VERIFY_FAILED", 0)
    assert verdict.runs[0].canary == "the one that must fail was reported as passed"


@pytest.mark.slow
def test_a_canary_runs_with_processes_and_settings_of_the_project(tmp_path: Path) -> None:
    files = {
        **BUG,
        "pytest.ini": "[pytest]\naddopts = -n 2 -p xdist -x --strict-markers --strict-config\n"
        "testpaths = checks\npython_files = check_*.py\npython_functions = check_*\nfilterwarnings = error\n",
        "checks/check_calc.py": "from calc import add\n\n\ndef check_add():\n    assert add(2, 3) == 5\n",
        "checks/conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--mine')\n",
    }
    made = project(tmp_path, files, "python -m pytest --mine=1")
    baseline = made.verification.start()
    assert (baseline.executed, baseline.canary) == (1, "plugin")
    assert made.verify(dict(FIX)).code == "PASS"
    # The baseline's tests are protected, whatever their names.
    made.write({"checks/check_calc.py": "def check_add():\n    pass\n"})
    assert made.protected_changed() == ["checks/check_calc.py"]


def test_tests_that_cannot_be_loaded_yet(tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "",
        "tests/test_new.py": "from pkg.new import f\n\n\ndef test_f():\n    assert f() == 1\n",
        "tests/test_old.py": "def test_old():\n    pass\n",
    }
    made = project(tmp_path, files)
    baseline = made.verification.start()
    # The error counts as one test, and does not hide the others.
    assert (baseline.executed, baseline.tests) == (2, ("tests/test_old.py::test_old",))
    assert baseline.notes == ("could not be loaded before any change: tests/test_new.py",)
    verdict = made.verify({"pkg/new.py": "def f():\n    return 1\n"})
    assert verdict.code == "PASS"
    assert verdict.runs[0].report is not None
    assert verdict.runs[0].report.executed == 2


def test_required_tests_and_a_resumed_run(tmp_path: Path) -> None:
    made = project(tmp_path, BUG, required=("test_add", "tests/test_new.py::test_docs"))
    made.verification.start()
    again = resumed(made)
    assert again.start() == made.verification.start()
    assert again.runs == 1
    verdict = again.verify(made.write(dict(FIX)))
    assert verdict.code == "REQUIRED_NOT_PASSED"
    assert verdict.details == ("tests/test_new.py::test_docs",)
    # A file of a required test is not opened by any pattern; others are.
    opened = Protected.of(made.task.model_copy(update={"allow": ("tests/*",)}))
    verification = Verification.from_dict(
        made.verification.to_dict(), made.trees, made.task.verify, opened, SANDBOX, made.state
    )
    tree = made.write({"tests/test_calc.py": "def test_add(): pass\n", "tests/test_other.py": ""})
    assert verification.protected.changed(made.trees, made.baseline, tree) == (
        ["tests/test_calc.py"],
        ["tests/test_other.py"],
    )


def test_another_command_than_the_kept_one_runs_its_own_baseline(tmp_path: Path) -> None:
    made = project(tmp_path, BUG)
    made.verification.start()
    data = made.verification.to_dict()
    settings = made.task.verify.model_copy(update={"command": "pytest -q"})
    again = Verification.from_dict(data, made.trees, settings, Protected([]), SANDBOX, made.state)
    assert again.baseline is None


def test_dependencies_are_bound_and_not_written(tmp_path: Path) -> None:
    host = tmp_path / "vendored"
    host.mkdir()
    (host / "lib.py").write_text("VALUE = 5\n")
    files = {
        **BUG,
        "calc.py": "import sys\nsys.path.insert(0, 'vendor')\nfrom lib import VALUE\n\n\n"
        "def add(a, b):\n    return 0 if a == 0 else VALUE\n",
    }
    made = project(tmp_path, files, dependencies={"vendor": host})
    assert made.verification.start().failed == ()
    assert made.verify({"README.md": "x"}).code == "PASS"
    (made.root / "vendor").mkdir()
    (made.root / "vendor" / "lib.py").write_text("VALUE = 6\n")
    assert made.verify({"README.md": "y"}).code == "PASS"  # the baseline's, not the workspace's
    verdict = made.verify({"conftest.py": BUG["conftest.py"], "calc.py": "open('vendor/lib.py', 'w')\n"})
    assert verdict.code == "VERIFY_FAILED"
    assert (host / "lib.py").read_text() == "VALUE = 5\n"
    gone = {"gone": host / "x"}
    with pytest.raises(EndstopError, match="the dependency gone is not there"):
        Verification(made.trees, made.task.verify, Protected([]), made.baseline, SANDBOX, made.state, gone)


def test_a_run_writes_to_its_own_export_only(tmp_path: Path) -> None:
    files = {**PASSING, "conftest.py": BUG["conftest.py"]}
    files["tests/test_write.py"] = (
        "import pathlib\n\n\ndef test_write():\n    pathlib.Path('new').write_text('x')\n"
        "    pathlib.Path('tests/test_write.py').write_text('def test_write(): pass')\n"
    )
    made = project(tmp_path, files)
    before = made.trees.snapshot()
    made.verification.start()
    assert made.trees.snapshot() == before
    assert made.verification.verify(before).code == "PASS"


def test_an_empty_difference_passes_where_the_tests_do(tmp_path: Path) -> None:
    made = project(tmp_path, {**PASSING, "conftest.py": BUG["conftest.py"]})
    assert made.verification.verify(made.baseline).code == "PASS"


@pytest.mark.parametrize("mode", ["namespaces", "process"])
@pytest.mark.slow
def test_weaker_sandboxes_verify_the_same(tmp_path: Path, mode: str) -> None:
    sandbox = replace(SANDBOX, mode=mode)  # type: ignore[arg-type]
    made = project(tmp_path, BUG, sandbox=sandbox)
    assert made.verification.start().canary == "plugin"
    assert made.verify({}).code == "VERIFY_FAILED"
    assert made.verify(dict(FIX)).code == "PASS"


def test_a_command_with_a_report_of_its_own(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys\nsys.path.insert(0, '.')\nfrom calc import add\n"
        "result = '' if add(2, 3) == 5 else '<failure/>'\n"
        "pathlib.Path('out.xml').write_text(\n"
        '    f\'<testsuite><testcase classname="calc" name="add">{result}</testcase></testsuite>\')\n'
    )
    made = project(tmp_path, {**BUG, "check.py": script}, "python3 check.py", report="out.xml")
    assert made.task.verify.verifier == "command"
    baseline = made.verification.start()
    assert (baseline.exit_code, baseline.tests, baseline.failed) == (0, ("calc.py::add",), ("calc.py::add",))
    assert baseline.notes[0].startswith("no canary; in its place: the report's count")
    assert made.verify({}).code == "VERIFY_FAILED"
    # A report that lies in the workspace says nothing about a run.
    forged = '<testsuite><testcase classname="calc" name="add"/></testsuite>'
    leaves = "import os\nos._exit(0)\n"
    verdict = made.verify({"out.xml": forged, "calc.py": leaves})
    assert verdict.code == "NO_TESTS_RAN"
    assert made.verify(dict(FIX)).code == "PASS"
    # What the command runs is protected.
    made.write({"check.py": "print('ok')\n"})
    assert made.protected_changed() == ["check.py"]


def test_an_exit_code_alone_is_weak_and_said_to_be_so(tmp_path: Path) -> None:
    command = "python3 -c 'from calc import add; assert add(2, 3) == 5'"
    made = project(tmp_path, BUG, command)
    assert made.verification.start().notes[0].startswith("weak: only the exit code is checked")
    assert made.verify({}).code == "VERIFY_FAILED"
    verdict = made.verify(dict(FIX))
    assert (verdict.code, verdict.runs[0].report, verdict.runs[0].canary) == ("PASS", None, "none")
    settings = made.task.verify.model_copy(update={"required": ("add",)})
    with pytest.raises(EndstopError, match="required tests need a report"):
        Verification(made.trees, settings, Protected([]), made.baseline, SANDBOX, made.state)


def test_what_was_left_by_a_killed_run_is_removed(tmp_path: Path) -> None:
    made = project(tmp_path, BUG)
    left = made.state / "runs" / "left"
    (left / "export").mkdir(parents=True)
    made.verification.start()
    assert not left.exists()


def test_without_a_command_there_is_nothing_to_verify_with(tmp_path: Path) -> None:
    with pytest.raises(EndstopError, match="no command to verify with"):
        project(tmp_path, {"notes.txt": "x"}, None)


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    made = project(tmp_path, BUG, "pytest-of-another-name", verifier="pytest")
    with pytest.raises(EndstopError, match="exited with 127"):
        made.verification.start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's commands run as another user")
def test_runs_see_files_in_spite_of_a_closed_mask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        made = project(tmp_path, BUG, sandbox=SANDBOX)
        made.verification.start()
        assert made.verify(dict(FIX)).code == "PASS"
    finally:
        os.umask(before)


def test_the_projects_own_report_is_read(tmp_path: Path) -> None:
    made = project(tmp_path, BUG, "pytest -q --junit-xml=out/report.xml")
    assert made.verification.start().executed == 2


def test_tests_in_the_code_itself_do_not_close_it(tmp_path: Path) -> None:
    files = {"calc.py": BUG["calc.py"] + "\n\ndef test_add():\n    assert add(2, 3) == 5\n"}
    made = project(tmp_path, files, "pytest -q calc.py")
    assert made.verification.start().tests == ("calc.py::test_add",)
    assert made.verify({"calc.py": files["calc.py"].replace("a - b", "a + b")}).code == "PASS"


@pytest.mark.slow
def test_a_new_module_cannot_skip_the_tests_that_waited_for_it(tmp_path: Path) -> None:
    files = {
        **BUG,
        **FIX,
        "tests/test_new.py": "from new import f, g\n\n\ndef test_f():\n    assert f() == 1\n\n\n"
        "def test_g():\n    assert g() == 2\n",
    }
    made = project(tmp_path, files)
    assert made.verification.start().failed == ("tests/test_new.py",)
    skips = "import pytest\n\n\ndef f():\n    return 1\n\n\ndef g():\n    pytest.xfail('later')\n"
    verdict = made.verify({"new.py": skips})
    assert (verdict.code, verdict.details) == ("FEWER_TESTS", ("tests/test_new.py::test_g",))
    assert made.verify({"new.py": skips.replace("pytest.xfail('later')", "return 2")}).code == "PASS"
