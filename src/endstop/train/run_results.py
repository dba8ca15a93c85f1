"""What a run has left on the disk, read for reports and model cards; whatever is missing is simply not there.

No torch. The files are described in `run_directory`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from endstop.protocol.errors import EndstopError
from endstop.train.metrics_log import read_metrics
from endstop.train.run_directory import TOKENIZER_EVALUATION
from endstop.train.tables import number, percent

STAGES = ("base", "mid", "sft", "rl")


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The answers to the questions of one task; shares, None where nothing was measured.

    Attributes:
        count: questions. correct: right. exact: right and ended by the model. overrun: ended by the limit.
        premature, late: stopped before or behind the end of the only right answer.
        false_stop: of a task whose answers have no end, the share that was ended all the same.
    """

    name: str
    count: int
    correct: float | None = None
    exact: float | None = None
    natural_stop: float | None = None
    premature: float | None = None
    late: float | None = None
    overrun: float | None = None
    false_stop: float | None = None
    p_stop_at_gold: float | None = None


@dataclass(frozen=True)
class StageResults:
    """One stage of a run.

    Attributes:
        settings, summary: what settings.json and summary.json hold, empty where there is none.
        lines: of metrics.jsonl. evaluations: file name -> what `endstop eval` has written into the stage.
    """

    name: str
    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[dict[str, Any], ...] = ()
    evaluations: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The last figures: those of the summary, else of the last lines."""
        found = self.summary.get("metrics")
        if isinstance(found, Mapping):
            return found
        last: dict[str, Any] = {}
        for line in self.lines:
            if line["kind"] in ("train", "eval"):
                prefix = "validation_" if line["kind"] == "eval" else ""
                last |= {
                    f"{prefix}{name}": value for name, value in line.items() if name not in ("kind", "step")
                }
        return last

    @property
    def steps(self) -> int | None:
        found = self.summary.get("steps", self.lines[-1]["step"] if self.lines else None)
        return found if isinstance(found, int) else None

    @property
    def seconds(self) -> float | None:
        """Time spent, evaluations included."""
        written = [self.summary.get("seconds"), *(line.get("seconds") for line in reversed(self.lines))]
        return next((float(found) for found in written if _is_number(found)), None)

    @property
    def tokens(self) -> int | None:
        found = self.summary.get("tokens")
        return found if isinstance(found, int) else None

    @property
    def flops(self) -> float | None:
        found = self.summary.get("flops")
        return float(found) if _is_number(found) else None

    @property
    def data(self) -> Mapping[str, Any]:
        """`sources`, `statistics` and `labels`, as far as they are known."""
        found = self.summary.get("data")
        return found if isinstance(found, Mapping) else {}

    @property
    def sources(self) -> list[Mapping[str, Any]]:
        found = self.data.get("sources")
        return [source for source in found if isinstance(source, Mapping)] if isinstance(found, list) else []

    def grouped_sources(self) -> list[list[str]]:
        """Rows of a table: sources with their documents and weights, licence, origin.

        Sources of the same licence and origin share a row.
        """
        groups: dict[tuple[str, str], list[str]] = {}
        for source in self.sources:
            count, weight = source.get("documents"), source.get("weight")
            words = str(source.get("name", ""))
            words += f" ({number(count)})" if count is not None else ""
            words += f" x {number(weight)}" if weight not in (None, 1, 1.0) else ""
            where = (str(source.get("licence") or "not stated"), str(source.get("origin") or ""))
            groups.setdefault(where, []).append(words)
        return [[", ".join(names), licence, origin] for (licence, origin), names in groups.items()]

    def figure(self, key: str, kind: str = "number") -> str:
        """A metric in words, "" where it is missing."""
        value = self.metrics.get(key)
        return percent(value) if kind == "percent" else number(value)

    def series(self, kind: str, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric over the run."""
        found = [
            (line["step"], line[key])
            for line in self.lines
            if line["kind"] == kind and _is_number(line.get(key))
        ]
        return [step for step, _ in found], [value for _, value in found]

    def keys(self, kind: str) -> list[str]:
        """The metrics that lines of a kind have, in the order of their first appearance."""
        names = {
            name: None
            for line in self.lines
            if line["kind"] == kind
            for name in line
            if name not in ("step", "kind")
        }
        return list(names)

    @cached_property
    def long_context(self) -> Mapping[str, Any]:
        """What `endstop eval long-context` has measured, empty where it was not asked."""
        found = _object(self.path / "long_context.json")
        return found if isinstance(found.get("series"), Mapping) else {}

    def mean(self, figure: str) -> float | None:
        """The mean of a figure of TaskResult over the tasks that have it."""
        values = [value for task in self.tasks if (value := getattr(task, figure)) is not None]
        return sum(values) / len(values) if values else None

    @cached_property
    def tasks(self) -> list[TaskResult]:
        """The results of `endstop eval chat`, by task."""
        return list(_tasks(self.evaluations))


