"""Writing a Hugging Face model directory as a GGUF file, for llama.cpp and what is built on it.

The file has the tensor names, row orders and keys that `gguf_config` reads back. What llama.cpp's network of
the same name would compute differently is refused: a file that loads and says something else is worse than
none. Facts about that: llama.cpp's converter and its model files.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from endstop.models.config import DecoderConfig
from endstop.models.gguf_config import ROPE_FACTORS, MappedTensor, tensor_table
from endstop.models.gguf_vocabulary import vocabulary_of
from endstop.protocol.errors import EndstopError, UnsupportedModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from endstop.models.load import StoredTensor

Dtype = Literal["f32", "f16", "bf16", "q8_0"]
DTYPES: tuple[Dtype, ...] = ("f32", "f16", "bf16", "q8_0")
# general.file_type of llama.cpp
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        size: bytes. architecture: llama.cpp's name. pre: the pre-tokenizer's name.
        types: storage type -> number of tensors. left_out: stop ids for which GGUF has no key.
    """

    path: Path
    size: int
    architecture: str
    pre: str
    types: dict[str, int]
    left_out: tuple[int, ...]


def export_gguf(
    directory: str | Path,
    path: str | Path,
    *,
    dtype: Dtype = "f16",
    pre: str | None = None,
    name: str | None = None,
    licence: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the model of a directory as one GGUF file, which appears whole or not at all.

    Matrices are stored as `dtype`, vectors as f32; a matrix whose rows are no multiple of 32 long cannot be
    q8_0 and becomes f16. `pre` names the pre-tokenizer instead of having it found (and checked). `progress`
    is told (tensors written, tensors in all). Needs torch and gguf.
    Raises UnsupportedModel for a network or tokenizer that GGUF cannot express, BrokenModel for a damaged
    directory, ValueError for an unknown dtype, EndstopError if the disk is full.
    """
    import gguf

    from endstop.models.load import check_stored, read_config, stored_tensors

    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    directory, path = Path(directory), Path(path)
    config = read_config(directory)
    architecture = architecture_of(config, directory)
    stored = stored_tensors(directory)
    check_stored(stored, config, directory)
    config, stored = _untangled(config, stored)
    vocabulary = vocabulary_of(directory, config.vocab_size, pre=pre)
    part = path.with_name(f".{path.name}.part")
    with _writing(path, part):
        writer = gguf.GGUFWriter(part, architecture)
        writer.add_name(name or directory.name)
        writer.add_file_type(_FILE_TYPES[dtype])
        if licence:
            writer.add_license(licence)
        for key, value in network_keys(config).items():
            _add(writer, f"{architecture}.{key}", value)
        for key, value in vocabulary.keys.items():
            _add(writer, f"tokenizer.{key}", value)
        types = _write_tensors(writer, config, stored, dtype, progress or (lambda done, total: None))
    return Exported(
        path, path.stat().st_size, architecture, vocabulary.keys["ggml.pre"], types, vocabulary.left_out
    )


def architecture_of(config: DecoderConfig, directory: str | Path = "the model") -> str:
    """llama.cpp's name for the network. Raises UnsupportedModel where it would compute something else."""

    def refuse(what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{directory} cannot be written as GGUF: {what}; serve it with endstop or transformers instead."
        )

    family = config.model_type
    if family == "nanochat":
        raise UnsupportedModel(
            f"{directory} is a nanochat model, and llama.cpp has no network with its norms without weights, "
            "its norm behind the embedding and its squared ReLU; train the Llama shape (`--shape llama`) for "
            "a model that exports."
        )
    if family not in _ARCHITECTURES:
        raise refuse(f"llama.cpp knows no {family} model that endstop can write")
    sliding = config.sliding_window is not None and config.sliding_window < config.max_position_embeddings
    if family in ("mistral", "qwen2", "qwen3") and sliding:
        raise refuse("llama.cpp's network of this family attends over the whole window, this one slides")
    if family == "qwen3" and (config.qkv_bias or config.output_bias):
        raise refuse("llama.cpp's qwen3 has no biases in its attention")
    if not math.isclose(config.attention_scale, config.head_dim**-0.5, rel_tol=1e-6):
        raise refuse(f"its attention is scaled by {config.attention_scale:.4g}, not by 1/sqrt(head size)")
    period = {"gemma2": 2, "gemma3_text": 6}.get(family)
    pattern = (
        "full" if period is None or (layer + 1) % period == 0 else "sliding" for layer in _layers(config)
    )
    if period is not None and tuple(pattern) != config.layer_types:
        raise refuse("its sliding and full layers do not alternate as in its family")
    if family == "gemma3_text" and (config.final_logit_softcap or config.attention_logit_softcap):
        raise refuse("llama.cpp's gemma3 caps no logits")
    _rope_keys(config, refuse)
    return _ARCHITECTURES[family]


def _layers(config: DecoderConfig) -> range:
    return range(config.num_hidden_layers)


def network_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of the network, behind the architecture's name; those that `hf_config_of` reads."""
    keys: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        **_rope_keys(config),
    }
    if config.model_type in ("gemma2", "gemma3_text"):
        keys["attention.sliding_window"] = config.sliding_window
    if config.rope_local is not None:
        keys["rope.freq_base_swa"] = float(config.rope_local.theta)
    for name, cap in (
        ("attn_logit_softcapping", config.attention_logit_softcap),
        ("final_logit_softcapping", config.final_logit_softcap),
    ):
        if cap is not None:
            keys[name] = float(cap)
    return keys


