"""The message parser against a slow reading of the whole text, and against itself under any split."""

from __future__ import annotations

import os
import time
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from endstop.protocol.toolcalls import MessageParser, Reasoning, ToolSyntax
from tests.protocol.message_oracle import read

PIECES = {
    "hermes": [
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "_call>",
        "</tool_",
        '{"name": "f", "arguments": {"c": "</tool_call>"}}',
    ],
    "llama3": [
        "<|python_tag|>",
        '{"name": "f", "parameters": {"c": 1}}',
        "; ",
        "f.call(",
        'q="a)\\"b"',
        ")",
        '{ "name"',
        "<|python",
        '{"nam',
        '{"type": "function", "name": "g", "parameters": {}}',
        '{"city": "SF"}',
        "[1]",
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL",
        '[{"name": "f", "arguments": {"c": 1}}',
        ', {"name": "g", "arguments": {}}',
        "]",
        "get_x",
        "[ARGS]",
        "[CALL_ID]",
        "[AR",
        '{"a": [1, {}]}',
        "[",
    ],
    "python": ["<|python_start|>", "<|python_end|>", "1 + 2", "<|python_"],
}
COMMON = [
    "<think>",
    "</think>",
    "<thi",
    "nk>",
    "\n",
    " ",
    "Hi",
    "é😀",
    "<",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\\",
    '"name"',
    '"f"',
    '"arguments"',
    '{"a": "x\\u00e9\\"}"}',
    "-0.5e+3",
    "01",
    "1.",
    "true",
    "nul",
    "null",
    '{"name": "f", "arguments": {"c": "LA"}}',
    '{"name": "h"}',
    '{"name": "f", "arguments": "{\\"c\\": 1}"}',
    '{"name": 1}',
    "{]",
    "\x01",
]

CALLS = {
    "hermes": [
        '<tool_call>{"name": "f", "arguments": {"c": "</tool_call>"}}</tool_call>',
        '<tool_call>\n{"arguments": {"a": [1, -2.5e3, {"b": null}]}, "name": "g"}\n</tool_call>\n',
        '<tool_call>{"name": "f", "arguments": "{\\"c\\": 1}"}</tool_call>',
        "<tool_call>{broken}</tool_call>",
    ],
    "llama3": [
        '{"name": "f", "parameters": {"c": "}"}}',
        '; {"name": "g", "parameters": {}}',
        '<|python_tag|>{"name": "f"}',
        '<|python_tag|>web.search.call(query="x")',
        '<|python_tag|>web.call(query="a)", n=[1, 2])',
        '{"name": "Bob", "age": 3}',
        "<|python_tag|>import math",
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "f", "arguments": {"c": "]"}}, {"name": "g", "arguments": {}}]',
        '[TOOL_CALLS] [ {"name": "f"} ]\n',
        '[TOOL_CALLS]f[ARGS]{"a": 1}',
        '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": 1}',
        '[TOOL_CALLS]f{"a": 1}',
        '[TOOL_CALLS]{"name": "f"}',
        "[TOOL_CALLS]f(1)",
    ],
    "python": ["<|python_start|>1 + 2<|python_end|>", "<|python_start|>'a'.count('a')<|python_end|>"],
}


@st.composite
def messages(draw):
    name = draw(st.sampled_from([*PIECES, None]))
    syntax = ToolSyntax(name) if name else None
    reasoning = draw(st.sampled_from([None, Reasoning(), Reasoning(open=True)]))
    piece = st.sampled_from((PIECES[name] * 2 if name else []) + COMMON)
    whole = st.sampled_from(CALLS[name]).map(lambda call: [call]) if name else st.nothing()
    parts = st.lists(piece, max_size=4)
    damaged = st.builds(lambda call, cut, rest: [call[0][:cut], *rest], whole, st.integers(0, 60), parts)
    chunks = draw(st.lists(st.one_of(parts, whole, damaged), max_size=6))
    return syntax, reasoning, [text for chunk in chunks for text in chunk]


def run(parser, pieces):
    """Feed (data, hidden) pairs; the message, and every border and call with its absolute offset."""
    text = {"content": "", "reasoning": ""}
    marks, offset = [], 0
    for data, hidden in pieces:
        for event in parser.push(data, hidden):
            assert 0 <= event.end <= len(data)
            if event.kind in text:
                text[event.kind] += event.text
            else:
                marks.append((event.kind, offset + event.end, event.region or event.call))
        offset += len(data)
    for event in parser.finish():
        text[event.kind] += event.text
    return text["content"], text["reasoning"], marks, parser.calls, parser.broken_calls, parser.open_call


def check_whole_message(message):
    syntax, reasoning, pieces = message
    text = "".join(pieces)
    content, thought, _, calls, broken, rest = run(MessageParser(syntax, reasoning), [(text.encode(), False)])
    want = read(text, syntax, reasoning)
    assert (content, thought) == (want.content, want.reasoning)
    assert (list(calls), list(broken), rest) == (want.calls, want.broken, want.open_call)


