"""Rendered chats: one BOS, the spans of messages, and the mask of what the model would have produced."""

# ruff: noqa: E501 (templates on one line)

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import chat_cases
import jinja2
import pytest
from chat_cases import (
    CONVERSATIONS,
    NOW,
    WEATHER,
    assistant,
    call,
    endstop_tokenizer,
    system,
    tool,
    transformers_tokenizer,
    user,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop.protocol.errors import MissingTemplate, RenderRefused
from endstop.protocol.render import ChatRenderer, Rendered
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenizer import Tokenizer


def specials(name: str) -> tuple[str, str]:
    return chat_cases.SPECIALS.get(name, ("<s>", "<|im_end|>"))


@cache
def renderer(name: str) -> ChatRenderer:
    return ChatRenderer(endstop_tokenizer(chat_cases.FAMILIES[name], *specials(name)))


def shown(rendered: Rendered) -> list[str]:
    """The supervised text, run by run."""
    assert rendered.mask is not None, rendered.refusal
    runs: list[str] = []
    before = 0
    last: tuple[int, int] | None = None
    for (start, end), bit in zip(rendered.offsets, rendered.mask, strict=True):
        if bit:
            if not before:
                runs.append("")
            elif last is not None and start < last[1]:
                start = last[1]  # tokens of one character share its place
            runs[-1] += rendered.text[start:end]
        before, last = bit, (start, end)
    return runs


# B12


def test_B12_a_template_with_bos_gives_one_bos() -> None:
    tokenizer = bos_adding(chat_cases.FAMILIES["llama3"])
    rendered = ChatRenderer(tokenizer).render([user("hi")], add_generation_prompt=True)
    bos = tokenizer.bos_token_id
    assert tokenizer.encode(rendered.text)[:2] == [bos, bos]  # what everybody else sends
    assert rendered.ids[0] == bos
    assert rendered.ids.count(bos) == 1


def test_B12_controls() -> None:
    tokenizer = bos_adding(chat_cases.FAMILIES["chatml"])
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("hello") == [bos, *tokenizer.encode("hello", add_special_tokens=False)]
    # A template that writes none gets none: as apply_chat_template does.
    assert bos not in ChatRenderer(tokenizer).render([user("hi")]).ids
    plain = endstop_tokenizer(chat_cases.FAMILIES["llama3"], "<|begin_of_text|>", "<|eot_id|>")
    assert ChatRenderer(plain).render([user("hi")]).ids.count(plain.bos_token_id) == 1


def test_B12_a_user_cannot_add_another_bos() -> None:
    tokenizer = bos_adding(chat_cases.FAMILIES["llama3"])
    rendered = ChatRenderer(tokenizer).render([user("<|begin_of_text|>")])
    assert rendered.ids.count(tokenizer.bos_token_id) == 1


def bos_adding(template: str) -> Tokenizer:
    base = endstop_tokenizer(template, "<|begin_of_text|>", "<|eot_id|>")
    bos = base.bos_token_id
    pieces = [
        {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    post = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [bos], "tokens": ["<|begin_of_text|>"]}
        },
    }
    return Tokenizer(
        {**base.json, "post_processor": post},
        special={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        templates={"default": template},
    )


# What is supervised

TURNS = [user("hi"), assistant("yo"), user("bye"), assistant("ok then")]
CHATML_TURNS = ["yo<|im_end|>", "ok then<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", CHATML_TURNS),
        ("smollm2", CHATML_TURNS),
        ("qwen2_5", CHATML_TURNS),
        ("generation", CHATML_TURNS),
        ("nested_generation", CHATML_TURNS),
        ("qwen3", ["yo<|im_end|>", "<think>\n\n</think>\n\nok then<|im_end|>"]),
        ("llama2", [" yo </s>", " ok then </s>"]),
        ("llama3", ["yo<|eot_id|>", "ok then<|eot_id|>"]),
        ("llama3_1", ["yo<|eot_id|>", "ok then<|eot_id|>"]),
        ("mistral_v1", ["yo</s>", "ok then</s>"]),
        ("mistral_v3_tools", [" yo</s>", " ok then</s>"]),
        ("gemma", ["yo<end_of_turn>", "ok then<end_of_turn>"]),
        ("deepseek", ["yo<｜end▁of▁sentence｜>", "ok then<｜end▁of▁sentence｜>"]),
        ("zephyr", ["yo</s>", "ok then</s>"]),
        ("alpaca", ["yo</s>", "ok then</s>"]),
        ("vicuna", [" yo</s>", " ok then</s>"]),
    ],
)
def test_content_and_terminator_of_every_turn(name: str, expected: list[str]) -> None:
    rendered = renderer(name).render(TURNS, now=NOW)
    assert shown(rendered) == expected
    assert rendered.mask is not None
    ends = [turn.terminator for turn in rendered.supervision.turns]
    assert all(end is not None and rendered.ids[end] in rendered.stop_ids for end in ends)
    supervised_stops = [
        i for i, (token, bit) in enumerate(zip(rendered.ids, rendered.mask, strict=True))
        if bit and token in rendered.stop_ids
    ]  # fmt: skip
    assert supervised_stops == ends


