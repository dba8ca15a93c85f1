"""TokenModel over any causal language model that transformers knows: the backend for all other architectures.

Each row has a cache of transformers' own class, and rows are computed one after the other, so this is the
slow and broad backend; the fast one is endstop.runtime.native. What a cache can do decides what the engine
may do: only caches of plain attention layers can be cut back, so only these models offer fork and truncate
(prefix reuse). Sliding windows, state spaces and hybrids keep no past that could be returned to.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from endstop.protocol.errors import BrokenModel, UnsupportedModel
from endstop.runtime.token_model import Capabilities, ForwardResult, RowChunk

logger = logging.getLogger(__name__)

# Names that transformers has given to the cache, the newest first.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


class _Row:
    """One sequence: its cache (None while it is empty) and how many tokens are in it."""

    __slots__ = ("cache", "length")

    def __init__(self, cache: Any = None, length: int = 0) -> None:
        self.cache = cache
        self.length = length


class TransformersModel:
    """A causal language model of transformers behind the TokenModel protocol.

    Args:
        model: an instance of PreTrainedModel with a language-model head.
        max_rows: rows that are computed at once.
        memory_budget: bytes of all caches together; None for what max_rows full windows need.

    Raises UnsupportedModel for encoder-decoder models and for models that keep no cache.
    """

    def __init__(self, model: Any, *, max_rows: int = 32, memory_budget: int | None = None) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedModel(
                f"{model.config.model_type} is an encoder-decoder model, and endstop runs decoders"
            )
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings()
        self.vocab_size = int(config.vocab_size if head is None else head.weight.shape[0])
        window: int | None = getattr(config, "max_position_embeddings", None)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in parameters), "")
        self._keeps_last = "logits_to_keep" in parameters
        self._rows: dict[int, _Row] = {}
        self._next_row = 0
        layers, self._row_bytes, self._token_bytes = self._probe()
        plain = all(name == "DynamicLayer" for name in layers)
        self.capabilities = Capabilities(batched=False, fork=plain, truncate=plain)
        # The scans of recurrent layers do not continue from a state over several tokens in every model, so
        # behind the first chunk these models are given one token at a time.
        self._one_by_one = any("Dynamic" not in name or "Linear" in name for name in layers)
        if memory_budget is None and window is not None:
            memory_budget = max_rows * (self._row_bytes + self._token_bytes * window)
        self.memory_budget = memory_budget
        if memory_budget is not None and self._token_bytes:
            room = max(0, memory_budget - self._row_bytes) // self._token_bytes
            window = room if window is None else min(window, room)
        self.context_len = window

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        revision: str | None = None,
        offline: bool | None = None,
        max_rows: int = 32,
        memory_budget: int | None = None,
        trust_remote_code: bool = False,
    ) -> TransformersModel:
        """Load a directory, or a name or .gguf that resolves to one; transformers itself fetches nothing.

        `dtype`: "auto" (what the checkpoint has), "float32", "bfloat16" or "float16". `device`: "auto" is
        CUDA where there is one. Pickled weights are refused.
        Raises ModelNotFound, UnsupportedModel (an architecture that transformers does not know, or one that
        brings its own code while trust_remote_code is off) and BrokenModel.
        """
        if dtype != "auto" and dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
        directory = _directory(path, revision, offline)
        model = _load(directory, dtype, trust_remote_code)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model.to(device), max_rows=max_rows, memory_budget=memory_budget)

    def open_row(self) -> int:
        return self._add(_Row())

    def close_row(self, row: int) -> None:
        del self._rows[row]

    def fork_row(self, row: int, length: int) -> int:
        self._need("fork")
        source = self._rows[row]
        with torch.inference_mode():
            fork = _Row(copy.deepcopy(source.cache), source.length)
        self._cut(fork, length)
        return self._add(fork)

    def truncate_row(self, row: int, length: int) -> None:
        self._need("truncate")
        self._cut(self._rows[row], length)

    def fits(self, lengths: Sequence[int]) -> bool:
        """By the bytes of a row of one token and of one of two; windows and states grow less, never more."""
        if self.memory_budget is None:
            return True
        return len(lengths) * self._row_bytes + sum(lengths) * self._token_bytes <= self.memory_budget

    def forward(self, chunks: Sequence[RowChunk]) -> ForwardResult:
        """Compute the chunks one after the other; logits float32 [R, vocab_size] on the model's device."""
        parts: list[torch.Tensor] = []
        with torch.inference_mode():
            for chunk in chunks:
                row = self._rows[chunk.row]
                if chunk.start != row.length:
                    raise ValueError(
                        f"row {chunk.row} has {row.length} tokens, the chunk starts at {chunk.start}"
                    )
                parts += self._compute(row, chunk)
        return ForwardResult(torch.cat(parts) if parts else None)

    def load_weights(self, state_dict: Mapping[str, Any]) -> None:
        """Swap the weights. Raises BrokenModel if they are not those of this model."""
        own = self.model.state_dict()
        unknown = sorted(set(state_dict) - set(own))
        # A tied weight is given under any of its names.
        given = {tensor.data_ptr() for name, tensor in own.items() if name in state_dict}
        missing = sorted(name for name, tensor in own.items() if tensor.data_ptr() not in given)
        wrong = sorted(
            name for name in set(own) & set(state_dict) if own[name].shape != state_dict[name].shape
        )
        for what, names in (("unknown", unknown), ("missing", missing), ("of another shape", wrong)):
            if names:
                raise BrokenModel(f"these weights are not for this model: {names[0]} is {what}")
        self.model.load_state_dict(dict(state_dict), strict=False)
        self.model.tie_weights()

    def _compute(self, row: _Row, chunk: RowChunk) -> list[torch.Tensor]:
        """The logits asked for of one chunk, as tensors [n, V]."""
        step = 1 if self._one_by_one and row.length else len(chunk.tokens)
        parts = []
        for start in range(0, len(chunk.tokens), step):
            tokens = chunk.tokens[start : start + step]
            last = start + step >= len(chunk.tokens)
            keep = 0 if chunk.logits == "all" else 1
            logits = self._run(row, tokens, keep)
            if chunk.logits == "all" or (chunk.logits == "last" and last):
                parts.append(logits)
        return parts

    def _run(self, row: _Row, tokens: list[int], keep: int) -> torch.Tensor:
        """One forward pass; float32 logits [keep or len(tokens), V] (keep 0 is all)."""
        arguments: dict[str, Any] = {"use_cache": True}
        if row.cache is not None:
            arguments[self._cache_name] = row.cache
        if self._keeps_last:
            arguments["logits_to_keep"] = keep
        input_ids = torch.tensor([tokens], dtype=torch.int64, device=self.model.device)
        output = self.model(input_ids=input_ids, **arguments)
        row.cache = _cache_of(output)
        row.length += len(tokens)
        logits: torch.Tensor = output.logits[0]
        return logits[-keep:].float() if keep else logits.float()

    def _probe(self) -> tuple[list[str], int, int]:
        """The class names of the cache's layers, the bytes of a row, and what each token adds to them."""
        row = _Row()
        sizes = []
        with torch.inference_mode():
            for _ in range(2):
                self._run(row, [0], 1)
                if row.cache is None or not self._cache_name:
                    kind = self.model.config.model_type
                    raise UnsupportedModel(f"{kind} keeps no cache that can be handed on")
                sizes.append(_bytes_of(row.cache))
        layers = getattr(row.cache, "layers", None)
        names = [type(layer).__name__ for layer in layers] if layers else [type(row.cache).__name__]
        each = sizes[1] - sizes[0]
        return names, sizes[0] - each, each

    def _cut(self, row: _Row, length: int) -> None:
        if not 0 <= length <= row.length:
            raise ValueError(f"a row of {row.length} tokens cannot be cut to {length}")
        if length == 0:
            row.cache = None
        elif length < row.length:
            row.cache.crop(length - row.length)
        row.length = length

    def _add(self, row: _Row) -> int:
        self._next_row += 1
        self._rows[self._next_row] = row
        return self._next_row

    def _need(self, what: str) -> None:
        if not getattr(self.capabilities, what):
            raise UnsupportedModel(f"the cache of {self.model.config.model_type} cannot {what} rows")


