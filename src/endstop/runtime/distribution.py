"""From logits to a drawn token: temperature, min_p, top_k, top_p, and the inversion of the result.

Everything works on weights: the softmax of the logits over the temperature. min_p, top_k and top_p keep the
largest weights, so that a short list of candidates is enough; a longer one is taken where it is not, and the
result does not depend on its length. An exact number of tokens is kept, the lower ids first among equals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from endstop.protocol.params import SamplingParams

CANDIDATES = (64, 1024)  # lengths of the list before the whole vocabulary is sorted
_BLOCK = 256
_SHORT = 128
_SMALLEST_TEMPERATURE, _LARGEST_TEMPERATURE = 1e-30, 1e30


def weights_of(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Softmax of logits over temperature: float32 [R, V] -> float32 [R, V]."""
    # The largest logit becomes 0 first, so that no temperature makes it infinite.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    temperatures = [min(max(p.temperature, _SMALLEST_TEMPERATURE), _LARGEST_TEMPERATURE) for p in params]
    shifted /= column(temperatures, logits)
    return torch.softmax(shifted, dim=-1)


def is_restricted(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def restricted(weights: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """min_p, then top_k, then top_p (each over what the one before has left).

    `weights`: float32 [R, V]. Returns ids int64 [R, C], ascending where the weight is not 0, and their
    weights float32 [R, C], 0 for what was taken out. top_p keeps the smallest set of the likeliest tokens
    whose mass is at least p (Holtzman et al., "The curious case of neural text degeneration", 2020).
    """
    size = weights.shape[-1]
    ids = torch.zeros(len(params), 0, dtype=torch.int64, device=weights.device)
    values = torch.zeros(len(params), 0, device=weights.device)
    left = list(range(len(params)))
    for length in (*CANDIDATES, size):
        length = min(length, size)
        # One more than is used, to see whether the last one kept has an equal.
        top_values, top_ids = largest_weights(weights[left], min(length + 1, size))
        counts, known = _kept(top_values, length, [params[r] for r in left], weights[left])
        ids, values = _widened(ids, length), _widened(values, length)
        done = [place for place in range(len(left)) if known[place]]
        rows = [left[place] for place in done]
        kept = torch.arange(length, device=weights.device) < counts[done, None]
        ids[rows, :length] = top_ids[done, :length]
        values[rows, :length] = torch.where(kept, top_values[done, :length], 0.0)
        for place, row in zip(done, rows, strict=True):
            count = int(counts[place])
            if count < top_values.shape[-1] and top_values[place, count - 1] == top_values[place, count] > 0:
                ids[row, :count], values[row, :count] = _lowest_equals(weights[row], count, top_values[place])
        left = [left[place] for place in range(len(left)) if not known[place]]
        if not left:
            break
    order = torch.where(values > 0, ids, size).argsort(dim=-1)
    return ids.gather(-1, order), values.gather(-1, order)


def largest_weights(weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest weights of each row, falling, and their ids: [R, count] each."""
    if weights.device.type != "cpu" or count <= _SHORT:
        found = torch.topk(weights, count, dim=-1)
        return found.values, found.indices
    # On CPUs NumPy selects and sorts long lists some twenty times faster than torch.
    import numpy

    falling = -weights.numpy()
    if count == falling.shape[-1]:
        ids = numpy.argsort(falling, axis=-1)
    else:
        ids = numpy.argpartition(falling, count, axis=-1)[:, :count]
        order = numpy.argsort(numpy.take_along_axis(falling, ids, axis=-1), axis=-1)
        ids = numpy.take_along_axis(ids, order, axis=-1)
    listed = torch.from_numpy(ids)
    return weights.gather(-1, listed), listed


def _kept(
    top: torch.Tensor, length: int, params: Sequence[SamplingParams], weights: torch.Tensor
) -> tuple[torch.Tensor, list[bool]]:
    """How many of the largest weights each row keeps, and whether the first `length` of them tell."""
    size = weights.shape[-1]
    top = top[:, :length].double()
    whole = length == size
    by_k = torch.tensor([p.top_k if 0 < p.top_k < size else size for p in params], device=top.device)
    least = column([p.min_p for p in params], top) * top[:, :1]
    by_min = (top >= least).sum(dim=-1)
    by_min = torch.where(by_min < length, by_min, size)
    first = torch.minimum(by_k, by_min)
    first_known = (first <= length) | whole
    reached = top.cumsum(dim=-1)
    # The mass that top_p divides: of what min_p and top_k have left, or of the whole row.
    inside = reached.gather(-1, first.clamp(1, length)[:, None] - 1)
    everything = block_sums(weights).sum(dim=-1, keepdim=True)
    mass = torch.where(first[:, None] <= length, inside, everything)
    wanted = column([p.top_p for p in params], top).double() * mass
    by_p = ((reached - top) < wanted).sum(dim=-1).clamp_min(1)
    nucleus = torch.tensor([p.top_p < 1 for p in params], device=top.device)
    found = (reached[:, -1:] >= wanted)[:, 0] & nucleus
    # Without min_p and top_k the list may be cut by top_p before its end is known.
    alone = torch.tensor([not 0 < p.top_k < size and p.min_p == 0 for p in params], device=top.device)
    counts = torch.where(nucleus, torch.minimum(by_p, first), first).clamp(1, length)
    return counts, (first_known | (alone & found)).tolist()


def _lowest_equals(
    weights: torch.Tensor, count: int, largest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of a row, where the last of them has equals: those with the lower ids."""
    least = largest[count - 1]
    above = (weights > least).nonzero()[:, 0]
    equal = (weights == least).nonzero()[:, 0][: count - len(above)]
    chosen = torch.cat([above, equal])
    return chosen, weights[chosen]


def invert_listed(ids: torch.Tensor, weights: torch.Tensor, draws: Sequence[float]) -> list[int]:
    """The token of each row at its draw in [0, 1): ids [R, C] ascending, weights [R, C]."""
    cumulative = weights.double().cumsum(dim=-1)
    targets = column(draws, cumulative, torch.float64) * cumulative[:, -1:]
    places = torch.searchsorted(cumulative, targets, right=True)
    found: list[int] = ids.gather(-1, places.clamp_max(ids.shape[-1] - 1))[:, 0].tolist()
    return found


def invert(weights: torch.Tensor, draws: Sequence[float]) -> list[int]:
    """The token of each row at its draw in [0, 1): the first id at which the cumulative weight exceeds it.

    `weights` [R, V] need not sum to one; a token of weight 0 is never returned. Sums are float64, of blocks
    of 256 ids first and then inside the block that was hit.
    """
    blocks = block_sums(weights).cumsum(dim=-1)
    targets = column(draws, blocks, torch.float64) * blocks[:, -1:]
    block = torch.searchsorted(blocks, targets, right=True).clamp_max(blocks.shape[-1] - 1)
    before = torch.where(block > 0, blocks.gather(-1, (block - 1).clamp_min(0)), 0.0)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = ids < weights.shape[-1]
    ids = ids.clamp_max(weights.shape[-1] - 1)
    local = weights.gather(-1, ids).double() * inside
    cumulative = local.cumsum(dim=-1)
    place = torch.searchsorted(cumulative, targets - before, right=True)
    # Rounding may put the target at the block's very end: then it is the last token that has a weight.
    last = torch.where(local > 0, torch.arange(_BLOCK, device=weights.device), 0).amax(dim=-1, keepdim=True)
    found: list[int] = ids.gather(-1, torch.minimum(place, last))[:, 0].tolist()
    return found


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums of 256 neighbouring weights each, the last block shorter: [R, V] -> float64 [R, ceil(V / 256)]."""
    whole = weights.shape[-1] // _BLOCK * _BLOCK
    blocks = weights[:, :whole].view(len(weights), -1, _BLOCK)
    sums: torch.Tensor = blocks.sum(dim=-1, dtype=torch.float64)
    if whole == weights.shape[-1]:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(dim=-1, keepdim=True, dtype=torch.float64)], dim=-1)


def column(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers as [R, 1] beside `like`."""
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _widened(table: torch.Tensor, width: int) -> torch.Tensor:
    """The same rows with zeros behind them, `width` wide."""
    if table.shape[-1] >= width:
        return table
    wide = table.new_zeros(len(table), width)
    wide[:, : table.shape[-1]] = table
    return wide
