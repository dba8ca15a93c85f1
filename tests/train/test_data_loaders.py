"""The two loaders: the same batches whatever the processes, exact states, counts, and what they refuse."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop.protocol.errors import EndstopError
from endstop.protocol.labels import IGNORE, Row
from endstop.train.chat_format import ASSISTANT_END, BOS, OUTPUT_END, USER_START
from endstop.train.data.ahead import AheadLoader
from endstop.train.data.chat_loader import ChatLoader
from endstop.train.data.document_loader import DocumentLoader
from endstop.train.data.mixture import Mixture
from endstop.train.data.sources import BadDocument
from endstop.train.data.statistics import combined
from tests.train.data_cases import chat, encode, renderer, rows_of, token
from tests.train.test_data_mixture import Numbers

TEXTS = [f"document {number} " + "x" * (number * 31 % 97) for number in range(40)]
# Longer than what is tokenised in one call, and much longer than a row.
GIANTS = ["giant " * 200_000, "large " * 100]
CHATS = [chat(f"say {n}", "yes " * (n * 7 % 11 + 1), "again", "no") for n in range(24)]


def document_loader(documents=TEXTS, **changes):
    arguments = {"row_length": 48, "rows_per_step": 8, "micro_rows": 3, "shards": 4, "buffer": 20, **changes}
    return DocumentLoader(documents, encode, token(BOS), **arguments)


def chat_loader(conversations=CHATS, **changes):
    arguments = {"row_length": 96, "rows_per_step": 8, "micro_rows": 3, "shards": 4, "buffer": 6, **changes}
    return ChatLoader(conversations, renderer(), stop_ids=[token(ASSISTANT_END), token(BOS)], **arguments)


LOADERS = {
    "crop": document_loader,
    "keep-ends": lambda **changes: document_loader(mode="keep-ends", isolate=True, **changes),
    "mixture": lambda **changes: document_loader(Mixture([(TEXTS, 0.5), (TEXTS[:7], 2.0)]), **changes),
    "stream": lambda **changes: document_loader(
        Mixture([(Numbers(50, 20), 1.0), (TEXTS, 1.0)]), mode="keep-ends", **changes
    ),
    "giants": lambda **changes: document_loader(TEXTS[:9] + GIANTS, row_length=12, **changes),
    "chat": lambda **changes: chat_loader(isolate=True, **changes),
    "chat stream": lambda **changes: chat_loader(
        Mixture([(ChatNumbers(50, 20), 1.0), (CHATS, 1.0)]), mask=False, **changes
    ),
}


class ChatNumbers(Numbers):
    def read(self, state=None):
        reader = super().read(state)
        take = reader.take
        reader.take = lambda position: chat("number", take(position))
        return reader


def global_rows(loaders):
    """The rows of a step in their global order, from the loaders of all processes."""
    step = {}
    for loader in loaders:
        own = [shard for shards in loader.plan.micro_batches() for shard in shards]
        rows = rows_of(loader.next_step())
        seen = dict.fromkeys(loader.own_shards, 0)
        for shard, row in zip(own, rows, strict=True):
            step[shard + seen[shard] * loader.plan.shards] = row
            seen[shard] += 1
    return [step[at] for at in range(len(step))]


@pytest.mark.parametrize("name", LOADERS)
def test_one_two_and_four_processes_see_the_same_steps(name):
    worlds = [[LOADERS[name](rank=rank, world=world) for rank in range(world)] for world in (1, 2, 4)]
    for _ in range(4):
        one, two, four = (global_rows(loaders) for loaders in worlds)
        assert one == two == four
        assert len(one) == 8


@pytest.mark.parametrize("name", LOADERS)
def test_a_checkpoint_of_two_processes_goes_on_in_one(name):
    two = [LOADERS[name](rank=rank, world=2) for rank in range(2)]
    for _ in range(3):
        global_rows(two)
    one = LOADERS[name]()
    for loader in two:
        for shard in loader.own_shards:
            one.load_state(shard, json.loads(json.dumps(loader.state(shard))))
    for _ in range(3):
        assert global_rows([one]) == global_rows(two)


@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=15, deadline=None)
@given(actions=st.lists(st.sampled_from(["step", "save", "restore"]), max_size=14))
def test_any_interleaving_of_saving_and_restoring_gives_the_uninterrupted_steps(name, actions):
    plain = LOADERS[name](shards=2, rows_per_step=2)
    steps = [rows_of(plain.next_step()) for _ in range(8)]
    loader, at = LOADERS[name](shards=2, rows_per_step=2), 0
    saved = ({shard: loader.state(shard) for shard in loader.own_shards}, 0)
    for action in actions:
        if action == "step" and at < len(steps):
            assert rows_of(loader.next_step()) == steps[at]
            at += 1
        elif action == "save":
            saved = (json.loads(json.dumps({s: loader.state(s) for s in loader.own_shards})), at)
        elif action == "restore":
            # Into a new process, and into the one that has gone on.
            loader = loader if len(actions) % 2 else LOADERS[name](shards=2, rows_per_step=2)
            for shard, state in saved[0].items():
                loader.load_state(int(shard), state)
            at = saved[1]
    if at == len(steps):
        assert loader.statistics() == plain.statistics()


@pytest.mark.parametrize("mode", ["crop", "keep-ends"])
def test_every_position_of_a_document_row_is_supervised_and_borders_are_isolated(mode):
    loader = document_loader(mode=mode, isolate=True)
    for batch in loader.next_step():
        assert batch.input_ids.shape == batch.targets.shape
        assert batch.supervised == batch.targets.numel()
        assert (batch.input_ids[:, 1:] == batch.targets[:, :-1]).all()
        for row, numbers in zip(batch.input_ids.tolist(), batch.document_ids.tolist(), strict=True):
            expected = 0
            for at, (token_id, number) in enumerate(zip(row, numbers, strict=True)):
                expected += at > 0 and token_id == token(BOS)
                assert number == expected
    assert [len(batch.input_ids) for batch in loader.next_step()] == [3, 3, 2]


def test_statistics_of_both_modes():
    steps = 40
    crop, keep = (document_loader(row_length=200, mode=mode) for mode in ("crop", "keep-ends"))
    for _ in range(steps):
        crop.next_step()
        keep.next_step()
    lost, kept = crop.statistics(), keep.statistics()
    assert lost["use"] == kept["use"] == 1.0
    assert kept["placed_tokens"] == steps * 8 * 200
    assert lost["placed_tokens"] == steps * 8 * 201
    assert kept["supervised_ends_share"] == 1.0
    assert kept["cropped_tokens"] == 0
    assert kept["split_documents"] > 0
    assert 0.02 < lost["cropped_share"] < 0.6
    assert 0.1 < lost["supervised_ends_share"] < 0.9
    assert lost["split_documents"] == 0
    assert kept["epochs"] > 1


def test_empty_documents_are_counted_and_nothing_but_them_is_an_error():
    loader = document_loader(["", "words", ""], shards=1, rows_per_step=1, micro_rows=1)
    assert rows_of(loader.next_step())
    assert loader.statistics()["empty_documents"] > 10
    with pytest.raises(EndstopError, match=r"none of .* documents in a row has any text"):
        document_loader(["", ""], shards=1, rows_per_step=1, micro_rows=1).next_step()


class Broken(list):
    def __getitem__(self, index):
        if index % 3 == 0:
            raise BadDocument(f"broken.jsonl, line {index + 1}: this is not JSON.")
        return super().__getitem__(index)


def test_a_giant_document_is_tokenised_once_where_only_its_beginning_is_used():
    tokenised = []

    def watched(texts):
        tokenised.extend(text for text in texts if len(text) > 1000)
        return encode(texts)

    arguments = {"row_length": 12, "rows_per_step": 8, "micro_rows": 8, "buffer": 20}
    loader = DocumentLoader(["small", "tiny", GIANTS[0]], watched, token(BOS), **arguments)
    for _ in range(5):
        loader.next_step()
    assert tokenised == [GIANTS[0]]
    figures = loader.statistics()
    times = figures["cropped_tokens"] // len(GIANTS[0])
    assert times > 5
    assert figures["cropped_share"] > 0.99
    # With every end kept it is read from its beginning to its end before it is read again.
    tokenised.clear()
    loader = DocumentLoader(["small", "tiny", GIANTS[0]], watched, token(BOS), mode="keep-ends", **arguments)
    for _ in range(5):
        loader.next_step()
    assert len(tokenised) <= 2


def test_bad_documents_are_an_error_or_counted():
    with pytest.raises(BadDocument, match=r"line .*not JSON"):
        document_loader(Broken(TEXTS)).next_step()
    loader = document_loader(Broken(TEXTS), skip_bad=True)
    loader.next_step()
    assert loader.statistics()["skipped_documents"] >= 20
    chats = chat_loader(Broken(CHATS), skip_bad=True)
    chats.next_step()
    assert chats.statistics()["skipped"] >= 6
    with pytest.raises(BadDocument, match="line"):
        chat_loader(Broken(CHATS)).next_step()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world": 3}, "4 data shards cannot be dealt to 3 processes"),
        ({"rows_per_step": 6}, "6 rows per step cannot be dealt evenly to 4 data shards"),
        ({"rank": 2, "world": 2}, "rank must be from 0 to 1"),
        ({"micro_rows": 0}, "micro_rows must be at least 1"),
        ({"buffer": 0}, "buffer must be at least 1"),
    ],
)
@pytest.mark.parametrize("make", [document_loader, chat_loader])
def test_numbers_that_do_not_go_together(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_a_mode_that_does_not_exist():
    with pytest.raises(ValueError, match="'crop' or 'keep-ends'"):
        document_loader(mode="greedy")


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (document_loader, {"mode": "keep-ends"}, "mode 'crop', this run has 'keep-ends'"),
        (document_loader, {"documents": TEXTS[1:]}, "documents 40, this run has 39"),
        (document_loader, {"row_length": 47}, "row_length 48, this run has 47"),
        (chat_loader, {"mask": False}, "mask True, this run has False"),
        (chat_loader, {"seed": 3}, "seed 0, this run has 3"),
    ],
)
def test_a_state_of_other_data_is_refused(make, changes, message):
    state = make().state(0)
    with pytest.raises(EndstopError, match=message):
        make(**changes).load_state(0, state)


def conversations_of(row, document_ids):
    """The tokens of each conversation in a row with document ids, padding last."""
    return [
        [i for i, d in zip(row, document_ids, strict=True) if d == k] for k in range(max(document_ids) + 1)
    ]


def test_chat_rows_are_supervised_by_the_renderer_alone():
    loader = chat_loader(isolate=True)
    expected = {}
    for messages in CHATS:
        rendered = renderer().render(messages)
        expected[tuple(rendered.ids)] = rendered.mask
    seen = 0
    for _ in range(6):
        for ids, targets, documents in rows_of(loader.next_step()):
            assert any(target != IGNORE for target in targets)
            at = 0
            for number, tokens in enumerate(conversations_of(ids, documents)):
                mask = expected.get(tuple(tokens))
                own = targets[at : at + len(tokens)]
                at += len(tokens)
                if mask is None:
                    # Padding, or the last conversation, whose last token is read by nobody.
                    assert number == max(documents)
                    continue
                seen += 1
                assert own[:-1] == [t if bit else IGNORE for t, bit in zip(tokens[1:], mask[1:], strict=True)]
                assert own[-1] == IGNORE
    assert seen > 20
    statistics = loader.statistics()
    assert statistics["supervised_stops"] == 2 * statistics["documents"]
    assert statistics["supervised_ends_share"] == 1.0
    assert statistics["cut"] == statistics["refused"] == statistics["unsupervised"] == 0


def test_unmasked_rows_supervise_everything_but_padding():
    loader = chat_loader(mask=False, isolate=True)
    supervised = 0
    for batch in loader.next_step():
        supervised += batch.supervised
        for ids, targets, documents in rows_of([batch]):
            assert all(t in (IGNORE, i) for i, t in zip(ids[1:], targets, strict=False))
            padding = max(documents) if ids[-1] == token(OUTPUT_END) else max(documents) + 1
            for at, number in enumerate(documents[:-1]):
                assert (targets[at] == IGNORE) == (documents[at + 1] >= padding)
                if number != documents[at + 1] < padding:
                    assert targets[at] == token(BOS)
    assert supervised == loader.statistics()["supervised_tokens"]


def test_long_conversations_are_cut_without_a_terminator_and_counted():
    long = [chat("tell", "word " * 100)]
    loader = chat_loader(long, row_length=64)
    for ids, targets, _ in rows_of(loader.next_step()):
        assert ids.count(token(BOS)) == 1
        assert token(ASSISTANT_END) not in targets
        assert sum(t != IGNORE for t in targets) > 50
    statistics = loader.statistics()
    assert statistics["cut"] >= 8
    assert statistics["supervised_stops"] == 0
    assert statistics["supervised_ends_share"] == 0.0
    assert statistics["use"] == 1.0


def test_what_cannot_be_trained_on_is_counted_and_never_loops():
    cut_away = chat("a very long question " * 10, "yes")
    broken = [{"role": "assistant", "content": "first"}]
    unanswered = chat("hello")
    loader = chat_loader([cut_away, broken, unanswered, CHATS[0]], row_length=64, shards=1)
    for batch in loader.next_step():
        assert all(any(t != IGNORE for t in row) for _, row, _ in rows_of([batch]))
    statistics = loader.statistics()
    assert statistics["unsupervised"] > 0
    assert statistics["refused"] > 0
    assert any("alternate" in reason for reason in statistics["refusals"])
    with pytest.raises(EndstopError, match=r"none of \d+ conversations can be trained on .*alternate"):
        chat_loader([broken], shards=1).next_step()
    with pytest.raises(EndstopError, match="with nothing to learn in 64 tokens"):
        chat_loader([cut_away], row_length=64).next_step()


def test_a_transform_changes_rows_before_they_are_packed():
    end = token(ASSISTANT_END)

    def masked_ends(row: Row) -> Row:
        return Row(row.ids, [IGNORE if label == end else label for label in row.labels], row.cut)

    loader = chat_loader(transform=masked_ends)
    for _, targets, _ in rows_of(loader.next_step()):
        assert end not in targets
    assert loader.statistics()["supervised_stops"] == 0


def test_padding_is_masked_by_its_place_even_with_a_stop_id():
    end = token(ASSISTANT_END)
    loader = chat_loader([chat("a", "b")], pad_id=end, row_length=60)
    for ids, targets, _ in rows_of(loader.next_step()):
        assert ids[-1] == end
        assert targets[-1] == IGNORE
        assert targets.count(end) == ids.count(token(USER_START))


def test_render_options_reach_the_template():
    with pytest.raises(EndstopError):
        chat_loader([chat("a", "b")], options={"continue_final_message": "nowhere"}).next_step()


@pytest.mark.parametrize("name", ["crop", "keep-ends", "chat"])
def test_statistics_of_all_processes_are_those_of_one(name):
    one = LOADERS[name]()
    two = [LOADERS[name](rank=rank, world=2) for rank in range(2)]
    for _ in range(5):
        for loader in (one, *two):
            loader.next_step()
    together = combined([loader.statistics() for loader in two])
    expected = one.statistics()
    assert together.pop("refusals", {}) == expected.pop("refusals", {})
    assert together == pytest.approx(expected)
    with pytest.raises(ValueError, match="no statistics"):
        combined([])


@pytest.mark.parametrize("name", LOADERS)
def test_steps_prepared_ahead_are_the_same_and_so_are_their_states(name):
    plain = LOADERS[name]()
    ahead = AheadLoader(LOADERS[name]())
    states = []
    try:
        assert ahead.own_shards == plain.own_shards
        for _ in range(4):
            states.append({shard: plain.state(shard) for shard in plain.own_shards})
            assert {shard: ahead.state(shard) for shard in ahead.own_shards} == states[-1]
            assert rows_of(ahead.next_step()) == rows_of(plain.next_step())
            assert ahead.statistics() == plain.statistics()
        ahead.close()
        assert rows_of(ahead.next_step()) == rows_of(plain.next_step())
        again = LOADERS[name]()
        for shard, state in states[1].items():
            ahead.load_state(shard, json.loads(json.dumps(state)))
            again.load_state(shard, state)
        for _ in range(3):
            assert rows_of(ahead.next_step()) == rows_of(again.next_step())
    finally:
        ahead.close()


def test_an_error_ahead_is_raised_when_its_step_is_asked_for():
    ahead = AheadLoader(document_loader(["", ""], shards=1, rows_per_step=1, micro_rows=1))
    for _ in range(2):
        with pytest.raises(EndstopError, match="has any text"):
            ahead.next_step()


def test_rendered_rows_are_kept_for_the_next_epoch_within_bounds(monkeypatch):
    rendered = []

    class Seen(list):
        def __getitem__(self, index):
            rendered.append(index)
            return super().__getitem__(index)

    loader = chat_loader(Seen(CHATS), shards=1)
    for _ in range(20):
        loader.next_step()
    assert sorted(rendered) == list(range(len(CHATS)))
    monkeypatch.setattr("endstop.train.data.chat_loader._KEPT_TOKENS", 600)
    small = chat_loader(Seen(CHATS), shards=1)
    again = chat_loader(CHATS, shards=1)
    for _ in range(20):
        assert rows_of(small.next_step()) == rows_of(again.next_step())
    assert len(rendered) > 4 * len(CHATS)
