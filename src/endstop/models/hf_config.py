"""Reading a Hugging Face `config.json` into a DecoderConfig, family by family.

Everything a `config.json` asks for is either represented or refused: a feature is never dropped silently.
Facts about the families were read in transformers 5.24's configuration and modelling files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from endstop.models.config import (
    FAMILIES,
    ROPE_TYPES,
    TRANSFORMERS_BACKEND,
    Activation,
    DecoderConfig,
    LayerType,
    QKNorm,
    RopeConfig,
)
from endstop.protocol.errors import BrokenModel, UnsupportedModel

# Keys that change the network in other architectures, with the values that mean "not used". A key of this
# table that a family does support is read by that family before the table is consulted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alibi": (None, False),
    "attention_bias": (None, False),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attention_sinks": (None, False),
    "attn_logit_softcapping": (None,),
    "attn_temperature_tuning": (None, False, 0),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "is_encoder_decoder": (None, False),
    "kv_lora_rank": (None, 0),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "mlp_bias": (None, False),
    "moe_intermediate_size": (None, 0),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1, 1.0),
    "qk_layernorm": (None, False),
    "quantization_config": (None, {}),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_qk_norm": (None, False),
    "use_sliding_window": (None, False),
    "vision_config": (None, {}),
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
# Every key of a rope dictionary that transformers gives a meaning for these types. Any of them may be present
# without being used by its type (transformers ignores it too); any other key is refused.
_ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "finetuned",
}


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a parsed `config.json`; see `DecoderConfig.from_hf`."""
    if not isinstance(config, Mapping):
        raise BrokenModel(f"config.json must hold a JSON object, not {type(config).__name__}.")
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(_unknown_family(config, model_type))
    return _read_family(_Fields(config, str(model_type)))


def _unknown_family(config: Mapping[str, Any], model_type: Any) -> str:
    families = ", ".join(FAMILIES)
    if model_type is None:
        named = f"config.json names no model_type; endstop itself runs {families}"
    else:
        named = f"model type {model_type!r} is not one that endstop itself runs ({families})"
    if config.get("auto_map"):
        named += ", and it asks for its own Python code, which needs trust_remote_code (off here)"
    return f"{named}; {TRANSFORMERS_BACKEND}."


