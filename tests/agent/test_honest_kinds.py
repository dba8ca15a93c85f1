"""Good work of kinds that a gate could take for tampering, and what stands right beside each."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from endstop.agent.checklist import flaw
from endstop.agent.protected import Protected
from endstop.agent.pytest_files import files_without_skips
from endstop.agent.report import has_passed
from endstop.agent.task import Task, VerifySettings
from endstop.agent.tree import Trees
from endstop.agent.verification import Verification
from tests.agent.projects import BUG, FIX, SANDBOX, project, put

INSTALLED = "src/calc.egg-info/entry_points.txt"
SCRIPTS = "[console_scripts]\ncalc = calc:main\n"


@pytest.mark.parametrize(
    ("after", "closed"),
    [
        (SCRIPTS, []),
        (f"{SCRIPTS}\n[gui_scripts]\nGreen=green:g\n", []),
        ("[pytest11]\ngreen = green\n", [INSTALLED]),
        (f"{SCRIPTS}\n[pytest11]\ngreen: green\n", [INSTALLED]),
        ("not of this form", [INSTALLED]),
    ],
)
@pytest.mark.parametrize("before", [None, "", SCRIPTS.replace("main", "old")])
def test_a_package_may_be_installed_in_the_workspace(
    tmp_path: Path, before: str | None, after: str, closed: list[str]
) -> None:
    root = tmp_path / "workspace"
    put(root, {"src/calc.py": "", **({INSTALLED: before} if before is not None else {})})
    trees = Trees(tmp_path / "state", root)
    baseline = trees.snapshot()
    put(root, {INSTALLED: after})
    protected = Protected.of(Task(task="x", verify=VerifySettings(command="pytest", verifier="pytest")))
    assert protected.changed(trees, baseline, trees.snapshot())[0] == closed
    whole = Protected.of(
        Task(task="x", verify=VerifySettings(command="pytest", verifier="pytest"), protected=(INSTALLED,))
    )
    assert whole.changed(trees, baseline, trees.snapshot())[0] == [INSTALLED]


@pytest.mark.parametrize("name", ["profile.py", "resource.py", "src/trace.py", "smtplib/__init__.py"])
def test_modules_that_no_runner_loads(tmp_path: Path, name: str) -> None:
    made = project(tmp_path, BUG)
    made.write({name: "X = 1\n"})
    assert made.protected_changed() == []


NEW = "from new import f\nfrom {0}\n\n\ndef test_f():\n    assert f() == 1\n"
SKIPS = "import pytest\n\nonly = pytest.mark.skipif(True, reason='not here')\n"


@pytest.mark.parametrize(
    ("helper", "imports", "skips", "text"),
    [
        ("tests/marks.py", "tests.marks import only", True, SKIPS),
        ("tests/marks.py", ".marks import (\n    only,\n)", True, SKIPS),
        ("testing/marks/__init__.py", "testing.marks import only", True, SKIPS),
        ("tests/marks.py", ". import marks", True, SKIPS),
        ("tests/marks.py", "tests.marks import only", False, "def only(test):\n    return test\n"),
        ("tests/others.py", "tests.marks import only", False, SKIPS),
        # What the agent may write says nothing about how tests are skipped.
        ("src/marks.py", "marks import only", False, SKIPS),
    ],
)
def test_marks_from_a_module_among_the_tests(
    tmp_path: Path, helper: str, imports: str, skips: bool, text: str
) -> None:
    root = tmp_path / "workspace"
    put(root, {"tests/test_new.py": NEW.format(imports), helper: text})
    trees = Trees(tmp_path / "state", root)
    found = files_without_skips(trees, trees.snapshot(), ["tests/test_new.py"])
    assert found == (set() if skips else {"tests/test_new.py"})


SAVES = (
    "import configparser\nimport pathlib\n\nfrom calc import add\n\n"
    "PATH = pathlib.Path(__file__).with_name('app.ini')\n\n\n"
    "def test_saves():\n    parser = configparser.ConfigParser()\n    parser.read(PATH)\n"
    "    parser['a']['sum'] = str(add(2, 3))\n    assert parser['a']['sum'] == '5'\n"
    "    with PATH.open('w') as file:\n        parser.write(file)\n"
)


def test_a_test_writes_its_data_once_the_work_is_done(tmp_path: Path) -> None:
    made = project(tmp_path, BUG | {"tests/app.ini": "[a]\nsum = 0\n", "tests/test_saves.py": SAVES})
    assert made.verification.start().rewrites == ()
    assert made.verify(dict(FIX)).code == "PASS"
    # The runner's own configuration is no data.
    rewrites = "import pathlib\n\npathlib.Path('pytest.ini').write_text('[pytest]\\n')\n"
    files = {"pytest.ini": "[pytest]\naddopts = -q\n"}
    (tmp_path / "other").mkdir()
    other = project(tmp_path / "other", BUG | files)
    verdict = other.verify({"calc.py": rewrites + FIX["calc.py"]})
    assert (verdict.code, verdict.details) == ("VERIFY_FAILED", ("pytest.ini",))


FURTHER_IN = {f"sub/{name}": text for name, text in BUG.items()}


@pytest.mark.parametrize("command", ["cd sub && python -m pytest", "python -m pytest sub"])
def test_a_runner_in_a_directory_further_in(tmp_path: Path, command: str) -> None:
    """Its tests are told from there; they may be named from the top as well."""
    files = FURTHER_IN | {"sub/pytest.ini": "[pytest]\npython_files = check_*.py\n"}
    files["sub/tests/check_calc.py"] = files.pop("sub/tests/test_calc.py")
    made = project(tmp_path, files, command, required=["sub/tests/check_calc.py::test_add"])
    assert made.verification.start().tests[0] == "tests/check_calc.py::test_add"
    verdict = made.verify({"sub/calc.py": FIX["calc.py"]})
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")
    report = verdict.runs[0].report
    assert report is not None
    for name in ("sub/tests/check_calc.py::test_add", "tests/check_calc.py::test_add", "test_add"):
        assert has_passed(name, report)
        assert flaw(name, report, ()) == ""
    assert not has_passed("other/check_calc.py::test_add", report)
    assert flaw("other/check_calc.py::test_add", report, ()) != ""
    # Names of their own: known from the run only.
    made.write({"sub/tests/check_calc.py": "def test_add():\n    pass\n"})
    assert made.protected_changed() == ["sub/tests/check_calc.py"]


@pytest.mark.parametrize("has_vite", [True, False])
def test_vite_has_a_place_for_its_configuration_in_read_only_packages(tmp_path: Path, has_vite: bool) -> None:
    """It writes there what it has made of vite.config.ts, and ends where it cannot."""
    packages = tmp_path / "workspace" / "node_modules"
    check = "test -d node_modules/left && ! touch node_modules/left/pad 2>/dev/null"
    if has_vite:
        check += (
            ' && test -z "$(ls -A node_modules/.vite-temp)" && echo x > node_modules/.vite-temp/config.mjs'
        )
    root, state = tmp_path / "workspace", tmp_path / "state"
    put(root, {"a.js": "", "node_modules/left/pad.js": ""})
    if has_vite:
        put(root, {"node_modules/vite/package.json": "{}"})
    settings = VerifySettings(command=check, verifier="command")
    trees = Trees(state, root, exclude=("node_modules",))
    task = Task(task="x", verify=settings, dependencies=("node_modules",))
    verification = Verification(
        trees, settings, Protected.of(task), trees.snapshot(), SANDBOX, state, {"node_modules": packages}
    )
    assert verification.verify(trees.snapshot()).code == "PASS"
    # Each command has its own.
    assert verification.verify(trees.snapshot()).code == "PASS"
    assert [path.name for path in packages.rglob("*.mjs")] == []
    assert (packages / ".vite-temp").is_dir() is has_vite


DEMANDS = (
    f"{BUG['conftest.py']}\nimport pytest\n\n\n"
    "@pytest.fixture(autouse=True)\ndef kind(request):\n    return request.module.KIND\n"
)


def test_fixtures_that_only_the_projects_own_tests_satisfy(tmp_path: Path) -> None:
    """Nothing can be loaded at the start, and yet it is known then that the gate's own test cannot pass."""
    files = {"conftest.py": DEMANDS, "tests/test_calc.py": "KIND = 'unit'\n" + BUG["tests/test_calc.py"]}
    made = project(tmp_path, files)
    baseline = made.verification.start()
    assert (baseline.tests, baseline.canary_strict) == ((), False)
    assert baseline.notes[-1] == "no canary, since the gate's own test does not pass in this project"
    assert made.verify(dict(FIX)).code == "PASS"
    assert made.verify({"calc.py": "def add(a, b):\n    return 0\n"}).code == "VERIFY_FAILED"


