"""Markdown tables, and numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a bar inside a cell is written so that it stays one cell."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def number(value: Any) -> str:
    """Thousands with commas; numbers that are not whole with four digits that count; "" for nothing."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not math.isfinite(value):
        return str(value)
    if float(value) == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(value: Any) -> str:
    """A share as `98.4 %`, "" for nothing."""
    return "" if value is None else f"{100 * float(value):.1f} %"


def spent(seconds: float | None) -> str:
    """A time as `45 s`, `12.5 min` or `3 h 51 min`."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02} min"


def short(number: float) -> str:
    """`561.0M`, `11.2B`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"
