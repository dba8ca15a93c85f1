"""The curve of P(stop) as a PNG, through matplotlib."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from endstop.protocol.errors import EndstopError
from endstop.view.document import TraceDocument
from endstop.view.marks import visible
from endstop.view.scale import LOWEST, log_floor, percent

# Tried in this order where installed; without one of them a CJK label shows boxes.
_FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Noto Emoji",
    "Apple Symbols",
)
_MOST_LABELS = 64


def save_png(document: TraceDocument, path: str | Path, *, linear: bool = False) -> None:
    """Draw the curve to `path`. Raises EndstopError where matplotlib is missing."""
    try:
        from matplotlib import font_manager
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.text import Text
    except ImportError as error:
        raise EndstopError("A PNG needs matplotlib: pip install 'endstop[plot]'.") from error
    steps = document.trace.steps
    installed = set(font_manager.get_font_names())
    count = len(steps)
    width = min(40.0, max(9.0, 0.24 * count)) if count <= _MOST_LABELS else min(40.0, max(12.0, 0.06 * count))
    figure = Figure(figsize=(width, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, document, linear)
    _label_tokens(axes, document)
    families = [name for name in _FONTS if name in installed] or ["sans-serif"]
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_fontfamily(families)
        text.set_parse_math(False)  # a dollar sign in a token is no formula
    # A font's missing weight or glyph is no news to a person who asked for a picture.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(str(path), format="png")


def _draw(axes: Any, document: TraceDocument, linear: bool) -> None:
    steps = document.trace.steps
    values = document.p_stops()
    places = range(1, len(steps) + 1)
    bottom = 10.0 ** log_floor(values)
    heights = [float("nan") if value is None else value for value in values]
    if not linear:
        heights = [max(height, LOWEST, bottom) if height == height else height for height in heights]
    axes.plot(
        places, heights, color="#b4530a", linewidth=1.6, marker="o", markersize=4, markerfacecolor="white"
    )
    first = [(place, heights[place - 1]) for place in places if steps[place - 1].best_stop_rank == 1]
    if first:
        axes.plot(
            *zip(*first, strict=True),
            linestyle="none",
            marker="o",
            markersize=5,
            color="#b4530a",
            label="a stop token was the likeliest token",
        )
    forced = [place for place in places if steps[place - 1].forced]
    for place in forced:
        axes.axvspan(place - 0.5, place + 0.5, color="#6b7280", alpha=0.14, linewidth=0)
    if steps:
        ending = document.ending()
        axes.axvline(
            len(steps), color="#0b6bcb", linestyle="--", linewidth=1.2, label=f"ended here: {ending}"
        )
    if linear:
        axes.set_ylim(-0.03, 1.03)
    else:
        axes.set_yscale("log")
        axes.set_ylim(bottom * 0.7, 1.6)
        axes.yaxis.set_major_formatter(lambda value, _: percent(value))
    axes.set_xlim(0.4, len(steps) + 0.6)
    axes.set_xlabel("generated token")
    axes.set_ylabel(f"P(stop), {'linear' if linear else 'log'} scale")
    title = f"P(stop) along the answer{' of ' + document.model if document.model else ''}"
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, axis="y", color="#e3e5e9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if steps:
        axes.legend(loc="best", fontsize=8, frameon=True, framealpha=0.9, edgecolor="#dcdfe4")


def _label_tokens(axes: Any, document: TraceDocument) -> None:
    """Under a short answer stand its tokens, under a long one their numbers."""
    if not 0 < len(document.texts) <= _MOST_LABELS:
        return
    # A token that ends inside a character completes no text.
    labels = [visible(text)[:14] or "…" for text in document.texts]
    axes.set_xticks(
        range(1, len(labels) + 1), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8
    )