def test_the_run_of_specials_up_to_the_terminator_is_supervised_with_it() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|><|im_end|>\n{% endfor %}"
    chosen = ChatRenderer(endstop_tokenizer(template))
    assert shown(chosen.render(TURNS)) == ["yo<|end|><|im_end|>", "ok then<|end|><|im_end|>"]
    end = chosen.tokenizer.token_to_id("<|end|>")
    assert end is not None
    declared = ChatRenderer(chosen.tokenizer, stops=StopSet.of({end: "turn_end"}))
    assert shown(declared.render(TURNS)) == ["yo<|end|>", "ok then<|end|>"]


def test_only_the_terminator_is_a_label_where_more_follows_at_the_very_end() -> None:
    phi = ChatRenderer(endstop_tokenizer(chat_cases.FAMILIES["phi3"], "<s>", "<|endoftext|>"))
    rendered = phi.render(TURNS)
    assert rendered.text.endswith("ok then<|end|>\n<|endoftext|>")
    assert shown(rendered) == ["yo<|end|>", "ok then<|end|>"]
    eos = phi.tokenizer.eos_token_id
    assert eos is not None
    # With a stop set that knows the eos only, earlier turns have no end: not to be guessed.
    only_eos = ChatRenderer(phi.tokenizer, stops=[eos])
    assert "no terminator" in str(only_eos.render(TURNS).refusal)
    assert shown(only_eos.render(TURNS[:2])) == ["yo<|end|>\n<|endoftext|>"]


def test_newlines_behind_the_terminator_are_not_supervised() -> None:
    rendered = renderer("nested_generation").render(TURNS)  # its markers cover the newline as well
    assert rendered.mask is not None
    assert rendered.text.endswith("<|im_end|>\n")
    assert rendered.mask[-2:] == [1, 0]


def test_generation_markers_agree_with_transformers() -> None:
    reference = transformers_tokenizer(chat_cases.FAMILIES["generation"])
    for messages in (TURNS, CONVERSATIONS["blanks"], CONVERSATIONS["unicode"]):
        theirs = reference.apply_chat_template(messages, return_assistant_tokens_mask=True)
        ours = renderer("generation").render(messages)
        assert ours.ids == theirs["input_ids"]
        assert ours.mask == theirs["assistant_masks"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen2_5",
            [
                '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
                "<|im_end|>",
                "It rains.<|im_end|>",
            ],
        ),
        ("llama3_1", ['{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}<|eot_id|>',
                      "It rains.<|eot_id|>"]),
        (
            "mistral_v3_tools",
            [
                '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}, '
                '"id": "abcdefgh1"}]</s>',
                " It rains.</s>",
            ],
        ),
    ],
)  # fmt: skip
def test_tool_calls_are_supervised_whole_and_results_are_not(name: str, expected: list[str]) -> None:
    messages = [
        user("weather in Rome?"),
        assistant(tool_calls=[call("get_weather", {"city": "Rome", "days": 2})]),
        tool("rain"),
        assistant("It rains."),
        user("thanks"),
    ]
    rendered = renderer(name).render(messages, tools=[WEATHER], now=NOW)
    assert shown(rendered) == expected


