"""Plugins and options files of a project: what a conftest, configuration or the command names."""

from __future__ import annotations

from pathlib import Path

import pytest

from endstop.agent.pytest_files import files_pytest_obeys
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
