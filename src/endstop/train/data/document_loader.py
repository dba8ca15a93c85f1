"""Batches for base training: documents of a mixture, tokenised and packed."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import torch

from endstop.protocol.errors import EndstopError
from endstop.train.batch import TokenBatch
from endstop.train.data.logical_shards import ShardedLoader, ShardPlan
from endstop.train.data.mixture import Order, Place, ShardReader, as_mixture
from endstop.train.data.packing import (
    CropPacker,
    Document,
    KeepEndsPacker,
    PackedRow,
    Piece,
)
from endstop.train.data.permutation import mixed
from endstop.train.data.sources import BadDocument
from endstop.train.data.statistics import PackingCounts

Encode = Callable[[list[str]], Sequence[Sequence[int]]]
Mode = Literal["crop", "keep-ends"]

# Documents tokenised in one call, and characters after which there are enough.
_CHUNK = 64
_CHUNK_CHARACTERS = 1 << 20
# So many documents that have more than so many times a row behind their first row are read once.
_BEGINNINGS, _MUCH_LONGER = 1000, 8


class DocumentLoader(ShardedLoader[PackedRow]):
    """Endless steps of packed documents; every position is supervised, the border between documents included.

    Args:
        documents: a `Mixture`, or one source of texts (a list will do).
        encode: texts to ids without BOS.
        row_length: tokens that a row reads (T).
        rows_per_step: rows of a step over all processes (R), a multiple of `shards`.
        micro_rows: rows of a micro-batch (B) at most.
        mode: "crop" (`CropPacker`) or "keep-ends" (`KeepEndsPacker`).
        shards, rank, world: see `logical_shards`.
        buffer: documents to choose from, in each shard; fewer where they have more than `row_length` tokens
            on average.
        isolate: give `document_ids`, so that attention stays within documents.
        skip_bad: count documents that cannot be read and go on; otherwise the first is an error.

    Raises ValueError for numbers that do not go together, EndstopError for data without documents.
    """

    def __init__(
        self,
        documents: Any,
        encode: Encode,
        bos_id: int,
        *,
        row_length: int,
        rows_per_step: int,
        micro_rows: int,
        mode: Mode = "crop",
        shards: int = 1,
        rank: int = 0,
        world: int = 1,
        buffer: int = 1000,
        isolate: bool = False,
        seed: int = 0,
        skip_bad: bool = False,
    ) -> None:
        if mode not in ("crop", "keep-ends"):
            raise ValueError(f"mode must be 'crop' or 'keep-ends', got {mode!r}")
        if buffer < 1:
            raise ValueError(f"buffer must be at least 1, got {buffer}")
        mixture = as_mixture(documents)
        plan = ShardPlan(shards, rows_per_step, micro_rows, rank, world)
        self.row_length = row_length
        self.isolate = isolate
        order = mixture.order(seed)
        beginnings = _Beginnings(row_length + 1) if mode == "crop" else None
        self._shards = {
            shard: _Shard(
                order, shard, shards, encode, bos_id, row_length, mode, buffer, seed, skip_bad, beginnings
            )
            for shard in plan.own_shards
        }
        facts = {"mode": mode, "row_length": row_length, "buffer": buffer, "seed": seed}
        super().__init__(mixture, plan, self._shards, facts)

    def statistics(self) -> dict[str, Any]:
        """Counts and shares over this process's shards since the first step; see `PackingCounts`."""
        counts = sum((shard.packer.counts for shard in self._shards.values()), PackingCounts())
        return {
            **counts.figures(),
            "skipped_documents": sum(shard.skipped for shard in self._shards.values()),
            "empty_documents": sum(shard.empty for shard in self._shards.values()),
            "epochs": self.epochs,
        }

    def _batch(self, rows: list[PackedRow]) -> TokenBatch:
        ids = torch.stack([torch.frombuffer(row.ids, dtype=torch.int32) for row in rows]).long()
        document_ids = torch.tensor([row.document_ids() for row in rows]) if self.isolate else None
        return TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), document_ids)


