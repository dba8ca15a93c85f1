"""P(stop) as one line of text."""

from __future__ import annotations

from collections.abc import Sequence

from endstop.view.scale import log_floor, log_height, percent

# One block for each power of ten from 1e-8 up.
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-:=+*#"


def sparkline(values: Sequence[float | None], width: int = 60, blocks: str = BLOCKS) -> str:
    """One character for each step on a log scale that begins at 1e-8 or above; a blank for forced tokens.

    Longer answers are squeezed to `width`: a character then shows the highest P(stop) of its steps,
    so that no peak is lost.
    """
    floor = _floor(values)
    columns = min(width, len(values))
    marks = []
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        known = [value for value in part if value is not None]
        if not known:
            marks.append(" ")
            continue
        marks.append(blocks[min(len(blocks) - 1, int(log_height(max(known), floor) * len(blocks) + 1e-9))])
    return "".join(marks)


def captioned_sparkline(values: Sequence[float | None], width: int = 60, encoding: str = "utf-8") -> str:
    """The sparkline with its scale: `P(stop) 1e-07 ▁▁▂▁█ 1, highest 0.98 at token 5 of 5`."""
    known = [(value, index) for index, value in enumerate(values) if value is not None]
    if not known:
        return "P(stop): no token was sampled"
    try:
        BLOCKS.encode(encoding)
        blocks = BLOCKS
    except (UnicodeEncodeError, LookupError):
        blocks = ASCII_BLOCKS
    highest, place = max(known)
    line = sparkline(values, width, blocks)
    return (
        f"P(stop) 1e{_floor(values)} {line} 1, "
        f"highest {percent(highest)} at token {place + 1} of {len(values)}"
    )


def _floor(values: Sequence[float | None]) -> int:
    return max(-len(BLOCKS), log_floor(values))
