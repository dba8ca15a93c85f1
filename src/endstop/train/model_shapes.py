"""Shapes of the models trained here, one dial each, and their first weights.

`nanochat`: rotary positions before weightless QK norm, norm behind the embedding, squared ReLU, logits capped
at 15, nothing tied (Karpathy's nanochat of October 2025, the architecture that transformers calls nanochat).
`llama`: RMSNorm with weights and SwiGLU, for servers that know only that family.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from endstop.models.config import DecoderConfig
from endstop.train.chat_format import ASSISTANT_END, BOS, OUTPUT_END, SPECIAL_TOKENS, generation_config

if TYPE_CHECKING:
    from endstop.models.decoder import Decoder

Shape = Literal["nanochat", "llama"]


def nanochat_config(
    depth: int,
    vocab_size: int,
    *,
    hidden_size: int | None = None,
    head_dim: int = 128,
    num_kv_heads: int | None = None,
    intermediate_size: int | None = None,
    context: int = 2048,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
) -> DecoderConfig:
    """The nanochat decoder of `depth` layers.

    Args:
        vocab_size: the nine special tokens of `chat_format`, which are the last ids, included.
        hidden_size: by default 64 * depth, rounded up to a multiple of head_dim.
        num_kv_heads: by default as many as query heads. intermediate_size: by default 4 * hidden_size.
        context: the window in tokens. rope_scaling: type and factors as in a config.json.

    Raises ValueError for sizes that do not fit together.
    """
    width = _width(depth, hidden_size, head_dim)
    return _config(
        "nanochat",
        depth,
        vocab_size,
        width,
        head_dim,
        num_kv_heads,
        intermediate_size or 4 * width,
        context,
        rope_theta,
        rope_scaling,
        {"hidden_act": "relu2", "final_logit_softcapping": 15.0, "tie_word_embeddings": False},
    )


def llama_config(
    depth: int,
    vocab_size: int,
    *,
    hidden_size: int | None = None,
    head_dim: int = 128,
    num_kv_heads: int | None = None,
    intermediate_size: int | None = None,
    context: int = 2048,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    tie_word_embeddings: bool = False,
) -> DecoderConfig:
    """A Llama of `depth` layers; arguments as for `nanochat_config`.

    intermediate_size: by default 8/3 * hidden_size, rounded up to a multiple of 64, which makes a layer as
    large as nanochat's.
    """
    width = _width(depth, hidden_size, head_dim)
    inner = intermediate_size or 64 * math.ceil(8 * width / 3 / 64)
    return _config(
        "llama",
        depth,
        vocab_size,
        width,
        head_dim,
        num_kv_heads,
        inner,
        context,
        rope_theta,
        rope_scaling,
        {"hidden_act": "silu", "tie_word_embeddings": tie_word_embeddings},
    )


def _width(depth: int, hidden_size: int | None, head_dim: int) -> int:
    if depth < 1:
        raise ValueError(f"depth must be at least 1 layer, got {depth}")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even to be rotated, got {head_dim}")
    width = head_dim * math.ceil(64 * depth / head_dim) if hidden_size is None else hidden_size
    if width < head_dim or width % head_dim:
        raise ValueError(f"hidden_size ({width}) must be a multiple of head_dim ({head_dim})")
    return width


def _config(
    family: Shape,
    depth: int,
    vocab_size: int,
    width: int,
    head_dim: int,
    num_kv_heads: int | None,
    intermediate_size: int,
    context: int,
    rope_theta: float,
    rope_scaling: Mapping[str, Any] | None,
    more: Mapping[str, Any],
) -> DecoderConfig:
    if vocab_size <= len(SPECIAL_TOKENS):
        raise ValueError(
            f"vocab_size must exceed the {len(SPECIAL_TOKENS)} special tokens it includes, got {vocab_size}"
        )
    heads = width // head_dim
    kv_heads = num_kv_heads or heads
    if heads % kv_heads:
        raise ValueError(f"num_kv_heads ({kv_heads}) must divide the {heads} query heads")
    if context < 1:
        raise ValueError(f"context must be at least 1 token, got {context}")
    first = vocab_size - len(SPECIAL_TOKENS)
    ids = {token: first + at for at, token in enumerate(SPECIAL_TOKENS)}
    assert generation_config(ids)["eos_token_id"] == [ids[ASSISTANT_END], ids[BOS]]
    return DecoderConfig.from_hf(
        {
            "model_type": family,
            "vocab_size": vocab_size,
            "hidden_size": width,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "initializer_range": 0.02,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta, **(rope_scaling or {})},
            "bos_token_id": ids[BOS],
            "eos_token_id": [ids[ASSISTANT_END], ids[BOS]],
            "pad_token_id": ids[OUTPUT_END],
            **more,
        }
    )


def new_model(config: DecoderConfig, seed: int = 0) -> Decoder:
    """A decoder with first weights in float32 on the CPU, the same for a seed on every machine.

    Matrices are normal with deviation min(1, sqrt(out / in)) / sqrt(in), the embedding with 1 (tied to the
    output: 0.02); the output matrix and those that write into the residual stream are 0, so that every layer
    begins as the identity and all tokens as equally probable. Source: nanochat, October 2025.
    """
    import torch
    from torch import nn

    from endstop.models.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = name.split(".")[-2]
            # A stream for each parameter: no weight depends on how many others there are.
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            if parameter.dim() < 2:
                neutral = 1.0 if name.endswith("norm.weight") and not config.norm_offset else 0.0
                nn.init.constant_(parameter, neutral)
            elif last == "embed_tokens":
                deviation = 0.02 if config.tie_word_embeddings else 1.0
                parameter.normal_(0.0, deviation, generator=generator)
            elif last in ("lm_head", "o_proj", "down_proj", "fc2"):
                parameter.zero_()
            else:
                rows, columns = parameter.shape
                deviation = min(1.0, math.sqrt(rows / columns)) / math.sqrt(columns)
                parameter.normal_(0.0, deviation, generator=generator)
    return model


def parameter_counts(config: DecoderConfig) -> dict[str, int]:
    """Parameters of the `embedding`, the `layers` (norms included), the `head`, and `total`.

    A head that is tied to the embedding counts 0.
    """
    from endstop.models.load import EMBEDDING, HEAD, parameter_shapes

    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(config).items()}
    embedding = sizes.pop(EMBEDDING)
    head = 0 if config.tie_word_embeddings else sizes[HEAD]
    sizes.pop(HEAD, None)
    layers = sum(sizes.values())
    return {
        "embedding": embedding,
        "layers": layers,
        "head": head,
        "total": embedding + layers + head,
    }


def flops_per_token(config: DecoderConfig, length: int) -> float:
    """Floating-point operations of forward and backward for one token in a row of `length` tokens.

    6 for each element of a matrix that is multiplied (the output matrix too, the embedding not) and
    12 * heads * head_dim * length for each layer's attention, which counts the keys that the causal mask
    hides, as PaLM (arXiv 2204.02311, appendix B) and nanochat do.
    """
    from endstop.models.load import EMBEDDING, parameter_shapes

    shapes = parameter_shapes(config)
    matrices = sum(math.prod(s) for name, s in shapes.items() if len(s) == 2 and name != EMBEDDING)
    attention = 0
    for kind in config.layer_types:
        window = config.sliding_window if kind == "sliding" and config.sliding_window else length
        attention += 12 * config.num_attention_heads * config.head_dim * min(window, length)
    return float(6 * matrices + attention)
