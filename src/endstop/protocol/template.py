"""Chat templates rendered exactly as `apply_chat_template` of transformers 5 renders them.

Templates come from strangers: they run in jinja2's immutable sandbox and see nothing but plain
JSON-like data. Whatever goes wrong in one becomes a single sentence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from endstop.protocol.errors import BrokenModel, EndstopError, RenderRefused

# Variables that hold the text of a special token; absent, not None, where the tokenizer has no such token.
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# A message's reasoning goes by several names; the first is the one that most templates read.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def render_template(
    template: str,
    messages: Sequence[Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    now: datetime | None = None,
    **variables: Any,
) -> str:
    """The text that the Jinja `template` makes of a conversation.

    Args:
        messages: mappings (or dataclasses, or pydantic models) with `role` and what belongs to it.
        tools: JSON schemas of the functions that the model may call.
        continue_final_message: leave the last message open, so that the model goes on with it; a string
            names the field to be continued, True is `content`.
        now: what `strftime_now` formats; None is the clock.
        variables: further names for the template, `bos_token` and `eos_token` above all. Names of special
            tokens whose value is None are left undefined.

    Raises BrokenModel for a template that is not valid Jinja, RenderRefused where the template refuses the
    conversation or cannot render it.
    """
    from endstop.protocol.template_environment import compiled, fixed_now

    with template_errors(), fixed_now(now):
        conversation = conversation_variables(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        opened = open_final_message(template, conversation, continue_final_message, add_generation_prompt)
        text: str = compiled(template).render(**conversation)
    return text if opened is None else cut_at_continuation(text, opened)


def conversation_variables(
    messages: Sequence[Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything the template sees, rebuilt from plain types: a fresh copy that the caller may change."""
    others = {
        name: plain_data(value)
        for name, value in (variables or {}).items()
        if value is not None or name not in SPECIAL_TOKEN_NAMES
    }
    clashes = {"messages", "tools", "documents", "add_generation_prompt"} & others.keys()
    if clashes:
        raise RenderRefused(f"{min(clashes)} is an argument of its own, not a variable of the template.")
    return {
        "messages": _messages(messages),
        "tools": _schemas(tools),
        "documents": _documents(documents),
        "add_generation_prompt": add_generation_prompt,
        **others,
    }


def open_final_message(
    template: str, conversation: dict[str, Any], field: bool | str, add_generation_prompt: bool
) -> str | None:
    """Mark the place in the last message where the model is to go on, by changing `conversation`.

    Returns the text before the mark, or None where the message is not to be continued.
    """
    if not field:
        return None
    if add_generation_prompt:
        raise RenderRefused(
            "a conversation either continues its last message or gets a generation prompt, not both."
        )
    last = conversation["messages"][-1]
    name = field if isinstance(field, str) else "content"
    text = last.get(name)
    if text is None:
        raise RenderRefused(f"the last message has no {name!r} that could be continued.")
    # Reasoning was copied under all its names; whichever the template reads is to be continued.
    names = [n for n in REASONING_FIELDS if last.get(n) == text] if name in REASONING_FIELDS else [name]
    if not any(n in template for n in names):
        raise RenderRefused(f"the chat template does not use {name!r}, so it cannot be continued.")
    if isinstance(text, list | tuple):
        for block in reversed(text):
            if isinstance(block, dict) and isinstance(block.get("text"), str):
                opened: str = block["text"]
                block["text"] = opened + _CONTINUE_TAG
                return opened
        raise RenderRefused("the last message has no text that could be continued.")
    if not isinstance(text, str):
        raise RenderRefused(f"{name!r} of the last message is not text, so it cannot be continued.")
    for n in names:
        last[n] = last[n] + _CONTINUE_TAG
    return text


def cut_at_continuation(rendered: str, opened: str) -> str:
    """The render of a conversation whose last message was opened, up to where the model goes on."""
    mark = _CONTINUE_TAG.strip()
    if opened.strip() not in rendered or mark not in rendered:
        raise RenderRefused("the chat template drops the last message, so it cannot be continued.")
    at = rendered.rindex(mark)
    if rendered[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return rendered[:at]
    # The template trims messages: the space behind the mark is gone, so trailing blanks go as well.
    return rendered[:at].rstrip()


def plain_data(value: Any) -> Any:
    """A copy of `value` out of str, int, float, bool, None, dict, list and tuple only.

    Objects with methods of their own never reach a template: what is no plain data becomes a placeholder
    such as `<Image>`, so that templates can still see that something is there.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_data(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain_data(item) for item in value)
    if any(base.__module__ == "numpy" and base.__name__ == "generic" for base in type(value).__mro__):
        return plain_data(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return plain_data(value.model_dump())
    return f"<{type(value).__name__}>"


@contextmanager
def template_errors() -> Iterator[None]:
    """Turns whatever a template may raise into one sentence."""
    import jinja2

    try:
        yield
    except EndstopError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise BrokenModel(
            f"the chat template is not valid Jinja: {error.message} (line {error.lineno})."
        ) from error
    except jinja2.exceptions.SecurityError as error:
        raise RenderRefused(f"the chat template tried something the sandbox forbids: {error}.") from error
    except jinja2.UndefinedError as error:
        raise RenderRefused(
            f"the chat template needs something that this conversation does not have: {error}."
        ) from error
    except jinja2.TemplateError as error:
        raise RenderRefused(f"the chat template refuses this conversation: {error}") from error
    except Exception as error:
        raise RenderRefused(
            f"the chat template cannot render this conversation: {type(error).__name__}: {error}"
        ) from error


def _messages(messages: Any) -> list[dict[str, Any]]:
    messages = getattr(messages, "messages", messages)
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RenderRefused(f"a conversation is a list of messages, got {type(messages).__name__}.")
    if not messages:
        raise RenderRefused("the conversation is empty, it needs at least one message.")
    rebuilt = []
    for index, message in enumerate(messages):
        plain = plain_data(message)
        if not isinstance(plain, dict):
            raise RenderRefused(f"message {index} must be a mapping with a role, got {plain!r}.")
        # APIs send content=None or tool_calls=None; templates handle a missing key, not None.
        plain = {key: item for key, item in plain.items() if item is not None}
        reasoning = next((plain[name] for name in REASONING_FIELDS if name in plain), None)
        if reasoning is not None:
            # gpt-oss templates read `thinking`, most others `reasoning_content`.
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        rebuilt.append(plain)
    return rebuilt


def _schemas(tools: Sequence[Any] | None) -> Any:
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise RenderRefused(f"tools is a list of JSON schemas, got {type(tools).__name__}.")
    for tool in tools:
        if not isinstance(tool, Mapping):
            name = getattr(tool, "__name__", repr(tool))
            raise RenderRefused(
                f"the tool {name} must be given as a JSON schema, a mapping "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}.'
            )
    return plain_data(list(tools))


def _documents(documents: Sequence[Any] | None) -> Any:
    if documents is None:
        return None
    for document in documents:
        if not isinstance(document, Mapping):
            raise RenderRefused(f"a document is a mapping with title and text, got {document!r}.")
    return plain_data(list(documents))
