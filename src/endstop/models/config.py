"""What a decoder-only transformer is made of, read from a Hugging Face `config.json`.

`DecoderConfig` says in plain values what each family of architectures does differently, so that the
reference forward pass and the fast backend need no family names. Everything a `config.json` asks for
is either represented here or refused (`hf_config`): a feature is never dropped silently.

Facts about the families were read in transformers 5.24's configuration and modelling files. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
LayerType = Literal["full", "sliding"]
Activation = Literal["silu", "gelu_tanh", "relu2"]
QKNorm = Literal["none", "weight", "weightless"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3")
# model_type -> the class that transformers has for it, as `architectures` of a config.json names it.
HF_CLASSES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "nanochat": "NanoChatForCausalLM",
}
FAMILIES: tuple[str, ...] = tuple(HF_CLASSES)
TRANSFORMERS_BACKEND = "run it with the transformers backend (backend='transformers', --backend transformers)"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    Attributes:
        type: how the frequencies theta^(-2i/d) are changed (see `ops.rope_frequencies`).
        theta: base of the frequencies. factor: context extension, 1.0 for `default`.
        original_max_position: the window before extension, in tokens (`dynamic`: the model's own window).
        low_freq_factor, high_freq_factor: only `llama3`. beta_fast, beta_slow, truncate: only `yarn`.
        attention_factor: cos and sin are multiplied by it (1.0 except for `yarn`).
        sign: +1 rotates by +angle (halves of the head: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin), -1 by
            -angle.
    """

    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    sign: Literal[1, -1] = 1


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer. Sizes are in elements, positions in tokens.

    Attributes:
        model_type: the family's Hugging Face name.
        norm_weight: norms have a learned weight. norm_offset: they multiply by (1 + weight), in float32.
        qkv_bias, output_bias, mlp_bias: biases of q/k/v, of the attention output, of all MLP matrices.
        qk_norm: RMSNorm over each head of q and k. qk_norm_after_rope: it comes after the rotation.
        gated: MLP is down_proj(act(gate_proj(x)) * up_proj(x)); otherwise fc2(act(fc1(x))).
        final_logit_softcap, attention_logit_softcap: cap c means c * tanh(x / c); None is off.
        attention_scale: factor of q.k before softcap and softmax.
        sliding_window: a query at index i sees keys j with i - sliding_window < j <= i in `sliding` layers.
        layer_types: for each layer `full` or `sliding`.
        embedding_norm: RMSNorm behind the embedding. embedding_scale: its factor, rounded to its dtype.
        post_norms: norms on both sides of attention and MLP (Gemma: post_attention_layernorm is behind the
            attention, pre_feedforward_layernorm and post_feedforward_layernorm around the MLP); otherwise
            post_attention_layernorm is the norm before the MLP.
        rope: rotation of full layers, and of sliding ones unless rope_local is there for them.
        max_position_embeddings: the window the model declares.
        bos_token_id, eos_token_ids: as declared in config.json.
        dtype: the weights' dtype as declared ("float32", "bfloat16", "float16"), None if not declared.
        source: the config.json it was read from, kept for writing it back.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    norm_weight: bool
    norm_offset: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: QKNorm
    qk_norm_after_rope: bool
    activation: Activation
    gated: bool
    tie_word_embeddings: bool
    final_logit_softcap: float | None
    attention_logit_softcap: float | None
    attention_scale: float
    sliding_window: int | None
    layer_types: tuple[LayerType, ...]
    embedding_norm: bool
    embedding_scale: float
    post_norms: bool
    rope: RopeConfig
    rope_local: RopeConfig | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None = None
    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def kv_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotation of one layer."""
        if self.rope_local is not None and self.layer_types[layer] == "sliding":
            return self.rope_local
        return self.rope

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a parsed `config.json`, as written by transformers 4 (`rope_scaling`, `rope_theta`) or 5.

        Raises UnsupportedModel for a family or feature that endstop does not run itself (the sentence offers
        the transformers backend), BrokenModel for a value that is missing, of a wrong type or contradictory.
        """
        from endstop.models.hf_config import read_config

        return read_config(config)
