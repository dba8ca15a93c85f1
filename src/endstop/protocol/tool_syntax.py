"""How models write tool calls and reasoning: the syntaxes, and reading one call from its text."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

ToolSyntaxName = Literal["hermes", "llama3", "mistral", "python"]
TOOL_SYNTAX_NAMES: tuple[ToolSyntaxName, ...] = get_args(ToolSyntaxName)

# open tag, close tag ("" where the syntax has none: the call ends where its JSON or its bracket closes)
_TAGS: dict[ToolSyntaxName, tuple[str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>", ""),
    "mistral": ("[TOOL_CALLS]", ""),
    "python": ("<|python_start|>", "<|python_end|>"),
}

# Start and end of reasoning in templates of published models.
_REASONING_TAGS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
)

# Characters of a `name.call(..)`; beyond it Python's parser would be fed for nothing.
_LONGEST_BUILTIN = 65536


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete tool call.

    Attributes:
        name: the tool's name, never empty.
        arguments: the JSON text of an object, exactly as the model wrote it (`{}` where it wrote none;
            where it wrote the object inside a JSON string, that string's value).
        raw: the call as written, without its tags.
    """

    name: str
    arguments: str
    raw: str


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """Which syntax a model writes its calls in, and whether it may write several in one turn.

    `hermes`: `<tool_call>{"name": .., "arguments": {..}}</tool_call>` (Hermes, Qwen).
    `llama3`: `{"name": .., "parameters": {..}}` at the start of the answer, several separated by `;` or
    white space; or `<|python_tag|>` before such objects, or before `name.call(key="value")`.
    `mistral`: `[TOOL_CALLS]` before a JSON array of calls, or before `name[ARGS]{..}` (with or without
    `[CALL_ID]id`, and with or without the `[ARGS]` mark).
    `python`: `<|python_start|>expression<|python_end|>`; the call is named `python`, its arguments are
    `{"code": "expression"}`.
    """

    name: ToolSyntaxName
    parallel: bool = True

    def __post_init__(self) -> None:
        if self.name not in TOOL_SYNTAX_NAMES:
            raise ValueError(f"tool syntax must be one of {', '.join(TOOL_SYNTAX_NAMES)}, got {self.name!r}")

    @property
    def open_tag(self) -> str:
        return _TAGS[self.name][0]

    @property
    def close_tag(self) -> str:
        """The tag that ends a call, or "" where the syntax has none."""
        return _TAGS[self.name][1]

    @classmethod
    def from_template(
        cls, template: str | None, added_tokens: Iterable[str] = (), *, parallel: bool = True
    ) -> ToolSyntax | None:
        """The syntax that `template` (Jinja source) writes calls in, or None where it is none of ours.

        Decided by the tags in the template's own text. `added_tokens` (contents of the tokenizer's added
        tokens) matter only for `python`, whose tags belong to the vocabulary and not to the template.
        Whoever knows better passes a ToolSyntax of their own.
        """
        text = template or ""
        if "<tool_call>" in text:
            # Qwen3-Coder and GLM put XML between the same tags; that is another syntax.
            known = "<function=" not in text and "<arg_key>" not in text
            return cls("hermes", parallel) if known else None
        if "[TOOL_CALLS]" in text:
            return cls("mistral", parallel)
        if "<|python_tag|>" in text:
            return cls("llama3", parallel)
        # Llama 3 and Llama 4; the latter has `<|python_start|>` as well, and no code between.
        headers = "<|start_header_id|>" in text or "<|header_start|>" in text
        if headers and '"name": ' in text and '"parameters": ' in text:
            return cls("llama3", parallel)
        if "<|python_start|>" in text or "<|python_start|>" in set(added_tokens):
            return cls("python", parallel)
        return None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tags around a model's reasoning. `open`: the prompt already opened the region."""

    start: str = "<think>"
    end: str = "</think>"
    open: bool = False

    def __post_init__(self) -> None:
        if not self.start or not self.end or self.start == self.end:
            raise ValueError("reasoning needs two different tags that are not empty")

    @classmethod
    def from_template(cls, template: str | None, rendered_prompt: str = "") -> Reasoning | None:
        """The reasoning tags that `template` (Jinja source) writes, or None where it writes none.

        `open` is true where `rendered_prompt` ends with the start tag (white space behind it allowed): a
        tag anywhere else in the prompt may be a user's text. A prompt that continues reasoning in the
        middle needs `Reasoning(start, end, open=True)` from the caller, who knows that it does.
        """
        text = template or ""
        for start, end in _REASONING_TAGS:
            # Some templates only cut the reasoning of old turns away and so name the end tag alone.
            if end in text or start in text:
                return cls(start, end, open=rendered_prompt.rstrip().endswith(start))
        return None


