"""Tool-call syntaxes: what is a call, what is not, and where each ends a row."""

from __future__ import annotations

import json

import pytest

from endstop import SamplingParams, StopMachine, StopSet, TokenBytes
from endstop.protocol.toolcalls import MessageParser, Reasoning, ToolCall, ToolSyntax

HERMES, LLAMA, MISTRAL, PYTHON = (ToolSyntax(name) for name in ("hermes", "llama3", "mistral", "python"))


def read(text, syntax, reasoning=None, hidden=()):
    """Content, calls as (name, arguments), and the parser, for a message in one piece (or several)."""
    parser = MessageParser(syntax, reasoning)
    events = []
    for piece in [text] if isinstance(text, str) else text:
        events += parser.push(piece.encode(), piece in hidden)
    events += parser.finish()
    content = "".join(event.text for event in events if event.kind == "content")
    return content, [(call.name, json.loads(call.arguments)) for call in parser.calls], parser


def row(pieces, tools, roles=None, **params):
    """A machine that has read `pieces` (texts; a number stands for the special token of that id)."""
    table = [piece.encode() for piece in pieces if isinstance(piece, str)]
    special = {900: b"<|eot_id|>", 901: b"<|eom_id|>", 902: b"<|python_tag|>"}
    table += [b""] * (900 - len(table)) + [special[key] for key in sorted(special)]
    machine = StopMachine(
        StopSet.of(roles or {900: "turn_end"}),
        SamplingParams(**params),
        TokenBytes(table, special=set(special)),
        tools=tools,
    )
    texts, index = [], 0
    for piece in pieces:
        step = machine.push(piece if isinstance(piece, int) else index)
        index += isinstance(piece, str)
        texts.append(step.text)
        if step.finished:
            break
    assert "".join(texts) == machine.text
    return machine


def test_B07_tool_end_token_ends_the_row_and_hands_over():
    call = '{"name": "get_weather", "parameters": {"city": "SF"}}'
    machine = row([call[:20], call[20:], 901, "junk", "junk"], LLAMA, {900: "turn_end", 901: "tool_end"})
    assert machine.text == call
    assert machine.stop_reason == 901
    assert (machine.stop_kind, machine.finish_reason) == ("tool_end", "tool_calls")
    assert [(c.name, c.arguments) for c in machine.tool_calls] == [("get_weather", '{"city": "SF"}')]
    assert (machine.content, machine.open_call) == ("", None)


def test_B07_without_a_call_syntax_the_kind_is_tool_end_and_the_reason_stop():
    machine = row(['{"name": "f", "parameters": {}}', 901], None, {900: "turn_end", 901: "tool_end"})
    assert (machine.stop_kind, machine.finish_reason) == ("tool_end", "stop")


B53 = [
    "<tool_call>",
    '{"name":"w","arguments":{"c":"LA"}}',
    "</tool_call>",
    "\n<tool_call>",
    '{"name":"w","arguments":{"c":"NY"}}',
    "</tool_call>",
    900,
]


def test_B53_the_close_tag_ends_the_call_and_the_terminator_the_turn():
    machine = row(B53, HERMES)
    assert [c.arguments for c in machine.tool_calls] == ['{"c":"LA"}', '{"c":"NY"}']
    assert (machine.stop_kind, machine.finish_reason, machine.content) == ("turn_end", "tool_calls", "")


def test_B53_one_call_where_parallel_calls_are_off():
    machine = row(B53, ToolSyntax("hermes", parallel=False))
    assert [c.arguments for c in machine.tool_calls] == ['{"c":"LA"}']
    assert (machine.stop_kind, machine.finish_reason) == ("tool_end", "tool_calls")
    assert len(machine.generated_token_ids) == 3


def test_B53_a_close_tag_inside_a_json_string_does_not_count():
    pieces = ["<tool_call>", '{"name":"w","arguments":{"c":"', "</tool_call>", '"}}', "</tool_call>", 900]
    for parallel in (True, False):
        machine = row(pieces, ToolSyntax("hermes", parallel=parallel))
        assert [json.loads(c.arguments) for c in machine.tool_calls] == [{"c": "</tool_call>"}]


B54 = [
    "<tool_call>",
    '{"name":"write",',
    '"arguments":{',
    '"path":"a.py",',
    '"content":"x = ',
    "1",
    '"}}</tool_call>',
]


