"""ScriptedChat: a Generator whose messages are written down. For agents and servers under test.

It works on messages, not on tokens: no stop rule runs, so a reply says itself how it ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from endstop.outcomes import StopKind, finish_reason_of
from endstop.protocol.errors import RequestRefused
from endstop.protocol.params import SamplingParams
from endstop.protocol.toolcalls import ToolCall
from endstop.runtime.chat import Conversation, conversations_of
from endstop.runtime.requests import Prompt, params_list
from endstop.runtime.results import CompletionOutput, Delta, RequestOutput, Timing, Usage


@dataclass(frozen=True)
class Reply:
    """One scripted message. `tokens` is what it costs, by default the number of its words."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    stop_kind: StopKind = "turn_end"
    stop_reason: int | str | None = None
    open_call: str | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class ChatCall:
    """What ScriptedChat was asked."""

    messages: tuple[Mapping[str, Any], ...]
    params: SamplingParams
    tools: tuple[Any, ...]


Answer = str | Reply | Callable[[Sequence[Mapping[str, Any]]], str | Reply]


class ScriptedChat:
    """Gives its answers one after the other; an answer may be a function of the messages.

    `calls` records what it was asked. It raises IndexError when it is asked more often than it has answers.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)
        self.calls: list[ChatCall] = []
        self.aborted: list[str] = []
        self._numbers = itertools.count()

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        conversations = conversations_of(messages)
        each = params_list(params, len(conversations))
        return [
            self._answer(conversation, own, tools, options.get("request_id"))
            for conversation, own in zip(conversations, each, strict=True)
        ]

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """Word by word; the calls come with the last delta."""
        result = self._answer(messages, params or SamplingParams(), tools, options.get("request_id"))
        output = result.outputs[0]
        for part in _words(output.reasoning or ""):
            yield Delta(result.request_id, 0, "", [], reasoning=part)
        for part in _words(output.content or ""):
            yield Delta(result.request_id, 0, part, [], content=part)
        last = Delta(result.request_id, 0, "", [], tool_calls=output.tool_calls, output=output)
        last.finish_reason, last.stop_kind = output.finish_reason, output.stop_kind
        last.stop_reason = output.stop_reason
        yield last

    def add(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> str:
        raise RequestRefused("ScriptedChat answers conversations; use ScriptedModel for prompts")

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Delta]:
        raise RequestRefused("ScriptedChat answers conversations; use ScriptedModel for prompts")

    def abort(self, request_id: str) -> bool:
        """Every answer is complete at once, so there is never anything to cancel."""
        self.aborted.append(request_id)
        return False

    def close(self) -> None:
        """Nothing is held."""

    def _answer(
        self,
        messages: Conversation,
        params: SamplingParams,
        tools: Sequence[Any] | None,
        request_id: str | None,
    ) -> RequestOutput:
        if params.n != 1:
            raise RequestRefused("ScriptedChat gives one message at a time, n must be 1")
        place = len(self.calls)
        self.calls.append(ChatCall(tuple(messages), params, tuple(tools or ())))
        if place >= len(self.answers):
            raise IndexError(f"the script has {len(self.answers)} answers, this is question {place + 1}")
        answer = self.answers[place]
        answer = answer(messages) if callable(answer) else answer
        reply = Reply(answer) if isinstance(answer, str) else answer
        output = CompletionOutput(
            0,
            reply.content,
            [],
            finish_reason_of(reply.stop_kind, len(reply.tool_calls)),
            reply.stop_kind,
            reply.stop_reason,
            content=reply.content,
            reasoning=reply.reasoning,
            tool_calls=reply.tool_calls,
            open_call=reply.open_call,
        )
        read = sum(len(str(message.get("content") or "").split()) for message in messages)
        written = len(f"{reply.reasoning} {reply.content}".split())
        usage = Usage(read, written if reply.tokens is None else reply.tokens)
        name = f"chat-{next(self._numbers)}" if request_id is None else request_id
        return RequestOutput(name, None, [], [output], usage, Timing(0.0, 0.0, 0.0))


def _words(text: str) -> list[str]:
    """The words with the blanks behind them; joined they are the text."""
    words: list[str] = []
    for character in text:
        if words and not (words[-1][-1].isspace() and not character.isspace()):
            words[-1] += character
        else:
            words.append(character)
    return words
