"""Reading a Hugging Face model directory: config.json and safetensors, whole or in shards.

Every tensor is checked against the configuration before anything is loaded, so that a damaged or foreign
file is one sentence that names file and tensor, not a traceback from inside a library. Pickled weights are
refused: unpickling runs code.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from endstop.models.config import TRANSFORMERS_BACKEND, DecoderConfig
from endstop.models.decoder import Decoder
from endstop.protocol.errors import BrokenModel, UnsupportedModel

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PICKLES = ("pytorch_model*.bin*", "*.pth", "*.pt", "*.ckpt", "*.bin", "*.pkl")
_WEIGHT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: its file, its dtype as safetensors spells it ("F32", "BF16") and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_config(directory: str | Path) -> DecoderConfig:
    """The configuration of a model directory.

    Raises BrokenModel for a missing or malformed config.json, UnsupportedModel as `DecoderConfig.from_hf`.
    """
    return DecoderConfig.from_hf(_read_json(Path(directory) / "config.json"))


def load_model(
    directory: str | Path, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> Decoder:
    """A decoder with the weights of a model directory, in evaluation mode.

    dtype: "auto" (as config.json declares, else as stored), "float32", "bfloat16", "float16", or torch's own.
    Raises BrokenModel for damaged, missing or misshapen files and tensors, UnsupportedModel for what
    endstop does not run itself.
    """
    config = read_config(directory)
    state = load_state_dict(directory, config=config, dtype=dtype, device=device)
    if config.tie_word_embeddings and state[HEAD] is not state[EMBEDDING]:
        config = replace(
            config, tie_word_embeddings=False, source={**config.source, "tie_word_embeddings": False}
        )
    with torch.device("meta"):
        model = Decoder(config)
    model.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def load_state_dict(
    directory: str | Path,
    *,
    config: DecoderConfig | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """All parameters by their Hugging Face names, exactly those that `config` asks for.

    `lm_head.weight` is always there: the same tensor as the embedding where they are tied. Where the config
    ties them but the files hold two different matrices, both are returned with a warning, as in transformers.
    Arguments and errors as for `load_model`.
    """
    directory = Path(directory)
    if config is None:
        config = read_config(directory)
    stored = stored_tensors(directory)
    check_stored(stored, config, directory)
    target = _resolve_dtype(dtype, config, stored)
    state: dict[str, Tensor] = {}
    names: dict[Path, list[str]] = {}
    for name in parameter_shapes(config):
        if name in stored:
            names.setdefault(stored[name].file, []).append(name)
    for file, wanted in names.items():
        state.update(_load_file(file, wanted, target, device))
    if config.tie_word_embeddings:
        _tie(state, directory)
    return state


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter that a model of this configuration has."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in Decoder(config).state_dict().items()}


def stored_tensors(directory: str | Path) -> dict[str, StoredTensor]:
    """What the safetensors files of a directory hold, from their headers only.

    Raises BrokenModel for a file that is missing, truncated or no safetensors, UnsupportedModel where there
    are only pickled weights or only an adapter.
    """
    directory = Path(directory)
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).exists():
        return _read_header(directory / SINGLE_FILE)
    if not index.exists():
        raise _no_weights(directory)
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise BrokenModel(f"{index} has no 'weight_map' from tensor names to files.")
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise BrokenModel(f"{index} names {file!r}, which is not a file of the same directory.")
        if not (directory / file).exists():
            raise BrokenModel(
                f"{directory / file}, named in {INDEX_FILE}, is missing; fetch the model again."
            )
        header = _read_header(directory / file)
        for name, tensor in header.items():
            if weight_map.get(name) == file:
                found[name] = tensor
    for name, file in weight_map.items():
        if name not in found:
            raise BrokenModel(f"{directory / file} lacks the tensor {name!r} that {INDEX_FILE} places there.")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenModel(f"{path} is missing, so {path.parent} is not a whole model directory.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BrokenModel(f"{path} is not valid JSON ({error}); fetch it again.") from error
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror or error}.") from error
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def _no_weights(directory: Path) -> Exception:
    if (directory / "adapter_model.safetensors").exists() or (directory / "adapter_config.json").exists():
        return UnsupportedModel(
            f"{directory} holds only an adapter; merge it into its base model (merge_and_unload in peft) "
            "and use what that gives."
        )
    for pattern in _PICKLES:
        for file in sorted(directory.glob(pattern)):
            return UnsupportedModel(
                f"{file} holds pickled weights, which can run code when they are loaded; where you "
                "trust them, save the model as safetensors (save_pretrained of transformers) and use that."
            )
    return BrokenModel(
        f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}, so there are no weights to load."
    )


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Read and check a safetensors header: 8 bytes of length, JSON, then data up to the end of the file."""

    def broken(what: str) -> BrokenModel:
        return BrokenModel(f"{path} {what}; fetch the model again.")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise broken(f"is truncated or no safetensors file: {size} bytes do not hold its header")
            text = file.read(length)
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {
            name: (StoredTensor(path, entry["dtype"], tuple(entry["shape"])), *entry["data_offsets"])
            for name, entry in entries.items()
        }
        spans = [(name, begin, end, tensor) for name, (tensor, begin, end) in tensors.items()]
        for name, begin, end, tensor in spans:
            expected = _WEIGHT_BYTES.get(tensor.dtype)
            if not 0 <= begin <= end:
                raise ValueError(f"offsets of {name}")
            if expected is not None and end - begin != expected * math.prod(tensor.shape):
                raise ValueError(f"size of {name}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise broken(f"has a damaged safetensors header ({error})") from error
    for name, _, end, _ in spans:
        if 8 + length + end > size:
            last = 8 + length + end
            raise broken(f"is truncated: it has {size} bytes, but the tensor {name!r} ends at byte {last}")
    return {name: tensor for name, _, _, tensor in spans}


def check_stored(stored: dict[str, StoredTensor], config: DecoderConfig, directory: Path) -> None:
    """Compare what is stored with what the configuration asks for; errors as for `load_model`."""
    shapes = parameter_shapes(config)
    for name, shape in shapes.items():
        tensor = stored.get(name)
        if tensor is None:
            twin = {HEAD: EMBEDDING, EMBEDDING: HEAD}.get(name)
            if config.tie_word_embeddings and twin in stored:
                continue
            raise BrokenModel(f"{directory} lacks the tensor {name!r} that config.json asks for.")
        if tensor.shape != shape:
            raise BrokenModel(
                f"{tensor.file}: the tensor {name!r} has shape {list(tensor.shape)}, "
                f"but config.json asks for {list(shape)}."
            )
        if tensor.dtype not in _WEIGHT_BYTES:
            raise UnsupportedModel(
                f"{tensor.file}: the tensor {name!r} is stored as {tensor.dtype}, but endstop reads F32, "
                f"F16, BF16 and F64 weights; if the model is quantised, {TRANSFORMERS_BACKEND}."
            )
    for name, tensor in stored.items():
        # Old checkpoints store the rotary frequencies, which follow from the config.
        if name not in shapes and not name.endswith("rotary_emb.inv_freq"):
            raise UnsupportedModel(
                f"{tensor.file} holds the tensor {name!r}, which a {config.model_type} model of this "
                f"config.json does not have; {TRANSFORMERS_BACKEND}."
            )


def _resolve_dtype(
    dtype: str | torch.dtype, config: DecoderConfig, stored: dict[str, StoredTensor]
) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        if dtype not in _DTYPES.values():
            raise ValueError(f"dtype must be float32, bfloat16 or float16, not {dtype}")
        return dtype
    if dtype == "auto":
        first = {"F16": "float16", "BF16": "bfloat16"}.get(next(iter(stored.values())).dtype, "float32")
        return _DTYPES[config.dtype or first]
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be 'auto', 'float32', 'bfloat16' or 'float16', not {dtype!r}")
    return _DTYPES[dtype]


def _load_file(
    file: Path, names: list[str], dtype: torch.dtype, device: str | torch.device
) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            return {name: tensors.get_tensor(name).to(dtype) for name in names}
    except (SafetensorError, OSError) as error:
        raise BrokenModel(f"{file} cannot be read ({error}); fetch the model again.") from error


def _tie(state: dict[str, Tensor], directory: Path) -> None:
    if EMBEDDING not in state:
        state[EMBEDDING] = state[HEAD]
    elif HEAD not in state or torch.equal(state[HEAD], state[EMBEDDING]):
        state[HEAD] = state[EMBEDDING]
    else:
        logger.warning(
            "%s: config.json ties %s to %s, but the files hold two different matrices; both are used.",
            directory,
            HEAD,
            EMBEDDING,
        )
