"""Rows out of documents and conversations: best fit with cropping, with every end kept, or with padding.

A row has T + 1 tokens; the model reads the first T and each is followed by its target. Documents begin with
BOS and the BOS that follows a document is what ends it: its end is learned where that BOS is a target.

- `CropPacker`: a row is filled with the largest buffered document that fits, again and again; when none fits,
  the shortest is cropped to fill the row exactly (nanochat's rule, Karpathy 2025). Tokens of a document
  beyond a whole row are cropped when it comes in. No padding; ends of cropped documents are lost.
- `KeepEndsPacker`: nothing is lost. A row reads T tokens, best fit; where nothing fits, a document is split
  and goes on at the beginning of the next row. The target behind the last token read is the document's next
  token, or BOS where the document ends there: every end is a target and every token is read exactly once.
- `ConversationPacker`: best fit without cropping; what is left of a row is padding.

Each placement costs O(log T) (`LengthBuckets`). Pieces of a row are put into a shuffled order, so that short
documents also stand at the beginning of a row, where nothing comes before them, as in use.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from endstop.protocol.labels import Row
from endstop.train.data.length_buckets import LengthBuckets
from endstop.train.data.permutation import mixed, shuffled
from endstop.train.data.statistics import PackingCounts

Refill = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens of a document, BOS first, and what the caller knows it by.

    Attributes:
        dropped: tokens that it had behind these.
    """

    tokens: array[int]
    reference: Any = None
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, start + length) of a document, which are read by one row."""

    document: Document
    start: int
    length: int

    @property
    def ends(self) -> bool:
        """The document's last token is in this piece."""
        document = self.document
        return self.start + self.length == len(document.tokens) and not document.dropped


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A row of T + 1 tokens.

    Attributes:
        ids: int32, T + 1 of them. A target is the id behind it, without exception.
        pieces: in the order in which they stand, from token 0 on, without gaps.
    """

    ids: array[int]
    pieces: list[Piece]

    def document_ids(self) -> list[int]:
        """For the T tokens that are read: which piece of the row each belongs to."""
        numbers = [number for number, piece in enumerate(self.pieces) for _ in range(piece.length)]
        return numbers[: len(self.ids) - 1]


class CropPacker:
    """Rows of `row_length` + 1 tokens, full of whole documents and one that is cropped.

    Attributes:
        counts: what was done so far.
    """

    def __init__(self, row_length: int, bos_id: int, seed: int = 0) -> None:
        _check_row_length(row_length)
        self.row_length, self.bos_id, self.seed = row_length, bos_id, seed
        self.counts = PackingCounts()
        self._buffer: LengthBuckets[Document] = LengthBuckets(row_length + 1)

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the documents that wait for a row."""
        return self._buffer.total

    def buffered(self) -> list[Document]:
        """What waits for a row, in no particular order."""
        return list(self._buffer)

    def add(self, document: Document) -> None:
        """Buffer a document. Of one longer than a row only the beginning is kept."""
        more = len(document.tokens) - self.row_length - 1
        if more > 0:
            document = Document(document.tokens[: self.row_length + 1], document.reference, more)
        self._buffer.add(len(document.tokens), document)

    def next_row(self, refill: Refill) -> PackedRow:
        """The next row; `refill` is called before each placement to `add` documents if there are too few."""
        room = self.row_length + 1
        pieces: list[Piece] = []
        before = self._buffer.steps
        while room:
            refill()
            length = self._buffer.largest_within(room)
            if length is None:
                shortest = self._buffer.shortest()
                if shortest is None:
                    raise ValueError("refill has added no document")
                document, length = self._buffer.take(shortest), room
            else:
                document = self._buffer.take(length)
            pieces.append(Piece(document, 0, length))
            room -= length
        cropped_last = not pieces[-1].ends
        movable = pieces[:-1] if cropped_last else pieces
        order = shuffled(list(range(len(movable))), mixed(self.seed, self.counts.rows))
        pieces = [movable[at] for at in order] + (pieces[-1:] if cropped_last else [])
        self._count(pieces, self._buffer.steps - before)
        return PackedRow(_joined(pieces), pieces)

    def _count(self, pieces: list[Piece], steps: int) -> None:
        counts = self.counts
        counts.rows += 1
        counts.steps += steps
        counts.placements += len(pieces)
        counts.documents += len(pieces)
        for number, piece in enumerate(pieces):
            counts.placed_tokens += piece.length
            counts.cropped_tokens += len(piece.document.tokens) + piece.document.dropped - piece.length
            counts.cropped_documents += not piece.ends
            # A row's last token is read by nobody: what would follow it is no target.
            counts.supervised_ends += piece.ends and number < len(pieces) - 1