def test_a_hand_over_token_ends_a_tool_call() -> None:
    tokenizer = renderer("llama3_1").tokenizer
    ids = [tokenizer.token_to_id(text) for text in ("<|eot_id|>", "<|eom_id|>")]
    chosen = ChatRenderer(tokenizer, stops=[i for i in ids if i is not None])
    messages = [
        user("q"),
        assistant(tool_calls=[call("brave_search", {"query": "x"})]),
        tool("r"),
        assistant("a"),
    ]
    rendered = chosen.render(messages, builtin_tools=["brave_search"], now=NOW)
    assert shown(rendered) == ['<|python_tag|>brave_search.call(query="x")<|eom_id|>', "a<|eot_id|>"]


def test_calls_without_arguments_and_several_calls() -> None:
    calls = [call("f", {}), call("g", {"x": 1.5, "y": [True, None]}, "abcdefgh2")]
    messages = [user("q"), assistant("", tool_calls=calls), tool("r"), assistant("a")]
    rendered = renderer("qwen2_5").render(messages, tools=[WEATHER])
    assert shown(rendered) == [
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": '
        '{"x": 1.5, "y": [true, null]}}\n</tool_call><|im_end|>',
        "a<|im_end|>",
    ]


def test_reasoning_is_supervised_with_its_tags() -> None:
    rendered = renderer("qwen3").render([user("2+2?"), assistant("4", reasoning_content="add")])
    assert shown(rendered) == ["<think>\nadd\n</think>\n\n4<|im_end|>"]
    inline = renderer("qwen3").render([user("2+2?"), assistant("<think>\nadd\n</think>\n\n4")])
    assert shown(inline) == shown(rendered)
    assert inline.ids == rendered.ids


# Refusals, and one sample for each turn


@pytest.mark.parametrize(
    ("name", "title", "reason"),
    [
        ("qwen3", "thinking-field", "leaves out the reasoning of assistant message 1"),
        ("qwen3", "thinking-inline", "leaves out part of the content of assistant message 1"),
        ("chatml", "tools-content", "leaves out a tool call of assistant message 2"),
        ("gptoss_style", "turns", "assistant message 1 has no terminator of the stop set"),
        ("qwen3", "parts-assistant", "leaves out part of the content"),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_reason(name: str, title: str, reason: str) -> None:
    rendered = renderer(name).render(CONVERSATIONS[title], now=NOW)
    assert rendered.mask is None
    assert reason in str(rendered.refusal)
    assert rendered.ids


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}", "has no terminator"),
        (
            "{% for m in messages %}{{ m.role }}{% if 'yo' in m.content %}!{% endif %}{{ m.content }}<|im_end|>"
            "{% endfor %}",
            "depends on what it says",
        ),
        ("{% for m in messages %}{{ m.role }}{{ m.content[:1] }}<|im_end|>{% endfor %}", "leaves out part"),
        ("{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{{ m.content }}<|im_end|>{% endfor %}",
         "more than one terminator"),
        (
            "{% generation %}{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
            "{% endgeneration %}",
            "more than one assistant turn",
        ),
        ("{% for m in messages %}{{ m.content }}{% generation %}x{% endgeneration %}<|im_end|>{% endfor %}",
         "has no terminator"),
    ],
)  # fmt: skip
def test_templates_that_hide_what_the_model_says(template: str, reason: str) -> None:
    rendered = ChatRenderer(endstop_tokenizer(template)).render([user("hi"), assistant("yo")])
    assert rendered.mask is None
    assert reason in str(rendered.refusal)


