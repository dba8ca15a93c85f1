"""Tiny random models for the tests of the native backend, and what their logits should be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from endstop.models.config import DecoderConfig
from endstop.models.decoder import Decoder
from endstop.runtime.native import NativeModel
from endstop.runtime.token_model import LogitsWanted, RowChunk
from tests.models.tiny_models import tiny_transformers_model


def tiny_pair(
    family: str, *, options: dict[str, Any] | None = None, **native: Any
) -> tuple[Decoder, NativeModel]:
    """The reference decoder and the native model with the same weights."""
    source = tiny_transformers_model(family, **(options or {}))
    config = DecoderConfig.from_hf(source.config.to_dict())
    decoder = Decoder(config).eval()
    decoder.load_state_dict(source.state_dict())
    return decoder, NativeModel(config, decoder.state_dict(), **{"dtype": "float32", **native})


def tokens_of(length: int, *, seed: int = 0, vocab_size: int = 61) -> list[int]:
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def expected_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Logits of the reference for one row, computed at once: [len(tokens), vocab_size]."""
    logits: Tensor = decoder(torch.tensor([tokens]))[0]
    return logits


def compute(
    model: NativeModel, row: int, tokens: list[int], start: int = 0, logits: LogitsWanted = "all"
) -> Any:
    """One chunk of one row; its logits."""
    return model.forward([RowChunk(row, tokens, start, logits)]).logits
