"""Sections of the report that show what `endstop eval tokenizer` and `endstop eval base` have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from endstop.train.run_directory import BASE_EVALUATION
from endstop.train.run_results import StageResults
from endstop.train.tables import markdown_table, number, percent

_OURS = "ours"


def tokenizer_section(found: Mapping[str, Any]) -> str:
    """Bytes for each token by sample, beside other vocabularies; found: `TokenizerEvaluation.to_json`."""
    samples = _objects(found.get("samples"))
    if not samples:
        return ""
    others = [name for name in _object(found.get("vocab_sizes")) if name != _OURS]
    rows = []
    for sample in samples:
        tokens, each = _object(sample.get("tokens")), _object(sample.get("bytes_per_token"))
        row = [str(sample.get("name", "")), number(sample.get("bytes")), number(tokens.get(_OURS))]
        row.append(number(each.get(_OURS)))
        for name in others:
            row += [number(each.get(name)), number(_object(sample.get("ratio")).get(name))]
        rows.append(row)
    header = ["sample", "bytes", "tokens", "bytes for each token"]
    for name in others:
        header += [name, "our tokens for each of its"]
    sizes = ", ".join(f"{name} {number(size)}" for name, size in _object(found.get("vocab_sizes")).items())
    return f"## Tokenizer\n\nTokens in the vocabulary: {sizes}.\n\n{markdown_table(header, rows)}"


def base_section(stage: StageResults) -> str:
    """Bits per byte with the ends beside it, and in-context tasks; "" where they were not measured."""
    found = _object(stage.evaluations.get(BASE_EVALUATION))
    said = ""
    texts = [(name, _object(scores)) for name, scores in _object(found.get("texts")).items()]
    if texts:
        header = [
            "text",
            "bits per byte",
            "bytes",
            "ends",
            "nats for each end",
            "P(stop) at ends",
            "elsewhere",
        ]
        keys = ("bits_per_byte", "bytes", "ends", "nats_per_end", "p_stop_at_ends", "p_stop_before")
        rows = [[name, *(number(scores.get(key)) for key in keys)] for name, scores in texts]
        said += f"### Texts\n\n{markdown_table(header, rows)}\n"
    core = _object(found.get("core"))
    if core:
        rows = [
            [
                str(task.get("label", "")),
                number(task.get("shots")),
                number(task.get("examples")),
                percent(task.get("accuracy")),
                percent(task.get("baseline")),
                number(task.get("centred")),
            ]
            for task in _objects(core.get("tasks"))
        ]
        header = ["in-context task", "shots", "examples", "right", "by guessing", "centred"]
        said += f"### CORE: {number(core.get('core'))}\n\n{markdown_table(header, rows)}\n"
    return said


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    found = value if isinstance(value, Sequence) and not isinstance(value, str) else []
    return [item for item in found if isinstance(item, Mapping)]