def test_what_stands_between_the_baseline_and_a_canary_may_go(tmp_path: Path) -> None:
    """A conftest that cannot be loaded without the work says nothing about the gate's own tests."""
    files = {
        "conftest.py": BUG["conftest.py"] + "import calc\n",
        "tests/test_calc.py": BUG["tests/test_calc.py"],
    }
    files["tests/test_other.py"] = "def test_other():\n    pass\n"
    made = project(tmp_path, files, "python -m pytest -q || python -m pytest -q --noconftest -k other")
    baseline = made.verification.start()
    assert (baseline.tests, baseline.canary_strict) != ((), False)
    assert made.verify(dict(FIX)).runs[0].canary == "ok"


ASKS_GIT = (
    "import subprocess\n\n\ndef git(*words):\n"
    "    return subprocess.run(['git', *words], check=True, capture_output=True, text=True).stdout\n\n\n"
    "def test_files():\n    assert 'calc.py' in git('ls-files').split()\n\n\n"
    "def test_clean():\n    assert git('status', '--porcelain', 'calc.py') == ''\n"
    "    assert len(git('rev-parse', 'HEAD').strip()) == 40\n"
)


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_tests_that_ask_for_a_repository(tmp_path: Path) -> None:
    made = project(tmp_path, BUG | {"tests/test_git.py": ASKS_GIT})
    subprocess.run(["git", "init", "-q", str(made.root)], check=True)
    hook = made.root / ".git" / "hooks" / "pre-commit"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    baseline = made.verification.start()
    assert (baseline.failed, baseline.repository) == (("tests/test_calc.py::test_add",), True)
    assert made.verify(dict(FIX)).code == "PASS"
    kept = made.verification.to_dict()
    again = Verification.from_dict(
        kept, made.trees, made.task.verify, Protected.of(made.task), SANDBOX, made.state
    )
    assert again.verify(made.trees.snapshot()).code == "PASS"


def test_no_repository_where_the_project_has_none(tmp_path: Path) -> None:
    made = project(tmp_path, BUG | {"tests/test_git.py": ASKS_GIT})
    baseline = made.verification.start()
    assert (len(baseline.failed), baseline.repository) == (3, False)


@pytest.mark.parametrize(
    ("command", "added"),
    [
        ("cd sub && python -m pytest", "pyproject.toml"),
        ("python -m pytest sub", "sub/pyproject.toml"),
        ("python -m pytest sub/tests", "sub/setup.py"),
    ],
)
def test_packaging_is_added(tmp_path: Path, command: str, added: str) -> None:
    """pytest then calls every test from another directory."""
    text = "[project]\nname = 'calc'\nversion = '1'\n" if added.endswith("toml") else "import setuptools\n"
    made = project(tmp_path, FURTHER_IN, command)
    before = made.verification.start().tests
    verdict = made.verify({"sub/calc.py": FIX["calc.py"], added: text})
    assert (verdict.code, verdict.runs[0].canary, made.protected_changed()) == ("PASS", "ok", [])
    assert verdict.runs[0].report is not None
    assert verdict.runs[0].report.passed.isdisjoint(before)
