"""Evaluating a base model: bits per byte of texts with the ends beside it, and in-context tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from endstop.models.decoder import Decoder
from endstop.train.evaluation.bits_per_byte import TextFormat, TextScores, score_texts
from endstop.train.evaluation.in_context import CoreReport, InContextTask, encoder_of, evaluate_tasks

StepProgress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done and how much there is (0 where that is not known)."""


@dataclass(frozen=True, slots=True)
class BaseReport:
    """What was measured. texts: by the name of the text. core: None where no tasks were given."""

    texts: Mapping[str, TextScores]
    core: CoreReport | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON: a bits_per_byte that is no number (no bytes) is None."""
        found = asdict(self)
        for scores in found["texts"].values():
            if not math.isfinite(scores["bits_per_byte"]):
                scores["bits_per_byte"] = None
        return found


def load_base(
    directory: str | Path, *, dtype: str = "float32", device: str = "cpu"
) -> tuple[Decoder, TextFormat]:
    """A model directory for `evaluate_base`. Errors as for `load_model` and `Tokenizer.from_pretrained`."""
    from endstop.models.load import load_model
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.tokenbytes import TokenBytes
    from endstop.protocol.tokenizer import Tokenizer

    text_format = TextFormat.of(
        Tokenizer.from_pretrained(directory),
        StopSet.from_pretrained(directory),
        TokenBytes.from_pretrained(directory),
    )
    return load_model(directory, dtype=dtype, device=device), text_format


def evaluate_base(
    model: Decoder,
    text_format: TextFormat,
    *,
    texts: Mapping[str, Iterable[str]] | None = None,
    tasks: Sequence[InContextTask] = (),
    examples: int | None = None,
    max_tokens: int | None = None,
    row_length: int | None = None,
    progress: StepProgress | None = None,
) -> BaseReport:
    """Measure a base model.

    Args:
        texts: documents by the name under which they are reported.
        tasks: of a bundle (`in_context.load_bundle`). examples: at most so many items of each.
        max_tokens: at most about so many tokens of each text.
        row_length: longest row in tokens, by default the model's window.
    """
    started = time.monotonic()
    scores = {}
    for name, documents in (texts or {}).items():
        report = None if progress is None else _named(progress, name)
        scores[name] = score_texts(
            model, text_format, documents, row_length=row_length, max_tokens=max_tokens, progress=report
        )
    core = None
    if tasks:
        encode = encoder_of(text_format.bos_id, text_format.tokenizer.encode_text)
        core = evaluate_tasks(
            model, encode, tasks, examples=examples, max_length=row_length, progress=progress
        )
    return BaseReport(scores, core, time.monotonic() - started)


def _named(progress: StepProgress, name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(name, done, total)
