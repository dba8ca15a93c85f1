"""Weights of a state dict, fused for inference: q, k and v in one matrix, gate and up in one matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from endstop.models import ops
from endstop.models.config import DecoderConfig
from endstop.models.load import EMBEDDING, HEAD, parameter_shapes
from endstop.runtime.native.linear import Linear, linear
from endstop.runtime.native.rotation import interleave_pairs

Take = Callable[[str], Tensor]


class Norm:
    """RMSNorm of [N, size]; `weight` as stored, None for a norm without weight."""

    def __init__(self, weight: Tensor | None, size: int, eps: float, *, offset: bool) -> None:
        self.shape, self.eps = (size,), eps
        # 1 + weight has no room for small weights in bfloat16; there it is added in float32 on each call.
        self.offset = offset and weight is not None and weight.dtype != torch.float32
        self.weight = weight + 1.0 if offset and weight is not None and not self.offset else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.offset:
            return ops.rms_norm(x, self.weight, self.eps, offset=True)
        return functional.rms_norm(x, self.shape, self.weight, self.eps)


@dataclass(slots=True)
class LayerWeights:
    """One layer. Pairs of q and k are neighbours (see `rotation`).

    qk_norm: float32 [heads + kv_heads, head_dim], the factors behind the norm of each head of q and k.
    after_attention, after_mlp: norms of the two branches' outputs, in families that have them.
    """

    before_attention: Norm
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    after_attention: Norm | None
    before_mlp: Norm
    up: Linear
    down: Linear
    after_mlp: Norm | None


@dataclass(slots=True)
class ModelWeights:
    """A whole model; `embedding` is [vocab_size, hidden_size], row-major."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Norm
    head: Linear


def check_state_dict(config: DecoderConfig, state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError unless the state dict holds exactly what the configuration asks for."""
    shapes = parameter_shapes(config)
    if config.tie_word_embeddings and HEAD not in state_dict:
        del shapes[HEAD]
    for name, shape in shapes.items():
        value = state_dict.get(name)
        if value is None:
            raise ValueError(f"the state dict lacks {name!r}, which this {config.model_type} model needs")
        if tuple(value.shape) != shape:
            raise ValueError(f"{name!r} has shape {list(value.shape)}, but the model needs {list(shape)}")
    foreign = sorted(set(state_dict) - set(shapes))
    if foreign:
        raise ValueError(f"the state dict holds {foreign[0]!r}, which this model does not have")


def fuse_weights(config: DecoderConfig, take: Take, *, tied: bool) -> ModelWeights:
    """Build all weights; `take(name)` gives a parameter in the dtype and on the device to run with.
    tied: the output matrix is the embedding.

    Every name is taken once, layer by layer, so that `dict.pop` keeps the peak of memory low.
    """

    def norm(name: str, size: int = config.hidden_size) -> Norm:
        weight = take(name + ".weight") if config.norm_weight else None
        return Norm(weight, size, config.rms_norm_eps, offset=config.norm_offset)

    layers = [
        _fuse_layer(config, f"model.layers.{index}.", take, norm) for index in range(config.num_hidden_layers)
    ]
    embedding = take(EMBEDDING)
    head = linear(embedding if tied else take(HEAD))
    return ModelWeights(embedding, layers, norm("model.norm"), head)


def _fuse_layer(config: DecoderConfig, prefix: str, take: Take, norm: Callable[[str], Norm]) -> LayerWeights:
    def bias(name: str, there: bool) -> Tensor | None:
        return take(f"{prefix}{name}.bias") if there else None

    def fused(names: list[str], biased: bool) -> Linear:
        return linear(
            torch.cat([take(f"{prefix}{name}.weight") for name in names]),
            torch.cat([take(f"{prefix}{name}.bias") for name in names]) if biased else None,
        )

    def pairs(part: str) -> Tensor:
        rows = take(f"{prefix}self_attn.{part}")
        return rows if part.startswith("v_") else interleave_pairs(rows, config.head_dim)

    qkv = linear(
        torch.cat([pairs(f"{name}_proj.weight") for name in "qkv"]),
        torch.cat([pairs(f"{name}_proj.bias") for name in "qkv"]) if config.qkv_bias else None,
    )
    output = linear(take(f"{prefix}self_attn.o_proj.weight"), bias("self_attn.o_proj", config.output_bias))
    first, second = (["gate_proj", "up_proj"], "down_proj") if config.gated else (["fc1"], "fc2")
    up = fused([f"mlp.{name}" for name in first], config.mlp_bias)
    down = linear(take(f"{prefix}mlp.{second}.weight"), bias(f"mlp.{second}", config.mlp_bias))
    behind_attention = norm(f"{prefix}post_attention_layernorm")
    return LayerWeights(
        before_attention=norm(f"{prefix}input_layernorm"),
        qkv=qkv,
        qk_norm=_qk_norm(config, prefix, take),
        output=output,
        after_attention=behind_attention if config.post_norms else None,
        before_mlp=norm(f"{prefix}pre_feedforward_layernorm") if config.post_norms else behind_attention,
        up=up,
        down=down,
        after_mlp=norm(f"{prefix}post_feedforward_layernorm") if config.post_norms else None,
    )


def _qk_norm(config: DecoderConfig, prefix: str, take: Take) -> Tensor | None:
    if config.qk_norm != "weight":
        return None
    query, key = (
        interleave_pairs(take(f"{prefix}self_attn.{name}_norm.weight").float(), config.head_dim)
        for name in "qk"
    )
    heads = [query] * config.num_attention_heads + [key] * config.num_key_value_heads
    return torch.stack(heads) + (1.0 if config.norm_offset else 0.0)