def test_B54_a_call_cut_by_the_limit_is_no_call():
    machine = row(B54, HERMES, max_tokens=5)
    assert (machine.finish_reason, machine.stop_kind, machine.tool_calls) == ("length", "max_tokens", ())
    assert machine.open_call == '{"name":"write","arguments":{"path":"a.py","content":"x = '
    assert machine.content == ""


def test_B54_a_call_complete_at_the_limit_is_still_length():
    machine = row(B54, HERMES, max_tokens=7)
    assert (machine.finish_reason, machine.open_call) == ("length", None)
    assert json.loads(machine.tool_calls[0].arguments) == {"path": "a.py", "content": "x = 1"}


def test_B55_a_natural_end_with_a_call_is_tool_calls_and_without_one_stop():
    whole = '<tool_call>{"name": "f"}</tool_call>'
    assert row([whole, 900], HERMES).finish_reason == "tool_calls"
    assert row(["Hi", 900], HERMES).finish_reason == "stop"
    assert row([whole[:-3], 900], HERMES).finish_reason == "stop"
    assert row([whole, "x"], HERMES, max_tokens=2).finish_reason == "length"


def test_B59_no_unfinished_call_is_ever_complete():
    first = '<tool_call>{"name": "write", "arguments": {"file_path": "y.py"}}</tool_call>'
    cut = '<tool_call>{"name": "write", "arguments": {"file_path": "x.py"'
    _, calls, parser = read(cut, HERMES)
    assert (calls, parser.open_call) == ([], '{"name": "write", "arguments": {"file_path": "x.py"')
    _, calls, parser = read(first + cut, HERMES)
    assert calls == [("write", {"file_path": "y.py"})]
    assert parser.open_call == '{"name": "write", "arguments": {"file_path": "x.py"'


@pytest.mark.parametrize("length", range(len('<tool_call>{"name": "f", "arguments": {}}</tool_call>')))
def test_a_call_cut_anywhere_behind_its_tag_is_open_and_never_content(length):
    whole = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    content, calls, parser = read("Hi " + whole[:length], HERMES)
    tag = len("<tool_call>")
    assert content == "Hi " + (whole[:length] if length < tag else "")
    assert (calls, parser.open_call) == ([], whole[tag:length] if length >= tag else None)


@pytest.mark.parametrize(
    ("text", "syntax", "calls"),
    [
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": {"b": "}]\\"\\\\"}}}\n</tool_call>',
            HERMES,
            [("f", {"a": {"b": '}]"\\'}})],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "\\u00e9\\ud83d\\ude00"}}</tool_call>',
            HERMES,
            [("f", {"a": "é😀"})],
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', HERMES, [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', HERMES, [("f", {})]),
        (
            '<tool_call>{"function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
            HERMES,
            [("f", {"a": 1})],
        ),
        ('{"name": "f", "parameters": {"a": 1}}', LLAMA, [("f", {"a": 1})]),
        ('\n {"type": "function", "name": "f", "parameters": {}}', LLAMA, [("f", {})]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}\n'
            '{"name": "h", "arguments": {}}',
            LLAMA,
            [("f", {}), ("g", {}), ("h", {})],
        ),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', LLAMA, [("f", {"a": 1})]),
        (
            '<|python_tag|>brave_search.call(query="a \\"b\\" (c", n=3)',
            LLAMA,
            [("brave_search", {"query": 'a "b" (c', "n": 3})],
        ),
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            MISTRAL,
            [("f", {"a": 1}), ("g", {})],
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', MISTRAL, [("f", {"a": 1}), ("g", {})]),
        ('[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', MISTRAL, [("f", {"a": 1})]),
        ('[TOOL_CALLS]f{"a": 1}', MISTRAL, [("f", {"a": 1})]),
        ("<|python_start|>12 * 3<|python_end|>", PYTHON, [("python", {"code": "12 * 3"})]),
    ],
)
def test_calls_in_every_syntax(text, syntax, calls):
    content, found, parser = read(text, syntax)
    assert (content, found, parser.broken_calls, parser.open_call) == ("", calls, (), None)
    # The arguments are the text that the model wrote, and the raw text holds them.
    assert all(call.raw for call in parser.calls)


