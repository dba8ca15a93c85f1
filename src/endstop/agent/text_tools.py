"""Tool calls for models whose chat template knows none: the tools are described in the system message, a call
is JSON between tags, results come back as the user's turns. Around any Generator."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from endstop.outcomes import finish_reason_of
from endstop.protocol.params import SamplingParams
from endstop.protocol.toolcalls import MessageParser, ToolCall, ToolSyntax, read_json_call
from endstop.runtime.chat import conversations_of
from endstop.runtime.generator import Generator
from endstop.runtime.requests import params_list
from endstop.runtime.results import CompletionOutput, Delta, RequestOutput

_SYNTAX = ToolSyntax("hermes")
_FENCE = re.compile(r"^```(?:tool_call|json)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)

_HOW = """

# How to call a tool
Write exactly this, one block for each call; for example:
<tool_call>
EXAMPLE
</tool_call>
The result comes in the next message between <tool_response> and </tool_response>; never write one yourself.

# Definitions of the tools
"""


class TextTools:
    """A Generator that takes `tools` although the model behind it knows nothing of them."""

    def __init__(self, inner: Generator) -> None:
        self.inner = inner

    def chat(
        self,
        messages: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """The next message of each conversation."""
        conversations = conversations_of(messages)
        each = params_list(params, len(conversations))
        spelled = [as_text(conversation, tools or ()) for conversation in conversations]
        results = self.inner.chat(spelled, each, **options)
        names = _names(tools or ())
        for result in results:
            result.outputs = [with_calls(output, names) for output in result.outputs]
        return results

    def stream_chat(
        self,
        messages: Any,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """As one delta: what is a call is known at the end."""
        result = self.chat([list(messages)], params, tools=tools, **options)[0]
        for output in result.outputs:
            delta = Delta(result.request_id, output.index, output.text, list(output.token_ids))
            delta.content, delta.reasoning = output.content or "", output.reasoning or ""
            delta.tool_calls, delta.finish_reason = output.tool_calls, output.finish_reason
            delta.stop_reason, delta.stop_kind, delta.output = output.stop_reason, output.stop_kind, output
            yield delta

    def add(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> str:
        return self.inner.add(prompt, params, **options)

    def stream(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> Iterator[Delta]:
        return self.inner.stream(prompt, params, **options)

    def abort(self, request_id: str) -> bool:
        return self.inner.abort(request_id)

    def close(self) -> None:
        self.inner.close()


def as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """A conversation without tools, calls and results: the same, said in texts.

    Users' turns that follow each other become one, since many templates ask for turns that alternate.
    """
    described = "".join(json.dumps(tool["function"], ensure_ascii=False) + "\n" for tool in tools)
    plain: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        for call in message.get("tool_calls") or ():
            function = call["function"]
            written = f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}'
            content = f"{content}\n<tool_call>\n{written}\n</tool_call>".lstrip("\n")
        if plain and role == "user" and plain[-1]["role"] == "user":
            plain[-1]["content"] += f"\n\n{content}"
        else:
            plain.append({"role": role, "content": content})
    if described:
        if not plain or plain[0]["role"] != "system":
            plain.insert(0, {"role": "system", "content": ""})
        how = _HOW.replace("EXAMPLE", json.dumps(_example(tools[0]["function"])))
        plain[0]["content"] = (plain[0]["content"] + how + described).strip()
    return plain


def with_calls(output: CompletionOutput, names: frozenset[str]) -> CompletionOutput:
    """Read the calls out of an answer's content. `names` are the tools: only their calls count in fences."""
    text = output.text if output.content is None else output.content
    parser = MessageParser(_SYNTAX, None)
    events = [*parser.push(text.encode("utf-8", "replace")), *parser.finish()]
    content = "".join(event.text for event in events if event.kind == "content")
    calls, broken = list(parser.calls), parser.broken_calls
    if not calls and not broken and parser.open_call is None:
        content, calls = _fenced(content, names)
    return replace(
        output,
        content=content.strip() if calls else content,
        tool_calls=tuple(calls),
        open_call=parser.open_call,
        broken_calls=broken,
        finish_reason=finish_reason_of(output.stop_kind, len(calls)),
    )


def _fenced(content: str, names: frozenset[str]) -> tuple[str, list[ToolCall]]:
    """Calls that stand in code fences: small models write these where they were shown tags."""
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = read_json_call(match[1].strip(), arguments_required=True)
        if call is None or call.name not in names:
            return match[0]
        calls.append(call)
        return ""

    rest = _FENCE.sub(take, content)
    return (rest, calls) if calls else (content, [])


def _example(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call of this tool with a text for each argument that it needs."""
    return {
        "name": function["name"],
        "arguments": dict.fromkeys(function["parameters"].get("required", ()), "..."),
    }


def _names(tools: Sequence[Any]) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)