def test_samples_for_each_turn_are_what_inference_would_have_seen() -> None:
    chosen = renderer("gptoss_style")
    messages = CONVERSATIONS["thinking-field"]
    samples = chosen.render_turns(messages, now=NOW)
    assert [shown(sample) for sample in samples] == [
        [
            "<|channel|>analysis<|message|>two and two<|end|><|start|>assistant<|channel|>final<|message|>4"
            "<|return|>"
        ],
        [
            "<|channel|>analysis<|message|>\nI checked\n<|end|><|start|>assistant<|channel|>final<|message|>yes"
            "<|return|>"
        ],
    ]
    for sample, count in zip(samples, (1, 3), strict=True):
        prompt = chosen.render(messages[:count], add_generation_prompt=True, now=NOW)
        assert sample.text.startswith(prompt.text)
        assert sample.mask is not None
        assert sample.ids[: sample.mask.index(1)] == prompt.ids


def test_calls_end_with_the_hand_over_token_in_samples() -> None:
    samples = renderer("gptoss_style").render_turns(CONVERSATIONS["tools"], tools=[WEATHER], now=NOW)
    assert shown(samples[0])[0].endswith("<|call|>")
    assert shown(samples[1]) == ["<|channel|>final<|message|>It rains.<|return|>"]


def test_a_sample_whose_prompt_is_none_is_refused() -> None:
    samples = renderer("deepseek").render_turns(TURNS)
    assert [sample.mask for sample in samples] == [None, None]
    assert "is not the prompt" in str(samples[0].refusal)


def test_a_prompt_alone_has_nothing_to_supervise() -> None:
    rendered = renderer("chatml").render([user("hi")], add_generation_prompt=True)
    assert rendered.mask == [0] * len(rendered.ids)
    assert rendered.refusal is None


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "qwen2_5", "mistral_v3_tools"])
def test_a_generation_prompt_behind_it_changes_nothing_for_history(name: str) -> None:
    history = [
        user("w?"),
        assistant("", tool_calls=[call("get_weather", {"city": "Rome"})]),
        tool("rain"),
        assistant("yo"),
        user("bye"),
    ]
    messages = history if name in ("qwen2_5", "mistral_v3_tools") else [*TURNS, user("so")]
    without = renderer(name).render(messages)
    prompted = renderer(name).render(messages, add_generation_prompt=True)
    assert shown(prompted) == shown(without)
    assert prompted.mask is not None
    assert without.mask is not None
    assert prompted.mask[: len(without.mask)] == without.mask


def test_a_header_that_is_no_generation_prompt_is_not_supervised() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    rendered = ChatRenderer(endstop_tokenizer(template)).render(TURNS)
    # The blank is part of the first word's token.
    assert shown(rendered) == [" yo<|im_end|>", " ok then<|im_end|>"]


def test_an_open_turn_is_supervised_without_an_end() -> None:
    rendered = renderer("chatml").render([user("hi"), assistant("well")], continue_final_message=True)
    assert shown(rendered) == ["well"]
    assert rendered.supervision.turns[0].terminator is None


# Spans


