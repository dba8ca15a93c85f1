"""Labels through the collator: the cases of the literature by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_cases import FAMILIES, assistant, endstop_tokenizer, transformers_tokenizer, user

from endstop.protocol.errors import EndstopError
from endstop.protocol.labels import IGNORE
from endstop.train.collate import ChatCollator
from tests.protocol.test_labels import LORA, PAIRS, words_tokenizer
from tests.protocol.test_labels import tokenizer as adding_tokenizer
from tests.train.collate_cases import EOS, TURNS, counted, ids_collator, lists, said, trained_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_tokenizer(tmp_path_factory.mktemp("run") / "tokenizer")


def test_B14_padding_is_masked_by_position_when_pad_is_eos() -> None:
    collator = ids_collator(pad_id=EOS)
    batch = collator([{"input_ids": ids} for ids in ([5, 6, EOS], [5, 6, 7, 8, EOS], [9, EOS])])
    assert lists(batch, "input_ids") == [[5, 6, 2, 2, 2], [5, 6, 7, 8, 2], [9, 2, 2, 2, 2]]
    assert lists(batch, "labels") == [
        [5, 6, 2, IGNORE, IGNORE],
        [5, 6, 7, 8, 2],
        [9, 2, IGNORE, IGNORE, IGNORE],
    ]
    assert lists(batch, "attention_mask") == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    # Rows that someone else has padded already.
    padded = [{"input_ids": [5, 6, 2, 2, 2], "attention_mask": [1, 1, 1, 0, 0]}, {"input_ids": [7, 8, 9, 2]}]
    assert lists(collator(padded), "labels") == [[5, 6, 2, IGNORE], [7, 8, 9, 2]]


def test_B14_chats_with_pad_equal_to_eos_and_left_padding() -> None:
    chosen = transformers_tokenizer(FAMILIES["chatml"], pad_token="<|im_end|>")
    end = chosen.eos_token_id
    assert chosen.pad_token_id == end
    for side in ("right", "left"):
        collator = ChatCollator(chosen, padding_side=side)  # type: ignore[arg-type]
        batch = collator([{"messages": TURNS}, {"messages": TURNS[:2]}])
        assert said(collator, batch) == ["yo<|im_end|>ok then<|im_end|>", "yo<|im_end|>"]
        assert batch["labels"][1].eq(end).sum() == 1
        assert batch["attention_mask"][1, -1 if side == "left" else 0] == 1
        assert batch["input_ids"][batch["attention_mask"] == 0].tolist() == [end] * int(
            (batch["attention_mask"] == 0).sum()
        )


def test_B14_left_padding_predicts_no_first_token_from_padding() -> None:
    batch = ids_collator(pad_id=0, padding_side="left")([{"input_ids": [5, 2]}, {"input_ids": [5, 6, 2]}])
    assert lists(batch, "labels") == [[IGNORE, IGNORE, 2], [IGNORE, 6, 2]]
    assert lists(batch, "attention_mask") == [[0, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_B15_every_completed_sample_ends_with_one_supervised_eos(add_bos: bool, add_eos: bool) -> None:
    chosen = adding_tokenizer(add_bos, add_eos)
    collator = ChatCollator(chosen)
    batch = collator([{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS])
    assert said(collator, batch) == ["4</s>", "Paris</s>", "ok</s>"]
    for ids, labels in zip(lists(batch, "input_ids"), lists(batch, "labels"), strict=True):
        assert (ids[0] == chosen.bos_token_id) == add_bos
        assert labels.count(chosen.eos_token_id) == 1  # type: ignore[arg-type]
    texts = collator([{"text": prompt + completion} for prompt, completion in PAIRS])
    assert said(collator, texts) == ["2+2=4</s>", "Capital of France?Paris</s>", "Say okok</s>"]


def test_B15_an_unfinished_completion_gets_none_and_is_counted() -> None:
    collator = ChatCollator(adding_tokenizer())
    batch = collator(
        [
            {"prompt": "2+2=", "completion": "4 and", "complete": False},
            {"prompt": "2+2=", "completion": "4", "complete": True},
            {"text": "Once upon", "complete": False},
        ]
    )
    assert said(collator, batch) == ["4 and", "4</s>", "Once upon"]
    assert (collator.so_far.rows, collator.so_far.cut_rows) == (3, 2)


@pytest.mark.parametrize("max_length", [None, 4, 8192])
def test_B16_a_limit_that_cuts_nothing_changes_nothing(max_length: int | None) -> None:
    collator = ids_collator(max_length=max_length, pad_id=0)
    batch = collator([{"input_ids": [1, 3, 9, EOS], "completion_mask": [0, 0, 1, 1]}])
    assert lists(batch, "labels") == [[IGNORE, IGNORE, 9, EOS]]
    assert collator.so_far.cut_rows == 0


@pytest.mark.parametrize("marker", ["Answer: ", "Answer:"])
def test_B17_markers_are_found_in_characters_not_in_ids(marker: str) -> None:
    chosen = words_tokenizer()
    collator = ChatCollator(chosen, response_marker=marker)
    batch = collator([{"text": "Answer: hi"}, {"text": "hi: hi"}])
    assert lists(batch, "labels") == [[IGNORE, IGNORE, 2, chosen.eos_token_id]]
    assert (collator.so_far.rows, collator.so_far.rows_without_labels) == (1, 1)
    with pytest.raises(EndstopError, match="None of the 1 examples of this batch has a supervised token"):
        collator([{"text": "hi: hi"}])


def test_B19_the_terminator_is_what_the_template_writes_not_the_tokenizers_eos() -> None:
    chosen = endstop_tokenizer(FAMILIES["gemma"], "<bos>", "<eos>")
    collator = ChatCollator(chosen)
    messages = [user("a"), assistant("yes"), user("b"), assistant("no")]
    batch = collator([{"messages": messages}])
    end = chosen.token_to_id("<end_of_turn>")
    assert said(collator, batch) == ["yes<end_of_turn>no<end_of_turn>"]
    assert lists(batch, "input_ids")[0].count(end) == 4
    assert counted(collator, batch, [end]).supervised_stop_rate == 1.0


def test_B19_a_tokenizer_alone_gives_the_terminator_of_its_template() -> None:
    chosen = transformers_tokenizer(FAMILIES["gemma"], "<bos>", "<eos>")
    ends = {chosen.eos_token_id, chosen.convert_tokens_to_ids("<end_of_turn>")}
    collator = ChatCollator(chosen)
    assert collator.stop_ids == ends
    batch = collator([{"prompt": "a", "completion": "b<end_of_turn>\n"}, {"prompt": "a", "completion": "b"}])
    assert said(collator, batch) == ["b<end_of_turn>", "b<eos>"]


def test_B21_a_newline_behind_the_terminator_is_no_reason_for_a_second_one() -> None:
    chosen = endstop_tokenizer(FAMILIES["chatml"])
    end = chosen.eos_token_id
    [newline] = chosen.encode_text("\n")
    collator = ChatCollator(chosen)
    row = {"input_ids": [33, 34, end, newline], "assistant_masks": [0, 1, 1, 0]}
    for example in (row, {**row, "complete": True}):
        batch = collator([example])
        assert lists(batch, "input_ids") == [[33, 34, end, newline]]
        assert lists(batch, "labels") == [[IGNORE, 34, end, IGNORE]]
    missing = collator([{"input_ids": [33, 34, newline], "assistant_masks": [0, 1, 0], "complete": True}])
    assert lists(missing, "labels") == [[IGNORE, 34, IGNORE, end]]
    spelled = collator([{"prompt": "a", "completion": "b<|im_end|>\n"}, {"messages": TURNS[:2]}])
    assert said(collator, spelled) == ["b<|im_end|>", "yo<|im_end|>"]


def test_B23_every_packed_sample_keeps_its_own_supervised_eos() -> None:
    collator = ids_collator(pack_length=8, pad_id=0)
    batch = collator([{"input_ids": ids, "complete": True} for ids in ([5, 6], [7], [8, 8])])
    assert lists(batch, "input_ids") == [[5, 6, 2, 7, 2, 8, 8, 2]]
    assert lists(batch, "labels") == [[IGNORE, 6, 2, IGNORE, 2, IGNORE, 8, 2]]
    assert lists(batch, "position_ids") == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert "attention_mask" not in batch
    whole = collator([{"input_ids": [5, 6, 7, 8, 9, 5, 6, EOS]}, {"input_ids": [9, EOS]}])
    assert lists(whole, "input_ids") == [[5, 6, 7, 8, 9, 5, 6, 2], [9, 2, 0, 0, 0, 0, 0, 0]]


def test_B25_a_cut_row_gets_no_supervised_eos_and_a_full_one_is_not_cut() -> None:
    collator = ids_collator(max_length=4, pad_id=0)
    batch = collator([{"input_ids": ids} for ids in ([5, 2], [5, 6, 7, 2], [5, 6, 7, 8, 9, 2])])
    assert lists(batch, "labels") == [[5, 2, IGNORE, IGNORE], [5, 6, 7, 2], [5, 6, 7, 8]]
    assert (collator.so_far.rows, collator.so_far.cut_rows) == (3, 1)
    # "Complete" holds before the cut: nothing puts a terminator behind it.
    batch = collator([{"input_ids": [5, 6, 7, 8, 9], "complete": True}])
    assert lists(batch, "labels") == [[5, 6, 7, 8]]


def test_B25_chats_and_completions_are_cut_in_the_same_way(directory: Path) -> None:
    collator = ChatCollator(directory, max_length=9)
    end = collator.terminator
    batch = collator([{"messages": TURNS}, {"prompt": "hi", "completion": "x" * 40}])
    labels = lists(batch, "labels")
    assert labels[0].count(end) == 1
    assert labels[1].count(end) == 0
    assert collator.so_far.cut_rows == 2
    assert batch["input_ids"].shape == (2, 9)


def test_B26_terminators_that_a_training_cannot_teach() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=480, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    chosen = endstop_tokenizer(FAMILIES["chatml"])
    end = chosen.eos_token_id
    collator = ChatCollator(chosen)
    assert collator.untrainable(model, untrained_ids=[end]) == {}
    model.peft_config = {"default": LORA}
    assert "never trained" in collator.untrainable(model, untrained_ids=[end])[end]
    assert collator.untrainable(model) == {}
    model.peft_config = {"default": {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}}
    assert collator.untrainable(model, untrained_ids=[end]) == {}
    assert ChatCollator(chosen, stops=[480]).untrainable(model) == {
        480: "id 480 is out of range: the model has 480 rows"
    }
