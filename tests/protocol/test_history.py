"""Answers that become history, and answers that are continued."""

from __future__ import annotations

from typing import Any

import chat_cases
import pytest
from chat_cases import NOW, assistant, endstop_tokenizer, system, transformers_tokenizer, user

from endstop.protocol.errors import RenderRefused
from endstop.protocol.history import (
    close_turn,
    continued_prompt,
    ids_between_turns,
    next_prompt,
    render_continuation,
    with_answer,
)
from endstop.protocol.render import ChatRenderer

# assistant_start 3, assistant_end 4, user_start 1, user_end 2, BOS 0
PROMPT = [0, 1, 40, 2, 3]
NEXT = [1, 60, 2, 3]


def test_B52_a_turn_cut_by_the_limit_is_closed_before_the_next_user_turn() -> None:
    prompt = next_prompt(PROMPT, [50, 51], NEXT, stop_ids={4}, terminator=4)
    assert prompt == [0, 1, 40, 2, 3, 50, 51, 4, 1, 60, 2, 3]


def test_B52_a_turn_to_be_continued_is_left_open() -> None:
    assert continued_prompt(PROMPT, [50, 51], stop_ids={4}) == [*PROMPT, 50, 51]
    assert continued_prompt(PROMPT, [50, 51, 4], stop_ids={4}) == [*PROMPT, 50, 51]


@pytest.mark.parametrize(
    ("output", "closed"),
    [
        ([50, 51], [50, 51, 4]),
        ([50, 51, 4], [50, 51, 4]),
        ([50, 51, 9], [50, 51, 9]),
        ([4], [4]),
        ([], [4]),
        ([4, 50], [4, 50, 4]),
    ],
)
def test_B52_a_terminator_is_never_doubled_and_never_missing(output: list[int], closed: list[int]) -> None:
    assert close_turn(output, {4, 9}, 4) == closed


def test_B52_a_model_without_terminator_says_so() -> None:
    assert close_turn([5, 2], {2}, None) == [5, 2]
    with pytest.raises(RenderRefused, match="no terminator"):
        close_turn([5], {2}, None)


def renderer(name: str) -> ChatRenderer:
    specials = chat_cases.SPECIALS.get(name, ("<s>", "<|im_end|>"))
    return ChatRenderer(endstop_tokenizer(chat_cases.FAMILIES[name], *specials))


CHAT = [system("Be brief."), user("hi")]


@pytest.mark.parametrize("name", ["chatml", "llama2", "llama3", "gemma", "zephyr", "qwen2_5", "vicuna"])
def test_B52_message_level_closing_and_continuing(name: str) -> None:
    chat = renderer(name)
    asked = chat.render(CHAT, add_generation_prompt=True)
    history = with_answer(CHAT, "I think", truncated=True)
    assert history[-1] == {"role": "assistant", "content": "I think", "truncated": True}
    closed = chat.render([*history, user("go on")], add_generation_prompt=True)
    assert closed.refusal is None
    [turn] = closed.supervision.turns
    assert turn.terminator is not None
    assert closed.ids[turn.terminator] in closed.stop_ids
    opened = render_continuation(chat, history)
    assert opened.text.endswith("I think")
    assert opened.text.startswith(asked.text)
    assert opened.mask is not None
    assert not any(i in opened.stop_ids for i, m in zip(opened.ids, opened.mask, strict=True) if m)
    said = opened.text[opened.supervision.turns[0].ranges[0][0] :]
    assert said.strip() == "I think"


@pytest.mark.parametrize("name", chat_cases.FAMILIES)
@pytest.mark.parametrize("content", ["I think", " I think ", "I\n\n", "x <|im_", "{{ x }}", "谢"])
def test_continued_messages_equal_those_of_transformers(name: str, content: str) -> None:
    specials = chat_cases.SPECIALS.get(name, ("<s>", "<|im_end|>"))
    reference = transformers_tokenizer(chat_cases.FAMILIES[name], *specials)
    messages = [user("hi"), assistant(content)]
    options = {"date_string": "1 Jan 2030"} if name == "llama3_1" else {}
    try:
        text = reference.apply_chat_template(messages, continue_final_message=True, tokenize=False, **options)
    except ValueError:
        with pytest.raises(RenderRefused):
            render_continuation(renderer(name), messages, **options)
        return
    rendered = render_continuation(renderer(name), messages, **options)
    if name != "gptoss_style":
        assert rendered.text == text
        assert rendered.ids == reference(text, add_special_tokens=False).input_ids
    assert rendered.message_spans[1].content[-1][1] == len(rendered.text)


def test_an_empty_answer_is_begun_anew() -> None:
    for empty in (assistant(""), assistant("  \n"), assistant()):
        rendered = render_continuation(renderer("llama3"), [user("hi"), empty])
        assert rendered.text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


@pytest.mark.parametrize("messages", [[], [user("hi")]])
def test_only_answers_can_be_continued(messages: list[Any]) -> None:
    with pytest.raises(RenderRefused, match="only an assistant message"):
        render_continuation(renderer("chatml"), messages)


@pytest.mark.parametrize("name", ["chatml", "llama2", "llama3", "gemma", "zephyr", "qwen3", "mistral_v1"])
def test_the_next_prompt_is_made_of_the_ids_that_were_seen_and_said(name: str) -> None:
    chat = renderer(name)
    stop_ids = chat.render([user("hi"), assistant("yo")]).stop_ids
    tokenizer = chat.tokenizer
    asked = chat.render([user("hi")], add_generation_prompt=True)
    said = tokenizer.encode("yo", add_special_tokens=False)
    between = ids_between_turns(chat, [user("hi")], [user("bye")])
    terminator = chat.render([user("hi"), assistant("yo")]).supervision.turns[0].terminator
    assert terminator is not None
    end = chat.render([user("hi"), assistant("yo")]).ids[terminator]
    prompt = next_prompt(asked.ids, said, between, stop_ids=stop_ids, terminator=end)
    whole = chat.render([user("hi"), assistant("yo"), user("bye")], add_generation_prompt=True)
    spaces = (" ",) if name == "llama2" else ()
    expected, got = whole.text, tokenizer.decode(prompt, skip_special_tokens=False)
    for space in spaces:
        expected, got = expected.replace(space, ""), got.replace(space, "")
    assert got == expected


def test_the_next_prompt_is_refused_where_history_is_closed_otherwise() -> None:
    with pytest.raises(RenderRefused, match="does not close earlier answers"):
        ids_between_turns(renderer("gptoss_style"), [user("hi")], [user("bye")], now=NOW)