def test_arguments_keep_the_spelling_of_the_model():
    _, _, parser = read('<tool_call>{"name": "f", "arguments": {"x":1.50,  "y": 1e2}}</tool_call>', HERMES)
    assert parser.calls == (
        ToolCall("f", '{"x":1.50,  "y": 1e2}', '{"name": "f", "arguments": {"x":1.50,  "y": 1e2}}'),
    )


@pytest.mark.parametrize(
    ("text", "syntax", "content"),
    [
        ('{"city": "SF"}', LLAMA, '{"city": "SF"}'),
        (' {"name": "Bob", "age": 3} is he', LLAMA, ' {"name": "Bob", "age": 3} is he'),
        ('{"name": "f", "parameters": {]', LLAMA, '{"name": "f", "parameters": {]'),
        ('Use {"name": "f", "parameters": {}}', LLAMA, 'Use {"name": "f", "parameters": {}}'),
        ("a < b, <tool, <tool_cal", HERMES, "a < b, <tool, <tool_cal"),
        ("[TOOL] [1, 2]", MISTRAL, "[TOOL] [1, 2]"),
        ("  \n", HERMES, "  \n"),
    ],
)
def test_what_is_no_call_is_content(text, syntax, content):
    assert read(text, syntax)[:2] == (content, [])
    assert read(list(text), syntax)[:2] == (content, [])


@pytest.mark.parametrize(
    ("text", "syntax", "broken"),
    [
        ("<tool_call>not json</tool_call>", HERMES, "not json"),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', HERMES, '{"name": "f", "arguments": {}}}'),
        ('<tool_call>{"arguments": {}}</tool_call>', HERMES, '{"arguments": {}}'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', HERMES, '{"name": "f", "arguments": [1]}'),
        ('<tool_call>{"name": "f", "arguments": NaN}</tool_call>', HERMES, '{"name": "f", "arguments": NaN}'),
        ('<|python_tag|>f.call("positional")', LLAMA, 'f.call("positional")'),
        ('<|python_tag|>{"city": "SF"}', LLAMA, '{"city": "SF"}'),
        ("[TOOL_CALLS][1][TOOL_CALLS]f[ARGS]{}", MISTRAL, "1]"),
    ],
)
def test_a_broken_call_is_reported_and_is_neither_call_nor_content(text, syntax, broken):
    content, _, parser = read(text, syntax)
    assert (content, parser.broken_calls, parser.open_call) == ("", (broken,), None)
    assert len(parser.calls) == text.count("[TOOL_CALLS]f")


def test_a_broken_call_does_not_swallow_the_next_one():
    good = '<tool_call>{"name": "f"}</tool_call>'
    _, calls, parser = read('<tool_call>{"name": "f", "arguments": {"x": "abc}}</tool_call>\n' + good, HERMES)
    assert calls == [("f", {})]
    assert parser.broken_calls == ('{"name": "f", "arguments": {"x": "abc}}',)
    _, calls, _ = read('<tool_call>{"name": "g", }\n' + good, HERMES)
    assert calls == [("f", {})]


def test_text_around_calls_is_content():
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert read(f"Let me look.\n{call}\nand\n{call}\n", HERMES)[0] == "Let me look.\nand\n"


def test_reasoning_is_no_answer_and_its_tags_are_no_calls():
    parser = MessageParser(HERMES, Reasoning())
    text = '<think>\nshall I <tool_call>{"name": "f"}</tool_call>?\n</think>\n\nYes.'
    text += '<tool_call>{"name": "g"}</tool_call>'
    events = parser.push(text.encode()) + parser.finish()
    kinds = {kind: "".join(e.text for e in events if e.kind == kind) for kind in ("content", "reasoning")}
    assert kinds["reasoning"] == 'shall I <tool_call>{"name": "f"}</tool_call>?\n'
    assert kinds["content"] == "Yes."
    assert [call.name for call in parser.calls] == ["g"]
    borders = [(event.region, event.end) for event in events if event.kind == "border"]
    starts = [text.index(tag) + len(tag) for tag in ("<think>", "</think>", "Yes.<tool_call>")]
    assert borders == [
        ("reasoning", starts[0]),
        ("answer", starts[1]),
        ("tool", starts[2]),
        ("answer", len(text)),
    ]


