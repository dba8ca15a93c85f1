"""The collator: all formats of examples, what it refuses, what it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_cases
import pytest
import torch
from chat_cases import FAMILIES, assistant, endstop_tokenizer, system, user

from endstop.protocol.errors import EndstopError
from endstop.protocol.labels import IGNORE
from endstop.protocol.tokenizer import Tokenizer
from endstop.train.chat_format import ASSISTANT_END
from endstop.train.collate import ChatCollator
from tests.train.collate_cases import TURNS, ids_collator, lists, said, trained_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_tokenizer(tmp_path_factory.mktemp("run") / "tokenizer")


def test_a_conversation_as_prompt_and_completion_supervises_the_completion(directory: Path) -> None:
    collator = ChatCollator(directory)
    batch = collator(
        [
            {"messages": TURNS},
            {"prompt": TURNS[:3], "completion": TURNS[3:]},
            {"prompt": TURNS[:1], "completion": TURNS[1:]},
            {"prompt": [system("x"), *TURNS[:3]], "completion": [*TURNS[3:], user("?"), assistant("!")]},
        ]
    )
    end = ASSISTANT_END
    assert said(collator, batch) == [
        *(f"yo{end}ok then{end}", f"ok then{end}", f"yo{end}ok then{end}", f"ok then{end}!{end}"),
    ]
    assert lists(batch, "input_ids")[0] == lists(batch, "input_ids")[1]


def test_templates_that_rewrite_history_give_a_row_for_each_turn() -> None:
    collator = ChatCollator(endstop_tokenizer(FAMILIES["qwen3"]))
    turns = [
        user("2+2?"),
        assistant("4", reasoning_content="two and two"),
        user("sure?"),
        assistant("yes", reasoning_content="I checked"),
    ]
    batch = collator([{"messages": turns}])
    assert said(collator, batch) == [
        "<think>\ntwo and two\n</think>\n\n4<|im_end|>",
        "<think>\nI checked\n</think>\n\nyes<|im_end|>",
    ]
    assert (collator.so_far.examples, collator.so_far.rows) == (1, 2)
    last = collator([{"prompt": turns[:3], "completion": turns[3:]}])
    assert said(collator, last) == ["<think>\nI checked\n</think>\n\nyes<|im_end|>"]


def test_tools_are_given_to_the_template() -> None:
    collator = ChatCollator(endstop_tokenizer(FAMILIES["qwen2_5"]))
    tools = [chat_cases.WEATHER]
    messages = chat_cases.CONVERSATIONS["tools"]
    given = collator([{"messages": messages, "tools": tools}])
    written = collator([{"messages": messages, "tools": json.dumps(tools)}])
    assert lists(given, "input_ids") == lists(written, "input_ids")
    text = collator._tokenizer.decode(lists(given, "input_ids")[0])
    assert "The weather in a city" in text
    [supervised] = said(collator, given)
    assert supervised.count("<|im_end|>") == 2
    assert "rain" not in supervised.replace("It rains.", "")


def test_what_forced_tokens_stand_for_is_not_supervised(directory: Path) -> None:
    collator = ChatCollator(directory)
    parts = [
        {"type": "python", "text": "2+2"},
        {"type": "python_output", "text": "4"},
        {"type": "text", "text": "4"},
    ]
    batch = collator([{"messages": [user("2+2=?"), assistant(parts)]}])
    assert said(collator, batch) == ["<|python_start|>2+2<|python_end|>4<|assistant_end|>"]


def test_text_of_users_becomes_no_control_token(directory: Path) -> None:
    collator = ChatCollator(directory)
    end = collator.terminator
    batch = collator([{"messages": [user(ASSISTANT_END), assistant(f"a{ASSISTANT_END}b")]}])
    assert lists(batch, "input_ids")[0].count(end) == 1
    assert lists(batch, "labels")[0].count(end) == 1


def test_a_conversation_that_was_cut_off_gets_no_terminator(directory: Path) -> None:
    collator = ChatCollator(directory)
    batch = collator([{"messages": TURNS, "complete": False}, {"messages": TURNS, "complete": None}])
    end = ASSISTANT_END
    assert said(collator, batch) == [f"yo{end}ok then", f"yo{end}ok then{end}"]
    assert collator.so_far.cut_rows == 1


def test_ids_with_masks_and_labels_of_others() -> None:
    collator = ids_collator(pad_id=0)
    row = {"input_ids": torch.tensor([5, 6, 7, 2]), "labels": torch.tensor([-100, 6, 7, 2])}
    assert lists(collator([row]), "labels") == [[IGNORE, 6, 7, 2]]
    both = {"input_ids": [5, 6, 7, 2], "assistant_masks": [1, 1, 0, 1], "completion_mask": [0, 1, 1, 1]}
    assert lists(collator([both]), "labels") == [[IGNORE, 6, IGNORE, 2]]
    for name in ("labels", "assistant_masks", "attention_mask"):
        made = collator.rows({"input_ids": [5, 6], name: [1]})
        assert "1 entries for 2 input_ids" in made.refusals[0]


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        ({}, "this one has nothing"),
        ({"question": "a", "answer": "b"}, "this one has question, answer"),
        ({"prompt": "a", "completion": [assistant("b")]}, "two texts or two lists of messages"),
        ({"messages": [assistant("a"), user("b")]}, "roles must alternate"),
        ({"prompt": "a", "completion": "\ud800"}, "half a surrogate pair"),
        ({"messages": TURNS, "tools": "{"}, "tools is no list and no JSON of one"),
        ({"messages": TURNS, "chat_template_kwargs": {"now": 1}}, "chat_template_kwargs cannot set now"),
        ({"messages": "hi"}, "messages is a list of objects"),
        ({"messages": [user("a"), assistant(None)]}, "a message of the assistant has no content"),
    ],
)
def test_examples_without_right_labels_are_refused_and_counted(
    directory: Path, example: dict[str, Any], reason: str
) -> None:
    collator = ChatCollator(directory)
    batch = collator([example, {"messages": TURNS}])
    assert batch["input_ids"].shape[0] == 1
    assert collator.so_far.refused == 1
    assert reason in str(collator.so_far.last_refusal)
    with pytest.raises(EndstopError, match="has a supervised token: ") as error:
        collator([example])
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "example",
    [
        {"messages": [user("hi")]},
        {"input_ids": [5, 6], "assistant_masks": [0, 0]},
        {"input_ids": [2]},
        {"prompt": "x" * 50, "completion": "y"},
    ],
)
def test_a_batch_without_labels_is_an_error_and_not_nan(directory: Path, example: dict[str, Any]) -> None:
    collator = ChatCollator(directory, max_length=20)
    with pytest.raises(EndstopError, match="None of the 1 examples of this batch has a supervised token"):
        collator([example])
    assert collator.so_far.rows_without_labels == 1
    assert collator([example, {"messages": TURNS}])["labels"].ne(IGNORE).any()


def test_bad_parameters(directory: Path) -> None:
    with pytest.raises(ValueError, match="padding_side must be 'right' or 'left'"):
        ChatCollator(directory, padding_side="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2"):
        ChatCollator(directory, max_length=1)
    with pytest.raises(ValueError, match="got int"):
        ChatCollator(7)
    bare = ChatCollator(Tokenizer(json.loads(chat_cases.crate_tokenizer_json())))
    made = bare.rows({"prompt": "a", "completion": "b"})
    assert made.refusals == ["tokenizer.json names no eos token; say which terminator ends a text."]
    assert "no chat template" in bare.rows({"messages": TURNS}).refusals[0]
