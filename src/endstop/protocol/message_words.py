"""What a message says, apart from how a template shows it: its texts, and the same message with others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from endstop.protocol.template import REASONING_FIELDS
from endstop.protocol.tracked_text import KEY, Path


def role_of(message: Any) -> Any:
    return field_of(message, "role")


def field_of(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, dict) else getattr(message, name, None)


def is_exchanged(path: Path) -> bool:
    """Whether a path under ("messages", i) names text that is exchanged in the twin render."""
    if path[-1] == KEY:
        return False
    return path[2] in ("content", *REASONING_FIELDS) or "arguments" in path[3:]


def stand_in(index: int) -> str:
    return f"Qz{index}Vx"


def _other(value: Any, index: int) -> Any:
    """The same data with other words in every text that is not blank."""
    if isinstance(value, str):
        return stand_in(index) if value.strip() else value
    if isinstance(value, dict):
        return {k: (v if k in ("type", "id") else _other(v, index)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_other(item, index) for item in value]
    return value


def with_other_words(message: Any, index: int) -> Any:
    changed = dict(message)
    calls = changed.get("tool_calls")
    for name in ("content", *REASONING_FIELDS):
        value = changed.get(name)
        if name == "content" and isinstance(value, str) and not value.strip() and not calls:
            changed[name] = stand_in(index)  # an empty answer has to be somewhere, too
        elif value is not None:
            changed[name] = _other(value, index)
    if isinstance(calls, list):
        changed["tool_calls"] = [_with_other_arguments(call, index) for call in calls]
    return changed


def _with_other_arguments(call: Any, index: int) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_other_arguments(call["function"], index)}
    if "arguments" in call:
        return {**call, "arguments": _other(call["arguments"], index)}
    return call


def words_of(message: Any) -> Iterator[tuple[Path, str]]:
    """(path below the message, text) of everything that an assistant message says."""
    content = field_of(message, "content")
    if isinstance(content, str):
        yield ("content",), content
    elif isinstance(content, list | tuple):
        for at, piece in enumerate(content):
            if isinstance(piece, dict) and isinstance(piece.get("text"), str):
                yield ("content", at, "text"), piece["text"]
    yield from words_beside_content(message)


def words_beside_content(message: Any) -> Iterator[tuple[Path, str]]:
    for name in REASONING_FIELDS:
        if isinstance(field_of(message, name), str):
            yield (name,), field_of(message, name)
    calls = field_of(message, "tool_calls")
    for at, call in enumerate(calls if isinstance(calls, list | tuple) else ()):
        inner = field_of(call, "function")
        base: Path = ("tool_calls", at) if inner is None else ("tool_calls", at, "function")
        function = call if inner is None else inner
        if isinstance(field_of(function, "name"), str):
            yield (*base, "name"), field_of(function, "name")
        yield from _texts(field_of(function, "arguments"), (*base, "arguments"))


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _texts(item, (*path, at))


def kind_of_words(path: Path) -> str:
    if path[0] == "content":
        return "part of the content"
    return "a tool call" if path[0] == "tool_calls" else "the reasoning"
