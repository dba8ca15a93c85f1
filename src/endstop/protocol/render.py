"""Chats as text, ids, spans and masks: what a model sees, and which of it the model would have said."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from endstop.protocol.chat_encoding import ChatEncoder, Span
from endstop.protocol.errors import MissingTemplate, RenderRefused
from endstop.protocol.message_words import role_of
from endstop.protocol.supervision import (
    Chat,
    Turn,
    Unclear,
    last_turn,
    supervised_turns,
    token_mask,
)
from endstop.protocol.template import (
    SPECIAL_TOKEN_NAMES,
    conversation_variables,
    cut_at_continuation,
    open_final_message,
    plain_data,
    render_template,
    template_errors,
)
from endstop.protocol.terminator import find_ends
from endstop.protocol.tracked_text import Mark, TrackedText, marks_of, untracked

if TYPE_CHECKING:
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.tokenizer import Tokenizer

# Roles that templates know. Their names are part of the template's language, not text of a user; a name
# that is none of them and does not stand in the template is treated as text.
_ROLES = frozenset(
    {"system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation"}
)


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Where a message stands in the rendered text, in characters [start, end).

    Attributes:
        index, role: the message.
        content: the pieces of its own text, as the template shows them (trimmed, escaped, moved).
        whole: from its header to the end of what is written behind it. None where there is no such place:
            the template moves the message's text into another one, or rewrites earlier messages as later
            ones come.
    """

    index: int
    role: str
    content: tuple[Span, ...]
    whole: Span | None


@dataclass(frozen=True, slots=True)
class Supervision:
    """The mask of a rendered conversation, or why there is none.

    Attributes:
        mask: for each token 1 if the model would have produced it, 0 if not; None if it cannot be told.
        refusal: the reason, where there is no mask.
        turns: what each assistant message contributes.
    """

    mask: list[int] | None
    refusal: str | None = None
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    Attributes:
        text: byte-equal to `apply_chat_template(tokenize=False)` of transformers.
        ids: its tokens, with nothing added around them: one BOS where the template writes one. Texts of
            added tokens inside messages are encoded as text.
        offsets: for each id the characters [start, end) of `text` that it stands for.
        escaped: places where a message's text would have become a control token.
    """

    text: str
    ids: list[int]
    offsets: list[Span]
    escaped: tuple[Span, ...]
    _chat: Chat = field(repr=False, compare=False)
    _only_last: bool = field(default=False, repr=False, compare=False)

    @cached_property
    def supervision(self) -> Supervision:
        """Found when first asked for: it takes some more renders of the conversation."""
        try:
            turns = [last_turn(self._chat)] if self._only_last else supervised_turns(self._chat)
        except Unclear as reason:
            return Supervision(None, f"{reason}.")
        except RenderRefused as error:
            return Supervision(None, str(error))
        ranges = [span for turn in turns for span in turn.ranges]
        return Supervision(token_mask(self._chat.encoded, ranges), None, tuple(turns))

    @property
    def mask(self) -> list[int] | None:
        """1 for each token that the model would have produced (terminators included), None if unclear."""
        return self.supervision.mask

    @property
    def refusal(self) -> str | None:
        """Why there is no mask."""
        return self.supervision.refusal

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a turn, as the renderer knows them."""
        return frozenset(self._chat.stop_ids)

    def message_content(self, index: int) -> Span | None:
        """From the first to the last character of a message's own text, None where none is shown."""
        marks = [mark for mark in marks_of(self._chat.text) if mark.path[:2] == ("messages", index)]
        return (min(m.start for m in marks), max(m.end for m in marks)) if marks else None

    @cached_property
    def message_spans(self) -> tuple[MessageSpan, ...]:
        """Where the messages stand. Takes one render for each of them when first asked."""
        content: dict[int, list[Span]] = {}
        for mark in marks_of(self._chat.text):
            if mark.path[0] == "messages":
                content.setdefault(int(mark.path[1]), []).append((mark.start, mark.end))
        pieces = [tuple(_merged(content.get(index, ()))) for index in range(len(self._chat.messages))]
        bounds = self._bounds()
        spans = []
        for index, message in enumerate(self._chat.messages):
            start, end = bounds[index], bounds[index + 1]
            whole = None if start is None or end is None else (start, end)
            if whole is not None and any(
                (whole[0] <= a and b <= whole[1]) != (owner == index)
                for owner, own in enumerate(pieces)
                for a, b in own
            ):
                whole = None
            spans.append(MessageSpan(index, str(role_of(message)), pieces[index], whole))
        return tuple(spans)

    def _bounds(self) -> list[int | None]:
        """Where each message ends, by rendering the conversation up to it; None where that is no prefix."""
        bounds: list[int | None] = [0]
        for count in range(1, len(self._chat.messages) + 1):
            if count == len(self._chat.messages) and self._chat.open:
                bounds.append(len(self.text))
                continue
            try:
                text = self._chat.render_plain(self._chat.messages[:count])
            except RenderRefused:
                bounds.append(None)
                continue
            bounds.append(len(text) if self.text.startswith(text) else None)
        return bounds


