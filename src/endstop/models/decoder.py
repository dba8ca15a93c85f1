"""One decoder-only transformer for every family of `DecoderConfig`: reference forward pass and training.

Parameters have the names of the Hugging Face implementations, so that state dicts are interchangeable with
transformers in both directions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from endstop.models import ops
from endstop.models.config import DecoderConfig, RopeConfig

CosSin = tuple[Tensor, Tensor]


class KVCache:
    """Keys and values of every layer, grown by concatenation.

    Keys are stored as they were rotated (and normed): with dynamic NTK scaling a key keeps the frequencies of
    the call that computed it, as in transformers, so that beyond the original window computing in chunks and
    at once differ. Sliding layers keep all keys; the mask hides the old ones.
    """

    def __init__(self, num_hidden_layers: int) -> None:
        self.keys: list[Tensor | None] = [None] * num_hidden_layers
        self.values: list[Tensor | None] = [None] * num_hidden_layers

    @property
    def length(self) -> int:
        """Slots in use (computed tokens, padding included)."""
        last = self.keys[-1]
        return 0 if last is None else last.shape[2]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, kv_heads, T, head_dim] to a layer; returns all of its keys and values."""
        old_key, old_value = self.keys[layer], self.values[layer]
        if old_key is not None and old_value is not None:
            key, value = torch.cat((old_key, key), dim=2), torch.cat((old_value, value), dim=2)
        self.keys[layer], self.values[layer] = key, value
        return key, value

    def truncate(self, length: int) -> None:
        """Forget everything behind the first `length` slots."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} tokens cannot be cut to {length}")
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            if key is not None and value is not None:
                self.keys[layer], self.values[layer] = key[:, :, :length], value[:, :, :length]


class Linear(nn.Linear):
    """A matrix without initial values: `Decoder.reset_parameters` gives them, or a state dict does.

    torch's own initialisation would be thrown away, and on the meta device it costs a second of imports.
    """

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """An embedding without initial values; see `Linear`."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight of `size` elements, or without any."""

    def __init__(self, config: DecoderConfig, size: int, *, weight: bool) -> None:
        super().__init__()
        self.eps, self.offset = config.rms_norm_eps, config.norm_offset
        neutral = torch.zeros(size) if config.norm_offset else torch.ones(size)
        self.weight = nn.Parameter(neutral) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, offset=self.offset)


class Attention(nn.Module):
    """Grouped-query attention of one layer."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        queries, keys = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = Linear(queries, config.hidden_size, bias=config.output_bias)
        if config.qk_norm != "none":
            weight = config.qk_norm == "weight"
            self.q_norm = RMSNorm(config, config.head_dim, weight=weight)
            self.k_norm = RMSNorm(config, config.head_dim, weight=weight)

    def forward(self, x: Tensor, cos_sin: CosSin, mask: ops.Mask, cache: KVCache | None) -> Tensor:
        config = self.config
        batch, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, config.head_dim).transpose(1, 2)

        query, key, value = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        norm = config.qk_norm != "none"
        if norm and not config.qk_norm_after_rope:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = ops.apply_rope(query, *cos_sin), ops.apply_rope(key, *cos_sin)
        if norm and config.qk_norm_after_rope:
            query, key = self.q_norm(query), self.k_norm(key)
        if cache is not None:
            key, value = cache.append(self.layer, key, value)
        mixed = ops.attention(query, key, value, mask, config.attention_scale, config.attention_logit_softcap)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return projected


class MLP(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = ops.mlp_inner(self.gate_proj(x), self.up_proj(x), self.activation)
        projected: Tensor = self.down_proj(inner)
        return projected


class UngatedMLP(nn.Module):
    """Feed-forward block of two matrices."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.fc2(ops.mlp_inner(self.fc1(x), None, self.activation))
        return projected


