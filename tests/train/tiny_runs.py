"""Tiny runs: a tokenizer of a few hundred tokens, a model of some thousand parameters, rows from a list."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from endstop.protocol.labels import IGNORE, Row
from endstop.train.batch import TokenBatch
from endstop.train.optimizer import OptimizerSettings
from endstop.train.run_directory import RunDirectory
from endstop.train.settings import ModelSettings, ScheduleSettings, StageSettings
from endstop.train.stages import StageData
from endstop.train.starting_point import Vocabulary
from endstop.train.tokenizer_training import save_tokenizer, train_tokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def documents(count: int, seed: int = 0) -> list[str]:
    """Short texts that end with a full stop."""
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=source.randint(2, 9))) + "." for _ in range(count)]


def conversations(count: int, seed: int = 0) -> list[list[dict[str, Any]]]:
    """Words to be repeated."""
    return [
        [{"role": "user", "content": f"say {text}"}, {"role": "assistant", "content": text}]
        for text in documents(count, seed)
    ]


def new_run(place: Path, vocab_size: int = 300) -> RunDirectory:
    """A run with a trained tokenizer."""
    save_tokenizer(train_tokenizer(documents(200), vocab_size, engine="tokenizers"), place / "tokenizer")
    return RunDirectory(place)


def tiny_settings(**changes: Any) -> StageSettings:
    """A base run of 6 steps on rows of 32 tokens, in float32."""
    settings: dict[str, Any] = {
        "stage": "base",
        "model": ModelSettings(depth=2, hidden_size=32, head_dim=16, context=64),
        "row_length": 32,
        "batch_tokens": 32 * 8,
        "micro_rows": 4,
        "steps": 6,
        "dtype": "float32",
        "device": "cpu",
        "samples": 0,
        "validation_rows": 4,
        "schedule": ScheduleSettings(warmup_steps=2),
        "optimizer": OptimizerSettings(newton_schulz="float32"),
    }
    return StageSettings(**{**settings, **changes})


@dataclass
class ListLoader:
    """Rows in their order, over and over; each row is one shard's."""

    rows: Sequence[Row]
    length: int
    per_step: int
    micro: int
    position: int = 0
    own_shards: list[int] = field(default_factory=lambda: [0])

    def next_step(self) -> list[TokenBatch]:
        taken = [self.rows[(self.position + k) % len(self.rows)] for k in range(self.per_step)]
        self.position += self.per_step
        groups = [taken[at : at + self.micro] for at in range(0, len(taken), self.micro)]
        return [batch_of(group, self.length) for group in groups]

    def state(self, shard: int) -> dict[str, Any]:
        return {"position": self.position}

    def load_state(self, shard: int, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def statistics(self) -> dict[str, Any]:
        return {"rows": self.position}


def batch_of(rows: Sequence[Row], length: int) -> TokenBatch:
    """Rows cut or filled to `length` targets."""
    ids = [(row.ids + [0] * (length + 1))[: length + 1] for row in rows]
    labels = [(row.labels + [IGNORE] * (length + 1))[: length + 1] for row in rows]
    return TokenBatch(torch.tensor(ids)[:, :-1].contiguous(), torch.tensor(labels)[:, 1:].contiguous())


def document_rows(vocabulary: Vocabulary, count: int, seed: int = 0) -> list[Row]:
    """Each document with a border in front and behind, all of it supervised."""
    border = vocabulary.border
    rows = []
    for text in documents(count, seed):
        ids = [border, *vocabulary.tokenizer.encode_text(text), border]
        rows.append(Row(ids, list(ids)))
    return rows


def list_data(settings: StageSettings, count: int = 40) -> Any:
    """The `data` argument of `run_stage`: documents from a list."""

    def data(vocabulary: Vocabulary) -> StageData:
        rows = document_rows(vocabulary, count)
        loader = ListLoader(rows, settings.row_length, settings.rows, settings.micro_rows)
        held_out = [batch_of(document_rows(vocabulary, 4, seed=9), settings.row_length)]
        return StageData(loader, held_out, sources=[{"name": "words", "licence": "CC0-1.0"}])

    return data