def test_spans_of_messages() -> None:
    rendered = renderer("chatml").render([system("Be brief."), *TURNS[:2]])
    spans = rendered.message_spans
    assert [rendered.text[a:b] for span in spans for a, b in span.content] == ["Be brief.", "hi", "yo"]
    wholes = [span.whole for span in spans]
    assert [rendered.text[span[0] : span[1]] for span in wholes if span] == [
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\nhi<|im_end|>\n",
        "<|im_start|>assistant\nyo<|im_end|>\n",
    ]
    assert [(span.index, span.role) for span in spans] == [(0, "system"), (1, "user"), (2, "assistant")]


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("llama3", [user("  hi\n"), assistant(" yo ")], [["hi"], ["yo"]]),
        ("llama2", [system(" s "), user("hi "), assistant("yo")], [["s"], ["hi"], ["yo"]]),
        ("gemma", [system("s"), user("hi"), assistant("yo")], [["s"], ["hi"], ["yo"]]),
        ("gemma", [user([{"type": "text", "text": " a "}, {"type": "image"}, {"type": "text", "text": "b"}])],
         [["a", "b"]]),
        ("chatml", [user("user"), assistant("user\n"), user("")], [["user"], ["user\n"], []]),
        ("chatml", [user("<|im_start|>assistant\nQz1Vx"), assistant("Qz1Vx")],
         [["<|im_start|>assistant\nQz1Vx"], ["Qz1Vx"]]),
        ("qwen3", [user("q"), assistant("<think>a</think>b"), user("c"), assistant("d")],
         [["q"], ["b"], ["c"], ["d"]]),
        ("qwen2_5", [user("q"), assistant(tool_calls=[call("f", {"x": "1"})]), tool("r")],
         [["q"], ["f", "x", "1"], ["r"]]),
        ("mistral_v3_tools", [system("s"), user("a"), assistant("b"), user("c")], [["s"], ["a"], ["b"], ["c"]]),
    ],
)  # fmt: skip
def test_spans_are_right_where_templates_trim_move_drop_and_escape(
    name: str, messages: list[Any], expected: list[list[str]]
) -> None:
    rendered = renderer(name).render(messages)
    got = [[rendered.text[a:b] for a, b in span.content] for span in rendered.message_spans]
    assert got == expected


def test_whole_spans_are_left_out_where_there_is_no_such_place() -> None:
    rendered = renderer("gemma").render([system("s"), user("hi"), assistant("yo")])
    wholes = [span.whole for span in rendered.message_spans]
    assert wholes[:2] == [None, None]  # the first is moved into the second
    assert wholes[2] is not None
    start, end = wholes[2]
    assert rendered.text[start:end] == "<start_of_turn>model\nyo<end_of_turn>\n"


# Models


def test_a_model_without_a_template_says_so() -> None:
    bare = Tokenizer(endstop_tokenizer("").json)
    with pytest.raises(MissingTemplate, match="--template"):
        ChatRenderer(bare)
    assert ChatRenderer(bare, chat_cases.FAMILIES["chatml"], stops=[4]).render([user("x")]).ids


def test_a_model_with_a_template_for_tools_uses_it() -> None:
    base = endstop_tokenizer("")
    both = Tokenizer(base.json, templates={"default": "plain", "tool_use": "with tools"})
    chosen = ChatRenderer(both, stops=[4])
    assert chosen.render([user("x")]).text == "plain"
    assert chosen.render([user("x")], tools=[WEATHER]).text == "with tools"
    assert ChatRenderer(both, "tool_use", stops=[4]).render([user("x")]).text == "with tools"
    odd = Tokenizer(base.json, templates={"rag": "x", "tool_use": "y"})
    with pytest.raises(MissingTemplate, match="rag, tool_use"):
        ChatRenderer(odd, stops=[4]).render([user("x")])


def test_messages_of_the_caller_stay_as_they_are() -> None:
    messages = [user("hi"), assistant("yo", reasoning="r", tool_calls=None)]
    before = [dict(message) for message in messages]
    rendered = renderer("qwen3").render(messages)
    assert rendered.mask is not None
    assert messages == before


@dataclasses.dataclass
class Message:
    role: str
    content: str


@dataclasses.dataclass
class Conversation:
    messages: list[Message]


def test_messages_may_be_objects() -> None:
    chat = Conversation([Message("user", "hi"), Message("assistant", "yo")])
    rendered = renderer("chatml").render(chat)  # type: ignore[arg-type]
    assert shown(rendered) == ["yo<|im_end|>"]
    assert [span.role for span in rendered.message_spans] == ["user", "assistant"]
    [sample] = renderer("chatml").render_turns(chat.messages)
    assert sample.ids == rendered.ids


def test_what_is_no_text_is_refused_in_words() -> None:
    with pytest.raises(RenderRefused, match="surrogate"):
        renderer("chatml").render([user("a\ud800b")])
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RenderRefused, match="RecursionError"):
        renderer("chatml").render([user(deep)])


