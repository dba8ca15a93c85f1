"""The figures of a run's report, drawn by matplotlib without a display."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from endstop.protocol.errors import EndstopError
from endstop.train.run_results import RunResults, StageResults, TaskResult
from endstop.train.tables import short

_BLUE, _ORANGE, _GREEN, _RED, _GREY, _VIOLET = (
    "#0b6bcb",
    "#b4530a",
    "#2e7d4f",
    "#b3261e",
    "#6b7280",
    "#6d4aae",
)
_EVENTS = {
    "content": ("content", _GREY),
    "document_end": ("end of document", _GREEN),
    "turn_end": ("end of turn", _ORANGE),
    "tool_end": ("hand-over to a tool", _VIOLET),
    "thinking_end": ("end of thinking", _BLUE),
}
_COLORS = (_BLUE, _ORANGE, _GREEN, _RED, _VIOLET, _GREY)

Draw = Callable[[Any], None]


def draw_figures(run: RunResults, folder: Path) -> dict[str, str]:
    """Draw everything there is data for into a folder: key of the figure -> file name.

    Keys are `loss`, `stops` and `speed` with the stage behind a dash, `rl`, `tasks-<stage>`, and
    `long-context-<stage>`. Raises EndstopError where matplotlib is missing.
    """
    found: dict[str, str] = {}
    for stage in run.stages:
        for key, draw, width in _figures_of(stage):
            name = f"{key}-{stage.name}"
            height = max(3.8, 0.3 * len(stage.tasks) + 1.4) if key == "tasks" else 3.8
            _save(folder / f"{name}.png", draw, width, height)
            found[name] = f"{name}.png"
    return found


def _figures_of(stage: StageResults) -> Iterable[tuple[str, list[Draw], float]]:
    steps = stage.keys("train")
    if "loss" in steps:
        yield "loss", [lambda axes: _loss(axes, stage), lambda axes: _event_losses(axes, stage)], 11
    if any(key.startswith(("p_", "natural_stop", "early_stop")) for key in stage.keys("eval")) and (
        stage.name != "rl"
    ):
        yield "stops", [lambda axes: _stop_probabilities(axes, stage), lambda axes: _samples(axes, stage)], 11
    if "reward" in steps:
        yield "rl", [lambda axes: _rewards(axes, stage), lambda axes: _answers(axes, stage)], 11
    if "tokens_per_second" in steps:
        yield "speed", [lambda axes: _speed(axes, stage)], 5.6
    if stage.tasks:
        yield "tasks", [lambda axes: _tasks(axes, stage.tasks)], 7
    if stage.long_context:
        yield "long-context", [lambda axes: _long_context(axes, stage.long_context)], 9


def _loss(axes: Any, stage: StageResults) -> None:
    steps, values = stage.series("train", "loss")
    axes.plot(steps, values, color=_BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smoothed(values), color=_BLUE, label="training")
    steps, values = stage.series("eval", "loss")
    if values:
        axes.plot(steps, values, color=_RED, marker="o", markersize=3, label="held out")
    _finish(axes, f"{stage.name}: loss", "nats for each supervised token", log=True)


def _event_losses(axes: Any, stage: StageResults) -> None:
    for event, (name, color) in _EVENTS.items():
        steps, values = stage.series("train", f"loss_{event}")
        if values:
            axes.plot(steps, smoothed(values), color=color, label=name)
    _finish(axes, f"{stage.name}: loss on each kind of target", "nats", log=True)


def _stop_probabilities(axes: Any, stage: StageResults) -> None:
    for event, (name, color) in _EVENTS.items():
        for suffix, style, words in (("at_end", "-", "at true ends"), ("before", ":", "before them")):
            steps, values = stage.series("eval", f"p_{event}_{suffix}")
            if values:
                axes.plot(
                    steps, values, style, color=color, marker="o", markersize=3, label=f"{name}, {words}"
                )
    axes.set_ylim(-0.03, 1.03)
    _finish(axes, f"{stage.name}: P(stop) on held-out data", "probability")


def _samples(axes: Any, stage: StageResults) -> None:
    for key, name, color in (
        ("natural_stop_rate", "stop by themselves", _GREEN),
        ("early_stop_rate", "too early", _ORANGE),
        ("late_stop_rate", "too late", _VIOLET),
    ):
        steps, values = stage.series("eval", key)
        if values:
            axes.plot(steps, values, color=color, marker="o", markersize=3, label=name)
    axes.set_ylim(-0.03, 1.03)
    _finish(axes, f"{stage.name}: how samples end", "share of samples")


def _rewards(axes: Any, stage: StageResults) -> None:
    steps, values = stage.series("train", "reward")
    axes.plot(steps, values, color=_BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smoothed(values), color=_BLUE, label="training")
    steps, values = stage.series("eval", "reward")
    if values:
        axes.plot(steps, values, color=_RED, marker="o", markersize=3, label="held out, greedy")
    _finish(axes, "rl: reward", "mean reward")


def _answers(axes: Any, stage: StageResults) -> None:
    for key, name, color in (
        ("accuracy", "right", _GREEN),
        ("stop_rate", "stop by themselves", _BLUE),
        ("false_completion_rate", "end, but wrong", _RED),
        ("gave_up_rate", "say that they gave up", _GREY),
    ):
        steps, values = stage.series("eval", key)
        if values:
            axes.plot(steps, values, color=color, marker="o", markersize=3, label=name)
    axes.set_ylim(-0.03, 1.03)
    _finish(axes, "rl: held-out answers", "share of answers")


def _speed(axes: Any, stage: StageResults) -> None:
    steps, values = stage.series("train", "tokens_per_second")
    axes.plot(steps, values, color=_GREY, linewidth=0.9)
    axes.set_ylim(0, 1.15 * max(values))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    _finish(axes, f"{stage.name}: speed", "tokens/s", legend=False)


def _tasks(axes: Any, tasks: Sequence[TaskResult]) -> None:
    shown = [task for task in tasks if task.exact is not None or task.correct is not None][::-1]
    places = range(len(shown))
    axes.barh(
        [place + 0.2 for place in places],
        [task.exact if task.exact is not None else task.correct or 0.0 for task in shown],
        height=0.36,
        color=_BLUE,
        label="right, and ended by itself",
    )
    axes.barh(
        [place - 0.2 for place in places],
        [task.natural_stop or 0.0 for task in shown],
        height=0.36,
        color="#c9ccd3",
        label="ended by itself",
    )
    axes.set_yticks(list(places), [task.name for task in shown])
    axes.set_xlim(0, 1.0)
    _finish(axes, "answers by task", "", grid="x", below=True)
    axes.set_xlabel("share of answers")


def _long_context(axes: Any, found: Mapping[str, Any]) -> None:
    for number, (name, stretches) in enumerate(found["series"].items()):
        color = _COLORS[number % len(_COLORS)]
        known = [each for each in stretches if each.get("p_at_end") is not None]
        places = [(each["begin"] + each["end"]) / 2 for each in known]
        axes.plot(
            places, [each["p_at_end"] for each in known], color=color, marker="o", markersize=3, label=name
        )
        axes.plot(places, [each.get("p_before") or 0.0 for each in known], ":", color=color)
    if found.get("trained"):
        axes.axvline(
            found["trained"], color=_GREY, linestyle="--", linewidth=1.0, label="end of the trained window"
        )
    axes.set_ylim(-0.03, 1.03)
    _finish(axes, "P(stop) at true ends (lines) and before them (dots), by position", "probability")
    axes.set_xlabel("tokens from the beginning of the row")


def smoothed(values: Sequence[float], share: float = 0.02) -> list[float]:
    """A running mean over about `share` of the values, which makes a noisy curve readable."""
    kept = 1.0 - 1.0 / max(1.0, share * len(values))
    found: list[float] = []
    mean = weight = 0.0
    for value in values:
        mean = kept * mean + (1.0 - kept) * value
        weight = kept * weight + (1.0 - kept)
        found.append(mean / weight)
    return found


def _finish(
    axes: Any,
    title: str,
    label: str,
    *,
    log: bool = False,
    legend: bool = True,
    grid: str = "y",
    below: bool = False,
) -> None:
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.set_ylabel(label)
    axes.set_xlabel("step")
    if log and all(value > 0 for line in axes.lines for value in line.get_ydata()):
        axes.set_yscale("log")
    axes.grid(True, axis=grid, color="#e3e5e9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend and axes.get_legend_handles_labels()[0]:
        look = {"fontsize": 8, "frameon": True, "framealpha": 0.9, "edgecolor": "#dcdfe4"}
        if below:
            axes.figure.legend(loc="outside lower center", ncols=2, **look)
        else:
            axes.legend(loc="best", **look)


def _save(path: Path, draws: Sequence[Draw], width: float, height: float) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EndstopError("The report's figures need matplotlib: pip install 'endstop[plot]'.") from error
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for number, draw in enumerate(draws, 1):
        draw(figure.add_subplot(1, len(draws), number))
    figure.savefig(str(path), format="png")
