"""The scripted models themselves: they keep to the protocol and notice who does not."""

from __future__ import annotations

import pytest

from endstop import SamplingParams
from endstop.protocol.errors import RequestRefused
from endstop.protocol.toolcalls import ToolCall
from endstop.runtime.generator import Generator
from endstop.runtime.token_model import Capabilities, RowChunk, TokenModel
from endstop.testing import Reply, ScriptedChat, ScriptedModel, follow

USER = [{"role": "user", "content": "list the files"}]


def test_a_script_is_followed_by_the_longest_prompt() -> None:
    script = follow({(1,): [2, 3], (1, 2): [9]})
    assert script((1,)) == 2
    assert script((1, 2)) == 9
    with pytest.raises(IndexError, match="ended after 1"):
        script((1, 2, 9))
    with pytest.raises(KeyError):
        script((5,))


def test_wrong_calls_are_noticed() -> None:
    model = ScriptedModel(lambda tokens: 5, vocab_size=8, context_len=4, memory=5)
    assert isinstance(model, TokenModel)
    row = model.open_row()
    for chunk, message in (
        (RowChunk(row, [1], 1), "0 computed tokens"),
        (RowChunk(row, [], 0), "0 computed tokens"),
        (RowChunk(row, [8], 0), "outside the vocabulary"),
        (RowChunk(row, [1] * 5, 0), "beyond the window"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model.forward([chunk])
    assert model.forward([RowChunk(row, [1, 2], 0)]).token_ids == [5]
    with pytest.raises(RuntimeError, match="two chunks"):
        model.forward([RowChunk(row, [1], 2), RowChunk(row, [1], 3)])
    other = model.fork_row(row, 2)
    with pytest.raises(RuntimeError, match="memory budget"):
        model.forward([RowChunk(row, [1], 2), RowChunk(other, [1], 2)])
    plain = model.without(batched=False, fork=False, truncate=False)
    assert plain.capabilities == Capabilities(False, False, False)
    with pytest.raises(RuntimeError, match="without the capability"):
        plain.fork_row(plain.open_row(), 0)


def test_scripted_chat_answers_in_order_and_records_the_questions() -> None:
    call = ToolCall("ls", "{}", '{"name": "ls", "arguments": {}}')
    chat = ScriptedChat(
        [
            Reply(tool_calls=(call,)),
            lambda messages: f"seen {len(messages)}",
            Reply("cut", stop_kind="max_tokens"),
        ]
    )
    assert isinstance(chat, Generator)
    first = chat.chat(USER, SamplingParams(max_tokens=9), tools=[{"name": "ls"}])[0].outputs[0]
    assert (first.finish_reason, first.tool_calls) == ("tool_calls", (call,))
    assert chat.chat([*USER, {"role": "assistant", "content": ""}])[0].outputs[0].content == "seen 2"
    deltas = list(chat.stream_chat(USER))
    assert "".join(delta.content for delta in deltas) == "cut"
    assert [delta.finish_reason for delta in deltas] == [None, "length"]
    assert [len(asked.tools) for asked in chat.calls] == [1, 0, 0]
    with pytest.raises(IndexError, match="question 4"):
        chat.chat(USER)
    with pytest.raises(RequestRefused):
        chat.add("prompt")


def test_a_scripted_stream_is_its_message() -> None:
    text = "  two words\nand  more "
    deltas = list(ScriptedChat([Reply(text, reasoning="think first")]).stream_chat(USER))
    assert "".join(delta.content for delta in deltas) == text
    assert "".join(delta.reasoning for delta in deltas) == "think first"
    assert deltas[-1].output is not None
    assert deltas[-1].output.content == text
