"""Plugins and options files of a project: what a conftest, configuration or the command names."""

from __future__ import annotations

from pathlib import Path

import pytest

from endstop.agent.pytest_files import files_pytest_obeys, files_without_skips
from endstop.agent.tree import Trees
from tests.agent.projects import BUG, FIX, project

FILES = (
    *("calc.py", "support/__init__.py", "support/reports.py", "tests/helpers.py", "ci/ci.ini", "reports.py"),
    *("src/plug/__init__.py", "no.py"),
)


@pytest.mark.parametrize(
    ("command", "more", "found"),
    [
        ("pytest -q", {}, []),
        ("python -m pytest -p support.reports -q", {}, ["support/reports.py"]),
        ("pytest -p no:cacheprovider -p plug", {}, ["src/plug/__init__.py"]),
        ("pytest -c ./ci/ci.ini", {}, ["ci/ci.ini"]),
        ("pytest --config-file=ci/ci.ini", {}, ["ci/ci.ini"]),
        (
            "pytest",
            {"conftest.py": "pytest_plugins = 'support.reports'\nX = 'calc'\n"},
            ["support/reports.py"],
        ),
        (
            "pytest",
            {
                "conftest.py": (
                    "pytest_plugins: list[str] = [\n    'support.reports',\n"
                    "    \"tests.helpers\",\n]\nX = 'calc'\n"
                )
            },
            ["support/reports.py", "tests/helpers.py"],
        ),
        ("pytest", {"tests/test_a.py": "pytest_plugins = ('plug',)\n"}, ["src/plug/__init__.py"]),
        ("pytest", {"pytest.ini": "[pytest]\naddopts = -q -p support.reports\n"}, ["support/reports.py"]),
        (
            "pytest",
            {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = ['-p', 'support.reports']\n"},
            ["support/reports.py"],
        ),
    ],
)
def test_named_files(command: str, more: dict[str, str], found: list[str], tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    for name, text in {**dict.fromkeys(FILES, ""), **more}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    trees = Trees(tmp_path / "state", root)
    assert files_pytest_obeys(trees, trees.snapshot(), command) == found


@pytest.mark.parametrize(
    ("conftest", "text", "found"),
    [
        ("", "from calc import add\n\n\ndef test_add():\n    assert add(1, 1) == 2\n", True),
        ("", "class AddTest(TestCase):\n    pass\n", True),
        ("", "HELPER = 1\n", False),
        ("", "@pytest.mark.skipif(WINDOWS)\ndef test_add():\n    pass\n", False),
        ("", "x = pytest.importorskip('x')\ndef test_add():\n    pass\n", False),
        ("def pytest_runtest_setup():\n    pytest.skip()\n", "def test_add():\n    pass\n", False),
    ],
)
def test_files_that_cannot_skip(conftest: str, text: str, found: bool, tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    (root / "tests").mkdir(parents=True)
    (root / "tests/test_new.py").write_text(text)
    (root / "tests/conftest.py").write_text(conftest)
    trees = Trees(tmp_path / "state", root)
    tree = trees.snapshot()
    wanted = {"tests/test_new.py"} if found else set()
    assert files_without_skips(trees, tree, ["tests/test_new.py"]) == wanted
    assert files_without_skips(trees, tree, ["unittest.loader._FailedTest.test_new"]) == wanted
    assert files_without_skips(trees, tree, []) == frozenset()


REWRITES = (
    "import os\nimport pathlib\n\npath = pathlib.Path('tests/test_later.py')\ntext = path.read_text()\n"
    "times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)\n"
    "path.write_text('def test_later():\\n    pass\\n' + '#' * (len(text) - 32))\n"
    "os.utime(path, ns=times)\n"
)
LATER = "from calc import add\n\n\ndef test_later():\n    assert add(20, 3) == 23\n"


def test_a_run_in_which_test_files_were_rewritten_is_not_trusted(tmp_path: Path) -> None:
    made = project(tmp_path, {**BUG, "tests/test_later.py": LATER})
    wrong = "\n\n\ndef add(a, b):\n    return a + b if a < 9 else 0\n"
    verdict = made.verify({"calc.py": REWRITES + wrong})
    assert (verdict.code, verdict.details) == ("VERIFY_FAILED", ("tests/test_later.py",))
    assert verdict.runs[0].exit_code == 0  # the runner itself saw nothing
    assert "files that decide about the tests were changed" in verdict.problem
    assert made.verify(dict(FIX)).passed


def test_what_a_project_rewrites_by_itself_is_known_from_the_baseline(tmp_path: Path) -> None:
    makes = "import pathlib\n\npathlib.Path('tests/made_data.py').write_text('X = 1\\n')\n"
    files = {**BUG, "tests/made_data.py": "X = 0\n", "conftest.py": BUG["conftest.py"] + makes}
    made = project(tmp_path, files)
    assert made.verification.start().rewrites == ("tests/made_data.py",)
    assert made.verify(dict(FIX)).passed