def check_any_split(message, data):
    syntax, reasoning, pieces = message
    hidden = data.draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    bytewise, pushed = [], []
    for piece, hide in zip(pieces, hidden, strict=True):
        bytewise += [(bytes([byte]), hide) for byte in piece.encode()]
    for byte, hide in bytewise:  # join neighbours at random
        if pushed and pushed[-1][1] == hide and data.draw(st.booleans()):
            pushed[-1] = (pushed[-1][0] + byte, hide)
        else:
            pushed.append((byte, hide))
    joined = []
    for byte, hide in bytewise:
        if joined and joined[-1][1] == hide:
            joined[-1] = (joined[-1][0] + byte, hide)
        else:
            joined.append((byte, hide))
    want = run(MessageParser(syntax, reasoning), bytewise)
    assert run(MessageParser(syntax, reasoning), pushed) == want
    assert run(MessageParser(syntax, reasoning), joined) == want


def check_fork(message, cut):
    syntax, reasoning, pieces = message
    data = "".join(pieces).encode()
    parser = MessageParser(syntax, reasoning)
    parser.push(data[:cut])
    fork = parser.fork()
    before = (parser.region, parser.calls, parser.open_call)
    fork.push(data[cut:])
    fork.finish()
    assert (parser.region, parser.calls, parser.open_call) == before
    rest = [(data[cut:], False)]
    whole = MessageParser(syntax, reasoning)
    whole.push(data[:cut])
    assert run(parser, rest) == run(whole, rest)
    assert fork.calls == whole.calls


def check_held_back(message):
    """Outside of calls it holds a proper prefix of a tag, the head of an untagged call, or leading space."""
    syntax, reasoning, pieces = message
    parser = MessageParser(syntax, reasoning)
    for byte in "".join(pieces).encode():
        parser.push(bytes([byte]))
        if parser.open_call is None and parser.region != "tool":
            held = bytes(parser._buffer)
            untagged = held.lstrip(b" \r\n\t;,").startswith(b"{") or not held.strip(b" \r\n\t;,")
            assert untagged or any(tag.encode().startswith(held) for tag in parser.tags), held


quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
slow = settings(
    max_examples=int(os.environ.get("ENDSTOP_EXAMPLES", "4000")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@quick
@given(messages())
def test_whole_message_is_read_as_the_oracle_reads_it(message):
    check_whole_message(message)


@quick
@given(messages(), st.data())
def test_any_split_gives_the_same_events(message, data):
    check_any_split(message, data)


@quick
@given(messages(), st.integers(0, 40))
def test_a_fork_goes_its_own_way(message, cut):
    check_fork(message, cut)


@quick
@given(messages())
def test_only_what_may_become_a_tag_is_held_back(message):
    check_held_back(message)


@pytest.mark.slow
@slow
@given(messages())
def test_whole_message_is_read_as_the_oracle_reads_it_many(message):
    check_whole_message(message)


@pytest.mark.slow
@slow
@given(messages(), st.data())
def test_any_split_gives_the_same_events_many(message, data):
    check_any_split(message, data)


@pytest.mark.slow
@slow
@given(messages(), st.integers(0, 40))
def test_a_fork_goes_its_own_way_many(message, cut):
    check_fork(message, cut)


@pytest.mark.slow
@slow
@given(messages())
def test_only_what_may_become_a_tag_is_held_back_many(message):
    check_held_back(message)


def test_push_after_finish_is_refused():
    parser = MessageParser(None, None)
    parser.finish()
    assert parser.finish() == []
    with pytest.raises(RuntimeError, match="finished"):
        parser.push(b"x")


def test_characters_are_delivered_whole():
    parser = MessageParser(ToolSyntax("hermes"), None)
    texts = [
        [e.text for e in parser.push(piece)]
        for piece in (b"ok ", b"\xf0\x9f", b"\x98\x80", b"!", b"\xf0\x9f")
    ]
    assert texts == [["ok "], [], ["😀"], ["!"], []]
    assert [e.text for e in parser.finish()] == ["\ufffd"]


def test_forced_text_is_never_searched():
    parser = MessageParser(ToolSyntax("hermes"), None)
    parser.push(b"a<tool")
    assert [e.text for e in parser.push_plain(b"_call>")] == ["<tool", "_call>"]
    assert parser.push_plain(b"<|x|>", hidden=True) == []
    events = parser.push(b'<tool_call>{"name": "f"}</tool_call>')
    assert [(e.kind, e.end) for e in events] == [("border", 11), ("call", 36), ("border", 36)]
    assert run(parser, [(b"b", False)])[0] == "b"


@pytest.mark.parametrize(
    ("syntax", "before", "piece"),
    [
        ("llama3", b"", b"\n\n"),
        ("llama3", b"<|python_tag|>", b" "),
        ("mistral", b"[TOOL_CALLS]", b"abcd"),
        ("hermes", b"<tool_call>{}", b"\n"),
    ],
)
def test_a_model_that_repeats_itself_before_a_call_costs_no_square(
    syntax: Literal["hermes", "llama3", "mistral"], before: bytes, piece: bytes
) -> None:
    parser = MessageParser(ToolSyntax(syntax), None)
    parser.push(before)
    begin = time.process_time()
    for _ in range(12_000):
        parser.push(piece)
    assert time.process_time() - begin < 4  # reading all again for every piece takes over 10


def test_forced_text_that_breaks_an_untagged_call_is_not_searched_for_tags() -> None:
    parser = MessageParser(ToolSyntax("llama3"), Reasoning())
    events = parser.push(b'{"type": "function", ')
    events += parser.push_plain(b"<think>")
    events += parser.push(b'{"name": "a", "parameters": {}}') + parser.finish()
    assert (parser.region, parser.calls) == ("answer", ())
    content = "".join(event.text for event in events if event.kind == "content")
    assert content == '{"type": "function", <think>{"name": "a", "parameters": {}}'