class _Fields:
    """Typed access to a config.json; remembers what was read, so that the rest can be checked."""

    def __init__(self, config: Mapping[str, Any], model_type: str) -> None:
        self.config = config
        self.model_type = model_type
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return self.config.get(name, default)

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            raise BrokenModel(f"config.json of this {self.model_type} model lacks {name!r}.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BrokenModel(f"config.json: {name!r} must be a positive integer, not {_short(value)}.")
        if value > _LARGEST.get(name, 2**31 - 1):
            raise BrokenModel(f"config.json: {name!r} is {_short(value)}, which no model has.")
        return value

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        return None if self.get(name, default) is None else self.size(name, default)

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        return _positive(value, f"config.json: {name!r}")

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        value = self.get(name, default)
        return None if value is None else _positive(value, f"config.json: {name!r}")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BrokenModel(f"config.json: {name!r} must be true or false, not {value!r}.")
        return value

    def refuse(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"This {self.model_type} model {what}, which endstop does not run itself; {TRANSFORMERS_BACKEND}."
        )

    def refuse_unread_features(self) -> None:
        for name, neutral in _NEUTRAL.items():
            if name not in self.read and name in self.config and self.config[name] not in neutral:
                raise self.refuse(f"sets {name!r} to {_short(self.config[name])}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _positive(value: Any, name: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise BrokenModel(f"{name} must be a positive number, not {value!r}.")
    return float(value)


def _read_family(fields: _Fields) -> DecoderConfig:
    family = fields.model_type
    gemma = family in ("gemma2", "gemma3_text")
    nanochat = family == "nanochat"
    hidden_size = fields.size("hidden_size")
    layers = fields.size("num_hidden_layers")
    heads = fields.size("num_attention_heads")
    # An absent count has the family's default; an explicit null means one for each query head.
    default_kv_heads = {"mistral": 8, "qwen2": 32, "qwen3": 32, "gemma2": 4, "gemma3_text": 4}.get(family)
    kv_heads = fields.optional_size("num_key_value_heads", default_kv_heads) or heads
    if heads % kv_heads:
        raise BrokenModel(
            f"config.json: num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})."
        )
    default_head_dim = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}.get(family, hidden_size // heads)
    head_dim = fields.optional_size("head_dim", default_head_dim) or hidden_size // heads
    if head_dim < 2 or head_dim % 2:
        raise BrokenModel(f"config.json: the head dimension must be even to be rotated, it is {head_dim}.")

    attention_bias = fields.flag("attention_bias") if family not in ("mistral", "qwen2") else False
    sliding_window, layer_types = _layer_types(fields, layers)
    max_position = fields.size("max_position_embeddings", _DEFAULT_WINDOW[family])
    rope, rope_local = _ropes(fields, max_position)
    softcap_default = {"gemma2": 30.0, "nanochat": 15.0}.get(family)
    qk_norm: QKNorm = "weightless" if nanochat else "weight" if family in ("qwen3", "gemma3_text") else "none"
    eos = fields.get("eos_token_id")
    config = DecoderConfig(
        model_type=family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_weight=not nanochat,
        norm_offset=gemma,
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") if family == "llama" else False,
        qk_norm=qk_norm,
        qk_norm_after_rope=nanochat,
        activation=_activation(fields),
        gated=not nanochat,
        tie_word_embeddings=fields.flag("tie_word_embeddings", gemma),
        final_logit_softcap=fields.optional_number("final_logit_softcapping", softcap_default)
        if gemma or nanochat
        else None,
        attention_logit_softcap=fields.optional_number("attn_logit_softcapping", 50.0)
        if family == "gemma2"
        else None,
        attention_scale=(fields.number("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
        sliding_window=sliding_window,
        layer_types=layer_types,
        embedding_norm=nanochat,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        post_norms=gemma,
        rope=rope,
        rope_local=rope_local,
        max_position_embeddings=max_position,
        bos_token_id=_token_id(fields, "bos_token_id", fields.get("bos_token_id")),
        eos_token_ids=tuple(
            token
            for item in (eos if isinstance(eos, list) else [eos])
            if (token := _token_id(fields, "eos_token_id", item)) is not None
        ),
        dtype=_dtype(fields),
        source=dict(fields.config),
    )
    fields.refuse_unread_features()
    return config


# A damaged size must not fill the memory before the tensors, which are all missing, are looked for.
_LARGEST = {"num_hidden_layers": 10_000}
_DEFAULT_WINDOW = {
    "llama": 2048,
    "mistral": 131072,
    "qwen2": 32768,
    "qwen3": 32768,
    "gemma2": 8192,
    "gemma3_text": 131072,
    "nanochat": 2048,
}


def _token_id(fields: _Fields, name: str, value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise BrokenModel(f"config.json: {name!r} must be a token id, not {value!r}.")


def _dtype(fields: _Fields) -> str | None:
    value = fields.get("dtype") or fields.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise fields.refuse(f"declares weights of dtype {name!r}")
    return name


def _activation(fields: _Fields) -> Activation:
    if fields.model_type in ("gemma2", "gemma3_text"):
        name = fields.get("hidden_activation", "gelu_pytorch_tanh")
    else:
        name = fields.get("hidden_act", "relu2" if fields.model_type == "nanochat" else "silu")
    activation = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if activation is None:
        raise fields.refuse(f"uses the activation {name!r}")
    return activation


def _layer_types(fields: _Fields, layers: int) -> tuple[int | None, tuple[LayerType, ...]]:
    """Window and kind of each layer, by each family's own rule for absent values."""
    family = fields.model_type
    declared = fields.get("layer_types")
    window: int | None = None
    default: list[LayerType] = ["full"] * layers
    if family == "mistral":
        window = fields.optional_size("sliding_window", 4096)
        if window is not None:
            default = ["sliding"] * layers
    elif family in ("qwen2", "qwen3"):
        window = fields.optional_size("sliding_window", 4096)
        if not fields.flag("use_sliding_window"):
            window = None
        first_sliding = fields.get("max_window_layers", 28)
        if window is not None:
            if isinstance(first_sliding, bool) or not isinstance(first_sliding, int):
                raise BrokenModel(
                    f"config.json: 'max_window_layers' must be an integer, not {first_sliding!r}."
                )
            default = ["sliding" if layer >= first_sliding else "full" for layer in range(layers)]
    elif family == "gemma2":
        window = fields.optional_size("sliding_window", 4096)
        default = ["full" if layer % 2 else "sliding" for layer in range(layers)]
    elif family == "gemma3_text":
        window = fields.optional_size("sliding_window", 4096)
        period = fields.size("sliding_window_pattern", 6)
        default = ["sliding" if (layer + 1) % period else "full" for layer in range(layers)]

    types = default
    if declared is not None:
        names: dict[str, LayerType] = {"full_attention": "full", "sliding_attention": "sliding"}
        if not isinstance(declared, list) or len(declared) != layers:
            raise BrokenModel(f"config.json: 'layer_types' must list {layers} layers.")
        unknown = [name for name in declared if not isinstance(name, str) or name not in names]
        if unknown:
            raise fields.refuse(f"has layers of type {unknown[0]!r}")
        types = [names[name] for name in declared]
        # These have one kind of layer whatever this list says, so one that differs is no model of theirs.
        if family in ("llama", "nanochat", "mistral") and types != default:
            raise fields.refuse("mixes full and sliding layers ('layer_types')")
    if "sliding" in types and window is None:
        raise fields.refuse("has sliding layers but no sliding_window in use")
    if "sliding" not in types:
        window = None
    return window, tuple(types)


def _ropes(fields: _Fields, max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    parameters = fields.get("rope_parameters")
    scaling = fields.get("rope_scaling")
    theta = fields.get("rope_theta")
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise BrokenModel(f"config.json: {name!r} must be an object, not {value!r}.")
    if fields.model_type == "gemma3_text":
        nested = dict(parameters or {})
        full = {**(nested.pop("full_attention", None) or {}), **(scaling or {})}
        sliding = nested.pop("sliding_attention", None) or {}
        if nested:
            raise fields.refuse(
                f"has rope parameters beside those of its two layer types ({', '.join(map(str, nested))})"
            )
        local_theta = fields.get("rope_local_base_freq")
        return (
            _rope(fields, full, 1_000_000.0 if theta is None else theta, max_position),
            _rope(fields, sliding, 10_000.0 if local_theta is None else local_theta, max_position),
        )
    # transformers 5 lets a `rope_scaling` that is still present win over `rope_parameters`.
    return _rope(
        fields, scaling or parameters or {}, 10_000.0 if theta is None else theta, max_position
    ), None


def _rope(fields: _Fields, parameters: Mapping[str, Any], theta: Any, max_position: int) -> RopeConfig:
    name = parameters.get("rope_type", parameters.get("type")) or "default"
    if name not in ROPE_TYPES:
        raise fields.refuse(f"uses rotary embeddings of type {name!r}")
    unknown = sorted(set(parameters) - _ROPE_KEYS)
    if unknown:
        raise fields.refuse(f"sets the rope parameter {unknown[0]!r}")
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.refuse(f"rotates only a part of each head ({parameters['partial_rotary_factor']})")

    def number(key: str, default: float | None = None) -> float:
        value = parameters.get(key)
        value = default if value is None else value
        if value is None:
            raise BrokenModel(f"config.json: rotary embeddings of type {name!r} need {key!r}.")
        return _positive(value, f"config.json: the rope parameter {key!r}")

    theta = number("rope_theta", theta)
    sign: Literal[1, -1] = -1 if fields.model_type == "nanochat" else 1
    if name == "default":
        return RopeConfig("default", theta, original_max_position=max_position, sign=sign)
    if name == "linear" or name == "dynamic":
        return RopeConfig(name, theta, number("factor"), max_position, sign=sign)
    outer = fields.get("original_max_position_embeddings")
    original = int(
        number("original_max_position_embeddings", max_position)
        if outer is None
        else _positive(outer, "config.json: 'original_max_position_embeddings'")
    )
    if name == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise BrokenModel(
                f"config.json: high_freq_factor ({high}) must be larger than low_freq_factor ({low})."
            )
        return RopeConfig("llama3", theta, number("factor"), original, low, high, sign=sign)
    factor = number("factor", max_position / original)
    truncate = parameters.get("truncate")
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=True if truncate is None else bool(truncate),
        attention_factor=_yarn_attention_factor(parameters, factor),
        sign=sign,
    )


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """Temperature of YaRN as a factor of cos and sin: 0.1 ln(s) + 1 (arXiv 2309.00071, section 3.4)."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return _positive(given, "config.json: the rope parameter 'attention_factor'")
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if above and below:
        return scale(_positive(above, "config.json: the rope parameter 'mscale'")) / scale(
            _positive(below, "config.json: the rope parameter 'mscale_all_dim'")
        )
    return scale(1.0)
