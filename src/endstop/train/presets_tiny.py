"""What the `tiny` preset trains on and how: two CPU cores, the whole pipeline in 20 minutes.

All data are generated, and all stages teach the same skills: base as plain documents, mid and SFT as
conversations. The weights were found by trial: what decides its end by content (`until`, `absent`) or keeps
a count letter by letter (`letters`) is learned last, so it gets the largest shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from endstop.train.optimizer import OptimizerSettings
from endstop.train.settings import ModelSettings, ScheduleSettings, StageSettings

VOCAB_SIZE = 320
"""256 bytes, 9 special tokens, 55 merges: the fewer letters a merge hides, the easier it is to spell."""

WEIGHTS: Mapping[str, float] = {
    "until": 3.0,
    "letters": 3.0,
    "count": 2.0,
    "close": 2.0,
    "first": 1.5,
    "spell": 1.5,
    "bee": 1.5,
    "turns": 2.0,
    "echo": 1.0,
    "absent": 1.5,
    "repeat": 1.0,
    "list": 1.0,
    "calc": 1.2,
    "story": 1.2,
    "define": 1.0,
    "identity": 1.0,
    "empty": 0.3,
}
"""Share of each task in the examples of a stage."""

MODEL = ModelSettings(depth=4, hidden_size=128, head_dim=32, context=256)

# Rates of embedding and output matrix are multiplied by (128 / 768)^-0.5 = 2.45.
OPTIMIZER = OptimizerSettings(matrix_lr=0.02, embedding_lr=0.004, head_lr=0.004)

BASE_TOKENS, MID_TOKENS, SFT_TOKENS = 2_000_000, 5_000_000, 8_000_000


def data(examples: int, *, base: bool = False) -> tuple[str, ...]:
    """So many examples of the mixture, for `StageSettings.data`; `base` adds dictionary entries."""
    weights = {**WEIGHTS, "entry": 1.0} if base else WEIGHTS
    total = sum(weights.values())
    return tuple(f"{name}@{max(1, round(examples * share / total))}" for name, share in weights.items())


def stages(predecessor: str) -> dict[str, StageSettings]:
    """Settings of base, mid and sft; `predecessor` stands for the model that mid and SFT begin with."""
    common: dict[str, Any] = {
        "row_length": 256,
        "batch_tokens": 4096,
        "micro_rows": 16,
        "buffer": 100,
        "isolate": True,
        "optimizer": OPTIMIZER,
    }
    constant = ScheduleSettings(warmup_steps=30, warmdown_fraction=0.0)
    return {
        "base": StageSettings(
            "base",
            model=MODEL,
            data=data(200_000, base=True),
            tokens=BASE_TOKENS,
            packing="keep-ends",
            schedule=constant,
            **common,
        ),
        "mid": StageSettings(
            "mid",
            init_from=predecessor,
            data=data(200_000),
            tokens=MID_TOKENS,
            schedule=constant,
            seed=1,
            **common,
        ),
        "sft": StageSettings(
            "sft",
            init_from=predecessor,
            data=data(200_000),
            tokens=SFT_TOKENS,
            schedule=ScheduleSettings(warmup_steps=30, warmdown_fraction=0.7),
            seed=2,
            **common,
        ),
    }
