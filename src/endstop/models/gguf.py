"""Running GGUF files: dequantised once into a cached Hugging Face directory with float32 safetensors.

Only the dequantising functions of the `gguf` package are used; the file itself is read with endstop's own
reader, because that package takes seconds to open one. Nothing here imports torch, and a file that is in the
cache costs a few calls to the file system.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from endstop.models.config import HF_CLASSES, DecoderConfig
from endstop.models.directory import whole_directory, write_json
from endstop.models.gguf_config import ROPE_FACTORS, MappedTensor, hf_config_of, tensor_table
from endstop.protocol.cache import RECORD, Record, cache_root, locked
from endstop.protocol.errors import BrokenModel, EndstopError, UnsupportedModel
from endstop.protocol.gguf import GGUFMetadata, GGUFTensor, read_gguf_metadata

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from endstop.protocol.resolve import ResolvedModel

# Counts the changes of what is written for the same file: a directory of an older count is not used again.
FORMAT = 1
TYPES = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
_CHUNK = 1 << 20


def ensure_directory(resolved: ResolvedModel) -> Path:
    """The Hugging Face directory of a resolved model; a GGUF file is dequantised into the cache on first use.

    A file is known by its path, size and time of change. Several processes may ask for it at once.
    Raises BrokenModel or UnsupportedModel as `dequantise_gguf`, EndstopError if the cache cannot be written.
    """
    if resolved.kind == "directory":
        return resolved.path
    path = resolved.path.absolute()
    try:
        state = path.stat()
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror or error}.") from error
    known = f"{FORMAT}\0{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    key = hashlib.sha256(known.encode()).hexdigest()[:16]
    target = cache_root() / "gguf" / f"{path.stem}-{key}"
    if not _is_whole(target):
        with locked(target):
            if not _is_whole(target):
                dequantise_gguf(path, target, source=resolved, replace=True)
    return target


def _is_whole(directory: Path) -> bool:
    record = Record.read(directory / RECORD)
    return record is not None and record.missing() is None


def dequantise_gguf(
    path: str | Path, directory: str | Path, *, source: ResolvedModel | None = None, replace: bool = False
) -> None:
    """Write a GGUF file as a Hugging Face directory: float32 weights, configs, tokenizer, chat template.

    The directory appears whole or not at all; one that exists is exchanged only with `replace`. `source` says
    where the file came from, for the record that is kept beside the weights.
    Raises UnsupportedModel for an architecture, tensor, tensor type, key or tokenizer that is not known,
    BrokenModel for a damaged or contradictory file, EndstopError if the disk is full.
    """
    from endstop.protocol.gguf_tokenizer import (
        generation_config_from_gguf,
        tokenizer_config_from_gguf,
        tokenizer_json_from_gguf,
    )

    if importlib.util.find_spec("gguf") is None:
        raise EndstopError(f"{path} needs the gguf package to be run: pip install 'endstop[torch]'.")
    meta = read_gguf_metadata(path)
    factors = meta.tensor(ROPE_FACTORS)
    raw = _map(meta.path)
    config = hf_config_of(meta, None if factors is None else _values(raw, factors, meta.path).tolist())
    decoder = DecoderConfig.from_hf(config)
    tensors = _mapped_tensors(meta, decoder)
    files = {
        "config.json": {"architectures": [HF_CLASSES[decoder.model_type]], **config},
        "tokenizer.json": tokenizer_json_from_gguf(meta),
        "tokenizer_config.json": tokenizer_config_from_gguf(meta),
        "generation_config.json": generation_config_from_gguf(meta),
    }
    with whole_directory(directory, replace=replace) as partial:
        for name, content in files.items():
            write_json(partial / name, content)
        _write_weights(partial / "model.safetensors", raw, tensors)
        _write_record(meta, source, partial)


def _write_record(meta: GGUFMetadata, source: ResolvedModel | None, directory: Path) -> None:
    beside = Record.read(meta.path.parent / RECORD)
    licence = source.licence if source else None
    record = Record(
        model=beside.model if beside else meta.path.name,
        source=f"{meta.path}, dequantised",
        revision=(source.revision if source else None) or "",
        licence=licence or meta.metadata.get("general.license"),
        directory=directory,
        sizes={file.name: file.stat().st_size for file in sorted(directory.iterdir())},
    )
    record.write(directory / RECORD, beside_files=True)


def _map(path: Path) -> NDArray[np.uint8]:
    import numpy as np

    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{path} cannot be read: {error}.") from error


def _mapped_tensors(meta: GGUFMetadata, config: DecoderConfig) -> list[tuple[GGUFTensor, MappedTensor]]:
    """Pair every tensor of the file with its parameter; all of them, and nothing else."""
    table = tensor_table(config)
    pairs = []
    for tensor in meta.tensors:
        mapped = table.pop(tensor.name, None)
        if mapped is None:
            if tensor.name == ROPE_FACTORS:
                continue
            raise UnsupportedModel(
                f"{meta.path} has the tensor {tensor.name}, which a {meta.architecture} model with its other "
                "tensors has not; use the model's Hugging Face directory."
            )
        if tensor.shape != mapped.shape:
            raise BrokenModel(
                f"{meta.path}: the tensor {tensor.name} has shape {list(tensor.shape)}, but the file's keys "
                f"ask for {list(mapped.shape)}."
            )
        if tensor.type not in TYPES:
            raise UnsupportedModel(
                f"{meta.path}: the tensor {tensor.name} is of type {tensor.type}; endstop reads "
                f"{', '.join(TYPES)}, so use another quantisation of the model."
            )
        pairs.append((tensor, mapped))
    if table:
        raise BrokenModel(f"{meta.path} lacks the tensor {next(iter(table))}.")
    return pairs


def _values(raw: NDArray[np.uint8], tensor: GGUFTensor, path: Path) -> NDArray[np.float32]:
    """A small tensor, dequantised whole."""
    if tensor.type not in TYPES:
        raise UnsupportedModel(f"{path}: the tensor {tensor.name} is of type {tensor.type}.")
    return _dequantise(_rows(raw, tensor), tensor.type).reshape(tensor.shape)


def _rows(raw: NDArray[np.uint8], tensor: GGUFTensor) -> NDArray[np.uint8]:
    """The stored bytes, one row for each row of the tensor; blocks never cross rows."""
    assert tensor.size is not None
    return raw[tensor.offset : tensor.offset + tensor.size].reshape(math.prod(tensor.shape[:-1]), -1)


def _dequantise(rows: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    import gguf
    import numpy as np

    values = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(values, dtype="<f4")


def _write_weights(
    file: Path, raw: NDArray[np.uint8], tensors: list[tuple[GGUFTensor, MappedTensor]]
) -> None:
    """Stream the tensors into a safetensors file: 8 bytes of header length, JSON, float32 data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for _, mapped in tensors:
        begin, end = end, end + 4 * math.prod(mapped.shape)
        header[mapped.parameter] = {
            "dtype": "F32",
            "shape": list(mapped.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if shutil.disk_usage(file.parent).free < end:
        raise OSError(errno.ENOSPC, f"the {end / 1e6:.0f} MB of float32 weights do not fit on the disk")
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor, mapped in tensors:
            for values in _parameter(raw, tensor, mapped):
                out.write(values.data)


def _parameter(
    raw: NDArray[np.uint8], tensor: GGUFTensor, mapped: MappedTensor
) -> Iterator[NDArray[np.float32]]:
    """The values of one parameter, some rows at a time."""
    import numpy as np

    rows = _rows(raw, tensor)
    if mapped.heads and len(mapped.shape) == 2:
        rows = rows[_row_order(mapped)]
    step = max(1, _CHUNK // mapped.shape[-1])
    for start in range(0, len(rows), step):
        values = _dequantise(rows[start : start + step], tensor.type)
        if mapped.heads and len(mapped.shape) == 1:
            values = np.ascontiguousarray(values.reshape(-1)[_row_order(mapped)])
        if mapped.plus_one:
            values = values - np.float32(1)
        yield values


def _row_order(mapped: MappedTensor) -> NDArray[np.intp]:
    """Rows in Hugging Face order: the file has the two halves of each head's rows interleaved."""
    import numpy as np

    rows = np.arange(mapped.shape[0])
    return rows.reshape(mapped.heads, -1, 2).swapaxes(1, 2).reshape(-1)