class ChatRenderer:
    """Renders conversations for one model.

    Args:
        tokenizer: the model's.
        template: a chat template to be used instead of the tokenizer's own, or the name of one of those.
        stops: the model's stop set, or its ids. Without it the stop ids are the tokenizer's eos token and
            the token that the template writes behind a last assistant message.
        assistant_tokens: texts of added tokens that stand for the token in assistant messages (`<think>`
            in answers to be trained on, say). Everywhere else, and by default, they are text.

    Raises MissingTemplate where neither the model nor the caller has a template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        stops: StopSet | Iterable[int] | None = None,
        assistant_tokens: Collection[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._templates = dict(tokenizer.chat_templates)
        self._given = self._templates.get(template, template) if template is not None else None
        self._assistant_tokens = frozenset(assistant_tokens)
        self._encoder = ChatEncoder(tokenizer)
        self._stops = (
            None if stops is None else frozenset(stops if isinstance(stops, Iterable) else stops.ids)
        )
        self._probed: dict[str, frozenset[int]] = {}
        if template is None and not self._templates:
            raise MissingTemplate(
                f"{tokenizer.source} has no chat template; give one with --template, or send a raw prompt."
            )

    def template_for(self, tools: Sequence[Any] | None = None) -> str:
        """The template in use: models may have one of their own for conversations with tools."""
        if self._given is not None:
            return self._given
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise MissingTemplate(
            f"{self.tokenizer.source} has chat templates named {', '.join(sorted(self._templates))} and no "
            "default; give one of them as the template."
        )

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        now: datetime | None = None,
        **variables: Any,
    ) -> Rendered:
        """A conversation as text and ids; see `render_template` for the arguments.

        Raises RenderRefused or BrokenModel with one sentence.
        """
        messages = getattr(messages, "messages", messages)
        source = _Source(self, self.template_for(tools), tools, documents, now or datetime.now(), variables)
        return self._rendered(source, messages, add_generation_prompt, continue_final_message)

    def render_turns(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
        **variables: Any,
    ) -> list[Rendered]:
        """One sample for each assistant message: the conversation up to it, only that turn supervised.

        For templates that rewrite earlier turns: each sample is exactly what inference would have seen and
        what the model would have answered. A sample whose prompt is none has no mask, but a refusal.
        """
        source = _Source(self, self.template_for(tools), tools, documents, now or datetime.now(), variables)
        messages = getattr(messages, "messages", messages)
        samples = []
        for index, message in enumerate(messages):
            if role_of(message) == "assistant":
                rendered = self._rendered(source, messages[: index + 1], False, False, only_last=True)
                samples.append(rendered)
        return samples

    def _rendered(
        self,
        source: _Source,
        messages: Sequence[Any],
        add_generation_prompt: bool,
        continue_final_message: bool | str,
        only_last: bool = False,
    ) -> Rendered:
        plain = source.render_plain(messages, add_generation_prompt, continue_final_message)
        text = source.render(messages, add_generation_prompt, continue_final_message)
        if any("\ud800" <= character <= "\udfff" for character in plain):
            raise RenderRefused("this conversation holds half a surrogate pair, which is no valid Unicode.")
        if untracked(text) != plain:
            raise RenderRefused(
                "the chat template changes texts in a way that hides where they come from, so that messages "
                "could become control tokens."
            )
        encoded = self._encoder.encode(text, self._genuine(messages))
        chat = Chat(
            render=source.render,
            render_plain=source.render_plain,
            template=source.template,
            messages=plain_data(list(messages)),
            text=text,
            encoded=encoded,
            stop_ids=self._stop_ids(source),
            special_ids=self.special_ids,
            add_generation_prompt=add_generation_prompt,
            open=bool(continue_final_message),
        )
        return Rendered(plain, encoded.ids, encoded.offsets, encoded.escaped, chat, _only_last=only_last)

    def _genuine(self, messages: Sequence[Any]) -> Any:
        if not self._assistant_tokens:
            return None

        def genuine(mark: Mark, content: str) -> bool:
            return (
                content in self._assistant_tokens
                and mark.path[0] == "messages"
                and role_of(messages[int(mark.path[1])]) == "assistant"
            )

        return genuine

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of the tokenizer's special tokens."""
        return frozenset(i for i, token in self.tokenizer.added_tokens.items() if token.special)

    @property
    def special_token_variables(self) -> dict[str, str]:
        """What templates get as `bos_token`, `eos_token` and the like."""
        return self.tokenizer.special_tokens

    def _stop_ids(self, source: _Source) -> frozenset[int]:
        if self._stops is not None:
            return self._stops
        if source.template not in self._probed:
            self._probed[source.template] = self._probe(source.template)
        return self._probed[source.template]

    def _probe(self, template: str) -> frozenset[int]:
        """The eos token, and what the template writes behind a last answer and behind a tool call."""
        eos = self.tokenizer.eos_token
        ends = find_ends(
            {"default": template},
            {token.content: token.special for token in self.tokenizer.added_tokens.values()},
            [] if eos is None else [eos],
            self.special_token_variables,
        )
        texts = {*ends.turn_ends, *ends.tool_ends} | ({eos} if eos is not None else set())
        ids = (self.tokenizer.token_to_id(text) for text in texts)
        return frozenset(token_id for token_id in ids if token_id is not None)


