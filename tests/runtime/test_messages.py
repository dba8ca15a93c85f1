"""Messages through the engine: content, reasoning, tool calls; the stream and the result agree."""

from __future__ import annotations

from typing import Any

import pytest

from endstop import Engine, SamplingParams, StopSet, TokenBytes
from endstop.protocol.toolcalls import Reasoning, ToolSyntax
from endstop.runtime.results import CompletionOutput, Delta
from endstop.testing import ScriptedModel

EOS = 1


def say(
    texts: list[str],
    *,
    end: bool = True,
    tools: ToolSyntax | None = None,
    reasoning: Reasoning | None = None,
    **params: Any,
) -> tuple[CompletionOutput, list[Delta]]:
    pieces = TokenBytes([b"?", b"<|im_end|>", *(text.encode() for text in texts)], special={EOS})
    ids = [2 + i for i in range(len(texts))] + [EOS] * end
    engine = Engine(ScriptedModel({(0,): ids}), StopSet.of({EOS: "turn_end"}), pieces)
    options = {"tools": tools, "reasoning": reasoning, "chat": True}
    deltas = list(engine.stream([0], SamplingParams(**params), **options))
    result = engine.generate([0], SamplingParams(**params), **options)[0].outputs[0]
    assert deltas[-1].output == result
    assert "".join(delta.text for delta in deltas) == result.text
    assert "".join(delta.content for delta in deltas) == result.content
    assert "".join(delta.reasoning for delta in deltas) == result.reasoning
    assert tuple(call for delta in deltas for call in delta.tool_calls) == result.tool_calls
    assert engine.stats.rows_computed_after_stop == 0
    return result, deltas


CALLS = [
    "<tool_call>",
    '{"name":"w","arguments":{"c":"LA"}}',
    "</tool_call>",
    "\n<tool_call>",
    '{"name":"w","arguments":{"c":"NY"}}',
    "</tool_call>",
]


def test_B53_the_close_tag_ends_a_call_and_the_terminator_the_turn() -> None:
    both, _ = say(CALLS, tools=ToolSyntax("hermes"))
    assert [call.arguments for call in both.tool_calls] == ['{"c":"LA"}', '{"c":"NY"}']
    assert (both.finish_reason, both.stop_kind) == ("tool_calls", "turn_end")
    one, _ = say(CALLS, tools=ToolSyntax("hermes", parallel=False))
    assert len(one.tool_calls) == 1
    assert (one.finish_reason, one.stop_kind) == ("tool_calls", "tool_end")
    inside, _ = say(
        ["<tool_call>", '{"name":"w","arguments":{"c":"</tool_call>"}}', "</tool_call>"],
        tools=ToolSyntax("hermes", parallel=False),
    )
    assert [call.arguments for call in inside.tool_calls] == ['{"c":"</tool_call>"}']


def test_B54_a_call_cut_by_the_limit_is_none() -> None:
    cut, deltas = say(
        ["<tool_call>", '{"name":"write",', '"arguments":{', '"path":"a.py",', '"content":"x = '],
        end=False,
        tools=ToolSyntax("hermes"),
        max_tokens=5,
    )
    assert (cut.finish_reason, cut.tool_calls, cut.content) == ("length", (), "")
    assert "write" in (cut.open_call or "")
    assert not any(delta.tool_calls for delta in deltas)
    whole, _ = say(CALLS[:3], end=False, tools=ToolSyntax("hermes"), max_tokens=3)
    assert (whole.finish_reason, len(whole.tool_calls)) == ("length", 1)


def test_B55_a_complete_call_and_a_natural_end_are_tool_calls() -> None:
    result, deltas = say(["Wait.", *CALLS[:3]], tools=ToolSyntax("hermes"))
    assert (result.content, result.finish_reason) == ("Wait.", "tool_calls")
    assert deltas[-1].finish_reason == "tool_calls"
    none, _ = say(["Hi"], tools=ToolSyntax("hermes"))
    assert (none.content, none.finish_reason, none.tool_calls) == ("Hi", "stop", ())


def test_B56_one_finish_reason_on_the_last_delta() -> None:
    _, deltas = say(["Hi"])
    assert [delta.finish_reason for delta in deltas] == [None, "stop"]


@pytest.mark.parametrize("open_region", [True, False])
def test_stop_strings_count_in_the_answer_only(open_region: bool) -> None:
    texts = ["a\n", "b</think>", "yes\n", "more"]
    texts = texts if open_region else ["<think>", *texts]
    result, _ = say(texts, reasoning=Reasoning(open=open_region), stop="\n")
    assert (result.reasoning, result.content, result.stop_reason) == ("a\nb", "yes", "\n")
    everywhere, _ = say(texts, reasoning=Reasoning(open=open_region), stop="\n", stop_scope="all")
    assert (everywhere.reasoning, everywhere.content) == ("a", "")


def test_raw_requests_have_no_message() -> None:
    engine = Engine(ScriptedModel({(0,): [2, 1]}), StopSet.of({1: "eos"}), TokenBytes([b"", b"", b"x"]))
    output = engine.generate([0])[0].outputs[0]
    assert (output.text, output.content, output.reasoning, output.tool_calls) == ("x", None, None, ())
