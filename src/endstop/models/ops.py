"""The maths of a decoder as plain functions on tensors: norm, rotation, mask rule, attention, MLP.

The reference forward pass (`decoder`) and the fast backend share these: one definition of each.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from endstop.models import gradients
from endstop.models.config import Activation, RopeConfig

# What a query sees: a boolean mask (True is visible) that broadcasts to [B, heads, T, S], "causal" for as
# many keys as queries without any padding, or None for everything.
Mask = Tensor | Literal["causal"] | None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, offset: bool = False) -> Tensor:
    """Root-mean-square norm over the last axis: x / sqrt(mean(x^2) + eps), times the weight if there is one.

    x: [..., n] of any float dtype; weight: [n]; the result has x's shape and dtype. The mean is float32.
    With `offset` the factor is (1 + weight), multiplied in float32 before the cast (Gemma); without, the cast
    comes first (Llama). Source: arXiv 1910.07467.
    """
    if offset and weight is not None:
        normed = functional.rms_norm(x.float(), x.shape[-1:], None, eps)
        return (normed * (1.0 + weight.float())).to(x.dtype)
    # torch's own works in float32 too, and may give that back under autocast.
    if gradients.by_hand(x):
        normed = gradients.RMSNorm.apply(x, eps)  # type: ignore[no-untyped-call]
    else:
        normed = functional.rms_norm(x, x.shape[-1:], None, eps).to(x.dtype)
    return normed if weight is None else weight * normed


def rope_frequencies(rope: RopeConfig, head_dim: int, length: int | None = None) -> Tensor:
    """Angle per position of each pair of elements: float32 [head_dim / 2] on the CPU.

    `length` is the number of positions the sequence has by now; only `dynamic` looks at it, and only beyond
    `original_max_position`. Sources: default arXiv 2104.09864; linear arXiv 2306.15595; dynamic NTK and YaRN
    arXiv 2309.00071; llama3 from the Llama 3.1 release.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    theta = rope.theta
    if rope.type == "dynamic" and length is not None and length > rope.original_max_position:
        stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    frequencies = 1.0 / theta**exponents
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3_frequencies(rope, frequencies)
    if rope.type == "yarn":
        return _yarn_frequencies(rope, head_dim, frequencies)
    return frequencies


def _llama3_frequencies(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Keep short waves, divide long ones by the factor, blend linearly in between (in turns per window)."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn_frequencies(rope: RopeConfig, head_dim: int, frequencies: Tensor) -> Tensor:
    """Keep frequencies that turn more than beta_fast times in the window, divide those below beta_slow."""

    def pair_that_turns(times: float) -> float:
        span = math.log(rope.original_max_position / (times * 2 * math.pi))
        return head_dim * span / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    divided = ((pairs - first) / (last - first)).clamp(0.0, 1.0)
    return frequencies / rope.factor * divided + frequencies * (1.0 - divided)


def rope_cos_sin(
    rope: RopeConfig, head_dim: int, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and (signed) sine of the rotation at each position: two [..., head_dim / 2] of `dtype`.

    positions: integers [T] or [B, T]. `dynamic` beyond its window: each row has the frequencies of its own
    largest position in this call, as transformers has for a single row; no row depends on its neighbours.
    """
    if rope.type == "dynamic" and positions.numel():
        rows = positions.reshape(-1, positions.shape[-1]).amax(-1).tolist()
        frequencies = torch.stack([rope_frequencies(rope, head_dim, int(last) + 1) for last in rows])
        frequencies = frequencies.reshape(*positions.shape[:-1], 1, -1)
    else:
        frequencies = rope_frequencies(rope, head_dim)
    angles = positions.unsqueeze(-1).float() * frequencies.to(positions.device)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return cos.to(dtype), (sin * rope.sign).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + d/2) of the last axis: x [..., d]; cos and sin broadcast to [..., d / 2]."""
    if gradients.by_hand(x) and x.dtype == cos.dtype:
        rotated: Tensor = gradients.Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return rotated
    return gradients.rotated(x, cos, sin)


def visible_keys(queries: Tensor, keys: Tensor, window: int | None = None) -> Tensor:
    """The mask rule: which key indices each query index may attend to, bool [queries, keys].

    A query sees itself and what came before it; with a window w only the last w indices, itself included.
    Indices count the row's slots in the cache, padding included; they are not rotary positions.
    """
    distance = queries.unsqueeze(-1) - keys
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def attention_mask(
    query_length: int,
    key_length: int,
    window: int | None,
    padding: Tensor | None,
    device: torch.device,
    documents: Tensor | None = None,
) -> Mask:
    """What each query sees, as `Mask` says.

    The queries are the last `query_length` of `key_length` slots. padding: [B, key_length], 0 where a slot is
    padding. A padded query sees itself, so that no row of the softmax is empty; its result means nothing.
    documents: [B, key_length], the document each slot belongs to; no query sees another document.
    """
    binding = window if window is not None and window < key_length else None
    if padding is None and binding is None and documents is None:
        if query_length == 1:
            return None
        if query_length == key_length:
            return "causal"
    keys = torch.arange(key_length, device=device)
    queries = keys[key_length - query_length :]
    mask = visible_keys(queries, keys, binding)
    if documents is not None:
        mask = mask & (documents[:, key_length - query_length :, None] == documents[:, None, :])
    if padding is not None:
        own = queries.unsqueeze(-1) == keys
        mask = (mask & padding.to(device=device, dtype=torch.bool)[:, None, :]) | own
    return mask.unsqueeze(1) if mask.dim() == 3 else mask


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), or x if there is no cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, cap: float | None = None
) -> Tensor:
    """Grouped-query attention: query [B, H, T, d], key and value [B, G, S, d] -> [B, H, T, d].

    H is a multiple of G: head h reads key head h // (H / G). mask: as `attention_mask`
    gives it. The softmax is taken in float32.
    """
    if cap is None and isinstance(mask, str) and _plain_is_faster(query):
        return _plain_attention(query, key, value, scale)
    if cap is None:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if isinstance(mask, str) else mask,
            is_causal=isinstance(mask, str),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    if isinstance(mask, str):
        slots = torch.arange(key.shape[2], device=key.device)
        mask = visible_keys(slots, slots)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = softcap(query @ key.transpose(-1, -2) * scale, cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def _plain_is_faster(query: Tensor) -> bool:
    """Whether all scores should be made at once: in bfloat16 on a CPU, while there are not too many of them.

    There two products are over twice as fast as torch 2.13's fused kernel (measured, forward and backward).
    """
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= 1024


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention as it is written; the softmax of bfloat16 is taken in float32 and rounded."""
    slots = torch.arange(key.shape[2])
    hidden = torch.zeros(len(slots), len(slots), dtype=query.dtype)
    hidden.masked_fill_(~visible_keys(slots, slots), -torch.inf)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    with torch.autocast("cpu", enabled=False):
        scores = (query * scale) @ key.transpose(-1, -2) + hidden
        return scores.softmax(-1) @ value


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The MLP's non-linearity: SiLU, GELU in its tanh form, or ReLU squared."""
    if activation == "silu":
        return functional.silu(x)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    if gradients.by_hand(x):
        squared: Tensor = gradients.SquaredReLU.apply(x)  # type: ignore[no-untyped-call]
        return squared
    return functional.relu(x).square()


def mlp_inner(gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
    """What stands between the matrices of an MLP: act(gate) * up, or act(gate) if it is ungated."""
    activated = activate(gate, activation)
    return activated if up is None else activated * up
