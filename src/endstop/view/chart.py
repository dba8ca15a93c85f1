"""The curve of P(stop) as inline SVG."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Literal

from endstop.view.document import TraceDocument
from endstop.view.marks import visible
from endstop.view.scale import log_floor, log_height, percent

Scale = Literal["log", "linear"]

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 340, 64, 28, 34, 46
_WIDTH = 1080  # of a short answer; longer ones get wider, so that every token can be pointed at
_STEP = 9


def chart_svg(document: TraceDocument, scale: Scale, hidden: bool = False) -> str:
    """The chart with one point for each step. Every text in it is escaped."""
    steps = document.trace.steps
    values = document.p_stops()
    floor = log_floor(values)
    width = max(_WIDTH, _LEFT + _RIGHT + _STEP * len(steps))
    inner, bottom = width - _LEFT - _RIGHT, _HEIGHT - _BOTTOM

    def x(index: float) -> float:
        return _LEFT + (index + 0.5) * inner / max(1, len(steps))

    def y(value: float) -> float:
        height = log_height(value, floor) if scale == "log" else value
        return bottom - height * (bottom - _TOP)

    # The end of a short answer is in sight on a narrow window too.
    fits = ' class="fits"' if width == _WIDTH else ""
    parts = [
        f'<svg data-scale="{scale}"{fits} viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}" '
        f'role="img" aria-label="P(stop) of {len(steps)} tokens, {scale} scale"{" hidden" if hidden else ""}>'
    ]
    for mark, label in _ticks(scale, floor):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 9}" y="{y(mark) + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    every = _tick_distance(len(steps), inner)
    for index in range(len(steps)):
        if (index + 1) % every == 0 or index == 0:
            parts.append(
                f'<text x="{x(index):.1f}" y="{bottom + 18}" text-anchor="middle">{index + 1}</text>'
            )
    parts.append(
        f'<text x="{_LEFT + inner / 2:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">generated token</text>'
    )
    parts.append(f'<text x="{_LEFT - 54}" y="16">P(stop), {scale} scale</text>')
    band = inner / max(1, len(steps))
    for index, step in enumerate(steps):
        if step.forced:
            parts.append(
                f'<rect class="band" x="{x(index) - band / 2:.1f}" y="{_TOP}" width="{band:.1f}" '
                f'height="{bottom - _TOP}"/>'
            )
    parts.extend(_curve(values, x, y))
    if steps:
        parts.extend(_end(document, x(len(steps) - 1), bottom))
    for index, (step, value) in enumerate(zip(steps, values, strict=True)):
        text = visible(document.texts[index] or step.token)
        title = f"{index + 1}: {text}, P(stop) {percent(value)}"
        parts.append(
            f'<rect class="hit" data-step="{index}" x="{x(index) - band / 2:.1f}" y="{_TOP}" '
            f'width="{band:.1f}" height="{bottom - _TOP}"><title>{escape(title)}</title></rect>'
        )
        if value is not None:
            first = " first" if step.best_stop_rank == 1 else ""
            radius = 4 if band >= 12 else 2.5
            parts.append(
                f'<circle class="dot{first}" data-step="{index}" '
                f'cx="{x(index):.1f}" cy="{y(value):.1f}" r="{radius}"/>'
            )
    parts.append("</svg>")
    return "".join(parts)


def _ticks(scale: Scale, floor: int) -> list[tuple[float, str]]:
    if scale == "linear":
        return [(tenth / 5, f"{tenth / 5:g}") for tenth in range(6)]
    every = 1 if floor >= -7 else 2
    return [(10.0**power, "1" if power == 0 else f"1e{power}") for power in range(0, floor - 1, -every)]


def _tick_distance(count: int, inner: float) -> int:
    """Steps between two labels of the axis: the smallest round number that leaves them room."""
    for distance in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        if inner / max(1, count) * distance >= 34:
            return distance
    return 5000


def _curve(values: list[float | None], x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    """Lines between neighbours that were both sampled: a forced token interrupts the curve."""
    runs: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{x(index):.1f},{y(value):.1f}")
    return [f'<polyline class="curve" points="{" ".join(run)}"/>' for run in runs if len(run) > 1]


def _end(document: TraceDocument, place: float, bottom: int) -> list[str]:
    label = escape(visible(document.stop_kind or "end"))
    return [
        f'<line class="end" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>',
        f'<text class="end-label" x="{place + 6:.1f}" y="{_TOP - 14}" text-anchor="end">'
        f"ended here: {label}</text>",
    ]