@dataclass(frozen=True)
class _Source:
    """What stays the same when the same conversation is rendered in several ways."""

    renderer: ChatRenderer
    template: str
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    now: datetime
    variables: Mapping[str, Any]

    def render_plain(
        self,
        messages: Sequence[Any],
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
    ) -> str:
        return render_template(
            self.template,
            messages,
            tools=self.tools,
            documents=self.documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            now=self.now,
            **{**self.renderer.special_token_variables, **self.variables},
        )

    def render(
        self,
        messages: Sequence[Any],
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
    ) -> str:
        """The same text with marks that say which characters are data."""
        from endstop.protocol.template_environment import fixed_now
        from endstop.protocol.tracked_render import render_tracked, track

        conversation = conversation_variables(
            messages,
            tools=self.tools,
            documents=self.documents,
            add_generation_prompt=add_generation_prompt,
            variables={**self.renderer.special_token_variables, **self.variables},
        )
        opened = open_final_message(
            self.template, conversation, continue_final_message, add_generation_prompt
        )
        marked = {
            name: value if name in SPECIAL_TOKEN_NAMES else track(value, (name,))
            for name, value in conversation.items()
        }
        with template_errors(), fixed_now(self.now):
            text = render_tracked(self.template, marked)
        # The name of a role is a word of the template's language, not something that somebody says.
        roles = {
            ("messages", index, "role")
            for index, message in enumerate(conversation["messages"])
            if isinstance(message.get("role"), str) and self._knows(message["role"])
        }
        text = TrackedText(untracked(text), [mark for mark in marks_of(text) if mark.path not in roles])
        return text if opened is None else cut_at_continuation(text, opened)

    def _knows(self, role: str) -> bool:
        return role in _ROLES or (
            role.isidentifier() and (f"'{role}'" in self.template or f'"{role}"' in self.template)
        )


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
