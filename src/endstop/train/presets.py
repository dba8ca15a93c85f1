"""The sizes that are trained by name: every setting of every stage.

`d12`, `d20` and `d32` are nanochat's configurations of October 2025 (Karpathy): width 64 times depth, 2048
tokens of context, 524,288 tokens a step, 20 tokens for each parameter. `tiny` is for two CPU cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from endstop.models.config import DecoderConfig
from endstop.train import presets_tiny
from endstop.train.model_shapes import Shape
from endstop.train.optimizer import OptimizerSettings
from endstop.train.settings import ModelSettings, ScheduleSettings, Stage, StageSettings

PREDECESSOR = "the stage before"
"""Stands for the model that a stage begins with until the run's directory is known."""


@dataclass(frozen=True, slots=True)
class ReinforcementNumbers:
    """How large the RL stage is.

    Attributes:
        steps: optimiser steps. questions: in a step. samples: answers to each. max_tokens: of an answer.
        rate: learning rates, as a fraction of the SFT stage's. evaluation_questions: held-out ones.
        tasks: what is asked; see `questions.task_names`.
    """

    steps: int
    questions: int = 16
    samples: int = 16
    max_tokens: int = 256
    rate: float = 0.05
    evaluation_questions: int = 128
    tasks: tuple[str, ...] = ("hard",)


@dataclass(frozen=True, slots=True)
class Preset:
    """One size.

    Attributes:
        vocab_size: special tokens included. tokenizer_characters: what the tokenizer is trained on at most.
        base, mid, sft: settings of the stages; mid and sft begin with PREDECESSOR.
        rl: the size of the RL stage. what: one line for people.
        digits: how many may stand together in a token.
        evaluation: what the models are asked at the end; see `task_names.tasks_named`.
    """

    name: str
    what: str
    vocab_size: int
    tokenizer_characters: int
    base: StageSettings
    mid: StageSettings
    sft: StageSettings
    rl: ReinforcementNumbers
    digits: int = 2
    evaluation: tuple[str, ...] = ("synthetic",)

    @property
    def model(self) -> ModelSettings:
        """The shape of the model."""
        assert self.base.model is not None
        return self.base.model

    def config(self, vocab_size: int | None = None) -> DecoderConfig:
        """The decoder, by default with as many tokens as the preset asks for."""
        return self.model.config(self.vocab_size if vocab_size is None else vocab_size)

    def stage(self, stage: Stage, init_from: str | None = None, **changes: Any) -> StageSettings:
        """The settings of a stage; `init_from` is the directory that stands in for PREDECESSOR.

        A change of the run's length (steps, tokens, seconds) replaces the preset's.
        """
        settings: StageSettings = {"base": self.base, "mid": self.mid, "sft": self.sft}[stage]
        lengths = {"steps", "tokens", "seconds"}
        if lengths & {name for name, value in changes.items() if value is not None}:
            changes = {**dict.fromkeys(lengths), **changes}
        if init_from is not None:
            changes = {**changes, "init_from": init_from, "model": None}
        return replace(settings, **changes)

    def with_shape(self, shape: Shape) -> Preset:
        """The same size in another shape. A Llama has tokens of single digits, so that it exports to GGUF."""
        digits = 1 if shape == "llama" else self.digits
        return replace(self, base=replace(self.base, model=replace(self.model, shape=shape)), digits=digits)


def _large(name: str, depth: int, tokens: int, shards: int, micro_rows: int, what: str) -> Preset:
    """Data of base, mid and SFT as nanochat has them, with `shards` of FineWeb-Edu (250 million characters
    each) for base: enough for one epoch."""
    optimizer = OptimizerSettings(batch_tokens=524_288)
    every: dict[str, Any] = {
        "evaluate_every": 250,
        "save_every": 1000,
        "data_shards": 8,
        "prepare_ahead": True,
        # Among half a million conversations there are some that are none.
        "skip_bad": True,
        "sample_tokens": 1024,
        "micro_rows": micro_rows,
    }
    base = StageSettings(
        "base",
        model=ModelSettings(depth=depth),
        data=(f"fineweb-edu@{shards}",),
        tokens=tokens,
        validation_rows=5120,
        optimizer=optimizer,
        compile=True,
        **every,
    )
    mid = StageSettings(
        "mid",
        init_from=PREDECESSOR,
        data=(
            "smoltalk@460000",
            "mmlu-aux@100000",
            "gsm8k@8000",
            "spell@200000",
            "bee@80000",
            "identity@2000",
        ),
        tokens=420_000_000,
        masked=True,
        validation_rows=1280,
        optimizer=optimizer,
        schedule=ScheduleSettings(warmdown_fraction=0.2),
        compile=True,
        **every,
    )
    sft = StageSettings(
        "sft",
        init_from=PREDECESSOR,
        data=(
            "smoltalk@10000",
            "arc-easy@2300",
            "arc-challenge@1100",
            "gsm8k@8000",
            "identity@1000",
            "spell@300",
            "bee@300",
        ),
        # About 32 conversations a step, packed, and each of them once.
        batch_tokens=16_384,
        tokens=10_500_000,
        validation_rows=256,
        optimizer=optimizer,
        schedule=ScheduleSettings(initial_fraction=0.02, warmdown_fraction=1.0),
        compile=True,
        **{**every, "evaluate_every": 100, "save_every": 200, "micro_rows": min(4, micro_rows)},
    )
    # One epoch of GSM8K's 7473 questions.
    rl = ReinforcementNumbers(steps=467, tasks=("gsm8k",))
    asked = ("synthetic", "chatcore")
    return Preset(name, what, 65_536, 2_000_000_000, base, mid, sft, rl, evaluation=asked)


def _tiny() -> Preset:
    stages = {
        name: replace(settings, evaluate_every=400, save_every=400)
        for name, settings in presets_tiny.stages(PREDECESSOR).items()
    }
    return Preset(
        "tiny",
        "0.9 million parameters; two CPU cores, 20 minutes, synthetic tasks",
        presets_tiny.VOCAB_SIZE,
        1_000_000,
        stages["base"],
        stages["mid"],
        stages["sft"],
        ReinforcementNumbers(20, questions=8, samples=8, max_tokens=64, rate=0.1, evaluation_questions=64),
    )


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        _tiny(),
        _large("d12", 12, 3_720_000_000, 80, 32, "186 million parameters; one GPU, some hours"),
        _large("d20", 20, 11_220_000_000, 240, 32, "561 million parameters; eight H100, four hours"),
        _large("d32", 32, 37_580_000_000, 800, 8, "1.9 billion parameters; eight H100, a day and a half"),
    )
}


def preset(name: str) -> Preset:
    """A preset by its name; ValueError names those there are."""
    if name not in PRESETS:
        raise ValueError(f"a preset is one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]