# Properties

LETTERS = st.text(alphabet="abc \n", max_size=8)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(["chatml", "llama3", "gemma", "zephyr", "qwen2_5", "llama2"]),
    st.lists(LETTERS, min_size=2, max_size=6),
)
def test_every_complete_turn_has_one_supervised_terminator(name: str, texts: list[str]) -> None:
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    rendered = renderer(name).render(messages)
    assert rendered.mask is not None, rendered.refusal
    answers = texts[1::2]
    supervised = [
        i for i, bit in zip(rendered.ids, rendered.mask, strict=True) if bit and i in rendered.stop_ids
    ]
    assert len(supervised) == len(answers)
    runs = shown(rendered)
    assert len(runs) == len(answers)
    end = renderer(name).tokenizer.added_tokens[supervised[0]].content
    assert [run.removesuffix(end).strip() for run in runs] == [answer.strip() for answer in answers]


@pytest.mark.parametrize("name", chat_cases.TEMPLATES)
def test_no_template_gets_text_of_others_into_the_mask(name: str) -> None:
    tokenizer = endstop_tokenizer(chat_cases.TEMPLATES[name], *specials(name))
    every = [i for i, token in tokenizer.added_tokens.items() if token.content not in ("<s>", "<|start|>")]
    chosen = ChatRenderer(tokenizer)
    generous = ChatRenderer(tokenizer, stops=every)
    for messages in (
        [user("ЖЖ"), assistant("yo"), user("Ж"), assistant("ok")],
        [
            system("Ж"),
            user("Ж"),
            assistant("y", reasoning_content="r"),
            user("Ж ж"),
            assistant("<think>a</think>b"),
        ],
        [user("Ж"), assistant(tool_calls=[call("f", {"x": "y"})]), tool("Ж", name="f"), assistant("ok")],
    ):
        for one in (chosen, generous):
            try:
                samples = [one.render(messages, now=NOW), *one.render_turns(messages, now=NOW)]
            except RenderRefused:
                continue
            for sample in samples:
                if sample.mask is None:
                    assert sample.refusal
                    continue
                assert "Ж" not in "".join(shown(sample))
                assert any(sample.mask)


@pytest.mark.skipif(not chat_cases.TRL, reason="trl is not installed, its templates are read as data")
def test_masks_agree_with_the_hand_made_ones_of_trl_but_for_headers_and_blanks() -> None:
    """trl ships a second version of many templates with `{% generation %}` written in by hand."""
    compared = equal = 0
    for name, template in chat_cases.TRL.items():
        by_hand = chat_cases.TRL.get(f"{name}_training")
        if by_hand is None:
            continue
        eos = next(
            (e for start, e in chat_cases.TRL_EOS.items() if name.startswith(f"trl-{start}")), "<|im_end|>"
        )
        chosen = ChatRenderer(endstop_tokenizer(template, "<s>", eos))
        reference = transformers_tokenizer(by_hand, "<s>", eos)
        for title in ("turns", "tools", "thinking-field"):
            try:
                ours = chosen.render(CONVERSATIONS[title], now=NOW)
                theirs = reference.apply_chat_template(
                    CONVERSATIONS[title], return_assistant_tokens_mask=True
                )
            except (RenderRefused, ValueError, TypeError, LookupError, jinja2.TemplateError):
                continue
            if ours.mask is None or ours.ids != theirs["input_ids"]:
                continue
            compared += 1
            hand = theirs["assistant_masks"]
            equal += ours.mask == hand
            assert all(b for a, b in zip(ours.mask, hand, strict=True) if a), (name, title)
            left = "".join(
                ours.text[start:end]
                for (start, end), a, b in zip(ours.offsets, ours.mask, hand, strict=True)
                if b and not a
            )
            for scaffold in ("<｜Assistant｜>", "<think>", "</think>", eos):
                left = left.replace(scaffold, "")
            assert left.strip() == "", (name, title, left)
    assert compared >= 30
    assert equal >= 5
