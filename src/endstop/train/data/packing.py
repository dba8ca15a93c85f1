"""Rows out of documents and conversations: best fit with cropping, with every end kept, or with padding.

A row has T + 1 tokens; the model reads the first T and each is followed by its target. Documents begin with
BOS and the BOS that follows a document is what ends it: its end is learned where that BOS is a target.

- `CropPacker`: a row is filled with the largest buffered document that fits, again and again; when none fits,
  the shortest is cropped to fill the row exactly (nanochat's rule, Karpathy 2025). Tokens of a document
  beyond a whole row are cropped when it comes in. No padding; ends of cropped documents are lost.
- `KeepEndsPacker`: nothing is lost. A row reads T tokens; its last documents are chosen to fill it exactly.
  Where that cannot be, one is split and goes on at the beginning of the next row. The target behind the last
  token read is the document's next token, or BOS where the document ends there: every end is a target and
  every token is read exactly once.
- `ConversationPacker`: best fit without cropping; what is left of a row is padding.

Each placement costs O(log T) (`LengthBuckets`). Pieces of a row are put into a shuffled order, so that short
documents also stand at the beginning of a row, where nothing comes before them, as in use.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from endstop.protocol.labels import Row
from endstop.train.data.length_buckets import LengthBuckets
from endstop.train.data.permutation import mixed, shuffled
from endstop.train.data.statistics import PackingCounts

# So many documents of mean length are sure to find some that fill the rest of a row exactly.
_AMPLE = 4

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
        # By their numbers in the order in which they came; those that fit into a row are in the buckets, too.
        self._waiting: OrderedDict[int, Document] = OrderedDict()
        self._buckets: LengthBuckets[int] = LengthBuckets(row_length)
        self._long: deque[int] = deque()
        self._came = 0
        self.waiting_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def buffered(self) -> list[Document]:
        """What waits for a row, the oldest first; `carried` is not among it."""
        return list(self._waiting.values())

    def add(self, document: Document) -> None:
        """Buffer a document of any length."""
        length = len(document.tokens)
        self._waiting[self._came] = document
        if length > self.row_length:
            self._long.append(self._came)
        else:
            self._buckets.add(length, self._came)
        self._came += 1
        self.waiting_tokens += length

    def next_row(self, refill: Refill) -> PackedRow:
        """The next row; `refill` is called before each placement to `add` documents if there are too few.

        Documents come in their order as long as the rest of the row can still be filled exactly, then one or
        two that fill it. Where there are none, the longest that fits comes next; when nothing fits, a
        document that must be split in any case is begun if there is one, else the shortest: of it the fewest
        tokens lose the beginning of their document.
        """
        room = self.row_length
        first: list[Piece] = []
        before = self._buckets.steps
        if self.carried is not None:
            first, room = [_part(self.carried, room)], max(0, room - self.carried.length)
        whole: list[Piece] = []
        last: list[Piece] = []
        while room:
            refill()
            if not self._waiting:
                raise ValueError("refill has added no document")
            lengths = self._next_lengths(room)
            for length in lengths:
                whole.append(Piece(self._taken(self._buckets.take(length)), 0, length))
                room -= length
            if not lengths:
                last, room = [Piece(self._taken(self._to_be_split()), 0, room)], 0
                self.counts.split_documents += 1
            self.counts.placements += max(1, len(lengths))
        order = shuffled(list(range(len(whole))), mixed(self.seed, self.counts.rows))
        pieces = first + [whole[at] for at in order] + last
        ids = _joined(pieces)
        end = pieces[-1]
        behind = end.start + end.length
        self.carried = None if end.ends else Piece(end.document, behind, len(end.document.tokens) - behind)
        ids.append(self.bos_id if end.ends else end.document.tokens[behind])
        ends = sum(piece.ends for piece in pieces)
        self.counts.rows += 1
        self.counts.steps += self._buckets.steps - before
        self.counts.placed_tokens += self.row_length
        self.counts.documents += ends
        self.counts.supervised_ends += ends
        return PackedRow(ids, pieces)

    def _next_lengths(self, room: int) -> tuple[int, ...]:
        """Lengths of the whole documents that come next; none where one must be split."""
        number, oldest = next(iter(self._waiting.items()))
        length = len(oldest.tokens)
        if length > self.row_length:
            return ()
        rest = room - length
        mean = self.waiting_tokens / len(self._waiting)
        if rest == 0 or rest >= _AMPLE * mean:
            return (length,)
        if rest > 0:
            self._buckets.take(length)
            fills = self._buckets.filling(rest)
            self._buckets.add(length, number, oldest=True)
            if fills:
                return (length,)
        longest = self._buckets.largest_within(room)
        return self._buckets.filling(room) or (() if longest is None else (longest,))

    def _to_be_split(self) -> int:
        if self._long:
            return self._long.popleft()
        shortest = self._buckets.shortest()
        assert shortest is not None
        return self._buckets.take(shortest)

    def _taken(self, number: int) -> Document:
        document = self._waiting.pop(number)
        self.waiting_tokens -= len(document.tokens)
        return document


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
