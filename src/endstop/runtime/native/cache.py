"""The KV cache: every row has a slot, a slot holds `capacity` tokens in every layer.

Slots lie side by side in one tensor for each layer, so that rows in neighbouring slots are one view and
attention for a whole batch reads the cache without copying it. Rows are moved between slots so that the rows
which decode together are neighbours (`bring_together`). Keys are stored as [kv_heads, head_dim, capacity]:
scores of a batch are then a product of two views that CPUs compute about twice as fast as with keys
stored like values, [kv_heads, capacity, head_dim].

What lies behind a row's length is masked, but must be finite, since 0 * nan is nan. Memory starts as zeros
and is zeroed when a row leaves it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Lengths of attention are rounded up to this many tokens: kernels are then compiled once for each multiple
# and not for each length, and results do not depend on neighbours that are a little longer.
LENGTH_STEP = 32
_FIRST_CAPACITY = 256
# Making the views of all layers takes as long as some products; those of recent calls are kept.
_KEPT_VIEWS = 64


def round_up(length: int) -> int:
    """The smallest multiple of LENGTH_STEP that holds `length` tokens, at least one step."""
    return max(1, -(-length // LENGTH_STEP)) * LENGTH_STEP


@dataclass(slots=True)
class LayerView:
    """The cache of one layer for some neighbouring slots.

    keys: [rows, kv_heads, head_dim, capacity], values: [rows, kv_heads, capacity, head_dim];
    flat_keys, flat_values: the same with rows and heads on one axis.
    """

    keys: Tensor
    values: Tensor
    flat_keys: Tensor
    flat_values: Tensor


class SlotCache:
    """Rows by handle, their slots and lengths; storage grows and shrinks within a budget of bytes."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        budget: int,
    ) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.slots = 0
        self.capacity = 0
        self.max_rows = max_rows
        self.budget = budget
        self._layers, self._kv_heads, self._head_dim = layers, kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self._slot: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._free: set[int] = set()
        self._handles = itertools.count()
        self._views: dict[tuple[int, int], list[LayerView]] = {}
        self.bytes_per_token = 2 * layers * kv_heads * head_dim * dtype.itemsize

    def __len__(self) -> int:
        """The number of open rows."""
        return len(self._length)

    def length(self, row: int) -> int:
        """Computed tokens of a row. Raises ValueError for a handle that is not open."""
        if row not in self._length:
            raise ValueError(f"row {row} is not open")
        return self._length[row]

    def slot(self, row: int) -> int:
        """Where a row is now, until the next call that may move rows."""
        return self._slot[row]

    def set_length(self, row: int, length: int) -> None:
        """Record tokens whose keys and values have been written."""
        self._length[row] = length

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether rows of these lengths fit into the budget at once."""
        return (
            len(lengths) <= self.max_rows
            and self._bytes(len(lengths), max(lengths, default=0)) <= self.budget
        )

    def open(self) -> int:
        """A new empty row. Raises ValueError beyond `max_rows`."""
        if len(self) >= self.max_rows:
            raise ValueError(f"the model has at most {self.max_rows} rows open at once; close one first")
        row = next(self._handles)
        self._length[row] = 0
        return row

    def close(self, row: int) -> None:
        """Forget a row; its slot is free for others."""
        self.truncate(row, 0)
        del self._length[row]
        slot = self._slot.pop(row, None)
        if slot is not None:
            self._free.add(slot)

    def truncate(self, row: int, length: int) -> None:
        """Forget what a row computed behind its first `length` tokens."""
        before = self.length(row)
        if not 0 <= length <= before:
            raise ValueError(f"row {row} has {before} computed tokens and cannot be cut to {length}")
        if length < before:
            self._clear(self._slot[row], length, before)
            self._length[row] = length

    def fork(self, row: int, length: int) -> int:
        """A new row that begins with the first `length` tokens of another."""
        before = self.length(row)
        if not 0 <= length <= before:
            raise ValueError(f"row {row} has {before} computed tokens, so {length} cannot be forked")
        new = self.open()
        if length:
            self.reserve({new: length})
            self._copy(self._slot[row], self._slot[new], length)
            self._length[new] = length
        return new

    def reserve(self, lengths: Mapping[int, int]) -> None:
        """Give rows room for these lengths. May move every row.

        Raises MemoryError if all open rows together then need more than the budget.
        """
        longest = max(lengths.values(), default=0)
        new = [row for row in lengths if row not in self._slot]
        if longest > self.capacity or len(new) > len(self._free):
            self._resize(len(self._slot) + len(new), max(longest, *self._length.values()))
        for row in new:
            slot = min(self._free)
            self._free.remove(slot)
            self._slot[row] = slot

    def bring_together(self, groups: Sequence[Sequence[int]]) -> None:
        """Move rows so that those of each group lie side by side, in any order. All must have slots."""
        if all(self._adjacent(group) for group in groups):
            return
        slots = sorted(self._slot[row] for group in groups for row in group)
        # Of all places for them, the one where most of them lie already.
        starts = [min(slot, self.slots - len(slots)) for slot in slots]
        place = max(starts, key=lambda start: sum(start <= slot < start + len(slots) for slot in slots))
        row_at = {slot: row for row, slot in self._slot.items()}
        for group in sorted(groups, key=lambda group: sum(self._slot[row] for row in group) / len(group)):
            target = range(place, place + len(group))
            place += len(group)
            outside = [row for row in group if self._slot[row] not in target]
            for slot in target:
                other = row_at.get(slot)
                if other in group:
                    continue
                row = outside.pop()
                old = self._slot[row]
                if other is None:
                    self._move(row, slot)
                    del row_at[old]
                else:
                    self._swap(row, other)
                    row_at[old] = other
                row_at[slot] = row

    def _adjacent(self, rows: Sequence[int]) -> bool:
        slots = [self._slot[row] for row in rows]
        return max(slots) - min(slots) == len(slots) - 1

    def views(self, slot: int, rows: int) -> list[LayerView]:
        """The cache of `rows` slots from `slot` on, for every layer."""
        found = self._views.get((slot, rows))
        if found is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            found = self._views[slot, rows] = [
                LayerView(key, value, key.flatten(0, 1), value.flatten(0, 1))
                for key, value in (
                    (key[slot : slot + rows], value[slot : slot + rows])
                    for key, value in zip(self.keys, self.values, strict=True)
                )
            ]
        return found

    def _bytes(self, slots: int, length: int) -> int:
        return slots * round_up(length) * self.bytes_per_token if slots and length else 0

    def _resize(self, rows: int, longest: int) -> None:
        """Storage for `rows` rows of `longest` tokens: with room to grow if the budget has it."""
        slots, capacity = max(rows, self.slots), max(round_up(longest), self.capacity)
        if rows > self.slots:
            slots = min(max(rows, 2 * self.slots), self.max_rows)
        if longest > self.capacity:
            capacity = max(round_up(longest), 2 * self.capacity, _FIRST_CAPACITY)
        if self._bytes(slots, capacity) > self.budget:
            slots, capacity = rows, round_up(longest)
        if self._bytes(slots, capacity) > self.budget:
            needed = self._bytes(slots, capacity)
            raise MemoryError(
                f"the KV cache needs {needed} bytes for {rows} rows of up to {longest} tokens, "
                f"but its budget is {self.budget}; run fewer or shorter rows at once, or raise memory_budget"
            )
        self._reallocate(slots, capacity)

    def _reallocate(self, slots: int, capacity: int) -> None:
        """Move all rows, packed together, into new storage; layer by layer, so that the peak stays low."""
        self._views.clear()
        order = sorted(self._slot, key=self._slot.__getitem__)
        old = [self._slot[row] for row in order]
        used = max((self._length[row] for row in order), default=0)
        shape = (slots, self._kv_heads)
        packed = old == list(range(len(old)))
        source = slice(0, len(old)) if packed else torch.tensor(old, device=self._device)
        for layer in range(self._layers):
            key = torch.zeros(*shape, self._head_dim, capacity, dtype=self._dtype, device=self._device)
            value = torch.zeros(*shape, capacity, self._head_dim, dtype=self._dtype, device=self._device)
            if layer < len(self.keys):
                if used:
                    key[: len(old), :, :, :used] = self.keys[layer][source, :, :, :used]
                    value[: len(old), :, :used] = self.values[layer][source, :, :used]
                self.keys[layer], self.values[layer] = key, value
            else:
                self.keys.append(key)
                self.values.append(value)
        self.slots, self.capacity = slots, capacity
        self._slot = {row: slot for slot, row in enumerate(order)}
        self._free = set(range(len(order), slots))

    def _move(self, row: int, slot: int) -> None:
        """Move a row to a free slot."""
        old = self._slot[row]
        self._copy(old, slot, self._length[row])
        self._clear(old, 0, self._length[row])
        self._free.remove(slot)
        self._free.add(old)
        self._slot[row] = slot

    def _swap(self, row: int, other: int) -> None:
        """Exchange two rows."""
        first, second = self._slot[row], self._slot[other]
        longest = max(self._length[row], self._length[other])
        pair = torch.tensor([first, second], device=self._device)
        for key, value in zip(self.keys, self.values, strict=True):
            key[pair, :, :, :longest] = key[pair.flip(0), :, :, :longest]
            value[pair, :, :longest] = value[pair.flip(0), :, :longest]
        self._slot[row], self._slot[other] = second, first

    def _copy(self, source: int, target: int, length: int) -> None:
        for key, value in zip(self.keys, self.values, strict=True):
            key[target, :, :, :length] = key[source, :, :, :length]
            value[target, :, :length] = value[source, :, :length]

    def _clear(self, slot: int, begin: int, end: int) -> None:
        for key, value in zip(self.keys, self.values, strict=True):
            key[slot, :, :, begin:end] = 0
            value[slot, :, begin:end] = 0
