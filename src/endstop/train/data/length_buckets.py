"""Items by length: the longest that fits, the shortest, each found in O(log n)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

_BITS = 6
_WORD = (1 << _BITS) - 1
# Pairs that are tried to fill a room exactly.
_PAIRS = 64


class LengthBuckets(Generic[Item]):
    """A multiset of items with lengths from 1 to `limit`; of equal lengths the oldest comes out first.

    Which lengths are there is kept as a tree of 64-bit words (a bit of a level says that a word of the level
    below is not empty), so that adding, taking and looking up touch at most one word up and one down for each
    of ceil(log64(limit + 1)) levels.

    Attributes:
        total: the sum of all lengths.
        steps: words looked at so far.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"the longest length must be at least 1, got {limit}")
        self.limit = limit
        self.total = 0
        self.steps = 0
        self._items: dict[int, deque[Item]] = {}
        self._count = 0
        self._levels: list[list[int]] = []
        size = limit + 1
        while True:
            size = -(-size // (_WORD + 1))
            self._levels.append([0] * size)
            if size == 1:
                break

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        return (item for bucket in self._items.values() for item in bucket)

    @property
    def levels(self) -> int:
        """Levels of the tree."""
        return len(self._levels)

    def add(self, length: int, item: Item, *, oldest: bool = False) -> None:
        """Add an item; `oldest` puts one back that was taken."""
        if not 1 <= length <= self.limit:
            raise ValueError(f"a length must be from 1 to {self.limit}, got {length}")
        bucket = self._items.get(length)
        if bucket is None:
            bucket = self._items[length] = deque()
            at = length
            for words in self._levels:
                self.steps += 1
                word, bit = at >> _BITS, at & _WORD
                was = words[word]
                words[word] = was | 1 << bit
                if was:
                    break
                at = word
        if oldest:
            bucket.appendleft(item)
        else:
            bucket.append(item)
        self._count += 1
        self.total += length

    def take(self, length: int) -> Item:
        """The oldest item of a length that is there."""
        bucket = self._items[length]
        item = bucket.popleft()
        self._count -= 1
        self.total -= length
        if not bucket:
            del self._items[length]
            at = length
            for words in self._levels:
                self.steps += 1
                word = at >> _BITS
                words[word] &= ~(1 << (at & _WORD))
                if words[word]:
                    break
                at = word
        return item

    def largest_within(self, room: int) -> int | None:
        """The greatest length that is there and not above `room`."""
        at = min(room, self.limit)
        for level, words in enumerate(self._levels):
            if at < 0:
                return None
            self.steps += 1
            word = at >> _BITS
            bits = words[word] & ((2 << (at & _WORD)) - 1)
            if bits:
                at = word << _BITS | bits.bit_length() - 1
                for below in reversed(self._levels[:level]):
                    self.steps += 1
                    at = at << _BITS | below[at].bit_length() - 1
                return at
            at = word - 1
        return None

    def shortest(self) -> int | None:
        """The least length that is there."""
        if not self._count:
            return None
        at = 0
        for words in reversed(self._levels):
            self.steps += 1
            bits = words[at]
            at = at << _BITS | (bits & -bits).bit_length() - 1
        return at

    def filling(self, room: int) -> tuple[int, ...]:
        """One or two lengths that are there and together exactly `room`; of pairs the first few are tried."""
        self.steps += 1
        if room in self._items:
            return (room,)
        shortest = self.shortest()
        if shortest is None:
            return ()
        for length in range(shortest, min(shortest + _PAIRS, room // 2 + 1)):
            self.steps += 1
            if length in self._items:
                other = self._items.get(room - length)
                if other is not None and (2 * length != room or len(other) > 1):
                    return length, room - length
        return ()
