"""NativeModel: every architecture of `models.config`, computed for inference.

The same mathematics as `models.decoder`, laid out for speed: fused and packed weights, a slot cache, and one
flat axis of tokens, so that rows that decode and rows whose prompt is computed share each matrix product.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from endstop.models import ops
from endstop.models.config import DecoderConfig, RopeConfig
from endstop.models.load import EMBEDDING, HEAD, load_state_dict, read_config
from endstop.runtime.native.cache import LayerView, SlotCache
from endstop.runtime.native.rotation import RotationTable
from endstop.runtime.native.segments import Block, Segment, lay_out
from endstop.runtime.native.weights import LayerWeights, check_state_dict, fuse_weights
from endstop.runtime.token_model import Capabilities, ForwardResult, RowChunk

DType = Literal["auto", "float32", "bfloat16"]


class NativeModel:
    """A TokenModel over a decoder-only transformer.

    Rows do not influence each other, except for rounding: in float32 logits of the same row computed in other
    company or in other chunks differ by about 1e-6 of their size, in bfloat16 by about 1e-2.
    """

    capabilities = Capabilities(batched=True, fork=True, truncate=True)

    def __init__(
        self,
        config: DecoderConfig,
        state_dict: Mapping[str, Any],
        *,
        dtype: DType = "auto",
        device: str = "cpu",
        max_rows: int = 256,
        memory_budget: int | None = None,
        context_len: int | None = None,
        consume: bool = False,
    ) -> None:
        """Build from parameters under their Hugging Face names; they are copied.

        dtype: of weights, activations and cache; "auto" is bfloat16 where the device computes it fast, else
        float32. device: "cpu", "cuda", "cuda:N"; "auto" is cuda if there is one.
        max_rows: rows open at once. memory_budget: bytes for the KV cache; by default half of the memory
        that is free now. context_len: longest row in tokens, by default what the config declares.
        consume: the state dict is emptied as it is read, so that less memory is needed.
        Raises ValueError for weights that do not fit the config and for settings out of range.
        """
        self.config = config
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        self.vocab_size = config.vocab_size
        self.context_len = config.max_position_embeddings if context_len is None else context_len
        for name, value in (("context_len", self.context_len), ("max_rows", max_rows)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if memory_budget is not None and memory_budget < 0:
            raise ValueError(f"memory_budget must be a number of bytes, not {memory_budget}")
        check_state_dict(config, state_dict)
        self._fuse(state_dict, consume=consume)
        self.cache = SlotCache(
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
            dtype=self.dtype,
            device=self.device,
            max_rows=max_rows,
            budget=_free_memory(self.device) // 2 if memory_budget is None else memory_budget,
        )
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._rotations = {
            rope: RotationTable(rope, config.head_dim, self.device, magnitude=not config.qk_norm_after_rope)
            for rope in {config.rope_of(layer) for layer in range(config.num_hidden_layers)}
        }
        # The scale of q.k is applied to q in float32, as a part of the rotation.
        scales = [config.attention_scale] * heads + [1.0] * kv_heads
        self._rotation_scales = torch.tensor(scales, device=self.device).unsqueeze(-1)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: DType = "auto",
        device: str = "cpu",
        max_rows: int = 256,
        memory_budget: int | None = None,
        context_len: int | None = None,
    ) -> NativeModel:
        """Load a Hugging Face model directory (safetensors).

        Arguments as for `NativeModel`. Raises BrokenModel for damaged or missing files, UnsupportedModel for
        architectures that endstop does not run itself.
        """
        config = read_config(directory)
        return cls(
            config,
            load_state_dict(directory, config=config, dtype=choose_dtype(dtype, choose_device(device))),
            dtype=dtype,
            device=device,
            max_rows=max_rows,
            memory_budget=memory_budget,
            context_len=context_len,
            consume=True,
        )

    def load_weights(self, state_dict: Mapping[str, Any]) -> None:
        """Swap the weights; they are copied. Rows computed with the old ones must be closed before.

        Raises ValueError, and changes nothing, if a parameter is missing, foreign or of another shape.
        """
        check_state_dict(self.config, state_dict)
        self._fuse(state_dict)

    @torch.no_grad()
    def _fuse(self, state_dict: Mapping[str, Any], *, consume: bool = False) -> None:
        head, embedding = state_dict.get(HEAD), state_dict[EMBEDDING]
        tied = head is None or head.data_ptr() == embedding.data_ptr()
        del head, embedding
        parameter = state_dict.pop if consume and isinstance(state_dict, dict) else state_dict.__getitem__

        def take(name: str) -> Tensor:
            # A copy, since norms and the embedding are used as they are given.
            taken: Tensor = parameter(name).detach().to(device=self.device, dtype=self.dtype, copy=True)
            return taken

        self._weights = fuse_weights(self.config, take, tied=tied)

    def open_row(self) -> int:
        """A new, empty row. Raises ValueError beyond `max_rows`."""
        return self.cache.open()

    @torch.inference_mode()
    def close_row(self, row: int) -> None:
        """Free a row and its slot in the cache."""
        self.cache.close(row)

    @torch.inference_mode()
    def fork_row(self, row: int, length: int) -> int:
        """A new row with a copy of the first `length` computed tokens of `row`."""
        return self.cache.fork(row, length)

    @torch.inference_mode()
    def truncate_row(self, row: int, length: int) -> None:
        """Cut a row back to its first `length` computed tokens."""
        self.cache.truncate(row, length)

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether open rows of these lengths fit into the memory budget, each as much as the longest."""
        return self.cache.fits(lengths)

    @torch.no_grad()
    def forward(self, chunks: Sequence[RowChunk]) -> ForwardResult:
        """Compute chunks of one or more rows; see `TokenModel.forward`.

        Raises ValueError for a chunk that does not continue its row, is empty, too long for the window or
        holds ids outside the vocabulary; MemoryError where `fits` would have been false.
        """
        if not chunks:
            return ForwardResult()
        self._check(chunks)
        with torch.inference_mode():
            hidden = self._hidden(chunks)
        if hidden is None:
            return ForwardResult()
        # Outside inference mode, so that the caller may change the logits in place.
        logits = self._weights.head(self._weights.norm(hidden)).float()
        return ForwardResult(logits=ops.softcap(logits, self.config.final_logit_softcap))

    def _check(self, chunks: Sequence[RowChunk]) -> None:
        if len({chunk.row for chunk in chunks}) < len(chunks):
            raise ValueError("a forward call may hold only one chunk of each row")
        for chunk in chunks:
            computed = self.cache.length(chunk.row)
            if chunk.start != computed:
                raise ValueError(
                    f"row {chunk.row} has {computed} computed tokens, but its chunk starts at {chunk.start}"
                )
            if not chunk.tokens:
                raise ValueError(f"the chunk of row {chunk.row} is empty")
            if chunk.start + len(chunk.tokens) > self.context_len:
                raise ValueError(
                    f"row {chunk.row} would be {chunk.start + len(chunk.tokens)} tokens long, "
                    f"but the window is {self.context_len}"
                )
            if min(chunk.tokens) < 0 or max(chunk.tokens) >= self.vocab_size:
                raise ValueError(f"token ids of row {chunk.row} must be in [0, {self.vocab_size})")

    def _hidden(self, chunks: Sequence[RowChunk]) -> Tensor | None:
        """Run all layers and extend the rows; the hidden states for the logits asked for, in chunk order."""
        lengths = {chunk.row: chunk.start + len(chunk.tokens) for chunk in chunks}
        self.cache.reserve(lengths)
        order, segments = lay_out(chunks, self.cache, self.config, self.dtype)
        x = self._embed([token for index in order for token in chunks[index].tokens])
        turns = self._turns(segments, max(lengths.values()))
        for index, layer in enumerate(self._weights.layers):
            x = self._layer(index, layer, x, turns[self.config.rope_of(index)], segments)
        for row, length in lengths.items():
            self.cache.set_length(row, length)
        wanted = _wanted(chunks, order)
        if wanted == list(range(len(x))):
            return x
        return x[torch.tensor(wanted, device=self.device)] if wanted else None

    def _embed(self, tokens: list[int]) -> Tensor:
        x = functional.embedding(torch.tensor(tokens, device=self.device), self._weights.embedding)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype, device=x.device)
        return self._weights.norm(x) if self.config.embedding_norm else x

    def _turns(self, segments: list[Segment], end: int) -> dict[RopeConfig, Tensor]:
        """Rotation of every head of q and k of every token: complex64 [N, heads + kv_heads, head_dim / 2]."""
        positions = torch.cat([segment.positions.flatten() for segment in segments])
        return {
            rope: table.at(positions, end).unsqueeze(1) * self._rotation_scales
            for rope, table in self._rotations.items()
        }

    def _layer(
        self, index: int, layer: LayerWeights, x: Tensor, turn: Tensor, segments: list[Segment]
    ) -> Tensor:
        mixed = self._attention(index, layer, layer.before_attention(x), turn, segments)
        if layer.after_attention is None:
            x = layer.output.plus(mixed, x)
        else:
            x = x + layer.after_attention(layer.output(mixed))
        inner = layer.up(layer.before_mlp(x))
        if self.config.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = ops.activate(gate, self.config.activation).mul_(up)
        else:
            inner = ops.activate(inner, self.config.activation)
        if layer.after_mlp is None:
            return layer.down.plus(inner, x)
        return x + layer.after_mlp(layer.down(inner))

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, turn: Tensor, segments: list[Segment]
    ) -> Tensor:
        """Store keys and values of all tokens, then attend by segments: [N, heads * head_dim]."""
        config = self.config
        heads = config.num_attention_heads
        turned_heads = heads + config.num_key_value_heads
        qkv = layer.qkv(x).view(len(x), -1, config.head_dim)
        pairs = self._normed_heads(index, layer, qkv[:, :turned_heads].float())
        rotated = torch.view_as_complex(pairs.view(*pairs.shape[:2], -1, 2)) * turn
        query_key = torch.view_as_real(rotated).flatten(-2)
        # Keys are rounded to the cache's dtype when they are stored, which saves a copy.
        query, key, value = query_key[:, :heads].to(self.dtype), query_key[:, heads:], qkv[:, turned_heads:]
        if len(segments) == 1:
            segments[0].write(index, key, value)
            return self._attend(index, segments[0], query)
        mixed = []
        for segment in segments:
            tokens = slice(segment.offset, segment.offset + segment.rows * segment.tokens)
            segment.write(index, key[tokens], value[tokens])
            mixed.append(self._attend(index, segment, query[tokens]))
        return torch.cat(mixed)

    def _normed_heads(self, index: int, layer: LayerWeights, heads: Tensor) -> Tensor:
        """The norm of q and k, float32 [N, heads + kv_heads, head_dim]."""
        config = self.config
        if config.qk_norm == "none":
            return heads
        eps = config.rms_norm_eps
        if config.qk_norm_after_rope:
            # A rotation keeps the norm, so a norm without weight may as well come first; only a factor f of
            # the rotation has to be moved into eps: f x / sqrt(f^2 m + eps) = x / sqrt(m + eps / f^2).
            eps /= config.rope_of(index).attention_factor ** 2
        heads = functional.rms_norm(heads, (config.head_dim,), None, eps)
        return heads if layer.qk_norm is None else heads * layer.qk_norm

    def _attend(self, index: int, segment: Segment, query: Tensor) -> Tensor:
        """Grouped-query attention of [rows * tokens, heads, head_dim] -> [rows * tokens, heads * head_dim].

        The query heads of a group are stacked as if they were more queries, so that keys and values are read
        once for all of them.
        """
        config = self.config
        view, blocks = segment.views[index], segment.blocks[config.layer_types[index]]
        rows, tokens, groups = segment.rows, segment.tokens, config.kv_groups
        if tokens == 1:
            stacked = query.reshape(-1, groups, config.head_dim)
            return self._attend_block(stacked, view, blocks[0], rows).view(rows, -1)
        stacked = query.view(rows, tokens, -1, groups, config.head_dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
        mixed = torch.empty_like(stacked)
        for block in blocks:
            part = stacked[:, :, block.begin : block.end]
            result = self._attend_block(part.flatten(1, 2), view, block, rows)
            mixed[:, :, block.begin : block.end] = result.view(part.shape)
        return mixed.view(rows, -1, *mixed.shape[1:]).permute(0, 3, 1, 2, 4).reshape(rows * tokens, -1)

    def _attend_block(self, queries: Tensor, view: LayerView, block: Block, rows: int) -> Tensor:
        """Attention of [rows * kv_heads, groups * queries, head_dim]; the result has the same shape."""
        config = self.config
        length = block.last - block.first
        scores = torch.bmm(queries, view.flat_keys.narrow(2, block.first, length))
        scores = ops.softcap(scores, config.attention_logit_softcap)
        scores.view(rows, config.num_key_value_heads, config.kv_groups, -1, length).add_(block.mask)
        return torch.bmm(scores.softmax(-1), view.flat_values.narrow(1, block.first, length))


def _wanted(chunks: Sequence[RowChunk], order: list[int]) -> list[int]:
    """Places on the flat axis whose logits are asked for, in chunk order."""
    begins, offset = {}, 0
    for index in order:
        begins[index] = offset
        offset += len(chunks[index].tokens)
    wanted: list[int] = []
    for index, chunk in enumerate(chunks):
        end = begins[index] + len(chunk.tokens)
        if chunk.logits == "last":
            wanted.append(end - 1)
        elif chunk.logits == "all":
            wanted.extend(range(begins[index], end))
    return wanted


def choose_device(device: str) -> torch.device:
    """The device by name; "auto" is cuda or else the CPU. Raises ValueError for one that is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps', not {device!r}") from None
    missing = chosen.type == "mps" and not torch.backends.mps.is_available()
    if missing or (chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"there is no device {device!r} here; use device='cpu'")
    return chosen


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to run with; "auto" is bfloat16 where the device computes it fast, else float32.

    Raises ValueError for any other name.
    """
    if dtype == "auto":
        return torch.bfloat16 if _fast_bfloat16(device) else torch.float32
    names: dict[str | torch.dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    names |= {value: value for value in names.values()}
    if dtype not in names:
        raise ValueError(f"dtype must be 'auto', 'float32' or 'bfloat16', not {dtype!r}")
    return names[dtype]


def _fast_bfloat16(device: torch.device) -> bool:
    """CPUs: instructions for bfloat16 products, as Linux lists them; CUDA: compute capability 8.0 and up."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def _free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now; where the system does not say, a quarter of its memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    page = os.sysconf("SC_PAGE_SIZE")
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return page * os.sysconf("SC_AVPHYS_PAGES")
    return page * os.sysconf("SC_PHYS_PAGES") // 4