class Layer(nn.Module):
    """Attention and MLP with their norms and residuals."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config, config.hidden_size, weight=config.norm_weight)

        self.post_norms = config.post_norms
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config) if config.gated else UngatedMLP(config)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        if config.post_norms:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()

    def forward(self, x: Tensor, cos_sin: CosSin, mask: ops.Mask, cache: KVCache | None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos_sin, mask, cache)
        if self.post_norms:
            x = x + self.post_attention_layernorm(attended)
            fed: Tensor = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + attended
            fed = self.mlp(self.post_attention_layernorm(x))
        return x + fed


class DecoderBody(nn.Module):
    """Everything below the output matrix; a module of its own for the `model.` of the parameter names."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config, config.hidden_size, weight=config.norm_weight)


class Decoder(nn.Module):
    """A decoder-only language model with fresh weights; `load.load_model` reads those of a directory."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderBody(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        if self.lm_head.weight.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh weights: matrices normal with the config's `initializer_range`, biases 0, norms neutral."""
        deviation = float(self.config.source.get("initializer_range", 0.02))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, RMSNorm) and module.weight is not None:
                nn.init.constant_(module.weight, 0.0 if module.offset else 1.0)

    def new_cache(self) -> KVCache:
        """An empty cache for one batch."""
        return KVCache(self.config.num_hidden_layers)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits at every position: input_ids int64 [B, T] -> float32 [B, T, vocab_size].

        attention_mask: [B, S + T], 0 where a slot is padding, S the cache's length before the call.
        cache: earlier keys and values; this call's are added to it.
        position_ids: rotary positions [T], [1, T] or [B, T]; by default S, S + 1, ... whatever is padding.
        document_ids: [B, T], without a cache: attention stays within the document.
        Raises ValueError for shapes that do not fit.
        """
        return self.logits(self.hidden_states(input_ids, attention_mask, cache, position_ids, document_ids))

    def hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Output of the last norm, [B, T, hidden_size] in the weights' dtype; arguments as for `forward`."""
        config = self.config
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be [batch, tokens], not {tuple(input_ids.shape)}")
        past = 0 if cache is None else cache.length
        batch, length = input_ids.shape
        if attention_mask is not None and attention_mask.shape != (batch, past + length):
            raise ValueError(
                f"attention_mask must be {(batch, past + length)} (cached tokens included), "
                f"not {tuple(attention_mask.shape)}"
            )
        if document_ids is not None and (past or document_ids.shape != input_ids.shape):
            raise ValueError(
                f"document_ids must be {(batch, length)}, and no cache filled before, "
                f"not {tuple(document_ids.shape)} behind {past} cached tokens"
            )
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=input_ids.device)
        if position_ids.shape[-1] != length:
            raise ValueError(f"position_ids must end in {length} positions, not {tuple(position_ids.shape)}")

        x = self.model.embed_tokens(input_ids)
        if config.embedding_scale != 1.0:
            x = x * torch.tensor(config.embedding_scale, dtype=x.dtype, device=x.device)
        if config.embedding_norm:
            x = self.model.norm(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        turns: dict[RopeConfig, CosSin] = {}
        masks: dict[str, ops.Mask] = {}
        for index, layer in enumerate(self.model.layers):
            rope, kind = config.rope_of(index), config.layer_types[index]
            if rope not in turns:
                cos, sin = ops.rope_cos_sin(rope, config.head_dim, position_ids, x.dtype)
                turns[rope] = (cos.unsqueeze(-3), sin.unsqueeze(-3))
            if kind not in masks:
                window = config.sliding_window if kind == "sliding" else None
                masks[kind] = ops.attention_mask(
                    length, past + length, window, attention_mask, x.device, document_ids
                )
            x = layer(x, turns[rope], masks[kind], cache)
        normed: Tensor = self.model.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Output matrix and softcap: [..., hidden_size] -> float32 [..., vocab_size]."""
        return ops.softcap(self.lm_head(hidden).float(), self.config.final_logit_softcap)
