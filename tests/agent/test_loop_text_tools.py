"""Tools for models whose chat template has none: what they are shown, and what counts as a call."""

from __future__ import annotations

import pytest

from endstop.agent.text_tools import TextTools, as_text
from endstop.testing import Reply, ScriptedChat

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
    }
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'


def ask(reply, messages=({"role": "user", "content": "Hi"},)):
    inner = ScriptedChat([reply])
    output = TextTools(inner).chat(list(messages), tools=TOOLS)[0].outputs[0]
    return output, inner.calls[0]


def test_tools_are_described_and_not_handed_on():
    _, asked = ask("Hello")
    assert asked.tools == ()
    assert asked.messages[0]["role"] == "system"
    assert '"name": "look"' in asked.messages[0]["content"]


def test_a_tagged_call_is_a_call():
    output, _ = ask(f"I look. {CALL}")
    assert (output.content, output.finish_reason) == ("I look.", "tool_calls")
    assert [(call.name, call.arguments) for call in output.tool_calls] == [("look", '{"at": "a"}')]


@pytest.mark.parametrize("fence", ["json", "tool_call", ""])
def test_a_fenced_call_of_a_known_tool_is_a_call(fence):
    output, _ = ask(f'So:\n```{fence}\n{{"name": "look", "arguments": {{"at": "a"}}}}\n```\n')
    assert [call.name for call in output.tool_calls] == ["look"]
    assert output.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"name": "other", "arguments": {}}\n```',  # no tool of that name
        '```json\n{"name": "look"}\n```',  # no arguments: some JSON file, perhaps
        '{"name": "look", "arguments": {}}',  # neither tag nor fence
        '```python\n{"name": "look", "arguments": {}}\n```',
    ],
)
def test_what_only_looks_like_a_call_is_text(text):
    output, _ = ask(text)
    assert (output.tool_calls, output.content, output.finish_reason) == ((), text, "stop")


def test_a_cut_call_is_none_and_length_stays_length():
    output, _ = ask(Reply(f"{CALL}\n<tool_call>\n" + '{"name": "look", "argu', stop_kind="max_tokens"))
    assert output.finish_reason == "length"
    assert output.open_call is not None
    output, _ = ask('<tool_call>\n{"name": "look", "argu')
    assert (output.tool_calls, output.open_call.strip()) == ((), '{"name": "look", "argu')


def test_a_broken_call_is_kept_apart():
    output, _ = ask("<tool_call>{look}</tool_call>")
    assert (output.tool_calls, output.broken_calls) == ((), ("{look}",))


def test_history_is_said_in_texts_and_users_turns_become_one():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "a"}'}}
    history = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "nothing"},
        {"role": "user", "content": "STATE"},
    ]
    plain = as_text(history, [])
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user"]
    assert plain[2]["content"] == CALL
    assert plain[3]["content"] == "<tool_response>\nnothing\n</tool_response>\n\nSTATE"


def test_streams_give_the_same_message():
    deltas = list(
        TextTools(ScriptedChat([CALL])).stream_chat([{"role": "user", "content": "Hi"}], tools=TOOLS)
    )
    assert deltas[-1].output.tool_calls[0].name == "look"
    assert deltas[-1].finish_reason == "tool_calls"
