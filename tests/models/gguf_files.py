"""Writing GGUF files from models of transformers, the way llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Tensors = dict[str, tuple[np.ndarray, str]]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def gguf_name(parameter: str, family: str) -> str:
    names = {**NAMES, **(GEMMA_NAMES if "gemma" in family else {})}
    path, _, kind = parameter.rpartition(".")
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", path)
    return f"blk.{layer[1]}.{names[layer[2]]}.{kind}" if layer else f"{names[path]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's `llama` architecture: pairs (i, i + d/2) of each head side by side."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors_of(model: Any, kind: str = "F32") -> Tensors:
    """All tensors of a model under their GGUF names, matrices stored as `kind`, vectors as F32."""
    config = model.config
    family = config.model_type
    tensors: Tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.float().numpy()
        if family in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = interleave(array, heads)
        if "gemma" in family and name.endswith("norm.weight"):
            array = array + np.float32(1)
        tensors[gguf_name(name, family)] = (np.ascontiguousarray(array), kind if array.ndim > 1 else "F32")
    return tensors


def keys_of(model: Any) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for a model, behind the architecture's name."""
    config = model.config
    rope = config.rope_parameters
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if config.model_type in ("mistral", "gemma2", "gemma3_text"):
        keys["attention.sliding_window"] = config.sliding_window
    if config.model_type == "gemma2":
        keys["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    return keys


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: str = "F32",
    keys: Mapping[str, Any] | None = None,
    change: Callable[[Tensors], None] = lambda tensors: None,
    raw: Mapping[str, tuple[np.ndarray, str]] | None = None,
) -> None:
    """Write a model; `keys` are added (None removes), `change` edits tensors, `raw` replaces stored bytes."""
    arch = ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**keys_of(model), **(keys or {})}.items():
        name = key if key.startswith("split.") else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
    write_tokenizer(writer, model.config.vocab_size)
    tensors = tensors_of(model, kind)
    change(tensors)
    for name, (array, stored) in tensors.items():
        if raw and name in raw:
            data, stored = raw[name]
        elif stored in ("F32", "I32"):
            data = array
        else:
            data = gguf.quantize(array, gguf.GGMLQuantizationType[stored])
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """A byte-level vocabulary: three special tokens, letters, and one merged pair."""
    tokens = ["<pad>", "<bos>", "<eos>", *(chr(33 + index) for index in range(size - 4)), '!"']
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (size - 3))
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(
        "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    )
