"""One choice of an answer from the wire: text, reasoning and calls as they come, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from endstop.outcomes import StopKind, finish_reason_of
from endstop.protocol.params import SamplingParams
from endstop.protocol.stopstrings import StopStrings
from endstop.protocol.toolcalls import (
    MessageEvent,
    MessageParser,
    Reasoning,
    ToolCall,
    ToolSyntax,
    read_arguments_call,
)
from endstop.runtime.results import CompletionOutput, Delta

# What servers call the end of a choice, and what it is here. `stop` is settled below, by what else they say.
_KINDS: dict[str, StopKind] = {
    "length": "max_tokens",
    "repetition": "repetition",
    "abort": "cancelled",
    "cancelled": "cancelled",
    "error": "error",
}
_NATURAL = frozenset({"stop", "eos", "eos_token", "stop_sequence", "end_turn", "tool_calls", "function_call"})


class WireChoice:
    """Collects one choice. `take` and `end` give what is new, as a Delta or None.

    Stop strings are matched here on the content, whatever the server does about them: a server that
    ignores `stop` is cut at the first match all the same.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        tools: ToolSyntax | None,
        reasoning: Reasoning | None,
        parallel: bool,
        chat: bool,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.chat = chat
        self.output: CompletionOutput | None = None
        self._params = params
        self._matcher = self._new_matcher()
        splits = tools is not None or reasoning is not None
        self._parser = MessageParser(tools, reasoning) if splits else None
        self._parallel = parallel
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._wire_calls: dict[int, dict[str, str]] = {}
        self._reason: str | None = None
        self._reason_detail: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.output is not None

    @property
    def ending_known(self) -> bool:
        """Whether the server has said how the choice ended."""
        return self._reason is not None

    def take(self, choice: Mapping[str, Any]) -> Delta | None:
        """Take one choice object of a chunk (or of a whole answer)."""
        if self.finished:
            return None
        message = choice.get("delta") or choice.get("message") or {}
        thought = message.get("reasoning_content") or message.get("reasoning") or ""
        written = _text_of(message.get("content") if self.chat else choice.get("text"))
        for call in message.get("tool_calls") or ():
            self._take_call(call)
        reason = choice.get("finish_reason")
        if reason is not None:
            self._reason = str(reason)
            detail = choice.get("stop_reason", choice.get("matched_stop"))
            self._reason_detail = detail if isinstance(detail, int | str) else None
        events: list[MessageEvent] = []
        if thought:
            border = MessageEvent("border", 0, region="reasoning")
            events += [border, MessageEvent("reasoning", 0, text=thought)]
        if self._parser is not None:
            events += self._parser.push(written.encode("utf-8", "surrogatepass"))
        else:
            events.append(MessageEvent("content", 0, text=written))
        shown, thought, stopped = self._match(events)
        if stopped is not None:
            return self._finish("stop_string", stopped, shown, thought)
        if self._parser is not None and self._parser.calls and not self._parallel:
            return self._finish("tool_end", None, shown + self._flush(), thought)
        return self._delta(shown, thought) if shown or thought else None

    def end(self, error: str | None = None, kind: StopKind | None = None) -> Delta | None:
        """The answer is over: `kind` says why where that was decided here, `error` what broke it."""
        if self.finished:
            return None
        events = self._parser.finish() if self._parser is not None else []
        shown, thought, stopped = self._match(events)
        detail: int | str | None = stopped
        if stopped is not None:
            kind = "stop_string"
        else:
            shown += self._flush()
            if kind is None:
                kind, detail, error = self._ending(error)
        return self._finish(kind, detail, shown, thought, error if kind == "error" else None)

    def _match(self, events: list[MessageEvent]) -> tuple[str, str, str | None]:
        """Search content for stop strings: the content that may be shown, the reasoning, what matched."""
        shown, thought = "", ""
        for event in events:
            if event.kind == "reasoning":
                thought += event.text
                self._reasoning.append(event.text)
            elif event.kind == "border":
                # No stop string lies across a border of regions.
                shown += self._flush()
                self._matcher = self._new_matcher()
            elif event.kind == "content":
                step = self._matcher.push_text(event.text)
                self._content.append(step.text)
                shown += step.text
                if step.finished:
                    return shown, thought, self._matcher.stop_reason
        return shown, thought, None

    def _new_matcher(self) -> StopStrings:
        include = self._params.include_stop_str_in_output
        return StopStrings(self._params.stop, include_stop_str_in_output=include)

    def _ending(self, error: str | None) -> tuple[StopKind, int | str | None, str | None]:
        """What the server's finish_reason means."""
        reason = self._reason
        if error is not None and reason is None:
            return "error", None, error
        if reason is None:
            return "error", None, "the answer is incomplete: it ended without a finish_reason"
        if reason in _KINDS:
            return _KINDS[reason], None, "the server reported an error"
        if reason not in _NATURAL:
            return "error", reason, f"the server ended the answer with finish_reason {reason!r}"
        if isinstance(self._reason_detail, str):
            return "stop_string", self._reason_detail, None
        if self._calls()[0]:
            return "tool_end", self._reason_detail, None
        if self._reason_detail is not None:
            return "stop_token", self._reason_detail, None
        return "eos", None, None

    def _flush(self) -> str:
        text = self._matcher.finish().text
        self._content.append(text)
        return text

    def _finish(
        self, kind: StopKind, detail: int | str | None, shown: str, thought: str, error: str | None = None
    ) -> Delta:
        calls, open_call = self._calls()
        text = "".join(self._content)
        self.output = CompletionOutput(
            self.index, text, [], finish_reason_of(kind, len(calls)), kind, detail, error=error
        )
        if self.chat:
            self.output.content, self.output.reasoning = text, "".join(self._reasoning)
            self.output.tool_calls, self.output.open_call = calls, open_call
        delta = self._delta(shown, thought)
        delta.tool_calls = self.output.tool_calls
        delta.finish_reason, delta.stop_kind = self.output.finish_reason, kind
        delta.stop_reason, delta.output = detail, self.output
        return delta

    def _delta(self, text: str, thought: str) -> Delta:
        delta = Delta(self.request_id, self.index, text, [])
        if self.chat:
            delta.content, delta.reasoning = text, thought
        return delta

    def _take_call(self, piece: Mapping[str, Any]) -> None:
        """Pieces of one call have the same index; a whole answer's calls have none and come in order."""
        index = piece.get("index")
        place = index if isinstance(index, int) else len(self._wire_calls)
        call = self._wire_calls.setdefault(place, {"name": "", "arguments": ""})
        function = piece.get("function") or {}
        call["name"] += str(function.get("name") or "")
        arguments = function.get("arguments")
        # The API says a text; some servers send the object itself.
        call["arguments"] += json.dumps(arguments) if isinstance(arguments, dict) else str(arguments or "")

    def _calls(self) -> tuple[tuple[ToolCall, ...], str | None]:
        """Complete calls, and the text of the first one that is none."""
        calls: list[ToolCall] = list(self._parser.calls) if self._parser is not None else []
        open_call = self._parser.open_call if self._parser is not None else None
        for place in sorted(self._wire_calls):
            call = self._wire_calls[place]
            arguments = call["arguments"] or "{}"
            read = read_arguments_call(call["name"], arguments, arguments) if call["name"] else None
            # Nothing at all behind a name is a call without arguments only if the answer went on.
            if read is not None and not (not call["arguments"] and self._reason == "length"):
                calls.append(read)
            elif open_call is None:
                open_call = call["arguments"]
        return tuple(calls), open_call


def _text_of(content: Any) -> str:
    """Content as a text: a string, nothing, or a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content or "")
