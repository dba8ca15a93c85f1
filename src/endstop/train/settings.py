"""Everything that decides what a stage of training does, as frozen dataclasses that go to JSON and back."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from endstop.models.config import DecoderConfig
from endstop.train.distributed import Strategy
from endstop.train.model_shapes import Shape, llama_config, nanochat_config
from endstop.train.optimizer import OptimizerSettings
from endstop.train.stop_events import EVENTS

Stage = Literal["base", "mid", "sft"]
STAGES: tuple[Stage, ...] = ("base", "mid", "sft")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A new model; see `model_shapes` for what None stands for."""

    shape: Shape = "nanochat"
    depth: int = 20
    hidden_size: int | None = None
    head_dim: int = 128
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    context: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        _check_choices(self)

    def config(self, vocab_size: int) -> DecoderConfig:
        """The decoder of these settings for a vocabulary; ValueError for sizes that do not fit."""
        common: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "head_dim": self.head_dim,
            "num_kv_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate_size,
            "context": self.context,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
        }
        if self.shape == "llama":
            return llama_config(
                self.depth, vocab_size, tie_word_embeddings=self.tie_word_embeddings, **common
            )
        if self.tie_word_embeddings:
            raise ValueError("the nanochat shape has its own output matrix; tie_word_embeddings needs llama")
        return nanochat_config(self.depth, vocab_size, **common)


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """Learning rate and momentum over the run; see `schedule`."""

    warmup_steps: int = 0
    warmdown_fraction: float = 0.2
    final_fraction: float = 0.0
    initial_fraction: float = 1.0
    momentum_warmup_steps: int = 300

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or self.momentum_warmup_steps < 0:
            raise ValueError(f"a warm-up takes 0 steps or more, got {self.warmup_steps}")
        for name in ("warmdown_fraction", "final_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if not 0.0 <= self.initial_fraction < math.inf:
            raise ValueError(f"the scale of the rates must be 0 or more, got {self.initial_fraction}")


@dataclass(frozen=True, slots=True)
class StageSettings:
    """One stage: base, mid or sft.

    Attributes:
        model: the shape of a new model. init_from: the directory of the model to begin with, in its place.
        context, rope_scaling: change the window (tokens) and the rotary scaling of `init_from`'s model.
        data, validation: what to train and to evaluate on, as the command line spells it; kept for the
            record. Without validation it is what the sources of data hold out.
        row_length: tokens predicted in a row. batch_tokens: in a step, over all processes, a multiple of it.
        micro_rows: rows that one process computes at a time.
        data_shards: logical shards of the data; the number of processes divides it, it divides the rows.
        packing: "crop" fills rows with whole documents and crops, "keep-ends" splits and keeps every end.
        isolate: attention stays within a document or conversation.
        masked: only what the assistant says is in the loss (mid, sft).
        buffer: documents or conversations that packing chooses from.
        prepare_ahead: make the next steps' batches in a thread while the model computes. It pays on a GPU; on
            a CPU both want the same cores.
        skip_bad: documents that cannot be read are counted and left out; otherwise the first ends the run.
        steps, tokens, seconds: the length of the run; exactly one is given. `seconds` becomes a number of
            steps after the first ones were timed.
        evaluate_every, save_every: in steps, None for only at the end. validation_rows: rows evaluated on.
        samples, sample_tokens: prompts continued at each evaluation, and for how many tokens at most; only
            questions are asked whose right answer has room in them.
        keep_checkpoints: the newest so many are kept.
        warm_optimizer: begin with the momenta of the stage that made `init_from`.
        event_weights: weight in the loss of each event of `stop_events`, 1 where not named.
        dtype: of the computation: "auto" is bfloat16 where it is fast. Weights are float32 always.
        compile: torch.compile the decoder. strategy: how several processes share the model.
        pathology: the name of a fault to train on purpose.
        date: the day that chat templates are told, such as 2026-11-30; by default that on which the stage is
            begun, so that a resumed one renders the same.
        seed: of new weights and of the order of the data.
    """

    stage: Stage
    model: ModelSettings | None = None
    init_from: str | None = None
    context: int | None = None
    rope_scaling: dict[str, Any] | None = None
    data: tuple[str, ...] = ()
    validation: tuple[str, ...] | None = None
    row_length: int = 2048
    batch_tokens: int = 524_288
    micro_rows: int = 8
    data_shards: int = 1
    packing: Literal["crop", "keep-ends"] = "crop"
    isolate: bool = False
    masked: bool = True
    buffer: int = 1000
    prepare_ahead: bool = False
    skip_bad: bool = False
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    evaluate_every: int | None = None
    save_every: int | None = None
    log_every: int = 1
    validation_rows: int = 64
    samples: int = 16
    sample_tokens: int = 128
    keep_checkpoints: int = 2
    warm_optimizer: bool = False
    event_weights: dict[str, float] = field(default_factory=dict)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    compile: bool = False
    strategy: Strategy = "auto"
    pathology: str | None = None
    date: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"a stage is one of {', '.join(STAGES)}, got {self.stage!r}")
        _check_choices(self)
        if (self.model is None) == (self.init_from is None):
            raise ValueError(f"{self.stage} needs either the shape of a new model or one to begin with")
        given = [name for name in ("steps", "tokens", "seconds") if getattr(self, name) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "nothing"
            raise ValueError(f"the length of a run is one of steps, tokens or seconds, got {said}")
        for name in (
            *("row_length", "batch_tokens", "micro_rows", "data_shards", "buffer", *given, "log_every"),
            *("validation_rows", "keep_checkpoints", "evaluate_every", "save_every", "context"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, got {value}")
        for name in ("samples", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.batch_tokens % self.row_length:
            raise ValueError(
                f"batch_tokens ({self.batch_tokens}) must be a multiple of row_length ({self.row_length})"
            )
        if self.rows % self.data_shards:
            raise ValueError(f"the {self.rows} rows of a step cannot be dealt to {self.data_shards} shards")
        for event in self.event_weights:
            if event not in EVENTS:
                raise ValueError(f"a weighted event is one of {', '.join(EVENTS)}, got {event!r}")
        if not any(self.event_weights.get(event, 1.0) for event in EVENTS):
            raise ValueError("the weights of all events are 0: nothing would be trained")
        assert self.template_options is not None

    @property
    def rows(self) -> int:
        """Rows of a step, over all processes."""
        return self.batch_tokens // self.row_length

    @property
    def template_options(self) -> dict[str, Any]:
        """Options of `ChatRenderer.render`; ValueError for a date that is none."""
        return {} if self.date is None else {"now": datetime.fromisoformat(self.date)}

    @property
    def fixed_steps(self) -> int | None:
        """Optimiser steps, where they are known before the run: not for a run of so many seconds."""
        if self.tokens is not None:
            return max(1, round(self.tokens / self.batch_tokens))
        return self.steps

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return typing.cast(dict[str, Any], _plain(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StageSettings:
        """What `to_json` gave; ValueError names a key that is unknown or a value that does not fit."""
        return typing.cast(StageSettings, _read(cls, value, "settings"))


def default_settings(
    stage: Stage, init_from: str | None = None, *, steps: int, foreign: bool = False
) -> StageSettings:
    """A stage of so many steps with nanochat's rates and schedule of October 2025 (Karpathy).

    SFT begins with a fiftieth of the rates, which fall to 0. Without `init_from` a new model is made.
    foreign: `init_from` was not trained here; embeddings elsewhere are much smaller than those of
    `new_model`, so theirs has the rate of the output matrix.
    """
    schedules = {
        "base": ScheduleSettings(),
        "mid": ScheduleSettings(),
        "sft": ScheduleSettings(initial_fraction=0.02, warmdown_fraction=1.0),
    }
    return StageSettings(
        stage,
        model=ModelSettings() if init_from is None else None,
        init_from=init_from,
        steps=steps,
        batch_tokens=524_288 if stage != "sft" else 65_536,
        schedule=schedules[stage],
        optimizer=OptimizerSettings(embedding_lr=0.004) if foreign else OptimizerSettings(),
    )


# May change between the parts of a run: how long it is, when it looks around, and what it runs on.
HARMLESS = {
    "steps",
    "tokens",
    "seconds",
    "evaluate_every",
    "save_every",
    "log_every",
    "validation_rows",
    "samples",
    "sample_tokens",
    "keep_checkpoints",
    "micro_rows",
    "prepare_ahead",
    "device",
    "compile",
    "strategy",
    "data",
    "validation",
    "skip_bad",
    "date",
}


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings (as `to_json` gives them) that differ and that a resumed run may not change."""
    names = sorted({*before, *now} - HARMLESS)
    return [
        f"{name} ({before.get(name)!r} before, {now.get(name)!r} now)"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _check_choices(settings: Any) -> None:
    """ValueError for a field that is none of the words that its type names."""
    for name, kind in typing.get_type_hints(type(settings)).items():
        if typing.get_origin(kind) is Literal and getattr(settings, name) not in typing.get_args(kind):
            known = ", ".join(map(str, typing.get_args(kind)))
            raise ValueError(f"{name} is one of {known}, got {getattr(settings, name)!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of a JSON file as the annotated type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _read(next(item for item in arguments if item is not type(None)), value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, got {value!r}")
        hints = typing.get_type_hints(kind)
        unknown = sorted(set(value) - set(hints))
        if unknown:
            raise ValueError(f"{where} has no {unknown[0]!r}; there are {', '.join(sorted(hints))}")
        found = {name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()}
        for each in dataclasses.fields(kind):
            if each.name not in found and each.default is each.default_factory is dataclasses.MISSING:
                raise ValueError(f"{where} has no {each.name!r}")
        return kind(**found)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} is one of {', '.join(map(str, arguments))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} must be a list, got {value!r}")
        return tuple(_read(arguments[0], item, where) for item in value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, got {value!r}")
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ValueError(f"{where} must be {kind.__name__}, got {value!r}")
    return value