@dataclass(frozen=True)
class RunResults:
    """A run: its stages in the order of training."""

    path: Path
    stages: tuple[StageResults, ...]
    tokenizer: Mapping[str, Any] = field(default_factory=dict)

    def stage(self, name: str) -> StageResults | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    def until(self, name: str | None) -> list[StageResults]:
        """The stages up to one, itself included; all where it is not known."""
        names = [stage.name for stage in self.stages]
        end = names.index(name) + 1 if name in names else len(names)
        return list(self.stages[:end])

    @property
    def best(self) -> StageResults | None:
        """The finished stage whose model answers best: right and ended by itself, over all tasks.

        The later one of equals; where nothing was evaluated, the last finished one.
        """
        finished = [stage for stage in self.stages if (stage.path / "model" / "config.json").is_file()]
        evaluated = [stage for stage in finished if stage.mean("exact") is not None]
        return max(
            evaluated or finished,
            key=lambda stage: (stage.mean("exact") or 0.0, STAGES.index(stage.name)),
            default=None,
        )

    @property
    def seconds(self) -> float:
        """Time of all stages."""
        return sum(stage.seconds or 0.0 for stage in self.stages)


def read_run(path: str | Path) -> RunResults:
    """Everything that lies in a run's directory. EndstopError where there is no stage in it."""
    path = Path(path)
    stages = tuple(_stage(path / name) for name in STAGES if _is_stage(path / name))
    if not stages:
        raise EndstopError(
            f"{path} is no run: none of {', '.join(STAGES)} is in it. Name the directory given as --run."
        )
    return RunResults(path, stages, _object(path / "tokenizer" / TOKENIZER_EVALUATION))


def run_of(model: Path) -> tuple[RunResults | None, str | None]:
    """The run and the stage that a model directory (RUN/sft/model) belongs to, None where it is of no run."""
    stage = model.resolve().parent
    if stage.name not in STAGES or not _is_stage(stage):
        return None, None
    return read_run(stage.parent), stage.name


def _is_stage(path: Path) -> bool:
    return any((path / name).is_file() for name in ("settings.json", "summary.json", "metrics.jsonl"))


def _stage(path: Path) -> StageResults:
    evaluations = {file.name: _object(file) for file in sorted(path.glob("eval*.json"))}
    return StageResults(
        path.name,
        path,
        _object(path / "settings.json"),
        _object(path / "summary.json"),
        tuple(line for line in read_metrics(path / "metrics.jsonl") if isinstance(line.get("kind"), str)),
        {name: value for name, value in evaluations.items() if value},
    )


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; what is missing or damaged is empty: a report is made of what there is."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _tasks(evaluations: Mapping[str, Any]) -> Iterator[TaskResult]:
    for found in evaluations.values():
        tasks = found.get("tasks")
        for figures in tasks if isinstance(tasks, list) else ():
            if isinstance(figures, Mapping) and "name" in figures:
                yield _task(figures)


def _task(figures: Mapping[str, Any]) -> TaskResult:
    stop = figures.get("stop")
    values = {**(stop if isinstance(stop, Mapping) else {}), **figures}

    def share(key: str) -> float | None:
        return float(values[key]) if _is_number(values.get(key)) else None

    return TaskResult(
        str(figures["name"]),
        int(values["examples"]) if _is_number(values.get("examples")) else 0,
        share("accuracy"),
        share("exact"),
        share("natural_stop"),
        share("premature"),
        share("late"),
        share("overrun"),
        share("false_stop"),
        share("p_stop_at_gold"),
    )


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
