"""Mixtures of sources: which document comes at which place, for ever, without going through those before it.

The order is global: place g holds the same document whatever the number of processes, so a position in the
data is an integer. In one epoch of a mixture each source gives `weight * len(source)` documents, drawn evenly
all through the epoch; a source begins its own next epoch, in a new order, when it has given all it has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from endstop.protocol.errors import EndstopError
from endstop.train.data.permutation import Permutation, mixed, shuffled

Item = TypeVar("Item", covariant=True)

# Sources alternate within stretches of about this many documents; longer ones would cost memory.
_PERIOD = 4096
_MOST = 10**15
"""Documents in an epoch of a mixture at most; far beyond lies what `len` cannot express."""


class Finite(Protocol[Item]):
    """A source with random access: a list will do.

    Sources that read in blocks (the row groups of a Parquet file) say so by an attribute `blocks`, the first
    index of each block and the length: their documents are shuffled block by block.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


class Stream(Protocol[Item]):
    """A source that can only be read from its beginning.

    Attributes:
        documents: how many of its documents count as one epoch of it in a mixture.
    """

    documents: int

    def read(self, state: dict[str, Any] | None = None) -> StreamReader[Item]:
        """A reader at the beginning, or where an earlier one was when its `state()` was taken."""
        ...


class StreamReader(Protocol[Item]):
    """Reads a stream; an end of the stream leads to its beginning."""

    def take(self, position: int) -> Item:
        """The document at `position`, which is larger than in every call before."""
        ...

    def state(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A source in a mixture.

    Attributes:
        weight: epochs of the source in one epoch of the mixture; 0.25 takes a quarter of its documents,
            another quarter in the next epoch, 3 takes each document three times.
        name: for messages and statistics.
    """

    source: Any
    weight: float = 1.0
    name: str = ""

    @property
    def is_stream(self) -> bool:
        return hasattr(self.source, "read") and hasattr(self.source, "documents")

    @property
    def size(self) -> int:
        """Documents of the source, or what counts as one epoch of a stream."""
        return self.source.documents if self.is_stream else len(self.source)

    @property
    def per_epoch(self) -> int:
        """Documents that the source gives in one epoch of the mixture."""
        return max(1, round(self.weight * self.size)) if self.weight > 0 and self.size else 0


@dataclass(frozen=True, slots=True)
class Place:
    """What stands at a place of an order: part of the mixture, index in its source, epoch of the source."""

    part: int
    index: int
    epoch: int


class Mixture:
    """Sources with weights. `len` is the number of documents in one epoch.

    Raises ValueError for a negative weight, EndstopError where a source has no documents.
    """

    def __init__(self, parts: Iterable[Part | tuple[Any, float]], *, shuffle: bool = True) -> None:
        made = [part if isinstance(part, Part) else Part(*part) for part in parts]
        self.parts = [
            Part(part.source, part.weight, part.name or str(getattr(part.source, "name", f"source {number}")))
            for number, part in enumerate(made)
        ]
        self.shuffle = shuffle
        for part in self.parts:
            if not part.weight >= 0 or part.weight == float("inf"):
                raise ValueError(f"the weight of {part.name} must be 0 or more, got {part.weight}")
            if part.per_epoch > _MOST:
                raise ValueError(
                    f"the weight of {part.name} is too large: {part.weight:g} times {part.size:,} documents "
                    f"are more than {_MOST:,}"
                )
            if part.weight > 0 and part.size < 1:
                raise EndstopError(f"{part.name} has no documents; leave it out, or look at what made it.")
        self._length = sum(part.per_epoch for part in self.parts)
        if self._length < 1:
            raise EndstopError("a mixture needs at least one source with documents and a weight above 0.")

    def __len__(self) -> int:
        return self._length

    def order(self, seed: int = 0) -> Order:
        """The order of documents that belongs to a seed."""
        return Order(self, seed)

    def item(self, place: Place) -> Any:
        """The document at a place of a finite source."""
        return self.parts[place.part].source[place.index]

    def sources(self) -> list[dict[str, Any]]:
        """For the summary of a run: name, weight, documents, licence and origin of each source."""
        return [
            {
                "name": part.name,
                "weight": part.weight,
                "documents": part.size,
                "licence": getattr(part.source, "licence", None),
                "origin": getattr(part.source, "origin", None),
            }
            for part in self.parts
        ]


def as_mixture(documents: Any) -> Mixture:
    """A mixture as it is; any other source becomes a mixture of one."""
    return documents if isinstance(documents, Mixture) else Mixture([Part(documents)])


class Order:
    """The documents of a mixture in the order of a seed: `order[g]` for any g from 0 on.

    An epoch is cut into periods of about 4096 documents. Each holds every source's even share (the first j of
    J periods hold n*j//J of a source's n documents), in a shuffled order, so that the number of a source's
    documents before any place is known without counting them.
    """

    def __init__(self, mixture: Mixture, seed: int) -> None:
        self.mixture = mixture
        self.seed = seed
        self._counts = [part.per_epoch for part in mixture.parts]
        self._sizes = [part.size for part in mixture.parts]
        self._streams = [part.is_stream for part in mixture.parts]
        self._length = len(mixture)
        self._periods = -(-self._length // _PERIOD)
        self._slots = lru_cache(maxsize=8)(self._slots_of)
        self._source_order = lru_cache(maxsize=4 * len(self._counts))(self._source_order_of)

    def __getitem__(self, place: int) -> Place:
        if place < 0:
            raise IndexError(f"places are counted from 0, got {place}")
        epoch, at = divmod(place, self._length)
        period = at * self._periods // self._length
        while self._start(period) > at:
            period -= 1
        while self._start(period + 1) <= at:
            period += 1
        part, rank = self._slots(epoch, period)[at - self._start(period)]
        turn = epoch * self._counts[part] + self._before(part, period) + rank
        if self._streams[part]:
            return Place(part, turn, turn // self._sizes[part])
        source_epoch, position = divmod(turn, self._sizes[part])
        if not self.mixture.shuffle:
            return Place(part, position, source_epoch)
        return Place(part, self._source_order(part, source_epoch)[position], source_epoch)

    def is_stream(self, place: Place) -> bool:
        """The document at a place can be read only once."""
        return self._streams[place.part]

    def _before(self, part: int, period: int) -> int:
        return self._counts[part] * period // self._periods

    def _start(self, period: int) -> int:
        return sum(self._before(part, period) for part in range(len(self._counts)))

    def _slots_of(self, epoch: int, period: int) -> list[tuple[int, int]]:
        """(part, how many of the same part stand before it in the period) for each place of a period."""
        parts = [
            part
            for part in range(len(self._counts))
            for _ in range(self._before(part, period + 1) - self._before(part, period))
        ]
        if len(self._counts) > 1:
            parts = shuffled(parts, mixed(self.seed, epoch, period))
        seen = [0] * len(self._counts)
        slots = []
        for part in parts:
            slots.append((part, seen[part]))
            seen[part] += 1
        return slots

    def _source_order_of(self, part: int, epoch: int) -> Permutation | _BlockOrder:
        source = self.mixture.parts[part].source
        key = mixed(self.seed, part + 1, epoch, 1)
        blocks = getattr(source, "blocks", None)
        return Permutation(len(source), key) if blocks is None else _BlockOrder(blocks, key)


class _BlockOrder:
    """Blocks in a shuffled order, shuffled inside: what is read one after the other lies side by side."""

    def __init__(self, blocks: Sequence[int], key: int) -> None:
        self._blocks = blocks
        self._key = key
        self._order = shuffled([b for b in range(len(blocks) - 1) if blocks[b + 1] > blocks[b]], key)
        self._starts = [0]
        for block in self._order:
            self._starts.append(self._starts[-1] + blocks[block + 1] - blocks[block])
        self._inside = lru_cache(maxsize=8)(self._inside_of)

    def __getitem__(self, position: int) -> int:
        at = bisect_right(self._starts, position) - 1
        block = self._order[at]
        return self._blocks[block] + self._inside(block)[position - self._starts[at]]

    def _inside_of(self, block: int) -> Permutation:
        return Permutation(self._blocks[block + 1] - self._blocks[block], mixed(self._key, block))


class ShardReader:
    """The documents of one logical shard: places shard, shard + shards, shard + 2 * shards, ... of an order.

    Attributes:
        position: documents taken so far.
    """

    def __init__(self, order: Order, shard: int, shards: int) -> None:
        self._order = order
        self._shard, self._shards = shard, shards
        self.position = 0
        self._readers: dict[int, StreamReader[Any]] = {}

    def next_place(self) -> Place:
        """The next document's place, and one step on."""
        self.position += 1
        return self._order[self._shard + self._shards * (self.position - 1)]

    def place(self, position: int) -> Place:
        """The place of the document that was, or will be, taken as number `position`."""
        return self._order[self._shard + self._shards * position]

    def item(self, place: Place) -> Any:
        """The document at a place. Documents of a stream can be had once, in their order."""
        part = self._order.mixture.parts[place.part]
        if not self.is_stream(place):
            return part.source[place.index]
        if place.part not in self._readers:
            self._readers[place.part] = part.source.read()
        return self._readers[place.part].take(place.index)

    def is_stream(self, place: Place) -> bool:
        return self._order.is_stream(place)

    def state(self) -> dict[str, Any]:
        streams = {str(part): reader.state() for part, reader in self._readers.items()}
        return {"position": self.position, "streams": streams}

    def load_state(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])
        self._readers = {
            int(part): self._order.mixture.parts[int(part)].source.read(saved)
            for part, saved in state["streams"].items()
        }

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.item(self.next_place())
