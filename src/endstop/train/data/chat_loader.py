"""Batches for mid-training and SFT: conversations of a mixture, rendered with their masks and packed."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from endstop.protocol.errors import EndstopError
from endstop.protocol.labels import IGNORE, Row, packed, truncated
from endstop.train.batch import TokenBatch
from endstop.train.data.logical_shards import ShardedLoader, ShardPlan
from endstop.train.data.messages import training_rows
from endstop.train.data.mixture import Order, Place, ShardReader, as_mixture
from endstop.train.data.packing import Conversation, ConversationPacker
from endstop.train.data.permutation import mixed
from endstop.train.data.records import BadDocument
from endstop.train.data.statistics import ChatCounts, PackingCounts

if TYPE_CHECKING:
    from endstop.protocol.render import ChatRenderer

# So many conversations one after the other of which nothing can be trained: there is no use in looking on.
_PATIENCE = 10_000
# Tokens of rendered rows that are kept for the next epoch: 8 bytes each, for the token and its label.
_KEPT_TOKENS = 4_000_000

_Compact = tuple["array[int]", "array[int]", bool]


class ChatLoader(ShardedLoader[list[Conversation]]):
    """Endless steps of packed conversations.

    Args:
        conversations: a `Mixture`, or one source of message lists (a list will do).
        renderer: renders them; what is supervised is decided by `protocol.labels.chat_rows` alone. Of
            `Messages` with a prompt only what follows the prompt is.
        stop_ids: ids that end a turn, to count supervised ends.
        row_length: tokens that a row reads (T). A longer conversation is cut to T + 1 tokens and counted; it
            then has no supervised terminator for the turn that was cut.
        rows_per_step, micro_rows, shards, rank, world, seed, isolate: as in `DocumentLoader`.
        buffer: rows to choose from, in each shard.
        mask: False supervises every position, the BOS of the next conversation included.
        pad_id: fills rows; masked by its position. Default: the tokenizer's pad token.
        transform: changes each row before it is cut to the row length. It must give the same for the same
            row: what is buffered is made again after a resume.
        options: those of `ChatRenderer.render`.
        skip_bad: count conversations that cannot be read and go on; otherwise the first is an error.

    No row is without labels. Conversations that cannot be rendered, or have nothing to learn, are counted.
    Raises EndstopError when nothing at all can be trained on, ValueError for numbers that do not go together.
    """

    def __init__(
        self,
        conversations: Any,
        renderer: ChatRenderer,
        *,
        stop_ids: Collection[int],
        row_length: int,
        rows_per_step: int,
        micro_rows: int,
        shards: int = 1,
        rank: int = 0,
        world: int = 1,
        buffer: int = 128,
        isolate: bool = False,
        seed: int = 0,
        mask: bool = True,
        pad_id: int | None = None,
        transform: Callable[[Row], Row] | None = None,
        options: Mapping[str, Any] | None = None,
        skip_bad: bool = False,
    ) -> None:
        if buffer < 1:
            raise ValueError(f"buffer must be at least 1, got {buffer}")
        mixture = as_mixture(conversations)
        plan = ShardPlan(shards, rows_per_step, micro_rows, rank, world)
        self.row_length = row_length
        self.isolate = isolate
        self.mask = mask
        self.pad_id = _pad_id(renderer) if pad_id is None else pad_id
        order = mixture.order(seed)
        rows_of = _RowsOf(renderer, row_length + 1, mask, transform, dict(options or {}))
        self._shards = {
            shard: _Shard(order, shard, shards, rows_of, frozenset(stop_ids), buffer, seed, skip_bad)
            for shard in plan.own_shards
        }
        facts = {"row_length": row_length, "buffer": buffer, "seed": seed, "mask": mask}
        super().__init__(mixture, plan, self._shards, facts)

    def statistics(self) -> dict[str, Any]:
        """Counts and shares over this process's shards since the first step; see `PackingCounts`,
        `ChatCounts`."""
        packing = sum((shard.packer.counts for shard in self._shards.values()), PackingCounts())
        chat = ChatCounts()
        for shard in self._shards.values():
            chat.include(shard.counts)
        return {**packing.figures(), **asdict(chat), "epochs": self.epochs}

    def _batch(self, rows: list[list[Conversation]]) -> TokenBatch:
        width = self.row_length + 1
        ids, labels, documents = [], [], []
        for members in rows:
            batch = packed(
                [member.row for member in members], width, self.pad_id, supervise_borders=not self.mask
            )
            # The members of a row fit into one block.
            ids += batch.input_ids
            labels += batch.labels
            lengths = [len(member.row.ids) for member in members]
            numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
            documents.append((numbers + [len(members)] * (width - len(numbers)))[:-1])
        document_ids = torch.tensor(documents) if self.isolate else None
        return TokenBatch(
            torch.tensor([row[:-1] for row in ids]), torch.tensor([row[1:] for row in labels]), document_ids
        )


class _RowsOf:
    """Rows of a conversation, at most `length` tokens each, and why there are none.

    Rendering one with its mask takes some 0.5 ms, as long as a small model trains on it: rows of finite
    sources are kept for the next epoch, the most recently used `_KEPT_TOKENS` of them.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        length: int,
        mask: bool,
        transform: Callable[[Row], Row] | None,
        options: dict[str, Any],
    ) -> None:
        self.length, self.mask = length, mask
        self._renderer, self._transform, self._options = renderer, transform, options
        self._kept: OrderedDict[tuple[int, int], tuple[list[_Compact], list[str]]] = OrderedDict()
        self._kept_tokens = 0

    def at(self, reader: ShardReader, place: Place) -> tuple[list[Row], list[str]]:
        """The rows of the conversation at a place, and the refusals."""
        if reader.is_stream(place):
            return self._made(reader.item(place))
        key = (place.part, place.index)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return [Row(ids.tolist(), labels.tolist(), cut) for ids, labels, cut in kept[0]], kept[1]
        rows, refusals = self._made(reader.item(place))
        self._kept[key] = [(array("i", row.ids), array("i", row.labels), row.cut) for row in rows], refusals
        self._kept_tokens += _cost(len(row.ids) for row in rows)
        while self._kept_tokens > _KEPT_TOKENS:
            _, (dropped, _) = self._kept.popitem(last=False)
            self._kept_tokens -= _cost(len(ids) for ids, _, _ in dropped)
        return rows, refusals

    def _made(self, messages: Any) -> tuple[list[Row], list[str]]:
        made = training_rows(self._renderer, messages, **self._options)
        rows = made.rows if self.mask else [Row(row.ids, list(row.ids)) for row in made.rows]
        if self._transform is not None:
            rows = [self._transform(row) for row in rows]
        return [truncated(row, self.length) for row in rows], made.refusals


