"""Packing against slow and obvious rules."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop.protocol.labels import IGNORE, Row, packed
from endstop.train.data.length_buckets import LengthBuckets
from endstop.train.data.packing import (
    Conversation,
    ConversationPacker,
    CropPacker,
    Document,
    KeepEndsPacker,
    PackedRow,
    Piece,
)

BOS = 0


def document(number: int, length: int) -> Document:
    """BOS, then tokens that tell which document they are from and where they stand."""
    return Document(array("i", [BOS, *(1000 * (number + 1) + at for at in range(1, length))]), number)


class Feed:
    """Adds documents to a packer whenever it has fewer than `buffer`."""

    def __init__(self, packer, items, buffer):
        self.packer, self.items, self.buffer = packer, list(items), buffer
        self.given = 0

    def __call__(self):
        while len(self.packer) < self.buffer and self.given < len(self.items):
            self.packer.add(self.items[self.given])
            self.given += 1


def rows_until_short(packer, feed, row_tokens) -> list[PackedRow]:
    """Rows as long as there are surely enough tokens for a whole one."""
    rows = []
    while True:
        feed()
        carried = getattr(packer, "carried", None)
        waiting = sum(len(d.tokens) for d in packer.buffered()) + (carried.length if carried else 0)
        waiting += sum(len(d.tokens) for d in feed.items[feed.given :])
        # Cropping throws tokens away: there must be enough documents for a row of one-token pieces.
        if waiting < row_tokens or len(packer) + len(feed.items) - feed.given < row_tokens:
            return rows
        rows.append(packer.next_row(feed))


def slow_crop(lengths: list[int], capacity: int, buffer: int, rows: int) -> list[Counter]:
    """The rule as it is written: the documents of each row with how many of their tokens stand there."""
    coming = list(enumerate(min(length, capacity) for length in lengths))
    waiting: list[tuple[int, int]] = []
    made = []
    for _ in range(rows):
        room, row = capacity, Counter()
        while room:
            while len(waiting) < buffer and coming:
                waiting.append(coming.pop(0))
            fitting = [entry for entry in waiting if entry[1] <= room]
            if fitting:
                number, used = max(fitting, key=lambda entry: (entry[1], -entry[0]))
                waiting.remove((number, used))
            else:
                number, length = min(waiting, key=lambda entry: (entry[1], entry[0]))
                waiting.remove((number, length))
                used = room
            row[number, used] += 1
            room -= used
        made.append(row)
    return made


lengths_and_sizes = st.integers(1, 12).flatmap(
    lambda row_length: st.tuples(
        st.just(row_length),
        st.lists(st.integers(2, 3 * row_length + 3), min_size=1, max_size=80),
        st.integers(1, 12),
        st.integers(0, 5),
    )
)


@given(lengths_and_sizes)
def test_crop_packing_follows_the_written_rule(case):
    row_length, lengths, buffer, seed = case
    packer = CropPacker(row_length, BOS, seed)
    documents = [document(number, length) for number, length in enumerate(lengths)]
    feed = Feed(packer, documents, buffer)
    rows = rows_until_short(packer, feed, row_length + 1)
    found = [Counter((piece.document.reference, piece.length) for piece in row.pieces) for row in rows]
    assert found == slow_crop(lengths, row_length + 1, buffer, len(rows))


@given(lengths_and_sizes)
def test_crop_packing_is_full_and_counts_every_token(case):
    row_length, lengths, buffer, seed = case
    packer = CropPacker(row_length, BOS, seed)
    documents = [document(number, length) for number, length in enumerate(lengths)]
    feed = Feed(packer, documents, buffer)
    rows = rows_until_short(packer, feed, row_length + 1)
    placed = Counter()
    ends = 0
    for row in rows:
        assert len(row.ids) == row_length + 1
        assert row.ids[0] == BOS
        placed.update(token for token in row.ids if token != BOS)
        # The tokens of a row are those of its pieces, each the beginning of its document.
        assert list(row.ids) == [t for p in row.pieces for t in p.document.tokens[: p.length]]
        for at in range(row_length):
            token, target = row.ids[at], row.ids[at + 1]
            if target != BOS:
                assert token == BOS or target == token + 1
            else:
                # What ends here may have been cropped only at the end of a row, where there is no target.
                number = token // 1000 - 1 if token != BOS else None
                if number is not None:
                    assert token == documents[number].tokens[-1]
                ends += 1
    assert all(count == 1 for count in placed.values())
    counts = packer.counts
    assert counts.figures()["use"] in (1.0, None)
    assert counts.placed_tokens == len(rows) * (row_length + 1)
    assert counts.supervised_ends == ends
    finished = {piece.document.reference for row in rows for piece in row.pieces}
    assert counts.documents == len(finished)
    assert counts.placed_tokens + counts.cropped_tokens == sum(lengths[number] for number in finished)
    waiting = {document.reference for document in packer.buffered()}
    assert waiting | finished == set(range(feed.given))
    assert not waiting & finished


@given(lengths_and_sizes)
def test_keep_ends_packing_reads_every_token_once_and_has_every_end_as_target(case):
    row_length, lengths, buffer, seed = case
    packer = KeepEndsPacker(row_length, BOS, seed)
    documents = [document(number, length) for number, length in enumerate(lengths)]
    feed = Feed(packer, documents, buffer)
    rows = rows_until_short(packer, feed, row_length)
    read: dict[int, list[int]] = {}
    targets: dict[int, list[int]] = {}
    for row in rows:
        assert len(row.ids) == row_length + 1
        assert sum(piece.length for piece in row.pieces) == row_length
        at = 0
        for number, piece in enumerate(row.pieces):
            reference = piece.document.reference
            if piece.start:
                # A document goes on only at the beginning of a row, and there at once.
                assert number == 0
                assert len(read[reference]) == piece.start
            read.setdefault(reference, []).extend(row.ids[at : at + piece.length])
            targets.setdefault(reference, []).extend(row.ids[at + 1 : at + piece.length + 1])
            at += piece.length
    for reference, tokens in read.items():
        whole = documents[reference].tokens.tolist()
        assert tokens == whole[: len(tokens)]
        assert targets[reference] == [*whole, BOS][1 : len(tokens) + 1]
    carried = None if packer.carried is None else packer.carried.document.reference
    complete = {reference for reference in read if reference != carried}
    assert all(len(read[reference]) == lengths[reference] for reference in complete)
    counts = packer.counts
    assert counts.placed_tokens == row_length * len(rows)
    assert counts.documents == counts.supervised_ends == len(complete)
    assert counts.cropped_tokens == 0
    if packer.carried is not None:
        assert packer.carried.start == len(read[carried])
        assert packer.carried.length == lengths[carried] - len(read[carried])
    # Nothing is lost on the way: what was given has been read or waits.
    waiting = sum(len(document.tokens) for document in packer.buffered())
    waiting += packer.carried.length if packer.carried else 0
    assert sum(map(len, read.values())) + waiting == sum(lengths[: feed.given])


@given(lengths_and_sizes)
def test_consecutive_rows_of_a_split_document_have_no_gap(case):
    row_length, lengths, buffer, seed = case
    packer = KeepEndsPacker(row_length, BOS, seed)
    feed = Feed(packer, [document(n, length) for n, length in enumerate(lengths)], buffer)
    rows = rows_until_short(packer, feed, row_length)
    for before, after in pairwise(rows):
        last = before.pieces[-1]
        if last.ends:
            assert before.ids[-1] == BOS == after.ids[0]
        else:
            assert before.ids[-1] == after.ids[0] == last.document.tokens[last.start + last.length]


@pytest.mark.parametrize("rows", [2, 5])
def test_a_document_that_fills_rows_exactly_has_its_border_as_target(rows):
    row_length = 8
    packer = KeepEndsPacker(row_length, BOS)
    feed = Feed(packer, [document(0, rows * row_length), document(1, row_length)], 2)
    made = [packer.next_row(feed) for _ in range(rows + 1)]
    assert [t for row in made[:rows] for t in row.ids[:-1]] == document(0, rows * row_length).tokens.tolist()
    assert [row.ids[-1] for row in made[:rows]] == [made[at].ids[0] for at in range(1, rows)] + [BOS]
    assert list(made[rows].ids) == [*document(1, row_length).tokens, BOS]
    assert packer.counts.supervised_ends == 2
    assert packer.carried is None


def test_documents_come_in_their_order_and_the_last_fill_the_row():
    packer = KeepEndsPacker(20, BOS)
    feed = Feed(packer, [document(n, length) for n, length in enumerate((4, 12, 7, 9, 8, 20, 13))], 7)
    rows = [sorted(piece.document.reference for piece in packer.next_row(feed).pieces) for _ in range(3)]
    # Behind 4 + 12 nothing fits; 4 is taken, 7 and 9 fill the row.
    assert rows[0] == [0, 2, 3]
    # 12 leaves 8, which is there; then the two others.
    assert rows[1:] == [[1, 4], [5]]
    assert packer.counts.split_documents == 0


def test_of_ordinary_documents_only_those_longer_than_a_row_are_split():
    draws = random.Random(0)
    lengths = [2 + int(draws.lognormvariate(4.5, 1.0)) for _ in range(8000)]
    packer = KeepEndsPacker(512, BOS)
    feed = Feed(packer, [Document(array("i", [BOS] * n), k) for k, n in enumerate(lengths)], 1000)
    while feed.given < len(lengths):
        packer.next_row(feed)
    begun = set(range(len(lengths))) - {document.reference for document in packer.buffered()}
    longer = sum(lengths[number] > 512 for number in begun)
    assert longer > 200
    assert packer.counts.split_documents == longer
    # And none waits much longer than the buffer is.
    assert feed.given - packer.buffered()[0].reference < 1300


def test_what_must_be_split_is_split_before_what_need_not_be():
    packer = KeepEndsPacker(10, BOS)
    feed = Feed(packer, [document(n, length) for n, length in enumerate((7, 9, 25, 6))], 4)
    row = packer.next_row(feed)
    # Nothing fills the row, so the longest that fits, and a beginning of the long one.
    assert [(piece.document.reference, piece.length) for piece in row.pieces] == [(1, 9), (2, 1)]
    assert [len(packer.next_row(feed).pieces) for _ in range(2)] == [1, 1]
    assert packer.counts.split_documents == 1
    assert packer.carried.length == 25 - 1 - 10 - 10


def test_crop_packing_does_not_count_an_end_that_is_no_target():
    packer = CropPacker(7, BOS)
    row = packer.next_row(Feed(packer, [document(0, 8)], 1))
    assert list(row.ids) == document(0, 8).tokens.tolist()
    assert packer.counts.documents == 1
    assert packer.counts.supervised_ends == 0
    assert packer.counts.cropped_tokens == 0


def test_a_document_longer_than_anything_is_split_without_being_copied_each_time():
    packer = KeepEndsPacker(64, BOS)
    giant = Document(array("i", [BOS, *range(1, 200_000)]), 0)
    feed = Feed(packer, [giant], 1)
    rows = [packer.next_row(feed) for _ in range(200_000 // 64)]
    assert [token for row in rows for token in row.ids[:-1]] == giant.tokens.tolist()
    assert all(row.pieces[0].document is giant for row in rows)


@given(st.integers(1, 9000), st.data())
def test_the_length_index_finds_what_a_scan_finds_in_logarithmic_steps(limit, data):
    index: LengthBuckets[int] = LengthBuckets(limit)
    there: list[tuple[int, int]] = []
    lengths = st.integers(1, limit)
    for number in range(data.draw(st.integers(0, 40))):
        before = index.steps
        action = data.draw(st.sampled_from(["add", "add", "within", "shortest", "pair"]))
        if action == "add":
            length = data.draw(lengths)
            index.add(length, number)
            there.append((length, number))
            assert index.steps - before <= index.levels
            continue
        if action == "pair":
            room = data.draw(st.integers(1, 2 * limit))
            found = index.filling(room)
            assert index.steps - before <= index.levels + 65
            counts = Counter(length for length, _ in there)
            pairs = {(a, room - a) for a in counts if a <= room - a and counts[room - a] > (2 * a == room)}
            near = {p for p in pairs if p[0] < min(counts, default=0) + 64}
            assert found == ((room,) if counts[room] else min(near, default=()))
            continue
        if action == "within":
            room = data.draw(lengths)
            expected = max((length for length, _ in there if length <= room), default=None)
            found = index.largest_within(room)
        else:
            expected = min((length for length, _ in there), default=None)
            found = index.shortest()
        assert found == expected
        assert index.steps - before <= 2 * index.levels
        if found is not None:
            oldest = min(number for length, number in there if length == found)
            before = index.steps
            assert index.take(found) == oldest
            assert index.steps - before <= index.levels
            there.remove((found, oldest))
        assert len(index) == len(there)
        assert sorted(index) == sorted(number for _, number in there)


@pytest.mark.parametrize("make", [CropPacker, KeepEndsPacker])
@pytest.mark.parametrize("buffer", [10, 100, 3000])
def test_a_placement_costs_no_more_with_a_larger_buffer(make, buffer):
    packer = make(2048, BOS)
    documents = [document(number, 2 + number * 7919 % 3000) for number in range(buffer + 4000)]
    feed = Feed(packer, documents, buffer)
    while feed.given < len(documents):
        packer.next_row(feed)
    levels = 2  # 64 ** 2 lengths
    # A placement looks up, looks for the shortest and takes; a document is added once.
    counts = packer.counts
    # To fill a row exactly, 65 lengths are tried at most, twice for a placement near its end.
    most = 4 * levels if make is CropPacker else 6 * levels + 130
    assert counts.steps <= most * counts.placements + levels * feed.given


rows_of_chats = st.integers(1, 16).flatmap(
    lambda row_length: st.tuples(
        st.just(row_length),
        st.lists(
            st.integers(2, row_length + 1).flatmap(
                lambda length: st.lists(st.booleans(), min_size=length, max_size=length).filter(
                    lambda bits: any(bits[1:])
                )
            ),
            min_size=1,
            max_size=60,
        ),
        st.integers(1, 10),
    )
)


@given(rows_of_chats, st.booleans())
def test_conversations_stand_whole_and_learn_nothing_from_each_other(case, mask):
    row_length, masks, buffer = case
    conversations = []
    for number, bits in enumerate(masks):
        ids = [1000 * (number + 1) + at for at in range(len(bits))]
        labels = [i if bit or not mask else IGNORE for i, bit in zip(ids, bits, strict=True)]
        conversations.append(Conversation(Row(ids, labels), number))
    packer = ConversationPacker(row_length)
    feed = Feed(packer, conversations, buffer)
    seen = []
    while len(packer) or feed.given < len(conversations):
        members = packer.next_row(feed)
        seen += [member.reference for member in members]
        batch = packed([m.row for m in members], row_length + 1, 7, supervise_borders=not mask)
        assert len(batch.input_ids) == 1
        ids, labels = batch.input_ids[0], batch.labels[0]
        used = sum(len(member.row.ids) for member in members)
        assert ids[:used] == [i for member in members for i in member.row.ids]
        assert labels[used:] == [IGNORE] * (row_length + 1 - used)
        targets = labels[1:]
        assert any(target != IGNORE for target in targets)
        starts = {sum(len(m.row.ids) for m in members[:k]) for k in range(len(members))}
        for at, target in enumerate(targets):
            if target != IGNORE:
                assert target == ids[at + 1]
            if mask and at + 1 in starts:
                assert target == IGNORE
    assert sorted(seen) == list(range(len(conversations)))
    assert packer.counts.documents == len(conversations)
    assert packer.counts.placed_tokens == sum(map(len, masks))
    assert packer.counts.placed_tokens + packer.counts.padded_tokens == packer.counts.rows * (row_length + 1)


def test_best_fit_pads_less_than_one_conversation_for_each_row():
    lengths = [2 + number * 37 % 30 for number in range(400)]
    packer = ConversationPacker(31)
    feed = Feed(packer, [Conversation(Row([1] * n, [1] * n), k) for k, n in enumerate(lengths)], 100)
    while len(packer) or feed.given < len(lengths):
        packer.next_row(feed)
    assert packer.counts.figures()["use"] > 0.97
    assert sum(lengths) / (32 * len(lengths)) < 0.55


def test_the_order_inside_a_row_is_shuffled():
    """Otherwise the shortest documents would never stand where a row begins."""
    packer = CropPacker(15, BOS)
    feed = Feed(packer, [document(number, (9, 5, 2)[number % 3]) for number in range(300)], 30)
    firsts = Counter(len(packer.next_row(feed).pieces[0].document.tokens) for _ in range(60))
    assert set(firsts) == {2, 5, 9}


def test_packers_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="row_length 0"):
        CropPacker(0, BOS)
    with pytest.raises(ValueError, match="refill has added no document"):
        KeepEndsPacker(4, BOS).next_row(lambda: None)
    with pytest.raises(ValueError, match="refill has added no conversation"):
        ConversationPacker(4).next_row(lambda: None)
    with pytest.raises(ValueError, match="from 1 to 5, got 6"):
        ConversationPacker(4).add(Conversation(Row([1] * 6, [1] * 6)))
    assert Piece(document(0, 4), 1, 3).ends
