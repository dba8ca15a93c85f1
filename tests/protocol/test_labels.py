"""Labels over plain lists, the cases of cases/stopping.md by name, and further ones of the same kinds."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import chat_cases
import pytest
from chat_cases import NOW, assistant, call, endstop_tokenizer, tool, user
from hypothesis import given
from hypothesis import strategies as st

from endstop.protocol.label_audit import audit
from endstop.protocol.labels import (
    IGNORE,
    Row,
    blank_tokens,
    chat_rows,
    completion_row,
    labels_from_mask,
    labels_of_padded,
    marker_row,
    packed,
    padded,
    row_from_mask,
    truncated,
    untrainable_terminators,
    with_terminator,
)
from endstop.protocol.render import ChatRenderer
from endstop.protocol.tokenizer import Tokenizer

EOS = 2


def whole(*ids: int) -> Row:
    return Row(list(ids), list(ids))


# B14


def test_B14_padding_is_masked_by_position_when_pad_is_eos() -> None:
    rows = [whole(5, 6, EOS), whole(5, 6, 7, 8, EOS), whole(9, EOS)]
    batch = padded(rows, pad_id=EOS)
    assert batch.input_ids == [[5, 6, 2, 2, 2], [5, 6, 7, 8, 2], [9, 2, 2, 2, 2]]
    assert batch.labels == [[5, 6, 2, IGNORE, IGNORE], [5, 6, 7, 8, 2], [9, 2, IGNORE, IGNORE, IGNORE]]
    assert batch.attention_mask == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    counted = audit(batch, {EOS}, pad_id=EOS)
    assert (counted.supervised_stops, counted.rows) == (3, 3)
    assert counted.supervised_stop_rate == 1.0
    assert counted.pad_in_stop_set
    assert counted.problems() == []


def test_B14_the_audit_sees_eos_masked_by_id() -> None:
    wrong = [
        {"input_ids": [5, 6, 2, 2, 2], "labels": [5, 6, -100, -100, -100], "attention_mask": [1, 1, 1, 0, 0]},
        {"input_ids": [5, 6, 7, 8, 2], "labels": [5, 6, 7, 8, -100]},
        {"input_ids": [9, 2, 2, 2, 2], "labels": [9, -100, -100, -100, -100]},
    ]
    counted = audit(wrong, {EOS}, pad_id=EOS)
    assert (counted.supervised_stops, counted.rows_without_stop) == (0, 3)
    assert counted.supervised_stop_rate == 0.0
    assert "3 of 3 turns end without a supervised terminator" in counted.problems()[0]


def test_B14_left_padding_and_rows_padded_by_others() -> None:
    batch = padded([whole(5, EOS), whole(5, 6, 7, EOS)], pad_id=EOS, side="left")
    assert batch.input_ids[0] == [2, 2, 5, 2]
    assert batch.labels[0] == [IGNORE, IGNORE, 5, 2]
    assert batch.position_ids[0] == [0, 0, 0, 1]
    assert labels_of_padded([2, 2, 5, 2], [0, 0, 1, 1]) == [IGNORE, IGNORE, 5, 2]
    assert labels_of_padded([2, 2, 5, 2], [0, 0, 1, 1], [0, 0, 0, 1]) == [IGNORE, IGNORE, IGNORE, 2]
    labelled = {"input_ids": [5, 2, 2], "labels": [5, 2, 2], "attention_mask": [1, 1, 0]}
    assert audit([labelled], {EOS}, pad_id=EOS).labelled_padding == 1
    with pytest.raises(ValueError, match="does not fit"):
        padded([whole(1, 2, 3)], pad_id=0, length=2)


@given(
    st.lists(st.lists(st.integers(3, 9), max_size=6), min_size=1, max_size=5),
    st.sampled_from(["left", "right"]),
    st.integers(0, 9),
)
def test_B14_every_row_keeps_its_labels_whatever_pads_it(bodies: Any, side: Any, pad: int) -> None:
    rows = [whole(*body, EOS) for body in bodies]
    batch = padded(rows, pad, side=side)
    for row, labels, attention in zip(rows, batch.labels, batch.attention_mask, strict=True):
        assert [label for label, bit in zip(labels, attention, strict=True) if bit] == row.labels
        assert all(label == IGNORE for label, bit in zip(labels, attention, strict=True) if not bit)
    assert audit(batch, {EOS}).supervised_stops == len(rows)


# B15


@cache
def tokenizer(add_bos: bool = False, add_eos: bool = False) -> Tokenizer:
    text = json.loads(chat_cases.crate_tokenizer_json())
    plain = endstop_tokenizer("", "<s>", "</s>")
    bos, eos = plain.token_to_id("<s>"), plain.token_to_id("</s>")
    pieces: list[Any] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if add_bos:
        pieces.insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    if add_eos:
        pieces.append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    text["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<s>": {"id": "<s>", "ids": [bos], "tokens": ["<s>"]},
            "</s>": {"id": "</s>", "ids": [eos], "tokens": ["</s>"]},
        },
    }
    return Tokenizer(text, special={"bos_token": "<s>", "eos_token": "</s>"})


PAIRS = [("2+2=", "4"), ("Capital of France?", "Paris"), ("Say ok", "ok</s>")]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_B15_every_completed_sample_ends_with_one_supervised_eos(add_bos: bool, add_eos: bool) -> None:
    chosen = tokenizer(add_bos, add_eos)
    eos, bos = chosen.eos_token_id, chosen.bos_token_id
    assert eos is not None
    rows = [completion_row(chosen, prompt, completion, eos) for prompt, completion in PAIRS]
    for row, (prompt, completion) in zip(rows, PAIRS, strict=True):
        assert row.ids[-1] == row.labels[-1] == eos
        assert row.ids.count(eos) == 1
        assert (row.ids[0] == bos) == add_bos
        supervised = [label for label in row.labels if label != IGNORE]
        assert (
            chosen.decode(supervised, skip_special_tokens=False) == completion.removesuffix("</s>") + "</s>"
        )
        assert chosen.decode(row.ids) == prompt + completion.removesuffix("</s>")
    counted = audit(rows, {eos})
    assert (counted.supervised_stops, counted.turns, counted.double_stops) == (3, 3, 0)


def test_B15_only_the_terminator_at_the_end_is_taken_as_one() -> None:
    chosen = tokenizer()
    eos = chosen.eos_token_id
    assert eos is not None
    row = completion_row(chosen, "Say </s>", "a</s>b<|im_end|>", eos)
    assert [i for i in row.ids if i in chosen.added_tokens] == [eos]
    assert (
        completion_row(chosen, "Say ok", "ok</s>\n", eos).ids
        == completion_row(chosen, "Say ok", "ok", eos).ids
    )
    other = chosen.token_to_id("<|im_end|>")
    assert other is not None
    assert completion_row(chosen, "x", "ok<|im_end|>", eos, stop_ids=[other]).ids[-1] == other


def test_B15_an_unfinished_completion_gets_none_and_is_counted() -> None:
    chosen = tokenizer()
    eos = chosen.eos_token_id
    assert eos is not None
    row = completion_row(chosen, "2+2=", "4 and", eos, complete=False)
    assert eos not in row.ids
    assert row.cut
    counted = audit([row], {eos})
    assert (counted.cut_rows, counted.turns, counted.rows_without_stop) == (1, 0, 1)


# B16


def test_B16_a_limit_that_cuts_nothing_changes_nothing() -> None:
    mask = [0, 0, 1, 1]
    without = row_from_mask([1, 2, 3, 9], mask)
    assert without.labels == [IGNORE, IGNORE, 3, 9]
    assert row_from_mask([1, 2, 3, 9], mask, max_length=8192) == without
    assert row_from_mask([1, 2, 3, 9], mask, max_length=4) == without


def test_B16_a_user_turn_at_the_end_stays_masked() -> None:
    assert row_from_mask([1, 3, 9, 5], [0, 1, 1, 0], max_length=8192).labels == [IGNORE, 3, 9, IGNORE]


def test_B16_a_real_cut_takes_the_terminator_and_says_so() -> None:
    assert row_from_mask([1, 2, 3, 9], [0, 0, 1, 1], max_length=3) == Row(
        [1, 2, 3], [IGNORE, IGNORE, 3], True
    )


# B17


@cache
def words_tokenizer() -> Tokenizer:
    """Whole words with the blank before them, as GPT-2 has them."""
    import tokenizers as crate

    vocabulary = {
        "Answer": 0,
        ":": 1,
        "\u0120hi": 2,
        "\u0120": 3,
        "hi": 4,
        "Q": 5,
        "\u010a": 6,
        "\u0120Answer": 7,
    }
    for byte, character in enumerate(sorted(crate.pre_tokenizers.ByteLevel.alphabet())):
        vocabulary.setdefault(character, 100 + byte)
    merges = [
        ("A", "n"),
        ("An", "s"),
        ("Ans", "w"),
        ("Answ", "e"),
        ("Answe", "r"),
        ("h", "i"),
        ("\u0120", "hi"),
    ]
    for pair in [*merges, ("\u0120", "Answer")]:
        vocabulary.setdefault("".join(pair), 400 + len(vocabulary))
    inner = crate.Tokenizer(crate.models.BPE(vocab=vocabulary, merges=[*merges, ("\u0120", "Answer")]))
    inner.pre_tokenizer = crate.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = crate.decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    return Tokenizer(json.loads(inner.to_str()), special={"eos_token": "<eos>"})


@pytest.mark.parametrize("marker", ["Answer: ", "Answer:"])
def test_B17_markers_are_found_in_characters_not_in_ids(marker: str) -> None:
    chosen = words_tokenizer()
    eos = chosen.eos_token_id
    assert [chosen.id_to_token(i) for i in chosen.encode("Answer: ")] == ["Answer", ":", "\u0120"]
    row = marker_row(chosen, "Answer: hi", marker, terminator=eos)
    assert [chosen.id_to_token(i) for i in row.ids] == ["Answer", ":", "\u0120hi", "<eos>"]
    assert row.labels == [IGNORE, IGNORE, 2, eos]


def test_B17_every_response_up_to_the_next_instruction() -> None:
    chosen = words_tokenizer()
    text = "Q:hi\nAnswer: hi\nQ:hi\n Answer: hi"
    row = marker_row(chosen, text, "Answer:", instruction_marker="\nQ:", terminator=chosen.eos_token_id)
    supervised = [chosen.decode([label]) for label in row.labels if label != IGNORE]
    assert supervised == [" hi", " hi", ""]


def test_B17_rows_without_the_marker_are_counted_and_fail() -> None:
    chosen = words_tokenizer()
    rows = [
        marker_row(chosen, t, "Answer:", terminator=chosen.eos_token_id) for t in ("hi: hi", "Answer: hi")
    ]
    counted = audit(rows, {chosen.eos_token_id})
    assert counted.rows_without_labels == 1
    assert counted.problems() == ["1 of 2 rows have no supervised token."]
    assert counted.problems(max_empty=0.5) == []
    with pytest.raises(ValueError, match="at least one character"):
        marker_row(chosen, "x", "")


# B19

GEMMA = chat_cases.FAMILIES["gemma"]


def test_B19_the_terminator_is_what_the_template_writes_not_the_tokenizers_eos() -> None:
    renderer = ChatRenderer(endstop_tokenizer(GEMMA, "<bos>", "<eos>"))
    chosen = renderer.tokenizer
    end, eos = chosen.token_to_id("<end_of_turn>"), chosen.eos_token_id
    messages = [user("a"), assistant("yes"), user("b"), assistant("no")]
    made = chat_rows(renderer, messages)
    assert made.whole
    [row] = made.rows
    assert row.labels.count(end) == 2
    assert row.ids.count(end) == 4
    supervised = chosen.decode([label for label in row.labels if label != IGNORE], skip_special_tokens=False)
    assert supervised == "yes<end_of_turn>no<end_of_turn>"
    counted = audit([row], renderer.render(messages).stop_ids)
    assert counted.supervised_stop_rate == 1.0
    assert counted.unused_stops == (eos,)


def test_B19_the_audit_sees_a_terminator_that_stays_masked_and_an_eos_that_never_occurs() -> None:
    # <eos> 1, <start_of_turn> 105, <end_of_turn> 106
    row = {
        "input_ids": [105, 4368, 107, 3553, 106, 107],
        "labels": [IGNORE, IGNORE, IGNORE, 3553, IGNORE, IGNORE],
    }
    counted = audit([row], {1})
    assert counted.supervised_stop_rate == 0.0
    assert counted.unused_stops == (1,)
    assert "no row holds a supervised stop id; 1 never occur." in counted.problems()
    right = {**row, "labels": [IGNORE, IGNORE, IGNORE, 3553, 106, IGNORE]}
    assert audit([right], {106}).problems() == []


# B21


def test_B21_a_newline_behind_the_terminator_is_no_reason_for_a_second_one() -> None:
    row = Row([8, 33, 151645, 198], [IGNORE, 33, 151645, IGNORE])
    same = with_terminator(row, 151645, blank=lambda i: i == 198)
    assert same == row
    assert same.labels.count(151645) == 1
    assert with_terminator(row, 151645).ids == [8, 33, 151645, 198, 151645]  # if blanks are not known


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([5, 9], [5, 9]),
        ([5, 9, 7, 7], [5, 9, 7, 7]),
        ([5, 7], [5, 7, 9]),
        ([5, 8], [5, 8]),
        ([7], [7, 9]),
        ([], [9]),
        ([9, 5], [9, 5, 9]),
    ],
)
def test_B21_the_last_token_that_is_not_blank_decides(ids: list[int], expected: list[int]) -> None:
    row = with_terminator(Row(ids, [IGNORE] * len(ids)), 9, {9, 8}, blank=lambda i: i == 7)
    assert row.ids == expected
    assert [label for label in row.labels if label != IGNORE] in ([9], [8])


def test_B21_a_rendered_chat_has_one_and_the_newline_is_no_label() -> None:
    renderer = ChatRenderer(endstop_tokenizer(chat_cases.FAMILIES["chatml"]))
    [row] = chat_rows(renderer, [user("a"), assistant("b")]).rows
    end = renderer.tokenizer.eos_token_id
    assert end is not None
    assert with_terminator(row, end, blank=blank_tokens(renderer.tokenizer)) == row
    assert renderer.tokenizer.decode(row.ids[-1:]) == "\n"
    assert row.labels[-2:] == [end, IGNORE]


def test_B21_the_audit_counts_doubled_terminators() -> None:
    blank = {198}.__contains__
    assert audit([whole(33, 9, 198, 9)], {9}, blank=blank).double_stops == 1
    assert audit([whole(33, 9, 9)], {9}).double_stops == 1
    assert audit([whole(33, 9, 198)], {9}, blank=blank).double_stops == 0
    assert audit([whole(33, 9, 198)], {9}, blank=blank).supervised_stop_rate == 1.0


# B23


def test_B23_every_packed_sample_keeps_its_own_supervised_eos() -> None:
    samples = [with_terminator(whole(*ids), EOS) for ids in ([5, 6], [7], [8, 8])]
    batch = packed(samples, 8, pad_id=0)
    assert batch.input_ids == [[5, 6, 2, 7, 2, 8, 8, 2]]
    assert [label for label in batch.labels[0] if label == EOS] == [EOS] * 3
    assert batch.labels == [[IGNORE, 6, 2, IGNORE, 2, IGNORE, 8, 2]]
    assert batch.position_ids == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert audit(batch, {EOS}).supervised_stops == len(samples)
    assert packed(samples, 8, 0, supervise_borders=True).labels == [[5, 6, 2, 7, 2, 8, 8, 2]]


def test_B23_a_sample_that_fills_a_block_exactly_is_kept() -> None:
    batch = packed([whole(5, 6, 7, EOS), whole(8, EOS)], 4, pad_id=EOS)
    assert batch.input_ids == [[5, 6, 7, 2], [8, 2, 2, 2]]
    assert batch.labels[1] == [IGNORE, 2, IGNORE, IGNORE]
    assert batch.attention_mask[1] == [1, 1, 0, 0]
    with pytest.raises(ValueError, match="does not fit into a block of 4"):
        packed([whole(1, 2, 3, 4, 5)], 4, pad_id=0)


@given(st.lists(st.integers(1, 7), max_size=40))
def test_B23_packing_loses_no_sample_and_no_terminator(lengths: list[int]) -> None:
    rows = [whole(*[10 + n] * n, EOS) for n in lengths]
    batch = packed(rows, 8, pad_id=EOS)
    assert audit(batch, {EOS}).supervised_stops == len(rows)
    assert sum(map(sum, batch.attention_mask)) == sum(len(row.ids) for row in rows)
    assert all(len(ids) == 8 for ids in batch.input_ids)


# B25


def test_B25_a_cut_row_gets_no_supervised_eos_and_a_full_one_is_not_cut() -> None:
    rows = [truncated(whole(*ids), 4) for ids in ([5, 2], [5, 6, 7, 2], [5, 6, 7, 8, 9, 2])]
    assert [row.cut for row in rows] == [False, False, True]
    assert rows[1] == whole(5, 6, 7, 2)
    assert rows[2] == Row([5, 6, 7, 8], [5, 6, 7, 8], cut=True)
    assert [EOS in row.labels for row in rows] == [True, True, False]
    counted = audit(rows, {EOS})
    assert (counted.rows_without_stop, counted.cut_rows) == (1, 1)
    assert counted.censored_rate == pytest.approx(1 / 3)
    assert (counted.turns, counted.stopped_turns) == (2, 2)
    assert counted.problems() == ["1 of 3 rows are cut: ends of long answers are never seen."]


def test_B25_nothing_puts_a_terminator_on_a_cut_row() -> None:
    cut = truncated(whole(5, 6, 7, 8, 9, EOS), 4)
    assert with_terminator(cut, EOS) == cut


def test_B25_earlier_turns_of_a_cut_row_keep_theirs() -> None:
    row = Row([1, 5, 2, 1, 6, 7, 2], [IGNORE, 5, 2, IGNORE, 6, 7, 2])
    cut = truncated(row, 5)
    assert cut == Row([1, 5, 2, 1, 6], [IGNORE, 5, 2, IGNORE, 6], cut=True)
    counted = audit([cut], {EOS})
    assert (counted.turns, counted.stopped_turns, counted.cut_rows) == (1, 1, 1)


def test_B25_losing_only_what_is_not_supervised_is_no_cut() -> None:
    row = Row([5, 2, 198, 1, 7], [5, 2, IGNORE, IGNORE, IGNORE])
    assert truncated(row, 2) == Row([5, 2], [5, 2], cut=False)
    with pytest.raises(ValueError, match="at least 1"):
        truncated(row, 0)


# B26

LORA = {"peft": "lora", "target_modules": ["q_proj", "v_proj"], "modules_to_save": []}


def test_B26_a_new_terminator_cannot_be_learned_by_adapters_on_attention() -> None:
    problems = untrainable_terminators([31999], vocab_size=32000, untrained_ids={31998, 31999}, lora=LORA)
    assert "never trained" in problems[31999]
    saved = {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}
    assert untrainable_terminators([31999], vocab_size=32000, untrained_ids={31999}, lora=saved) == {}


@pytest.mark.parametrize(
    ("lora", "tied", "learns"),
    [
        (None, False, True),
        ({"target_modules": "all-linear"}, False, False),
        ({"target_modules": ["model.embed_tokens", "lm_head"]}, False, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, True, True),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [7]}, True, True),
        ({"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7]}}, False, False),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "trainable_token_indices": [7]},
            False,
            True,
        ),
        ({"target_modules": ["q_proj"], "modules_to_save": None}, True, False),
    ],
)
def test_B26_what_reaches_the_rows_of_a_token(lora: Any, tied: bool, learns: bool) -> None:
    problems = untrainable_terminators([7], vocab_size=10, untrained_ids=[7], lora=lora, tied=tied)
    assert (problems == {}) == learns
    assert untrainable_terminators([7], vocab_size=10, untrained_ids=[], lora=lora, tied=tied) == {}


def test_B26_a_terminator_beyond_the_embedding() -> None:
    problems = untrainable_terminators([32000], vocab_size=32000)
    assert problems == {32000: "id 32000 is out of range: the model has 32000 rows"}
    assert audit([whole(5, 32000)], {32000}, vocab_size=32000).out_of_range == (32000,)


# The audit, further


def test_the_audit_sees_turns_of_others_that_are_trained_on() -> None:
    # <|im_start|> 8, <|im_end|> 9: everything is supervised
    everything = whole(8, 1, 5, 9, 8, 3, 6, 9)
    counted = audit([everything], {9}, header_ids={8})
    assert (counted.runs_past_stop, counted.supervised_headers) == (1, 2)
    assert any("turns of others are trained on" in problem for problem in counted.problems())


def test_the_audit_sees_labels_that_are_not_the_token() -> None:
    # One library puts EOS as the label of the first token of the next turn.
    counted = audit([{"input_ids": [5, 8, 6], "labels": [5, 9, 6]}], {9})
    assert counted.foreign_labels == 1


def test_the_audit_of_nothing() -> None:
    assert audit([], {2}).problems() == ["there are no rows."]
    empty = audit([Row([], [])], {2})
    assert (empty.rows_without_labels, empty.supervised_stop_rate) == (1, 0.0)


def test_labels_and_rows_check_their_lengths() -> None:
    with pytest.raises(ValueError, match="as long as its ids"):
        labels_from_mask([1, 2], [1])
    with pytest.raises(ValueError, match="as many labels as ids"):
        Row([1], [])


# Conversations


def test_chats_whose_template_rewrites_turns_give_one_row_for_each() -> None:
    renderer = ChatRenderer(endstop_tokenizer(chat_cases.FAMILIES["qwen3"]))
    made = chat_rows(renderer, chat_cases.CONVERSATIONS["thinking-field"])
    assert not made.whole
    assert made.refusals == []
    texts = [
        renderer.tokenizer.decode(
            [label for label in row.labels if label != IGNORE], skip_special_tokens=False
        )
        for row in made.rows
    ]
    assert texts == [
        "<think>\ntwo and two\n</think>\n\n4<|im_end|>",
        "<think>\nI checked\n</think>\n\nyes<|im_end|>",
    ]
    counted = audit(made.rows, {renderer.tokenizer.eos_token_id})
    assert (counted.turns, counted.stopped_turns) == (2, 2)


def test_chats_that_cannot_be_rendered_give_a_reason() -> None:
    renderer = ChatRenderer(endstop_tokenizer(GEMMA, "<bos>", "<eos>"))
    made = chat_rows(renderer, [user("a"), user("b")])
    assert made.rows == []
    assert "must alternate" in made.refusals[0]
    silent = ChatRenderer(
        endstop_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    )
    made = chat_rows(silent, [user("a"), assistant("b")])
    assert made.rows == []
    assert "no terminator" in made.refusals[0]


def test_tool_results_are_never_labels() -> None:
    renderer = ChatRenderer(endstop_tokenizer(chat_cases.FAMILIES["qwen2_5"]))
    messages = [
        user("weather?"),
        assistant(tool_calls=[call("get_weather", {"city": "Rome"})]),
        tool("<secret> 21"),
        assistant("21"),
    ]
    [row] = chat_rows(renderer, messages, tools=[chat_cases.WEATHER], now=NOW).rows
    text = renderer.tokenizer.decode([x for x in row.labels if x != IGNORE], skip_special_tokens=False)
    assert text == (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
        "21<|im_end|>"
    )
