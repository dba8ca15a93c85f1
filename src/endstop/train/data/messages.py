"""Conversations as records have them: messages with what stands beside them, and the rows to train on."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from endstop.protocol.labels import IGNORE, ChatRows, Row, chat_rows, truncated
from endstop.protocol.message_words import role_of
from endstop.protocol.template import SPECIAL_TOKEN_NAMES
from endstop.train.data.records import BadDocument

if TYPE_CHECKING:
    from endstop.protocol.render import ChatRenderer

Message = dict[str, Any]
COLUMNS = ("messages", "prompt", "completion")
"""Where the messages of a record are."""
BESIDE = ("tools", "chat_template_kwargs", "complete")
"""What a record may have beside them."""

_DEEPEST = 100
# What the one who renders decides, not the data.
_NOT_OF_THE_DATA = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "now", "max_length"),
    *("first_message", "renderer", *SPECIAL_TOKEN_NAMES),
)


class Messages(list[Message]):
    """The messages of a conversation, and what its record says besides.

    Attributes:
        first_message: the turns in front of it belong to a prompt: they are read, not trained on.
        tools: definitions of tools, for templates that take them.
        template_options: more that the template is given (`chat_template_kwargs`).
        complete: False where the last answer was cut off: its end is none.
    """

    def __init__(
        self,
        messages: Iterable[Message],
        first_message: int = 0,
        tools: list[Any] | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        complete: bool = True,
    ) -> None:
        super().__init__(messages)
        self.first_message = first_message
        self.tools = tools
        self.template_options = dict(template_options or {})
        self.complete = complete

    @property
    def render_options(self) -> dict[str, Any]:
        """Options of `ChatRenderer.render` for this conversation."""
        return {**({} if self.tools is None else {"tools": self.tools}), **self.template_options}


def training_rows(
    renderer: ChatRenderer, messages: Sequence[Any], max_length: int | None = None, **options: Any
) -> ChatRows:
    """`chat_rows` of a conversation, with what `Messages` know besides.

    `options` are those of `ChatRenderer.render`; where the record says otherwise, it has the last word.
    """
    if not isinstance(messages, Messages):
        return chat_rows(renderer, messages, max_length, **options)
    made = chat_rows(
        renderer,
        messages,
        # What has no end is known before anything is cut.
        max_length if messages.complete else None,
        first_message=messages.first_message,
        **{**options, **messages.render_options},
    )
    if messages.complete or not made.rows or role_of(messages[-1]) != "assistant":
        return made
    last = _without_end(made.rows[-1], renderer.tokenizer.added_tokens)
    rows = [*made.rows[:-1], last]
    if max_length is not None:
        rows = [truncated(row, max_length) for row in rows]
    return replace(made, rows=rows)


def _without_end(row: Row, specials: Collection[int]) -> Row:
    """The row without the tokens behind its last words: a turn that was cut off was not ended."""
    labels = list(row.labels)
    at = len(labels)
    while at and labels[at - 1] == IGNORE:
        at -= 1
    while at and labels[at - 1] != IGNORE and labels[at - 1] in specials:
        at -= 1
        labels[at] = IGNORE
    return Row(row.ids, labels, cut=True)


def messages_of(record: Any) -> Messages:
    """The conversation of a record in TRL's formats; BadDocument where it is none."""
    if not isinstance(record, Mapping):
        raise BadDocument("a conversation is a JSON object.")
    first_message = 0
    if record.get("messages") is not None:
        found = record["messages"]
    elif record.get("prompt") is not None and record.get("completion") is not None:
        prompt, completion = record["prompt"], record["completion"]
        first = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        last = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        if not isinstance(first, list) or not isinstance(last, list):
            raise BadDocument("prompt and completion are texts or lists of messages.")
        found, first_message = [*first, *last], len(first)
    else:
        raise BadDocument(
            f"there are no messages, and no prompt with a completion, among {', '.join(map(str, record))}."
        )
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise BadDocument("messages is a list of objects.")
    for message in found:
        if not isinstance(message.get("role"), str):
            raise BadDocument("every message has a role, which is a text.")
        _check_content(message)
    complete = record.get("complete")
    if not isinstance(complete, bool | None):
        raise BadDocument(f"complete is true or false, got {complete!r:.40}.")
    return Messages(
        (_without_none(message) for message in found),
        first_message,
        _tools(record.get("tools")),
        template_options=_template_options(record.get("chat_template_kwargs")),
        complete=complete is not False,
    )


def _check_content(message: Message) -> None:
    """BadDocument for contents that templates would take for an empty one."""
    content = message.get("content")
    if content is None:
        # What stands beside it may be what the message says: tool calls, thoughts.
        if not any(value for key, value in message.items() if key not in ("role", "content", "name")):
            raise BadDocument(f"a message of the {message['role']} has no content.")
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise BadDocument(f"the content of a message is a text or a list of parts, got {content!r:.40}.")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise BadDocument(f"a part of a message's content is an object with a type, got {part!r:.40}.")
        if "text" in part and not isinstance(part["text"], str | None):
            raise BadDocument(f"the text of a part of a message must be a text, got {part['text']!r:.40}.")


def _tools(value: Any) -> list[Any] | None:
    """The definitions of tools in a record: a list, or one as JSON; none where it is empty."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadDocument(f"tools is no list and no JSON of one: {error}.") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadDocument(f"tools is a list of objects, got {value!r:.40}.")
    return [_without_none(tool) for tool in value]


def _template_options(value: Any) -> dict[str, Any]:
    """What a record gives its template besides: an object, or one as JSON."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadDocument(f"chat_template_kwargs is no object and no JSON of one: {error}.") from error
    if value is None or value == "":
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise BadDocument(f"chat_template_kwargs is an object, got {value!r:.40}.")
    if wrong := [name for name in value if name in _NOT_OF_THE_DATA]:
        raise BadDocument(f"chat_template_kwargs cannot set {wrong[0]}.")
    return dict(_without_none(dict(value)))


def _without_none(value: Any, depth: int = 0) -> Any:
    """Parquet gives every object every key that one of them has. BadDocument for what templates, which go
    through it in their own way, could not go through."""
    if depth > _DEEPEST:
        raise BadDocument(f"this conversation is nested more than {_DEEPEST} levels deep.")
    if isinstance(value, dict):
        return {key: _without_none(item, depth + 1) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item, depth + 1) for item in value]
    return value
