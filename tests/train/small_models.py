"""Decoders of both shapes that are trained here, small enough for a test."""

from __future__ import annotations

from typing import Any

import torch

from endstop.models.config import DecoderConfig
from endstop.models.decoder import Decoder

SHAPES: dict[str, dict[str, Any]] = {
    "nanochat": {"model_type": "nanochat"},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
}


def small_model(shape: str = "nanochat", *, seed: int = 0, **options: Any) -> Decoder:
    """A float32 decoder with fresh weights, the same for the same seed."""
    config = {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": 64,
        **SHAPES[shape],
        **options,
    }
    torch.manual_seed(seed)
    return Decoder(DecoderConfig.from_hf(config))
