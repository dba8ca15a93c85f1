"""Stopping where the text has regions: reasoning, tool calls, the answer."""

from __future__ import annotations

import json

import pytest

from endstop import SamplingParams, StopMachine, StopSet, TokenBytes
from endstop.protocol.toolcalls import Reasoning, ToolSyntax

HERMES = ToolSyntax("hermes")
ONE_CALL = ToolSyntax("hermes", parallel=False)
THINK = Reasoning("<think>", "</think>")


def run(pieces, *, special=(), roles=None, end=None, tools=None, reasoning=None, split=None, **params):
    """The machine behind these pieces; `end` is the index of a piece that is in the stop set."""
    data = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
    stops = StopSet.of(roles or ({} if end is None else {end: "turn_end"}))
    table = TokenBytes(data, special=set(special) | set(stops.ids))
    machine = StopMachine(stops, SamplingParams(**params), table, tools=tools, reasoning=reasoning)
    content, reasoning_text, text, calls = "", "", "", []
    for token_id in range(len(data)):
        step = machine.push(token_id)
        text += step.text
        content += step.content
        reasoning_text += step.reasoning
        calls += step.tool_calls
        if step.finished:
            break
    assert text == machine.text
    assert content == machine.content
    assert reasoning_text == machine.reasoning
    assert tuple(calls) == machine.tool_calls
    return machine


CALL_LA = ["<tool_call>", '{"name":"w","arguments":{"c":"LA"}}', "</tool_call>"]
CALL_NY = ["\n<tool_call>", '{"name":"w","arguments":{"c":"NY"}}', "</tool_call>"]
EOS = "<eos>"


def arguments(machine):
    return [(call.name, json.loads(call.arguments)) for call in machine.tool_calls]


def test_B53_the_close_tag_ends_a_call_and_the_terminator_ends_the_turn():
    machine = run([*CALL_LA, *CALL_NY, EOS], end=6, tools=HERMES)
    assert arguments(machine) == [("w", {"c": "LA"}), ("w", {"c": "NY"})]
    assert (machine.finish_reason, machine.stop_kind) == ("tool_calls", "turn_end")
    assert machine.content.strip() == ""


def test_B53_one_call_only_where_parallel_calls_are_off():
    machine = run([*CALL_LA, *CALL_NY, EOS], end=6, tools=ONE_CALL)
    assert arguments(machine) == [("w", {"c": "LA"})]
    assert (machine.finish_reason, machine.stop_kind) == ("tool_calls", "tool_end")
    assert machine.generated_token_ids == machine.token_ids == [0, 1, 2]
    assert machine.stop_reason == "</tool_call>"


def test_broken_json_between_tags_is_reported_and_no_call():
    machine = run(["<tool_call>", '{"name": w}', "</tool_call>", EOS], end=3, tools=HERMES)
    assert (machine.tool_calls, machine.broken_calls, machine.content) == ((), ('{"name": w}',), "")
    assert machine.finish_reason == "stop"


def test_B53_a_close_tag_in_a_string_is_no_close_tag():
    inner = [
        "<tool_call>",
        '{"name":"w","arguments":{"c":"a </tool_call> b \\" </tool_call>"}}',
        "</tool_call>",
    ]
    machine = run([*inner, "x", EOS], end=4, tools=ONE_CALL)
    assert arguments(machine) == [("w", {"c": 'a </tool_call> b " </tool_call>'})]
    assert machine.generated_token_ids == [0, 1, 2]


def test_B53_one_token_that_closes_the_call_and_goes_on_is_cut_behind_the_call():
    machine = run(["<tool_call>", '{"name":"w","arguments":{}}', "</tool_call> and more"], tools=ONE_CALL)
    assert machine.text == '<tool_call>{"name":"w","arguments":{}}</tool_call>'
    assert (machine.stop_kind, machine.token_ids) == ("tool_end", [0, 1, 2])


def test_B07_a_tool_hand_over_token_ends_the_row_as_tool_end():
    pieces = ["<|python_tag|>", '{"name": "get_weather", "parameters": {"city": "SF"}}', "<|eom_id|>", "junk"]
    machine = run(pieces, special=[0, 2], roles={2: "tool_end"}, tools=ToolSyntax("llama3"))
    assert arguments(machine) == [("get_weather", {"city": "SF"})]
    assert (machine.finish_reason, machine.stop_kind, machine.stop_reason) == ("tool_calls", "tool_end", 2)
    # Raw generation parses no calls: the kind is the same, the reason is `stop`.
    machine = run(pieces, special=[0, 2], roles={2: "tool_end"})
    assert (machine.finish_reason, machine.stop_kind) == ("stop", "tool_end")
    assert machine.text == pieces[1]


CUT = ["<tool_call>", '{"name":"write",', '"arguments":{', '"path":"a.py",', '"content":"x = ']


def test_B54_a_call_cut_by_the_limit_is_no_call():
    machine = run([*CUT, "1"], tools=HERMES, max_tokens=5)
    assert (machine.finish_reason, machine.tool_calls, machine.content) == ("length", (), "")
    assert machine.open_call is not None
    assert "a.py" in machine.open_call
    assert len(machine.generated_token_ids) == 5


def test_B54_a_call_complete_exactly_at_the_limit_is_a_length():
    machine = run([*CALL_LA, "x"], tools=HERMES, max_tokens=3)
    assert machine.finish_reason == "length"
    assert arguments(machine) == [("w", {"c": "LA"})]
    # Where only one call is wanted, the call itself is the end, and it came first.
    machine = run([*CALL_LA, "x"], tools=ONE_CALL, max_tokens=3)
    assert (machine.finish_reason, machine.stop_kind) == ("tool_calls", "tool_end")


