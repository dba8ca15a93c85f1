"""Which tokens of a rendered conversation the model would have produced: each assistant turn with its end.

Never guessed: a turn counts where its surroundings are shown not to depend on what it says, where all of
it is there, and where it ends with a terminator of the stop set. Otherwise there is a reason why not.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from endstop.protocol.chat_encoding import EncodedChat, Span
from endstop.protocol.errors import RenderRefused
from endstop.protocol.message_words import (
    field_of,
    is_exchanged,
    kind_of_words,
    role_of,
    stand_in,
    with_other_words,
    words_beside_content,
    words_of,
)
from endstop.protocol.template import REASONING_FIELDS
from endstop.protocol.tracked_text import Mark, Path, marks_of, untracked

# Renders messages (with the conversation's tools and variables), with or without a generation prompt.
Render = Callable[[Sequence[Any], bool], str]

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Unclear(Exception):
    """It cannot be told what the model would have produced; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model would have produced for one assistant message.

    Attributes:
        message: index of the message.
        ranges: characters of the rendered text, the last range up to the end of the terminator.
        terminator: index of the token that ends the turn, None for a turn that is left open.
    """

    message: int
    ranges: tuple[Span, ...]
    terminator: int | None


@dataclass(frozen=True, slots=True)
class Chat:
    """A rendered conversation and what is needed to ask further questions about it."""

    render: Render
    render_plain: Callable[[Sequence[Any]], str]
    template: str
    messages: Sequence[Any]
    text: str
    encoded: EncodedChat
    stop_ids: Collection[int]
    special_ids: Collection[int]
    add_generation_prompt: bool = False
    open: bool = False


def supervised_turns(chat: Chat) -> list[Turn]:
    """The assistant turns of a conversation in place. Raises Unclear with the reason."""
    return _Turns(chat).in_place()


def last_turn(chat: Chat) -> Turn:
    """The last message's turn, where the rendered prompt before it is what inference would have seen."""
    return _Turns(chat).last()


def token_mask(encoded: EncodedChat, ranges: Sequence[Span]) -> list[int]:
    """1 for every token that shares a character with `ranges`, which are in order and apart."""
    mask = []
    before = at = 0
    for start, end in encoded.cores:
        # Some tokenizers leave leading blanks out of a token's offsets.
        start, before = min(start, before), max(before, end)
        while at < len(ranges) and ranges[at][1] <= start:
            at += 1
        mask.append(int(at < len(ranges) and ranges[at][0] < end))
    return mask


def terminator_after(
    ids: Sequence[int],
    offsets: Sequence[Span],
    text: str,
    window: Span,
    stop_ids: Collection[int],
    special_ids: Collection[int],
    skip_text: bool = False,
) -> list[int]:
    """Indices of the run of special tokens that begins in the characters `window`, blanks left out.

    Blanks may stand before the run, with `skip_text` other text as well (the closing of a tool call). It
    ends with its first token of `stop_ids`, and is empty without one; with no `stop_ids` it is the whole run.
    """
    run: list[int] = []
    for index in range(bisect.bisect_left(offsets, (window[0], 0)), len(ids)):
        token_id, (start, end) = ids[index], offsets[index]
        if start >= window[1]:
            break
        if end <= window[0]:
            continue
        if token_id in stop_ids:
            return [*run, index]
        if token_id in special_ids:
            run.append(index)
        elif text[start:end].strip() and (run or not skip_text):
            break
    return [] if stop_ids else run


