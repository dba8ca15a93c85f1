"""Plugins and options files of a project: what a conftest, configuration or the command names."""

from __future__ import annotations

from pathlib import Path

import pytest

from endstop.agent.pytest_files import files_pytest_obeys, files_without_skips
from endstop.agent.tree import Trees

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
