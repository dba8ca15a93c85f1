"""The regions of a message (answer, reasoning, tool calls) as the stop machine needs them.

There are two readers. One reads tokens as they come: it knows in which region the row is, so which
stop strings count, and when a call is complete. The other reads what is shown, up to the cut: what it
finds is the message.
"""

from __future__ import annotations

from typing import NamedTuple

from endstop.protocol.automaton import StopAutomaton, compile_stop_strings
from endstop.protocol.message_parser import MessageParser
from endstop.protocol.params import SamplingParams
from endstop.protocol.spelledtext import Found, Run, SpelledText
from endstop.protocol.step import StopStep
from endstop.protocol.toolcalls import Reasoning, ToolCall, ToolSyntax


class CompleteCall(NamedTuple):
    """The first complete tool call where only one is wanted: the row ends behind it."""

    end: int
    close_tag: str | None


class Regions:
    """Both readers of one row, and the stop strings of each region."""

    __slots__ = ("_close_tag", "_content", "_one_call", "_reasoning", "_shown", "_stop", "_written")

    def __init__(self, params: SamplingParams, tools: ToolSyntax | None, reasoning: Reasoning | None) -> None:
        self._written = MessageParser(tools, reasoning)
        self._shown = MessageParser(tools, reasoning)
        self._one_call = tools is not None and not tools.parallel
        self._close_tag = (tools.close_tag or None) if tools is not None else None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        # A stop string that is a tag itself counts everywhere, whatever the scope.
        tags = tuple(text for text in params.stop if text in self._written.tags)
        inside = params.stop if params.stop_scope == "all" else tags
        self._stop = {"answer": params.stop, "reasoning": inside, "tool": inside}

    def automaton(self, active: bool) -> StopAutomaton:
        """The stop strings of the region where the row is; none while they are not active yet."""
        return compile_stop_strings(self._stop[self._written.region] if active else ())

    def read(
        self, text: SpelledText, piece: bytes, hidden: bool, active: bool
    ) -> Found | CompleteCall | None:
        """Matches a sampled token's bytes, region by region; `active`: whether stop strings count yet."""
        read = 0
        for event in self._written.push(piece, hidden):
            if event.kind not in ("border", "call"):
                continue
            found = text.feed(piece[read : event.end], hidden)
            if found is not None:
                return found
            read = event.end
            if event.kind == "border":
                text.reset(compile_stop_strings(self._stop[event.region] if active else ()))
            elif self._one_call and event.call is not None:
                return CompleteCall(text.end, self._close_tag)
        return text.feed(piece[read:], hidden)

    def take_forced(self, piece: bytes, hidden: bool) -> None:
        """A forced token: no tag, and no tag goes on behind it."""
        self._written.push_plain(piece, hidden)

    def show(self, step: StopStep, runs: list[Run], *, forced: bool = False, last: bool = False) -> None:
        """Splits what a step shows into content, reasoning and complete calls; forced text has no tags."""
        push = self._shown.push_plain if forced else self._shown.push
        events = [event for data, hidden in runs for event in push(data, hidden)]
        if last:
            events += self._shown.finish()
        content = "".join(event.text for event in events if event.kind == "content")
        reasoning = "".join(event.text for event in events if event.kind == "reasoning")
        self._content.append(content)
        self._reasoning.append(reasoning)
        step.parts = (content, reasoning)
        step.tool_calls = tuple(event.call for event in events if event.call is not None)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return self._shown.calls

    @property
    def broken_calls(self) -> tuple[str, ...]:
        return self._shown.broken_calls

    @property
    def open_call(self) -> str | None:
        return self._shown.open_call

    def fork(self) -> Regions:
        other = object.__new__(Regions)
        other._written, other._shown = self._written.fork(), self._shown.fork()
        other._content, other._reasoning = list(self._content), list(self._reasoning)
        other._one_call, other._close_tag, other._stop = self._one_call, self._close_tag, self._stop
        return other
