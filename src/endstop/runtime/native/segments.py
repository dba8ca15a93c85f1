"""How the chunks of one forward call are laid out: which rows attend together, over which keys.

All tokens of a call are one flat axis for the matrix products. Attention works on segments: rows in
neighbouring slots with equally many tokens each, which are one view of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from endstop.models import ops
from endstop.models.config import DecoderConfig, LayerType
from endstop.runtime.native.cache import LENGTH_STEP, LayerView, SlotCache, round_up
from endstop.runtime.token_model import RowChunk

# Rows with at most this many new tokens attend together even if their lengths differ.
_SHORT_CHUNK = 8
# Attending together costs what the longest row costs. Shorter rows are a segment of their own if that saves
# this many positions: reading so many takes a few times as long as the calls of one more segment.
_WORTH_A_SEGMENT = 4096
# Scores held at once (elements): longer chunks are computed in blocks of queries.
_MAX_SCORES = 1 << 24


@dataclass(slots=True)
class Block:
    """Queries [begin, end) of every row of a segment read the keys at positions [first, last).

    mask: [rows or 1, 1, 1, end - begin, last - first], 0 where visible and -inf elsewhere.
    """

    begin: int
    end: int
    first: int
    last: int
    mask: Tensor


@dataclass(slots=True)
class Segment:
    """`rows` rows in neighbouring slots, `tokens` new tokens each, from `offset` of the flat axis on.

    start: computed tokens of the rows before this call if that is the same for all, else None;
    then positions holds the new tokens' positions, int64 [rows, tokens].
    """

    offset: int
    rows: int
    tokens: int
    views: list[LayerView]
    start: int | None
    positions: Tensor
    row_index: Tensor
    blocks: dict[LayerType, list[Block]]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store a layer's new keys (float32) and values, [rows * tokens, kv_heads, head_dim]."""
        view = self.views[layer]
        if self.start is not None and self.tokens == 1:
            view.keys.select(3, self.start).copy_(key)
            view.values.select(2, self.start).copy_(value)
            return
        shape = (self.rows, self.tokens, *key.shape[1:])
        key, value = key.view(shape), value.view(shape)
        if self.start is None:
            view.keys[self.row_index, :, :, self.positions] = key.to(view.keys.dtype)
            view.values[self.row_index, :, self.positions] = value
            return
        end = self.start + self.tokens
        view.keys[:, :, :, self.start : end] = key.permute(0, 2, 3, 1)
        view.values[:, :, self.start : end] = value.transpose(1, 2)


def lay_out(
    chunks: Sequence[RowChunk], cache: SlotCache, config: DecoderConfig, dtype: torch.dtype
) -> tuple[list[int], list[Segment]]:
    """Order of the chunks on the flat axis and their segments. Rows that decode are brought together."""
    alike: dict[tuple[int, int], list[int]] = {}
    for index, chunk in enumerate(chunks):
        tokens = len(chunk.tokens)
        alike.setdefault((tokens, -1 if tokens <= _SHORT_CHUNK else chunk.start), []).append(index)
    groups: list[list[int]] = []
    for (tokens, _), indices in alike.items():
        groups += _by_length(indices, chunks) if tokens <= _SHORT_CHUNK else [indices]
    decoding = [group for group in groups if len(chunks[group[0]].tokens) == 1]
    if decoding:
        cache.bring_together([[chunks[index].row for index in group] for group in decoding])

    order: list[int] = []
    segments: list[Segment] = []
    offset = 0
    for group in groups:
        tokens = len(chunks[group[0]].tokens)
        group.sort(key=lambda index: cache.slot(chunks[index].row))
        for run in _neighbours(group, [cache.slot(chunks[index].row) for index in group]):
            starts = [chunks[index].start for index in run]
            views = cache.views(cache.slot(chunks[run[0]].row), len(run))
            segments.append(_segment(offset, views, tokens, starts, config, dtype))
            offset += len(run) * tokens
            order += run
    return order, segments


def _by_length(indices: list[int], chunks: Sequence[RowChunk]) -> list[list[int]]:
    """Cut rows into groups of similar length, longest first.

    Lengths differ by powers of two, so that rows seldom change their group (and their slot) as they grow.
    """
    classes: dict[int, list[int]] = {}
    for index in indices:
        classes.setdefault(chunks[index].start.bit_length(), []).append(index)
    groups: list[list[int]] = []
    longest = 0
    for power in sorted(classes, reverse=True):
        length = max(chunks[index].start for index in classes[power])
        if groups and (longest - length) * len(classes[power]) < _WORTH_A_SEGMENT:
            groups[-1] += classes[power]
        else:
            groups.append(classes[power])
            longest = length
    return groups


def _neighbours(items: list[int], slots: list[int]) -> list[list[int]]:
    """Cut items where their (ascending) slots have a gap."""
    runs: list[list[int]] = []
    for position, item in enumerate(items):
        if position and slots[position] == slots[position - 1] + 1:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _segment(
    offset: int,
    views: list[LayerView],
    tokens: int,
    starts: list[int],
    config: DecoderConfig,
    dtype: torch.dtype,
) -> Segment:
    device = views[0].keys.device
    same = min(starts) == max(starts)
    rows = len(starts)
    begins = torch.tensor(starts[:1] if same else starts, device=device)
    queries = begins.unsqueeze(-1) + torch.arange(tokens, device=device)
    longest = max(starts) + tokens
    per_query = rows * config.num_attention_heads * round_up(longest)
    step = max(1, _MAX_SCORES // per_query)
    blocks: dict[LayerType, list[Block]] = {}
    for kind in dict.fromkeys(config.layer_types):
        window = config.sliding_window if kind == "sliding" else None
        if window is not None and window >= longest and "full" in blocks:
            blocks[kind] = blocks["full"]
            continue
        blocks[kind] = [
            _block(queries, begin, min(begin + step, tokens), starts, window, dtype)
            for begin in range(0, tokens, step)
        ]
    row_index = torch.arange(rows, device=device).unsqueeze(-1)
    return Segment(
        offset,
        rows,
        tokens,
        views,
        starts[0] if same else None,
        queries.expand(rows, tokens),
        row_index,
        blocks,
    )


def _block(
    queries: Tensor, begin: int, end: int, starts: list[int], window: int | None, dtype: torch.dtype
) -> Block:
    last = round_up(max(starts) + end)
    oldest = 0 if window is None else max(0, min(starts) + begin - window + 1)
    first = oldest - oldest % LENGTH_STEP
    keys = torch.arange(first, last, device=queries.device)
    visible = ops.visible_keys(queries[:, begin:end], keys, window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=queries.device).masked_fill_(~visible, -torch.inf)
    return Block(begin, end, first, last, mask[:, None, None])