def read_json_call(text: str, *, arguments_required: bool = False) -> ToolCall | None:
    """The call that a JSON object spells, or None where it spells none.

    The name stands under `name`, the arguments under `arguments` or `parameters`, both possibly inside
    an object under `function`. Arguments are an object, null, or a string that holds an object.
    """
    members = _members(text)
    if members is not None and "name" not in members and "function" in members:
        members = _members(members["function"][1])
    if members is None:
        return None
    name = members.get("name", (None, ""))[0]
    if not isinstance(name, str) or not name or not _encodable(name):
        return None
    for key in ("arguments", "parameters"):
        if key in members:
            value, written = members[key]
            break
    else:
        return None if arguments_required else ToolCall(name, "{}", text)
    if value is None:
        return ToolCall(name, "{}", text)
    if isinstance(value, str):
        inner = _members(value)
        return None if inner is None or not _encodable(value) else ToolCall(name, value.strip(), text)
    return ToolCall(name, written, text) if isinstance(value, dict) else None


def read_arguments_call(name: str, arguments: str, raw: str) -> ToolCall | None:
    """The call of `name` with the JSON object `arguments`, or None where they are no JSON object."""
    return ToolCall(name, arguments, raw) if _members(arguments) is not None else None


def read_builtin_call(text: str) -> ToolCall | None:
    """The call that `name.call(key="value", ..)` spells, keyword arguments and literals only, or None."""
    if len(text) > _LONGEST_BUILTIN:
        return None
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Attribute):
            return None
        if node.func.attr != "call" or not isinstance(node.func.value, ast.Name):
            return None
        values = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = ast.literal_eval(keyword.value)
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return ToolCall(node.func.value.id, arguments, text) if _encodable(arguments) else None


def read_python_call(text: str) -> ToolCall:
    """The call of endstop's own syntax: an expression for the in-stream calculator."""
    return ToolCall("python", json.dumps({"code": text}, ensure_ascii=False), text)


def _members(text: str) -> dict[str, tuple[Any, str]] | None:
    """The members of the JSON object `text`: key -> (value, the value as written). None: no object."""
    decoder = json.JSONDecoder()
    space = " \t\r\n"

    def skip(position: int) -> int:
        while position < len(text) and text[position] in space:
            position += 1
        return position

    try:
        if not isinstance(json.loads(text, parse_constant=_refuse_constant), dict):
            return None
        members: dict[str, tuple[Any, str]] = {}
        position = skip(skip(0) + 1)
        while text[position] != "}":
            key, position = decoder.raw_decode(text, position)
            start = skip(skip(position) + 1)
            value, end = decoder.raw_decode(text, start)
            members[key] = (value, text[start:end])
            position = skip(end)
            if text[position] == ",":
                position = skip(position + 1)
        return members
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    """NaN and Infinity are Python's, not JSON's."""
    raise ValueError(f"{name} is not JSON")


def _encodable(text: str) -> bool:
    """Whether `text` can leave as UTF-8: JSON escapes can spell half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
