"""The summary of a finished stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from endstop.train.checkpoint import Position
from endstop.train.data.statistics import combined
from endstop.train.distributed import gathered
from endstop.train.metrics_log import read_metrics
from endstop.train.model_shapes import flops_per_token, parameter_counts
from endstop.train.training_loop import Job


def stage_summary(
    job: Job,
    position: Position,
    finished: bool,
    *,
    sources: Sequence[Mapping[str, Any]],
    labels: Mapping[str, Any],
) -> dict[str, Any]:
    """What summary.json holds: the last figures, what was spent, and what was trained on; every process must
    call it.

    sources: name, licence and origin of each. labels: of the audit of the first rows.
    """
    settings, config = job.settings, job.parallel.model.config
    metrics: dict[str, Any] = {}
    rates: list[float] = []
    for line in read_metrics(job.directory.metrics):
        kind = line.pop("kind")
        step = line.pop("step")
        if kind == "eval":
            metrics |= {f"validation_{name}": value for name, value in line.items()} | {
                "evaluated_step": step
            }
        elif kind == "train":
            metrics |= {name: line[name] for name in ("loss", "mfu") if name in line}
            if isinstance(line.get("tokens_per_second"), int | float):
                rates.append(line["tokens_per_second"])
    if rates:
        metrics["tokens_per_second"] = sorted(rates)[len(rates) // 2]
    positions = position.step * settings.batch_tokens
    counted = gathered(dict(job.loader.statistics()), job.process)
    return {
        "stage": settings.stage,
        "finished": finished,
        "settings": settings.to_json(),
        "metrics": metrics,
        "steps": position.step,
        "seconds": round(position.seconds, 1),
        "tokens": positions,
        "supervised_tokens": position.tokens,
        "parameters": parameter_counts(config),
        "flops": flops_per_token(config, settings.row_length) * positions,
        "data": {
            "sources": [dict(source) for source in sources],
            "statistics": combined(counted) if len(counted) > 1 else counted[0],
            "labels": dict(labels),
        },
    }