def test_stop_strings_are_searched_in_the_answer_only_by_default():
    pieces = ["<think>", "so END ", "of thought", "</think>", "answer ", "END", "more"]
    machine = run(pieces, reasoning=THINK, stop=["END"])
    assert (machine.text, machine.stop_kind) == ("<think>so END of thought</think>answer ", "stop_string")
    assert (machine.reasoning, machine.content) == ("so END of thought", "answer ")
    machine = run(pieces, reasoning=THINK, stop=["END"], stop_scope="all")
    assert machine.text == "<think>so "
    machine = run(pieces, stop=["END"])
    assert machine.text == "<think>so "


def test_reasoning_that_the_prompt_has_opened():
    pieces = ["so END ", "</think>", "an", "swer END"]
    machine = run(pieces, reasoning=Reasoning("<think>", "</think>", open=True), stop=["END"])
    assert (machine.reasoning, machine.content) == ("so END ", "answer ")


def test_a_stop_string_never_matches_across_a_border():
    pieces = ["E", "N", "<tool_call>", '{"name":"w","arguments":{}}', "</tool_call>", "D"]
    machine = run(pieces, tools=HERMES, stop=["END", "</tool_call>D", "N<tool_call>{"])
    assert not machine.finished
    pieces = ["</th", "ink>", "D"]
    machine = run(pieces, reasoning=Reasoning(open=True), stop=["k>D"])
    assert not machine.finished


@pytest.mark.parametrize("scope", ["answer", "all"])
def test_a_stop_string_that_is_a_tag_is_always_searched(scope):
    pieces = ["<think>", "hm", "</th", "ink>", "answer"]
    machine = run(pieces, reasoning=THINK, stop=["</think>"], stop_scope=scope)
    assert (machine.text, machine.stop_reason) == ("<think>hm", "</think>")


def test_arguments_may_hold_a_stop_string():
    call = ["<tool_call>", '{"name":"w","arguments":{"text":"a\\n', "END", ' b"}}', "</tool_call>", "END"]
    machine = run(call, tools=HERMES, stop=["END"])
    assert arguments(machine) == [("w", {"text": "a\nEND b"})]
    assert machine.stop_kind == "stop_string"
    # A stop string is no natural end, so no `tool_calls` is claimed.
    assert machine.finish_reason == "stop"


def test_forced_text_is_no_tag():
    pieces = TokenBytes([b"<tool_call>", b'{"name":"w","arguments":{}}', b"</tool_call>", b"a"])
    machine = StopMachine(StopSet.of({}), SamplingParams(), pieces, tools=HERMES)
    for token_id in (0, 1, 2):
        machine.push(token_id, forced=True)
    machine.push(3)
    machine.finish("cancelled")
    assert machine.tool_calls == ()
    assert machine.content == machine.text == '<tool_call>{"name":"w","arguments":{}}</tool_call>a'


def test_forced_text_divides_a_tag():
    pieces = TokenBytes([b"<tool", b"x", b"_call>", b" END", b"</think>"])
    machine = StopMachine(StopSet.of({}), SamplingParams(stop=["END"]), pieces, tools=HERMES)
    machine.push(0)
    machine.push(1, forced=True)
    machine.push(2)
    assert machine.push(3).stop_kind == "stop_string"
    assert machine.content == machine.text == "<toolx_call> "
    # Forced text is no border of a region either.
    machine = StopMachine(
        StopSet.of({}), SamplingParams(stop=["END"]), pieces, reasoning=Reasoning(open=True)
    )
    machine.push(4, forced=True)
    assert not machine.push(3).finished
    assert (machine.reasoning, machine.content) == ("</think> END", "")


def test_min_tokens_and_regions():
    pieces = ["<think>", "x", "</think>", "END", "a", "END"]
    machine = run(pieces, reasoning=THINK, stop=["END"], min_tokens=4)
    assert machine.text == "<think>x</think>ENDa"


def test_forced_text_divides_a_tag_for_both_readers():
    table = TokenBytes([b"<thi", b"X", b"nk>", b"END"])
    machine = StopMachine(StopSet.of({}), SamplingParams(stop=["END"]), table, reasoning=THINK)
    machine.push(0)
    machine.push(1, forced=True)
    machine.push_many([2, 3])
    assert (machine.stop_kind, machine.text, machine.content) == ("stop_string", "<thiXnk>", "<thiXnk>")


def test_an_untagged_call_does_not_begin_behind_forced_text_and_ends_nothing_there():
    table = TokenBytes([b"x", b'{"name": "a", "parameters": {}}'])
    tools = ToolSyntax("llama3", parallel=False)
    machine = StopMachine(StopSet.of({}), SamplingParams(), table, tools=tools)
    machine.push(0, forced=True)
    machine.push(1)
    assert (machine.stop_kind, machine.tool_calls) == (None, ())
    assert machine.content == machine.text == 'x{"name": "a", "parameters": {}}'


def test_forced_text_inside_a_call_is_part_of_it_for_both_readers():
    table = TokenBytes([b'<tool_call>{"name": "a", "arguments": {}}', b"</tool_call>", b"zz", b"END"])
    machine = StopMachine(StopSet.of({}), SamplingParams(stop=["END"]), table, tools=HERMES)
    machine.push(0)
    machine.push(1, forced=True)
    machine.push_many([2, 3])
    assert [call.name for call in machine.tool_calls] == ["a"]
    assert (machine.content, machine.stop_kind) == ("zz", "stop_string")