def _cache_of(output: Any) -> Any:
    return next((cache for name in _CACHE_NAMES if (cache := getattr(output, name, None)) is not None), None)


def _bytes_of(item: Any) -> int:
    """The bytes of all tensors in a cache, whatever its layers call them."""
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, Mapping):
        return sum(_bytes_of(value) for value in item.values())
    if isinstance(item, list | tuple):
        return sum(_bytes_of(value) for value in item)
    if type(item).__module__.startswith("transformers"):
        return sum(_bytes_of(value) for value in vars(item).values())
    return 0


def _directory(path: str | Path, revision: str | None, offline: bool | None) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from endstop.models.gguf import ensure_directory
    from endstop.protocol.resolve import resolve_model

    directory: Path = ensure_directory(resolve_model(path, revision=revision, offline=offline))
    return directory


def _load(directory: Path, dtype: str, trust_remote_code: bool) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(directory, **common)
        own_code = getattr(config, "auto_map", None)
        if own_code and not trust_remote_code and type(config) not in AutoModelForCausalLM._model_mapping:
            raise UnsupportedModel(f"{directory} {_NEEDS_CODE}")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
            **common,
        )
    except (SafetensorError, OSError) as error:
        raise BrokenModel(f"{directory} cannot be loaded: {_first_line(error)}") from error
    except (ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(f"{directory} {_NEEDS_CODE}") from error
        raise UnsupportedModel(f"transformers cannot run {directory}: {_first_line(error)}") from error
    model, info = loaded
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        # transformers would run it with random numbers in their place.
        raise BrokenModel(f"{directory} lacks {len(missing)} weights, among them {missing[0]}")
    return model


_NEEDS_CODE = (
    "brings Python code of its own, which is not run: trust_remote_code is off. "
    "Read that code, and pass trust_remote_code=True if you trust it"
)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
