"""Permutations that are computed, not stored: shuffling a source of any size takes no memory.

A Feistel network over the next even number of bits is a permutation of that many numbers; walking along its
cycle until a number of the wanted range comes keeps it one (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). The numbers are mixed by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from functools import lru_cache

_MASK = (1 << 64) - 1
_ROUNDS = 6
# A network of a few bits reaches only few permutations: small ranges are shuffled in memory.
_STORED = 4096


def mixed(*numbers: int) -> int:
    """A 64-bit number out of several numbers; equal on every machine."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = _finalised((state ^ (number & _MASK)) + 0x9E3779B97F4A7C15)
    return state


def shuffled(items: list[int], key: int) -> list[int]:
    """The items in an order that is drawn from `key` (Fisher and Yates)."""
    items = list(items)
    state = key
    for at in range(len(items) - 1, 0, -1):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        other = _finalised(state) * (at + 1) >> 64
        items[at], items[other] = items[other], items[at]
    return items


class Permutation:
    """A permutation of `range(size)` drawn from `key`: `permutation[i]` takes constant time."""

    def __init__(self, size: int, key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation has at least one item, got size {size}")
        self.size = size
        self._table = _table(size, key) if size <= _STORED else None
        self._half = ((size - 1).bit_length() + 1) // 2
        self._low = (1 << self._half) - 1
        self._keys = [mixed(key, number) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is not in a permutation of {self.size}")
        if self._table is not None:
            return self._table[index]
        while True:
            left, right = index >> self._half, index & self._low
            for key in self._keys:
                left, right = right, left ^ (_finalised(right ^ key) & self._low)
            index = left << self._half | right
            if index < self.size:
                return index


@lru_cache(maxsize=64)
def _table(size: int, key: int) -> list[int]:
    return shuffled(list(range(size)), key)


def _finalised(number: int) -> int:
    number &= _MASK
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)
