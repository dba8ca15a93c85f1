"""A run as it lies on the disk after training, with figures that are made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.models.exportable import write_model


def _task(name: str, examples: int, accuracy: float | None, **stop: float) -> dict[str, Any]:
    record = {
        "task": name,
        "prompt": f"{name} | abc",
        "output": "a`bc",
        "gold": "abc",
        "stop_kind": "turn_end",
    }
    found: dict[str, Any] = {"name": name, "kind": "generative", "examples": examples, "accuracy": accuracy}
    false_stop = stop.pop("false_stop", None)
    records = [{**record, "exact": False, "stop_kind": "max_tokens"}, {**record, "exact": True}]
    return {**found, "false_stop": false_stop, "stop": stop or None, "records": records}


EVALUATION = {
    "tasks": [
        _task("echo", 100, 0.99, exact=0.985, natural_stop=1.0, premature=0.0, late=0.01),
        _task("until", 100, 0.5, exact=0.25, natural_stop=0.75, overrun=0.25),
        _task("count-on", 50, None, false_stop=0.02),
    ],
    "chat_core": 0.745,
}


def write_run(
    path: Path, stages: Sequence[str] = ("base", "mid", "sft"), *, family: str = "nanochat"
) -> Path:
    """Write settings, metrics, summaries, one evaluation and models."""
    for number, stage in enumerate(stages):
        place = path / stage
        place.mkdir(parents=True)
        _write(place / "settings.json", {"stage": stage, "row_length": 256, "batch_tokens": 4096, "seed": 0})
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(number)))
        _write(place / "summary.json", summary(stage, number))
        write_model(place / "model", family)
    _write(path / stages[-1] / "evaluation-chat.json", EVALUATION)
    return path


def lines(number: int) -> list[dict[str, Any]]:
    """metrics.jsonl of a stage: ten steps, evaluated before, half-way and at the end."""
    found: list[dict[str, Any]] = []
    for step in range(11):
        if step:
            found.append(
                {
                    "step": step,
                    "kind": "train",
                    "loss": 3.0 / step,
                    "loss_content": 3.1 / step,
                    "loss_turn_end": 0.5 / step,
                    "bits_per_byte": 2.0 / step,
                    "tokens_per_second": 1000.0 + step,
                    "mfu": 0.3,
                    "seconds": 10.0 * step,
                }
            )
        if step % 5 == 0:
            found.append(
                {
                    "step": step,
                    "kind": "eval",
                    "loss": 3.0 - step / 5,
                    "bits_per_byte": 2.0 - step / 10,
                    "p_turn_end_at_end": step / 10,
                    "p_turn_end_before": 0.1 - step / 100,
                    "natural_stop_rate": step / 10,
                }
            )
    return found


def summary(stage: str, number: int) -> dict[str, Any]:
    return {
        "stage": stage,
        "finished": True,
        "settings": {"stage": stage},
        "metrics": {
            "loss": 0.3,
            "mfu": 0.3,
            "tokens_per_second": 1005.0,
            "validation_loss": 1.0,
            "validation_bits_per_byte": 1.25,
            "validation_p_turn_end_at_end": 0.98,
            "validation_p_turn_end_before": 0.001,
            "validation_natural_stop_rate": 0.995,
        },
        "steps": 10,
        "seconds": 100.0 * (number + 1),
        "tokens": 40_960,
        "supervised_tokens": 12_345,
        "parameters": {"embedding": 20_000, "layers": 100_000, "head": 20_000, "total": 140_000},
        "flops": 3.5e10,
        "data": {
            "sources": [
                {
                    "name": f"corpus-{stage}",
                    "weight": 1.0,
                    "documents": 1200,
                    "licence": "public domain",
                    "origin": "https://example.org/corpus",
                }
            ],
            "statistics": {"use": 1.0, "cropped_tokens": 0, "supervised_ends": 345},
            "labels": {"supervised_stop_rate": 1.0, "censored_rate": 0.0},
        },
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))
