"""What a GGUF file says about its network, as a Hugging Face config.json and a table of its tensors.

Facts: the key and tensor names are those of the `gguf` package; llama.cpp's converter interleaves the rows of
q and k of the `llama` architecture, adds 1 to Gemma's norm weights, and stores Llama 3's frequency scaling as
a tensor of divisors. A key or tensor that is not known here is refused: it would change the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from endstop.models.config import DecoderConfig
from endstop.protocol.errors import BrokenModel, UnsupportedModel
from endstop.protocol.gguf import GGUFMetadata

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
ROPE_FACTORS = "rope_freqs.weight"
_ELSEWHERE = "use the model's Hugging Face directory"

# Keys (behind the architecture's name) that are read below.
_READ = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
}
# Keys that are accepted with these values, which mean "not used".
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "tensor_data_layout": ("Meta AI original pth", "reference"),
}


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """How a tensor of the file becomes a parameter.

    Attributes:
        parameter: its Hugging Face name. shape: its shape, rows first.
        heads: the number of heads whose rows are interleaved in the file, 0 if they are not.
        plus_one: the file holds 1 + the parameter (Gemma's norms).
    """

    parameter: str
    shape: tuple[int, ...]
    heads: int = 0
    plus_one: bool = False


def hf_config_of(meta: GGUFMetadata, rope_factors: Sequence[float] | None = None) -> dict[str, Any]:
    """A config.json for the network of a GGUF file.

    rope_factors: the content of the tensor `rope_freqs.weight`, if the file has it.
    Raises UnsupportedModel for an architecture, key or scaling that is not known, BrokenModel for missing
    keys and contradictions.
    """
    arch = meta.architecture
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            f"{meta.path} is of the architecture {arch!r}; endstop reads {known} from GGUF, so {_ELSEWHERE}."
        )
    keys = _Keys(meta)
    keys.refuse_unknown()
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, head_dim) != head_dim:
            raise keys.refuse(name, f"it must equal the head dimension {head_dim}")
    embedding = meta.tensor("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BrokenModel(f"{meta.path} lacks the tensor token_embd.weight.")
    layers = keys.integer("block_count")
    if layers > len(meta.tensors):
        raise keys.broken("block_count", f"at most the number of tensors ({len(meta.tensors)})")
    window = keys.integer("attention.sliding_window", 0)
    config: dict[str, Any] = {
        "model_type": _model_type(arch, window),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": meta.tensor("output.weight") is None,
        "dtype": "float32",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = meta.metadata.get(f"tokenizer.ggml.{key}_token_id")
    config["rope_parameters"] = _rope(keys, head_dim, rope_factors)
    if config["model_type"] == "llama":
        config["attention_bias"] = meta.tensor("blk.0.attn_q.bias") is not None
        config["mlp_bias"] = meta.tensor("blk.0.ffn_up.bias") is not None
    elif config["model_type"] == "mistral":
        config["sliding_window"] = window
    elif arch in ("gemma2", "gemma3"):
        config |= _gemma_options(keys, config, window)
    elif window:
        raise keys.refuse("attention.sliding_window", "which layers it is for is not stored")
    return config


def _gemma_options(keys: _Keys, config: dict[str, Any], window: int) -> dict[str, Any]:
    arch, heads = keys.meta.architecture, config["num_attention_heads"]
    # llama.cpp's rule: the 27B models (46, 62 layers) scale by the width per head, others by the head's own.
    wide = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[arch]
    options = {
        "query_pre_attn_scalar": config["hidden_size"] // heads if wide else config["head_dim"],
        # Without the key llama.cpp has 4096 for gemma2 and no window at all for gemma3, which is no Gemma.
        "sliding_window": window or (4096 if arch == "gemma2" else keys.get("attention.sliding_window")),
        "layer_types": _layer_types(keys, config["num_hidden_layers"]),
        "final_logit_softcapping": keys.optional_number("final_logit_softcapping"),
    }
    if arch == "gemma2":
        return {**options, "attn_logit_softcapping": keys.optional_number("attn_logit_softcapping")}
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    nested = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return {**options, "rope_parameters": nested}


def _layer_types(keys: _Keys, layers: int) -> list[str]:
    """Which layers slide: a list of flags, or a period of which the last layer is full."""
    name = "attention.sliding_window_pattern"
    pattern = keys.get(name, {"gemma2": 2, "gemma3": 6}[keys.meta.architecture])
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise keys.broken(name, f"a period or {layers} flags")
    return ["sliding_attention" if sliding else "full_attention" for sliding in pattern]


def tensor_table(config: DecoderConfig) -> dict[str, MappedTensor]:
    """Every tensor a GGUF file of this network has, by its GGUF name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    interleaved = config.model_type in ("llama", "mistral")

    def norm(parameter: str, size: int = hidden) -> MappedTensor:
        return MappedTensor(parameter, (size,), plus_one=config.norm_offset)

    table = {
        "token_embd.weight": MappedTensor("model.embed_tokens.weight", (config.vocab_size, hidden)),
        "output_norm.weight": norm("model.norm.weight"),
    }
    if not config.tie_word_embeddings:
        table["output.weight"] = MappedTensor("lm_head.weight", (config.vocab_size, hidden))
    matrices = {
        "attn_q": ("self_attn.q_proj", queries, hidden, config.qkv_bias, heads if interleaved else 0),
        "attn_k": ("self_attn.k_proj", keys, hidden, config.qkv_bias, kv_heads if interleaved else 0),
        "attn_v": ("self_attn.v_proj", keys, hidden, config.qkv_bias, 0),
        "attn_output": ("self_attn.o_proj", hidden, queries, config.output_bias, 0),
        "ffn_gate": ("mlp.gate_proj", inner, hidden, config.mlp_bias, 0),
        "ffn_up": ("mlp.up_proj", inner, hidden, config.mlp_bias, 0),
        "ffn_down": ("mlp.down_proj", hidden, inner, config.mlp_bias, 0),
    }
    norms = {
        "attn_norm": ("input_layernorm", hidden),
        "ffn_norm": ("post_attention_layernorm", hidden),
    }
    if config.post_norms:
        norms |= {
            "post_attention_norm": ("post_attention_layernorm", hidden),
            "ffn_norm": ("pre_feedforward_layernorm", hidden),
            "post_ffw_norm": ("post_feedforward_layernorm", hidden),
        }
    if config.qk_norm == "weight":
        norms |= {f"attn_{name}_norm": (f"self_attn.{name}_norm", config.head_dim) for name in "qk"}
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"blk.{layer}", f"model.layers.{layer}"
        for name, (parameter, rows, columns, bias, mixed) in matrices.items():
            weight = MappedTensor(f"{ours}.{parameter}.weight", (rows, columns), mixed)
            table[f"{theirs}.{name}.weight"] = weight
            if bias:
                table[f"{theirs}.{name}.bias"] = MappedTensor(f"{ours}.{parameter}.bias", (rows,), mixed)
        for name, (parameter, size) in norms.items():
            table[f"{theirs}.{name}.weight"] = norm(f"{ours}.{parameter}.weight", size)
    return table


def _model_type(arch: str, window: int) -> str:
    if arch == "llama":
        return "mistral" if window else "llama"
    return "gemma3_text" if arch == "gemma3" else arch


class _Keys:
    """Typed access to the keys of the file's architecture."""

    def __init__(self, meta: GGUFMetadata) -> None:
        self.meta = meta
        self.prefix = f"{meta.architecture}."

    def refuse(self, name: str, why: str) -> UnsupportedModel:
        value = repr(self.get(name))
        return UnsupportedModel(
            f"{self.meta.path} sets {self.prefix}{name} to {value[:60]}, which endstop does not read from "
            f"GGUF ({why}); {_ELSEWHERE}."
        )

    def broken(self, name: str, expected: str) -> BrokenModel:
        return BrokenModel(
            f"{self.meta.path}: {self.prefix}{name} must be {expected}, not {self.get(name)!r}."
        )

    def refuse_unknown(self) -> None:
        for key, value in self.meta.metadata.items():
            name = key.removeprefix(self.prefix)
            known = name in _READ or value in _NEUTRAL.get(name, ())
            if key.startswith(self.prefix) and not known:
                raise self.refuse(name, "it is not known here")
        parts = self.meta.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise UnsupportedModel(
                f"{self.meta.path} is one of {parts} parts; join them (`llama-gguf-split --merge` of "
                f"llama.cpp) or {_ELSEWHERE}."
            )

    def has(self, name: str) -> bool:
        return self.prefix + name in self.meta.metadata

    def get(self, name: str, default: Any = None) -> Any:
        value = self.meta.metadata.get(self.prefix + name, default)
        if value is None:
            raise BrokenModel(f"{self.meta.path} lacks the key {self.prefix}{name}.")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, list) and value:
            if len(set(value)) != 1:
                raise self.refuse(name, "its layers differ")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.broken(name, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.broken(name, "a positive number")
        # Numbers are stored in float32; seven digits bring 1e-05 back from 9.999999747378752e-06.
        return float(f"{value:.7g}")

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None


def _rope(keys: _Keys, head_dim: int, factors: Sequence[float] | None) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.get("rope.scaling.type", "none")
    if factors is not None and any(abs(factor - 1) > 1e-6 for factor in factors):
        if keys.meta.architecture != "llama" or kind != "none":
            raise UnsupportedModel(
                f"{keys.meta.path} has the tensor {ROPE_FACTORS}, which endstop reads only for llama without "
                f"other scaling; {_ELSEWHERE}."
            )
        return _llama3_rope(keys, theta, head_dim, factors)
    if kind == "none" and keys.has("rope.scale_linear"):
        return {"rope_type": "linear", "rope_theta": theta, "factor": keys.number("rope.scale_linear")}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": keys.number("rope.scaling.factor")}
    if kind != "yarn":
        raise keys.refuse("rope.scaling.type", "known are linear and yarn")
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": original,
    }
    for name in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{name}"):
            rope[name] = keys.number(f"rope.scaling.yarn_{name}")
    return rope