def test_reasoning_that_the_prompt_opened():
    parser = MessageParser(None, Reasoning(open=True))
    assert parser.region == "reasoning"
    events = parser.push(b"\nhm</think>Hi")
    assert [(e.kind, e.text) for e in events if e.text] == [("reasoning", "hm"), ("content", "Hi")]
    assert parser.region == "answer"


def test_hidden_special_tokens_open_calls_and_are_never_content():
    text = ["<|python_tag|>", '{"name": "f", "parameters": {}}', "<|eom_id|>"]
    content, calls, _ = read(text, LLAMA, hidden={"<|python_tag|>", "<|eom_id|>"})
    assert (content, calls) == ("", [("f", {})])
    assert read(["Hi", "<|x|>", "!"], HERMES, hidden={"<|x|>"})[0] == "Hi!"
    machine = row([902, 'f.call(q="x")', 900], LLAMA)
    assert (machine.text, machine.tool_calls[0].arguments) == ('f.call(q="x")', '{"q": "x"}')


def test_stop_strings_leave_reasoning_and_calls_alone():
    pieces = ["<tool_call>", '{"name": "f", "arguments": {"c": "END"}}', "</tool_call>", " END", "x"]
    machine = row(pieces, HERMES, stop=["END"])
    assert (machine.stop_kind, machine.stop_reason) == ("stop_string", "END")
    assert len(machine.generated_token_ids) == 4
    machine = row(pieces, HERMES, stop=["END"], stop_scope="all")
    assert len(machine.generated_token_ids) == 2


def test_syntax_from_template():
    qwen = '{{- \'<tool_call>\\n{"name": "\' }}'
    assert ToolSyntax.from_template(qwen) == HERMES
    assert ToolSyntax.from_template(qwen + "<function=") is None
    assert ToolSyntax.from_template("{{ '[TOOL_CALLS]' }}", parallel=False) == ToolSyntax(
        "mistral", parallel=False
    )
    assert ToolSyntax.from_template("<|start_header_id|> <|python_tag|>") == LLAMA
    llama32 = "<|start_header_id|>{{- '{\"name\": \"' + call.name + '\", ' }}{{- '\"parameters\": ' }}"
    assert ToolSyntax.from_template(llama32) == LLAMA
    llama4 = llama32.replace("<|start_header_id|>", "<|header_start|>") + "<|python_start|>"
    assert ToolSyntax.from_template(llama4, added_tokens=["<|python_start|>"]) == LLAMA
    assert ToolSyntax.from_template("{{ x }}", added_tokens=["<|python_start|>"]) == PYTHON
    assert ToolSyntax.from_template("<|im_start|>") is None
    assert ToolSyntax.from_template(None) is None


def test_calls_behind_the_empty_code_of_llama4():
    calls = b'{"name": "f", "parameters": {"a": 1}}{"name": "g", "parameters": {}}'
    pieces = TokenBytes([b"<|python_start|>", b"<|python_end|>", b"<|eom|>", calls], special={0, 1, 2})
    stops = StopSet.of({2: "tool_end"})
    machine = StopMachine(stops, SamplingParams(max_tokens=9), pieces, tools=LLAMA)
    machine.push_many([0, 1, 3, 2])
    assert (machine.finish_reason, machine.stop_kind, machine.content) == ("tool_calls", "tool_end", "")
    assert [(call.name, call.arguments) for call in machine.tool_calls] == [("f", '{"a": 1}'), ("g", "{}")]


def test_reasoning_from_template():
    template = "{{ content.split('</think>')[-1] }}"
    assert Reasoning.from_template(template, "<|im_start|>assistant\n") == Reasoning()
    assert Reasoning.from_template(template, "<|im_start|>assistant\n<think>\n") == Reasoning(open=True)
    assert Reasoning.from_template(template, "user: <think>\nassistant:\n") == Reasoning()
    assert Reasoning.from_template("[THINK]") == Reasoning("[THINK]", "[/THINK]")
    assert Reasoning.from_template("<|im_start|>") is None


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="hermes, llama3, mistral, python"):
        ToolSyntax("xml")
    with pytest.raises(ValueError, match="two different tags"):
        Reasoning("", "</think>")
