"""What the tests of the collator share: examples, a trained tokenizer, ways to read a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from chat_cases import FAMILIES, assistant, endstop_tokenizer, user

from endstop.protocol.label_audit import audit
from endstop.protocol.labels import IGNORE
from endstop.train.collate import ChatCollator
from endstop.train.tokenizer_training import save_tokenizer, train_tokenizer

EOS = 2
TURNS = [user("hi"), assistant("yo"), user("bye"), assistant("ok then")]


def trained_tokenizer(place: Path) -> Path:
    """A tokenizer of this package that knows the words of the examples, in a directory."""
    save_tokenizer(train_tokenizer(["hi yo bye ok then, 2+2=4 Paris"] * 3, 280), place)
    return place


def ids_collator(**options: Any) -> ChatCollator:
    """For rows of ids in which 2 is the eos token."""
    return ChatCollator(endstop_tokenizer(FAMILIES["chatml"]), stops=[EOS], terminator=EOS, **options)


def lists(batch: dict[str, torch.Tensor], name: str) -> list[list[int]]:
    assert batch[name].dtype == torch.long
    found: list[list[int]] = batch[name].tolist()
    return found


def said(collator: ChatCollator, batch: dict[str, torch.Tensor]) -> list[str]:
    """What is supervised in each row, as text."""
    return [
        collator._tokenizer.decode([i for i in row if i != IGNORE], skip_special_tokens=False)
        for row in lists(batch, "labels")
    ]


def counted(collator: ChatCollator, batch: dict[str, torch.Tensor], stops: Sequence[int]) -> Any:
    rows = zip(*(lists(batch, name) for name in ("input_ids", "labels", "attention_mask")), strict=True)
    return audit([{"input_ids": i, "labels": label, "attention_mask": a} for i, label, a in rows], set(stops))