class _Turns:
    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.plain = untracked(chat.text)
        self.marks = _data_marks(chat.text)
        self.generated = sorted(
            (mark.start, mark.end) for mark in marks_of(chat.text) if mark.path[0] == "generation"
        )
        self.owned: dict[int, list[Mark]] = {}
        for mark in self.marks:
            if mark.path[0] == "messages":
                self.owned.setdefault(int(mark.path[1]), []).append(mark)
        self._edges: dict[tuple[Any, bool], tuple[str | None, str | None]] = {}

    def in_place(self) -> list[Turn]:
        assistants = [i for i, message in enumerate(self.chat.messages) if role_of(message) == "assistant"]
        if not assistants:
            return []
        for index in assistants:
            missing = self.left_out(index)
            if missing and not self.says_it_all(index):
                raise Unclear(f"the chat template leaves out {missing} of assistant message {index}")
        if GENERATION_TAG.search(self.chat.template):
            places = self.generation_places(assistants)
        else:
            places = self.twin_places(assistants)
        turns = [self.turn(index, places[index]) for index in assistants]
        self.check(turns)
        return turns

    def last(self) -> Turn:
        index = len(self.chat.messages) - 1
        prompt = untracked(self.chat.render(self.chat.messages[:index], True))
        if not self.plain.startswith(prompt):
            raise Unclear(
                f"what the chat template renders before assistant message {index} is not the prompt that it "
                "would render for generation"
            )
        missing = self.left_out(index)
        if missing and not self.says_it_all(index, len(prompt)):
            raise Unclear(f"the chat template leaves out {missing} of assistant message {index}")
        end = max((mark.end for mark in self.owned.get(index, ())), default=len(prompt))
        turn = self.turn(index, [(len(prompt), max(end, len(prompt)))])
        self.check([turn])
        return turn

    def twin_places(self, assistants: list[int]) -> dict[int, list[Span]]:
        """For each turn the characters from the generation prompt to the end of what the message says."""
        told = self.aligned(assistants)
        places = {}
        for index in assistants:
            spans = told if told is not None else self.aligned([index])
            if spans is None and self.says_it_all(index):
                spans = {}
            if spans is None:
                raise Unclear(
                    f"what the chat template writes around assistant message {index} depends on what it says"
                )
            own = [(mark.start, mark.end) for mark in self.owned.get(index, ())]
            own += [span for path, span in spans.items() if path[1] == index]
            if not own:
                raise Unclear(f"assistant message {index} does not appear in the rendered text")
            first, last = min(own)[0], max(end for _, end in own)
            start = self.prompt_end(index, first)
            if start is None:
                if self.has_scaffold(index):
                    raise Unclear(
                        f"it cannot be told where the model would begin to write assistant message {index}: "
                        "the generation prompt does not appear before it"
                    )
                start = first
            places[index] = [(start, last)]
        return places

    def generation_places(self, assistants: list[int]) -> dict[int, list[Span]]:
        """For each turn the characters inside `{% generation %}`, without the header before the answer."""
        places: dict[int, list[Span]] = {index: [] for index in assistants}
        for start, end in self.generated:
            inside = {mark.path[:2] for mark in self.marks if mark.start < end and start < mark.end}
            owners = {int(path[1]) for path in inside if path[0] == "messages"}
            if not owners:
                owners = self._turn_without_words(start, assistants)
            if len(owners) != 1 or not owners <= places.keys() or any(p[0] != "messages" for p in inside):
                raise Unclear(
                    "a {% generation %} region of the chat template holds more than one assistant turn"
                )
            places[owners.pop()].append((start, end))
        for index, spans in places.items():
            if not spans:
                raise Unclear(f"assistant message {index} is outside of every {{% generation %}} region")
            own = [mark.start for mark in self.owned.get(index, ())]
            begin = self.prompt_end(index, min(own, default=spans[-1][1]))
            if begin is None and own and not self.has_scaffold(index):
                begin = min(own)
            if begin is not None:
                places[index] = [(max(start, begin), end) for start, end in spans if end > begin]
        return places

    def _turn_without_words(self, start: int, assistants: list[int]) -> set[int]:
        """The turn of a region at `start` that holds no text of a message."""
        before = [mark for mark in self.marks if mark.path[0] == "messages" and mark.end <= start]
        index = int(max(before, key=lambda mark: mark.end).path[1]) if before else -1
        if index in assistants and index + 1 not in assistants:
            return {index}
        return set([i for i in assistants if i > index][:1])

    def prompt_end(self, index: int, first: int) -> int | None:
        """Where the text stops being the prompt of generation, before character `first` of the turn."""
        before = [mark for mark in self.marks if mark.end <= first and not self.belongs(mark, index)]
        edge = max((mark.end for mark in before), default=0)
        owner = max(before, key=lambda mark: mark.end).path[:2] if before else None
        previous = index > 0 and owner == ("messages", index - 1)
        key = (role_of(self.chat.messages[index - 1]), True) if previous else (index, False)
        if key not in self._edges:
            self._edges[key] = self._prompt_edge(index)
        tail, header = self._edges[key]
        if tail is not None and self.plain[edge:first].startswith(tail):
            return edge + len(tail)
        prompt = self.rendered(index, True)
        if prompt is not None and self.plain.startswith(untracked(prompt)) and len(prompt) <= first:
            return len(prompt)
        # The prompt says more than what is kept of earlier turns. What stands before every answer is
        # none of the model's words in any case.
        if header is not None and self.plain[edge:first].startswith(header):
            return edge + len(header)
        return None

    def _prompt_edge(self, index: int) -> tuple[str | None, str | None]:
        """What the template writes between the last word of others and a generation, and an answer."""
        header = self._answer_header(index)
        prompt, bare = self.rendered(index, True), self.rendered(index, False)
        if prompt is None or bare is None:
            return None, header
        tail = _behind_marks(prompt)
        ignored = untracked(prompt) == untracked(bare)
        if ignored and header is not None and header.startswith(tail):
            # The template takes no notice of add_generation_prompt. If it writes a header before the
            # answer all the same, that header belongs to the prompt.
            tail = header if header[len(tail) :].strip() else tail
        return tail, header

    def _answer_header(self, index: int) -> str | None:
        """What the template writes between the last word of others and the content of a plain answer."""
        probe = {"role": "assistant", "content": stand_in(index)}
        try:
            answered = self.chat.render([*self.chat.messages[:index], probe], False)
        except RenderRefused:
            return None
        own = [m.start for m in _data_marks(answered) if m.path[:2] == ("messages", index)]
        others = [m.end for m in _data_marks(answered) if m.path[:2] != ("messages", index)]
        return untracked(answered)[max(others, default=0) : min(own)] if own else None

    def rendered(self, index: int, add_generation_prompt: bool) -> str | None:
        if index == 0:
            return None
        try:
            return self.chat.render(self.chat.messages[:index], add_generation_prompt)
        except RenderRefused:
            return None

    def aligned(self, indices: list[int]) -> dict[Path, Span] | None:
        """Render once more with other words in these messages, and lay both renders side by side.

        Returns where each changed text stands in the rendered conversation, or None if anything but
        those texts differs.
        """
        twin_messages = [
            with_other_words(message, index) if index in indices else message
            for index, message in enumerate(self.chat.messages)
        ]
        try:
            twin = self.chat.render(twin_messages, self.chat.add_generation_prompt)
        except RenderRefused:
            return None
        changed = [mark for mark in sorted(marks_of(twin)) if self._is_changed(mark, indices)]
        plain_twin = untracked(twin)
        owners = {(mark.path, mark.start): mark.end for mark in self.marks}
        spans: dict[Path, Span] = {}
        here = there = 0
        for mark in changed:
            if mark.start < there:
                continue  # several sources of one text
            literal = plain_twin[there : mark.start]
            if not self.plain.startswith(literal, here):
                return None
            here += len(literal)
            start = here
            while (end := owners.get((mark.path, here))) is not None and end > here:
                here = end
            low, high = spans.get(mark.path, (start, here))
            spans[mark.path] = (min(low, start), max(high, here))
            there = mark.end
        if self.plain[here:] != plain_twin[there:] and not self.chat.open:
            return None
        return spans

    def _is_changed(self, mark: Mark, indices: list[int]) -> bool:
        return (
            mark.path[0] == "messages"
            and mark.path[1] in indices
            and is_exchanged(mark.path)
            and mark.source_end > mark.source_start
        )

    def belongs(self, mark: Mark, index: int) -> bool:
        return mark.path[:2] == ("messages", index)

    def left_out(self, index: int) -> str | None:
        """What of the message does not appear, in words, or None."""
        message = self.chat.messages[index]
        reads_reasoning = any(name in self.chat.template for name in REASONING_FIELDS)
        for path, text in words_of(message):
            if path[0] in REASONING_FIELDS and not reads_reasoning:
                continue
            names: list[Path] = [path]
            if path[0] in REASONING_FIELDS:
                names = [(name, *path[1:]) for name in REASONING_FIELDS]
            if not any(self._covers(index, name, text) for name in names):
                return kind_of_words(path)
        return None

    def _covers(self, index: int, path: Path, text: str) -> bool:
        full = ("messages", index, *path)
        wanted = {at for at, character in enumerate(text) if not character.isspace()}
        for mark in self.owned.get(index, ()):
            if mark.path == full:
                wanted.difference_update(range(mark.source_start, mark.source_end))
        return not wanted

    def says_it_all(self, index: int, start: int | None = None) -> bool:
        """The rendered turn is the message's content up to blanks: the template took it apart and back."""
        message = self.chat.messages[index]
        content = field_of(message, "content")
        own = self.owned.get(index, ())
        if not isinstance(content, str) or not own or any(words_beside_content(message)):
            return False
        if start is None:
            start = self.prompt_end(index, own[0].start)
        if start is None:
            return False
        shown, meant = _squeezed(self.plain[start : max(m.end for m in own)]), _squeezed(content)
        # The prompt may have begun the answer already, with an opening reasoning tag.
        begun = meant[: len(meant) - len(shown)]
        return meant.endswith(shown) and _squeezed(self.plain[:start]).endswith(begun)

    def has_scaffold(self, index: int) -> bool:
        """The template writes more around the message's words than blanks before the terminator."""
        return any(mark.path[2] != "content" for mark in self.owned.get(index, ()))

    def turn(self, index: int, spans: list[Span]) -> Turn:
        own = self.owned.get(index, ())
        start, end = spans[0][0], spans[-1][1]
        limit = min(
            (m.start for m in self.marks if m.start >= end and not self.belongs(m, index)),
            default=len(self.plain),
        )
        if self.chat.open and index == len(self.chat.messages) - 1:
            return Turn(index, tuple(spans), None)
        last = max(own, key=lambda mark: mark.end, default=None)
        said = start if last is None else last.end
        run = terminator_after(
            self.chat.encoded.ids,
            self.chat.encoded.cores,
            self.plain,
            (said, limit),
            self.chat.stop_ids,
            self.chat.special_ids,
            skip_text=last is None or last.path[2] == "tool_calls",
        )
        if not run:
            raise Unclear(f"assistant message {index} has no terminator of the stop set behind it")
        finish = self.chat.encoded.cores[run[-1]][1]
        if finish < max(said, start) or said > finish:
            raise Unclear(f"the terminator of assistant message {index} stands before its end")
        kept = [(a, min(b, finish)) for a, b in spans if a < finish]
        kept[-1] = (kept[-1][0], finish)
        return Turn(index, tuple(kept), run[-1])

    def check(self, turns: list[Turn]) -> None:
        """Raises Unclear unless the turns are in order and hold one terminator and nobody else's words."""
        ids, at = self.chat.encoded.ids, 0
        for turn in turns:
            start, end = turn.ranges[0][0], turn.ranges[-1][1]
            if start < at:
                raise Unclear(
                    f"assistant message {turn.message} is rendered before the turn that precedes it"
                )
            at = end
        ranges = [(span, turn) for turn in turns for span in turn.ranges]
        starts = [span[0] for span, _ in ranges]
        for mark in self.marks:
            for span, turn in ranges[max(0, bisect.bisect_right(starts, mark.start) - 1) :]:
                if span[0] >= mark.end:
                    break
                if mark.start < span[1] and not self.belongs(mark, turn.message):
                    raise Unclear(
                        f"text of others stands inside the turn of assistant message {turn.message}"
                    )
        mask = token_mask(self.chat.encoded, [span for span, _ in ranges])
        ends = [index for index, bit in enumerate(mask) if bit and ids[index] in self.chat.stop_ids]
        if ends != [turn.terminator for turn in turns if turn.terminator is not None]:
            raise Unclear("an assistant message holds more than one terminator")


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _behind_marks(text: str) -> str:
    return untracked(text)[max((mark.end for mark in _data_marks(text)), default=0) :]


def _data_marks(text: str) -> list[Mark]:
    """The marks of what the caller gave, in order; regions of `{% generation %}` left out."""
    return sorted(mark for mark in marks_of(text) if mark.path[0] != "generation")
