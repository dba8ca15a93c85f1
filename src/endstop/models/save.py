"""Writing a Hugging Face model directory that transformers and endstop load alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from endstop.models.config import HF_CLASSES, DecoderConfig
from endstop.models.decoder import Decoder
from endstop.models.directory import whole_directory, write_json
from endstop.models.load import HEAD, INDEX_FILE, SINGLE_FILE


def save_pretrained(
    model: Decoder,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    files: Mapping[str, str | bytes] | None = None,
    shard_bytes: int = 5_000_000_000,
    replace: bool = False,
) -> None:
    """Write config.json, the weights (in shards above `shard_bytes`) and `files` (name -> content).

    dtype: stored dtype, by default that of the weights. `files` is for the tokenizer's files and
    generation_config.json; names are plain file names. Errors as for `whole_directory`.
    """
    with whole_directory(directory, replace=replace) as partial:
        write_model(model.state_dict(), model.config, partial, dtype, files, shard_bytes)


def write_model(
    state: Mapping[str, Tensor],
    config: DecoderConfig,
    directory: Path,
    dtype: torch.dtype | None = None,
    files: Mapping[str, str | bytes] | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write weights that were gathered from a model into a directory that is there; see `save_pretrained`."""
    kept = {
        name: value.detach()
        for name, value in state.items()
        if not (name == HEAD and config.tie_word_embeddings)
    }
    stored = dtype if dtype is not None else next(iter(kept.values())).dtype
    for name, content in (files or {}).items():
        if Path(name).name != name:
            raise ValueError(f"files must have plain names, not {name!r}")
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)
    write_json(directory / "config.json", hf_config(config, stored))
    _write_weights(kept, stored, directory, shard_bytes)


def hf_config(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a model: what it was read from, with the architecture's name and stored dtype."""
    written = {name: value for name, value in config.source.items() if name != "torch_dtype"}
    written["architectures"] = [HF_CLASSES[config.model_type]]
    written["dtype"] = str(dtype).removeprefix("torch.")
    return written


def _write_weights(state: dict[str, Tensor], dtype: torch.dtype, directory: Path, shard_bytes: int) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, value in state.items():
        size = value.numel() * dtype.itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = value
        filled, total = filled + size, total + size
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    try:
        for name, shard in zip([SINGLE_FILE] if len(shards) == 1 else names, shards, strict=True):
            whole = {key: value.to(device="cpu", dtype=dtype).contiguous() for key, value in shard.items()}
            save_file(whole, directory / name, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
