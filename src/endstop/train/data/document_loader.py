"""Batches for base training: documents of a mixture, tokenised and packed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch

from endstop.protocol.errors import EndstopError
from endstop.train.batch import TokenBatch
from endstop.train.data.logical_shards import ShardPlan, check_same
from endstop.train.data.mixture import Mixture, Order, ShardReader, as_mixture
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


class DocumentLoader:
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
        self.mixture: Mixture = as_mixture(documents)
        self.plan = ShardPlan(shards, rows_per_step, micro_rows, rank, world)
        self.row_length = row_length
        self.isolate = isolate
        self._facts = {
            "mode": mode,
            "row_length": row_length,
            "shards": shards,
            "buffer": buffer,
            "seed": seed,
            "documents": len(self.mixture),
        }
        order = self.mixture.order(seed)
        self._shards = {
            shard: _Shard(order, shard, shards, encode, bos_id, row_length, mode, buffer, seed, skip_bad)
            for shard in self.plan.own_shards
        }

    @property
    def own_shards(self) -> list[int]:
        return self.plan.own_shards

    def next_step(self) -> list[TokenBatch]:
        """This process's micro-batches of the next optimiser step, each [<= micro_rows, row_length]."""
        return [
            self._batch([self._shards[shard].next_row() for shard in shards])
            for shards in self.plan.micro_batches()
        ]

    def state(self, shard: int) -> dict[str, Any]:
        """The position of a shard, for `json.dumps`: what comes after it is the same in whatever process."""
        return {**self._facts, **self._shards[shard].state()}

    def load_state(self, shard: int, state: dict[str, Any]) -> None:
        """Go on where a state was taken. Raises EndstopError for a state of other data or settings."""
        check_same(state, self._facts)
        self._shards[shard].load_state(state)

    def statistics(self) -> dict[str, Any]:
        """Counts and shares over this process's shards since the first step; see `PackingCounts`."""
        counts = sum((shard.packer.counts for shard in self._shards.values()), PackingCounts())
        taken = sum(shard.reader.position for shard in self._shards.values())
        return {
            **counts.figures(),
            "skipped_documents": sum(shard.skipped for shard in self._shards.values()),
            "empty_documents": sum(shard.empty for shard in self._shards.values()),
            "epochs": taken * self.plan.world / len(self.mixture),
        }

    def _batch(self, rows: list[PackedRow]) -> TokenBatch:
        ids = torch.stack([torch.frombuffer(row.ids, dtype=torch.int32) for row in rows]).long()
        document_ids = torch.tensor([row.document_ids() for row in rows]) if self.isolate else None
        return TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), document_ids)


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
            numbers: list[int] = []
            texts: list[str] = []
            first = self.reader.position
            while self.reader.position < first + min(_CHUNK, self._buffer):
                number = self.reader.position
                text = self._read()
                if text:
                    numbers.append(number)
                    texts.append(text)
                    if sum(map(len, texts)) > _CHUNK_CHARACTERS:
                        break
            before = len(self.packer)
            for number, tokens in zip(numbers, self._tokens(texts), strict=True):
                if len(tokens) > 1:
                    self.packer.add(Document(tokens, number))
                else:
                    self.empty += 1
            rejected = 0 if len(self.packer) > before else rejected + self.reader.position - first
            if rejected >= self._patience:
                raise EndstopError(
                    f"none of {rejected} documents in a row has any text; look at the sources of the mixture."
                )

    def _read(self) -> str | None:
        """The next document's text, None (and counted) where there is none to use."""
        place = self.reader.next_place()
        try:
            text: str = self.reader.item(place)
        except BadDocument:
            if not self._skip_bad:
                raise
            self.skipped += 1
            return None
        if not text:
            self.empty += 1
            return None
        return text

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
            texts: list[str] = []
            while again and len(texts) < _CHUNK and sum(map(len, texts)) <= _CHUNK_CHARACTERS:
                numbers.append(again.pop())
                texts.append(self.reader.item(self.reader.place(numbers[-1])))
            for number, tokens in zip(numbers, self._tokens(texts), strict=True):
                documents[number] = Document(tokens, number)
        return [documents[entry[0]] for entry in saved]