class KeepEndsPacker:
    """Rows that read `row_length` tokens each; every token of every document is read once.

    Attributes:
        counts: what was done so far.
        carried: what is left of a split document, with which the next row begins.
    """

    def __init__(self, row_length: int, bos_id: int, seed: int = 0) -> None:
        _check_row_length(row_length)
        self.row_length, self.bos_id, self.seed = row_length, bos_id, seed
        self.counts = PackingCounts()
        self.carried: Piece | None = None
        self._buffer: LengthBuckets[Document] = LengthBuckets(row_length)
        self._long: deque[Document] = deque()
        self._long_tokens = 0

    def __len__(self) -> int:
        return len(self._buffer) + len(self._long)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the documents that wait for a row."""
        return self._buffer.total + self._long_tokens

    def buffered(self) -> list[Document]:
        """What waits for a row, in no particular order; `carried` is not among it."""
        return [*self._buffer, *self._long]

    def add(self, document: Document) -> None:
        """Buffer a document of any length."""
        if len(document.tokens) > self.row_length:
            self._long.append(document)
            self._long_tokens += len(document.tokens)
        else:
            self._buffer.add(len(document.tokens), document)

    def next_row(self, refill: Refill) -> PackedRow:
        """The next row; `refill` is called before each placement to `add` documents if there are too few.

        The largest document that fits comes next. Where it would leave a gap that no document fits into, two
        that fill the row are looked for. When nothing fits, a document that must be split in any case is
        begun if there is one, else the shortest: of it the fewest tokens lose their document's beginning.
        """
        room = self.row_length
        first: list[Piece] = []
        before = self._buffer.steps
        if self.carried is not None:
            first, room = [_part(self.carried, room)], max(0, room - self.carried.length)
        whole: list[Piece] = []
        last: list[Piece] = []
        while room:
            refill()
            lengths = self._fitting(room)
            self.counts.placements += max(1, len(lengths))
            if lengths:
                whole += [Piece(self._buffer.take(length), 0, length) for length in lengths]
                room -= sum(lengths)
                continue
            shortest = self._buffer.shortest()
            if self._long:
                document = self._long.popleft()
                self._long_tokens -= len(document.tokens)
            elif shortest is not None:
                document = self._buffer.take(shortest)
            else:
                raise ValueError("refill has added no document")
            self.counts.split_documents += 1
            last, room = [Piece(document, 0, room)], 0
        order = shuffled(list(range(len(whole))), mixed(self.seed, self.counts.rows))
        pieces = first + [whole[at] for at in order] + last
        ids = _joined(pieces)
        end = pieces[-1]
        behind = end.start + end.length
        self.carried = None if end.ends else Piece(end.document, behind, len(end.document.tokens) - behind)
        ids.append(self.bos_id if end.ends else end.document.tokens[behind])
        self.counts.rows += 1
        self.counts.steps += self._buffer.steps - before
        self.counts.placed_tokens += self.row_length
        ends = sum(piece.ends for piece in pieces)
        self.counts.documents += ends
        self.counts.supervised_ends += ends
        return PackedRow(ids, pieces)

    def _fitting(self, room: int) -> list[int]:
        """The greatest length that fits; two that fill the room where behind it nothing would fit."""
        length = self._buffer.largest_within(room)
        if length is None:
            return []
        shortest = self._buffer.shortest()
        # A document that must be split in any case may as well begin in the gap.
        if shortest is None or self._long or not 0 < room - length < shortest:
            return [length]
        return list(self._buffer.pair_filling(room) or [length])


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered conversation (or one turn of it), and what the caller knows it by."""

    row: Row
    reference: Any = None


class ConversationPacker:
    """Rows of at most `row_length` + 1 tokens out of whole conversations, by best fit.

    Attributes:
        counts: what was done so far; `documents` are conversations.
    """

    def __init__(self, row_length: int, seed: int = 0) -> None:
        _check_row_length(row_length)
        self.row_length, self.seed = row_length, seed
        self.counts = PackingCounts()
        self._buffer: LengthBuckets[Conversation] = LengthBuckets(row_length + 1)

    def __len__(self) -> int:
        return len(self._buffer)

    def buffered(self) -> list[Conversation]:
        """What waits for a row, in no particular order."""
        return list(self._buffer)

    def add(self, conversation: Conversation) -> None:
        """Buffer a conversation. Raises ValueError where it is longer than a row."""
        self._buffer.add(len(conversation.row.ids), conversation)

    def next_row(self, refill: Refill) -> list[Conversation]:
        """What stands in the next row, at least one conversation; the rest of the row is padding."""
        room = self.row_length + 1
        before = self._buffer.steps
        members: list[Conversation] = []
        while room:
            refill()
            length = self._buffer.largest_within(room)
            if length is None:
                break
            members.append(self._buffer.take(length))
            room -= length
        if not members:
            raise ValueError("refill has added no conversation")
        self.counts.padded_tokens += room
        self.counts.placed_tokens += self.row_length + 1 - room
        self.counts.documents += len(members)
        self.counts.placements += len(members)
        self.counts.steps += self._buffer.steps - before
        order = shuffled(list(range(len(members))), mixed(self.seed, self.counts.rows))
        self.counts.rows += 1
        return [members[at] for at in order]


def _check_row_length(row_length: int) -> None:
    if row_length < 1:
        raise ValueError(f"a row has at least 1 token to read, got row_length {row_length}")


def _part(piece: Piece, room: int) -> Piece:
    return Piece(piece.document, piece.start, min(piece.length, room))


def _joined(pieces: list[Piece]) -> array[int]:
    ids = array("i")
    for piece in pieces:
        tokens = piece.document.tokens
        ids += tokens if piece.length == len(tokens) else tokens[piece.start : piece.start + piece.length]
    return ids
