"""Conversations that go on: an answer becomes history, or is continued.

An answer that was cut off goes into the history closed with the terminator and marked as truncated, so
that the next user turn does not run into it. An answer to be continued is left open and gets no new header.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from endstop.protocol.errors import RenderRefused
from endstop.protocol.message_words import role_of
from endstop.protocol.supervision import terminator_after

if TYPE_CHECKING:
    from endstop.protocol.render import ChatRenderer, Rendered

# A key of messages that chat templates do not read.
TRUNCATED = "truncated"


def close_turn(output_ids: Sequence[int], stop_ids: Collection[int], terminator: int | None) -> list[int]:
    """The ids of an answer as they go into the history: with exactly one token of the stop set at the end.

    Args:
        output_ids: what was generated, with or without the token that ended it; may be empty.
        terminator: what closes a turn that nothing has closed, `StopSet.terminator`.

    Raises RenderRefused for an unclosed turn of a model without terminator.
    """
    closed = list(output_ids)
    if closed and closed[-1] in stop_ids:
        return closed
    if terminator is None:
        raise RenderRefused("this model has no terminator, so a truncated turn cannot be closed.")
    return [*closed, terminator]


def next_prompt(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    next_ids: Sequence[int],
    *,
    stop_ids: Collection[int],
    terminator: int | None,
) -> list[int]:
    """The prompt after an answer: what the model has seen and said, closed, and what comes next.

    `next_ids` is what stands behind the terminator: the next messages and the header of the next answer,
    as `ids_between_turns` finds them.
    """
    return [*prompt_ids, *close_turn(output_ids, stop_ids, terminator), *next_ids]


def continued_prompt(
    prompt_ids: Sequence[int], output_ids: Sequence[int], *, stop_ids: Collection[int]
) -> list[int]:
    """The prompt that lets the model go on with its answer: left open, no new header.

    The token that ended the answer, if any did, is taken back.
    """
    kept = list(output_ids)
    if kept and kept[-1] in stop_ids:
        kept.pop()
    return [*prompt_ids, *kept]


def with_answer(
    messages: Sequence[Mapping[str, Any]],
    content: str | Sequence[Mapping[str, str]] | None,
    *,
    truncated: bool = False,
    **fields: Any,
) -> list[dict[str, Any]]:
    """The conversation with an assistant message added.

    Rendering it closes the turn. `truncated` marks an answer that a limit cut off; `fields` are further keys
    of the message, such as `reasoning_content` and `tool_calls` (complete calls only).
    """
    message: dict[str, Any] = {"role": "assistant", **fields}
    if content is not None:
        message["content"] = content
    if truncated:
        message[TRUNCATED] = True
    return [*(dict(m) for m in messages), message]


def render_continuation(renderer: ChatRenderer, messages: Sequence[Any], **options: Any) -> Rendered:
    """The prompt for going on with the last message, which must be the assistant's.

    Equal to `apply_chat_template(continue_final_message=True)`, but for an answer without any text: that one
    is begun anew with a generation prompt. `options` are those of `ChatRenderer.render`.
    """
    if not messages or role_of(messages[-1]) != "assistant":
        raise RenderRefused("only an assistant message can be continued.")
    last = messages[-1]
    content = last.get("content") if isinstance(last, Mapping) else getattr(last, "content", None)
    if not content or (isinstance(content, str) and not content.strip()):
        return renderer.render(messages[:-1], add_generation_prompt=True, **options)
    return renderer.render(messages, continue_final_message=True, **options)


def ids_between_turns(
    renderer: ChatRenderer, messages: Sequence[Any], new_messages: Sequence[Any], **options: Any
) -> list[int]:
    """What stands between the terminator of an answer and the model's next words.

    Args:
        messages: the conversation before the answer.
        new_messages: what is said after it, by users or tools.
        options: those of `ChatRenderer.render`.

    With `next_prompt` this makes the next prompt out of the ids that the model has really seen and said,
    which a new render of the answer's text need not give. Raises RenderRefused where the template closes
    turns with something else than a stop id once they are history.
    """
    answer = {"role": "assistant", "content": "Qz"}
    rendered = renderer.render([*messages, answer, *new_messages], add_generation_prompt=True, **options)
    span = rendered.message_content(len(messages))
    if span is None:
        raise RenderRefused(
            "the chat template drops earlier answers, so the next prompt must be rendered whole."
        )
    end = terminator_after(
        rendered.ids,
        rendered.offsets,
        rendered.text,
        (span[1], len(rendered.text)),
        rendered.stop_ids,
        renderer.special_ids,
    )
    if not end:
        raise RenderRefused("the chat template does not close earlier answers with a token of the stop set.")
    return rendered.ids[end[-1] + 1 :]
