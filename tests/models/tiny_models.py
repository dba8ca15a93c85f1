"""Tiny random models of every family, made by transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers

CONFIGS: dict[str, type[transformers.PretrainedConfig]] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "nanochat": transformers.NanoChatConfig,
}

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# What makes each family itself, small enough to bind within some 20 tokens.
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 13, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 13},
    "nanochat": {},
}


def tiny_transformers_model(family: str, *, seed: int = 0, **options: Any) -> Any:
    """A model of transformers with random weights large enough to make every term of the network matter."""
    config = CONFIGS[family](**{**TINY, **FAMILY_OPTIONS[family], **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.2
            fresh = torch.randn(parameter.shape, generator=generator) * spread
            if "norm" in name and "gemma" not in family:
                fresh += 1.0
            parameter.copy_(fresh)
    return model