class _Shard:
    """One logical shard: reads its conversations, renders them, packs them.

    A row is known by the number of its conversation in the shard and its own number in that conversation,
    from which it can be made again; those of streams cannot, so that their tokens go into the state.
    """

    def __init__(
        self,
        order: Order,
        shard: int,
        shards: int,
        rows_of: _RowsOf,
        stop_ids: frozenset[int],
        buffer: int,
        seed: int,
        skip_bad: bool,
    ) -> None:
        self.packer = ConversationPacker(rows_of.length - 1, mixed(seed, shard))
        self.reader = ShardReader(order, shard, shards)
        self.counts = ChatCounts()
        self._rows_of = rows_of
        self._stop_ids = stop_ids
        self._buffer = buffer
        self._skip_bad = skip_bad
        # A shard of a small source may meet the same conversation in several epochs running.
        self._patience = min(20 * (len(order.mixture) + 1), _PATIENCE)

    def next_row(self) -> list[Conversation]:
        members = self.packer.next_row(self._refill)
        for member in members:
            labels = [label for label in member.row.labels[1:] if label != IGNORE]
            self.counts.supervised_tokens += len(labels)
            self.counts.supervised_stops += sum(label in self._stop_ids for label in labels)
            self.packer.counts.supervised_ends += not member.row.cut and labels[-1] in self._stop_ids
        if not self._rows_of.mask:
            # The BOS of every conversation but the first of its row.
            self.counts.supervised_tokens += len(members) - 1
        return members

    def state(self) -> dict[str, Any]:
        waiting = sorted(self.packer.buffered(), key=lambda conversation: tuple(conversation.reference))
        return {
            "reader": self.reader.state(),
            "buffered": [self._saved(conversation) for conversation in waiting],
            "packing": asdict(self.packer.counts),
            "counts": asdict(self.counts),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.packer = ConversationPacker(self.packer.row_length, self.packer.seed)
        self.packer.counts = PackingCounts(**state["packing"])
        self.counts = ChatCounts(**state["counts"])
        self.reader.load_state(state["reader"])
        made: tuple[int, list[Row]] = (-1, [])
        for number, index, *tokens in state["buffered"]:
            if tokens:
                row = Row(tokens[0], tokens[1], tokens[2])
            else:
                if made[0] != number:
                    made = (number, self._rows_of.at(self.reader, self.reader.place(number))[0])
                row = made[1][index]
            self.packer.add(Conversation(row, (number, index)))

    def _refill(self) -> None:
        rejected = 0
        while len(self.packer) < self._buffer:
            if self._take():
                rejected = 0
                continue
            rejected += 1
            # What is there can still be placed; only an empty buffer has no way on.
            if rejected >= self._patience:
                if len(self.packer):
                    return
                raise EndstopError(self._nothing(rejected))

    def _take(self) -> bool:
        """Buffer the rows of the next conversation; False where it has none."""
        number = self.reader.position
        place = self.reader.next_place()
        try:
            rows, refusals = self._rows_of.at(self.reader, place)
        except BadDocument:
            if not self._skip_bad:
                raise
            self.counts.skipped += 1
            return False
        for reason in refusals:
            self.counts.refuse(reason)
        taken = False
        for index, row in enumerate(rows):
            self.counts.cut += row.cut
            # Nothing predicts a row's first token.
            if any(label != IGNORE for label in row.labels[1:]):
                self.packer.add(Conversation(row, (number, index)))
                taken = True
            else:
                self.counts.unsupervised += 1
        return taken

    def _nothing(self, rejected: int) -> str:
        counts = self.counts
        reasons = [
            f"{counts.refused} refused" if counts.refused else "",
            f"{counts.unsupervised} with nothing to learn in {self.packer.row_length} tokens"
            if counts.unsupervised
            else "",
            f"{counts.skipped} unreadable" if counts.skipped else "",
        ]
        first = next(iter(counts.refusals), "")
        because = f"; the first refusal: {first}" if first else "."
        what = ", ".join(filter(None, reasons))
        return f"none of {rejected} conversations can be trained on ({what}){because}"

    def _saved(self, conversation: Conversation) -> list[Any]:
        number, index = conversation.reference
        if self.reader.is_stream(self.reader.place(number)):
            row = conversation.row
            return [number, index, row.ids, row.labels, row.cut]
        return [number, index]


def _cost(lengths: Iterable[int]) -> int:
    """What keeping a conversation costs, in tokens; one without rows costs something, too."""
    return 64 + sum(lengths)


def _pad_id(renderer: ChatRenderer) -> int:
    pad = renderer.tokenizer.pad_token
    pad_id = None if pad is None else renderer.tokenizer.token_to_id(pad)
    if pad_id is None:
        raise ValueError("the tokenizer names no pad token; give pad_id, which may be any id")
    return pad_id