def _llama3_rope(keys: _Keys, theta: float, head_dim: int, factors: Sequence[float]) -> dict[str, Any]:
    """Recover Llama 3's scaling from its divisors.

    The divisor of a pair with w turns per token is 1 / ((1 - s) / F + s), s = (L w - low) / (high - low) cut
    to [0, 1]: F is the largest, and two pairs in between give the line of s. L, low and high can be scaled
    together, so low is 1, as in all Llama models. What was found is accepted only if it gives all divisors
    again.
    """
    turns = [theta ** (-2 * pair / head_dim) / (2 * math.pi) for pair in range(head_dim // 2)]
    largest = float(f"{max(factors):.6g}")
    candidates = [(4.0, 8192)]
    blended = [
        (turn, (1 / factor - 1 / largest) / (1 - 1 / largest))
        for turn, factor in zip(turns, factors, strict=False)
        if 1.0001 < factor < largest * 0.9999
    ]
    if len(blended) > 1:
        (first, upper), (last, lower) = blended[0], blended[-1]
        slope = (upper - lower) / (first - last)
        base = upper - slope * first
        if base < 0:
            high = float(f"{1 - 1 / base:.5g}")
            candidates.append((high, round(slope * (high - 1))))
    for high, original in candidates:
        kept = [min(max((original * turn - 1) / (high - 1), 0.0), 1.0) for turn in turns]
        again = [1 / ((1 - share) / largest + share) for share in kept]
        if len(again) == len(factors) and all(
            math.isclose(new, old, rel_tol=1e-4) for new, old in zip(again, factors, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": largest,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModel(
        f"{keys.meta.path} scales its rotary frequencies by a tensor ({ROPE_FACTORS}) that is not Llama 3's "
        f"scaling; {_ELSEWHERE}."
    )
