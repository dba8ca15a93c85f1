"""A small real project with a history, a bug, and tests that show it; and what models do in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILES = {
    "pyproject.toml": """[project]
name = "shelf"
version = "0.3.0"

[tool.pytest.ini_options]
pythonpath = ["src"]
""",
    "README.md": "# shelf\n\nKeeps count of what is on the shelves.\n",
    ".gitignore": "__pycache__/\n",
    "src/shelf/__init__.py": "from shelf.stock import Stock\n\n__all__ = ['Stock']\n",
    "src/shelf/stock.py": '''"""What is there, and how much of it."""


class Stock:
    def __init__(self):
        self.items = {}

    def put(self, name, count=1):
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        self.items[name] = self.items.get(name, 0) + count

    def take(self, name, count=1):
        if self.items.get(name, 0) < count:
            raise KeyError(f"there are not {count} of {name}")
        self.items[name] -= count
        return count

    def total(self):
        return len(self.items)
''',
    "src/shelf/report.py": '''"""The stock as text."""


def report(stock):
    lines = [f"{name}: {count}" for name, count in sorted(stock.items.items())]
    return "\\n".join([*lines, f"total: {stock.total()}"])
''',
    "tests/test_stock.py": """import pytest

from shelf import Stock


@pytest.fixture
def stock():
    made = Stock()
    made.put("apple", 3)
    made.put("pear")
    return made


def test_put_adds_up(stock):
    stock.put("apple", 2)
    assert stock.items["apple"] == 5


def test_take_takes(stock):
    assert stock.take("apple", 2) == 2
    assert stock.items["apple"] == 1


def test_take_of_too_many_is_refused(stock):
    with pytest.raises(KeyError):
        stock.take("pear", 2)


def test_total_counts_pieces(stock):
    assert stock.total() == 4
""",
    "tests/test_report.py": """from shelf import Stock
from shelf.report import report


def test_report_ends_with_the_total():
    stock = Stock()
    stock.put("pear", 2)
    assert report(stock) == "pear: 2\\ntotal: 2"


def test_an_empty_report():
    assert report(Stock()) == "total: 0"
""",
}
VERIFY = "python -m pytest -q"
FIX = {
    "edit_file": {"path": "src/shelf/stock.py", "old": "len(self.items)", "new": "sum(self.items.values())"}
}
CLAIM = "I have read the code and all tests pass now. Done!"


def make(place: Path) -> Path:
    """Write the project and commit it."""
    for name, text in FILES.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "Start"],
    ):
        subprocess.run(["git", *command], cwd=place, check=True, capture_output=True)
    return place


def script(place: Path, turns: Sequence[Any], then: str = "end") -> str:
    """A script of a model, as the value of --model."""
    place.write_text(json.dumps({"turns": list(turns), "then": then}))
    return f"scripted:{place}"


def submit(**more: Any) -> Mapping[str, Any]:
    return {"calls": [{"submit": {"summary": "the total counts pieces", **more}}]}


def virtualenv() -> str:
    """The interpreter that runs this has pytest; commands are shown it."""
    return sys.prefix if sys.prefix != sys.base_prefix else "none"