class _Beginnings:
    """Documents much longer than a row, of which a row takes the beginning, each read and tokenised once.

    A giant one among few documents would be drawn again and again.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._kept: OrderedDict[tuple[int, int], tuple[Document, int]] = OrderedDict()

    def at(self, place: Place) -> tuple[Document, int] | None:
        """The document at a place of a finite source, and its characters, if it is kept."""
        key = place.part, place.index
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, place: Place, document: Document, characters: int) -> None:
        """Keep what is used of a document if the rest of it is long."""
        more = len(document.tokens) - self._tokens
        if more < _MUCH_LONGER * self._tokens:
            return
        beginning = replace(document, tokens=document.tokens[: self._tokens], dropped=more)
        self._kept[place.part, place.index] = beginning, characters
        if len(self._kept) > _BEGINNINGS:
            self._kept.popitem(last=False)


class _Shard:
    """One logical shard: reads its documents, tokenises them, packs them.

    A document is known by its number in the shard, from which it can be read again; documents of streams
    cannot, so that their tokens go into the state.
    """

    def __init__(
        self,
        order: Order,
        shard: int,
        shards: int,
        encode: Encode,
        bos_id: int,
        row_length: int,
        mode: Mode,
        buffer: int,
        seed: int,
        skip_bad: bool,
        beginnings: _Beginnings | None,
    ) -> None:
        packer = CropPacker if mode == "crop" else KeepEndsPacker
        self.packer: CropPacker | KeepEndsPacker = packer(row_length, bos_id, mixed(seed, shard))
        self.reader = ShardReader(order, shard, shards)
        self.skipped = 0
        self.empty = 0
        self._encode = encode
        self._bos_id = bos_id
        self._buffer = buffer
        self._most_tokens = buffer * row_length
        self._skip_bad = skip_bad
        self._beginnings = beginnings
        # A shard of a small source may meet the same document in several epochs running.
        self._patience = 20 * (len(order.mixture) + _CHUNK)

    def next_row(self) -> PackedRow:
        return self.packer.next_row(self._refill)

    def state(self) -> dict[str, Any]:
        documents = sorted(self.packer.buffered(), key=lambda document: int(document.reference))
        carried = self.packer.carried if isinstance(self.packer, KeepEndsPacker) else None
        return {
            "reader": self.reader.state(),
            "buffered": [self._saved(document) for document in documents],
            "carried": None if carried is None else [self._saved(carried.document), carried.start],
            "counts": asdict(self.packer.counts),
            "skipped": self.skipped,
            "empty": self.empty,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        old = self.packer
        self.packer = type(old)(old.row_length, old.bos_id, old.seed)
        self.packer.counts = PackingCounts(**state["counts"])
        self.skipped, self.empty = state["skipped"], state["empty"]
        # The position first: what was buffered is read again by its number, whatever the position.
        self.reader.load_state(state["reader"])
        for document in self._restored(state["buffered"]):
            self.packer.add(document)
        if state["carried"] is not None and isinstance(self.packer, KeepEndsPacker):
            saved, start = state["carried"]
            document = self._restored([saved])[0]
            self.packer.carried = Piece(document, start, len(document.tokens) - start)

    def _refill(self) -> None:
        rejected = 0
        while len(self.packer) < self._buffer and self.packer.waiting_tokens < self._most_tokens:
            first = self.reader.position
            documents = self._read(min(_CHUNK, self._buffer))
            for document in documents:
                self.packer.add(document)
            rejected = 0 if documents else rejected + self.reader.position - first
            if rejected >= self._patience:
                raise EndstopError(
                    f"none of {rejected} documents in a row has any text; look at the sources of the mixture."
                )

    def _read(self, count: int) -> list[Document]:
        """The next documents, so many or fewer; those that are of no use are counted."""
        numbers: list[int] = []
        found: list[Document | str] = []
        first, characters = self.reader.position, 0
        while self.reader.position < first + count and characters <= _CHUNK_CHARACTERS:
            number = self.reader.position
            place = self.reader.next_place()
            try:
                item, length = self._item(place)
            except BadDocument:
                if not self._skip_bad:
                    raise
                self.skipped += 1
                continue
            if item:
                numbers.append(number)
                found.append(item)
                # The same for one that is kept: how many are read at once decides what is there to choose
                # from, and a resumed run must have the same choice.
                characters += length
            else:
                self.empty += 1
        documents = self._documents(numbers, found)
        usable = [document for document in documents if len(document.tokens) > 1]
        self.empty += len(documents) - len(usable)
        return usable

    def _item(self, place: Place) -> tuple[Document | str, int]:
        """The text at a place, or its beginning as a document if that is kept; and its characters."""
        if self._beginnings is not None and not self.reader.is_stream(place):
            kept = self._beginnings.at(place)
            if kept is not None:
                return kept
        text: str = self.reader.item(place)
        return text, len(text or "")

    def _documents(self, numbers: list[int], found: list[Document | str]) -> list[Document]:
        """Documents of these numbers, with those that are texts tokenised."""
        texts = [item for item in found if isinstance(item, str)]
        made = iter(self._tokens(texts))
        documents = []
        for number, item in zip(numbers, found, strict=True):
            if isinstance(item, str):
                document = Document(next(made), number)
                place = self.reader.place(number)
                if self._beginnings is not None and not self.reader.is_stream(place):
                    self._beginnings.keep(place, document, len(item))
            else:
                document = replace(item, reference=number)
            documents.append(document)
        return documents

    def _tokens(self, texts: list[str]) -> list[array[int]]:
        if not texts:
            return []
        made = []
        for ids in self._encode(texts):
            tokens = array("i", [self._bos_id])
            tokens.extend(ids)
            made.append(tokens)
        return made

    def _saved(self, document: Document) -> list[Any]:
        number = int(document.reference)
        if self.reader.is_stream(self.reader.place(number)):
            return [number, document.tokens.tolist(), document.dropped]
        return [number]

    def _restored(self, saved: list[list[Any]]) -> list[Document]:
        """The documents again, in the order given."""
        documents: dict[int, Document] = {
            entry[0]: Document(array("i", entry[1]), entry[0], entry[2]) for entry in saved if len(entry) > 1
        }
        again = [entry[0] for entry in saved if len(entry) == 1]
        while again:
            numbers: list[int] = []
            found: list[Document | str] = []
            characters = 0
            while again and len(numbers) < _CHUNK and characters <= _CHUNK_CHARACTERS:
                numbers.append(again.pop())
                item, length = self._item(self.reader.place(numbers[-1]))
                found.append(item)
                characters += length
            documents |= zip(numbers, self._documents(numbers, found), strict=True)
        return [documents[entry[0]] for entry in saved]