def _rope_keys(
    config: DecoderConfig, refuse: Callable[[str], UnsupportedModel] = UnsupportedModel
) -> dict[str, Any]:
    rope = config.rope
    keys: dict[str, Any] = {"rope.freq_base": float(rope.theta)}
    if rope.type in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.type, "rope.scaling.factor": float(rope.factor)}
    if rope.type == "yarn":
        usual = 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0
        if not rope.truncate or not math.isclose(rope.attention_factor, usual, rel_tol=1e-6):
            raise refuse("its YaRN has an attention factor or a rounding that llama.cpp does not compute")
        keys |= {
            "rope.scaling.original_context_length": rope.original_max_position,
            "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
        }
    if rope.type == "dynamic":
        raise refuse("llama.cpp has no dynamic scaling of rotary embeddings")
    if rope.type == "llama3" and config.model_type != "llama":
        raise refuse("llama.cpp scales frequencies as Llama 3 does only in its llama network")
    if config.rope_local is not None and config.rope_local.type != "default":
        raise refuse("llama.cpp does not scale the rotary embeddings of sliding layers")
    return keys


def _untangled(
    config: DecoderConfig, stored: dict[str, StoredTensor]
) -> tuple[DecoderConfig, dict[str, StoredTensor]]:
    """Tied matrices are written once; two different ones that a config calls tied are both written."""
    import torch

    from endstop.models.load import EMBEDDING, HEAD

    if not config.tie_word_embeddings:
        return config, stored
    if EMBEDDING not in stored:
        return config, {**stored, EMBEDDING: stored[HEAD]}
    if HEAD in stored and not torch.equal(_tensor(stored, EMBEDDING), _tensor(stored, HEAD)):
        return replace(config, tie_word_embeddings=False), stored
    return config, stored


def _tensor(stored: dict[str, StoredTensor], name: str) -> Any:
    from safetensors import safe_open

    with safe_open(stored[name].file, framework="pt") as tensors:
        held = set(tensors.keys())
        return tensors.get_tensor(name if name in held else "lm_head.weight")


@contextlib.contextmanager
def _writing(path: Path, part: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
        part.replace(path)
    except OSError as error:
        raise EndstopError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_tensors(
    writer: Any,
    config: DecoderConfig,
    stored: dict[str, StoredTensor],
    dtype: Dtype,
    progress: Callable[[int, int], None],
) -> dict[str, int]:
    """All tensors one after the other, so that no more than one is in memory; returns counts by type."""
    import gguf
    import numpy as np

    table = tensor_table(config)
    kinds = {name: _kind(mapped, dtype) for name, mapped in table.items()}
    divisors = _llama3_divisors(config)
    for name, mapped in table.items():
        kind = gguf.GGMLQuantizationType[kinds[name]]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = math.prod(mapped.shape)
        writer.add_tensor_info(name, mapped.shape, np.dtype("float32"), count // block * size, kind)
    if divisors is not None:
        writer.add_tensor_info(ROPE_FACTORS, divisors.shape, divisors.dtype, divisors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, (name, mapped) in enumerate(table.items()):
        values = _values(stored, mapped)
        kind = gguf.GGMLQuantizationType[kinds[name]]
        writer.write_tensor_data(values if kinds[name] == "F32" else gguf.quantize(values, kind))
        progress(done + 1, len(table))
    if divisors is not None:
        writer.write_tensor_data(divisors)
    writer.close()
    counts: dict[str, int] = {}
    for stored_as in kinds.values():
        counts[stored_as.lower()] = counts.get(stored_as.lower(), 0) + 1
    return counts


def _kind(mapped: MappedTensor, dtype: Dtype) -> str:
    if len(mapped.shape) == 1:
        return "F32"
    if dtype == "q8_0" and mapped.shape[-1] % 32:
        return "F16"
    return dtype.upper()


def _values(stored: dict[str, StoredTensor], mapped: MappedTensor) -> NDArray[np.float32]:
    """A parameter as the file has it: float32, rows interleaved, Gemma's norms plus one."""
    import numpy as np

    values = cast("NDArray[np.float32]", _tensor(stored, mapped.parameter).float().numpy())
    if mapped.plus_one:
        values = values + np.float32(1)
    if mapped.heads:
        halves = values.reshape(mapped.heads, 2, -1, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(values)


def _llama3_divisors(config: DecoderConfig) -> NDArray[np.float32] | None:
    """What Llama 3's scaling divides each frequency by, as llama.cpp keeps it."""
    if config.rope.type != "llama3":
        return None
    from endstop.models.ops import rope_frequencies

    plain = rope_frequencies(replace(config.rope, type="default"), config.head_dim)
    divided = plain / rope_frequencies(config.rope, config.head_dim)
    return cast("NDArray[np.float32]", divided.float().numpy())
