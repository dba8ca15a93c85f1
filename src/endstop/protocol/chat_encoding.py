"""Token ids of rendered chats in which no text of a message becomes a control token.

A tokenizer looks for the texts of its added tokens anywhere, in what a user wrote as well as in what the
chat template wrote. Here a match counts only where every character of it was written by the template.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from endstop.protocol.errors import RenderRefused
from endstop.protocol.tokenizer_pieces import merges_of, renamed_pieces
from endstop.protocol.tracked_text import Mark, marks_of, untracked

if TYPE_CHECKING:
    from endstop.protocol.tokenizer import Tokenizer

Span = tuple[int, int]

# Where stand-ins for control tokens come from: the private-use planes of Unicode, tried one after the other.
_STAND_IN_BASES = (0xF0000, 0x100000)
_PLANE = 0xFFFE


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """Ids of a rendered chat.

    Attributes:
        ids: nothing is added around what the text says.
        offsets: for each id the characters [start, end) that it stands for.
        escaped: the places where text of a message was an added token's text and was encoded as text.
        cores: offsets without the blanks that added tokens may take along, which can be a message's own.
    """

    ids: list[int]
    offsets: list[Span]
    escaped: tuple[Span, ...]
    cores: list[Span]


def cores_of(tokenizer: Tokenizer, text: str, ids: Sequence[int], offsets: Sequence[Span]) -> list[Span]:
    """The characters of each token, without blanks beside an added token's text that it takes along."""
    cores = []
    for token_id, (start, end) in zip(ids, offsets, strict=True):
        token = tokenizer.added_tokens.get(token_id)
        if token is not None and (token.lstrip or token.rstrip):
            at = text[start:end].find(token.content)
            if at >= 0:
                start, end = start + at, start + at + len(token.content)
        cores.append((start, end))
    return cores


class ChatEncoder:
    """Encodes rendered chats with a model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stand_ins: dict[int, _StandIn] = {}

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Added tokens that text must not become: all but ordinary vocabulary.

        Runs of blanks and what merges make anyway are added tokens of some models, too. They steer
        nothing, text is meant to become them, and a model would be worse off without.
        """
        made = {"".join(pair) for pair in merges_of(self._tokenizer.json.get("model") or {})}
        return frozenset(
            token_id
            for token_id, token in self._tokenizer.added_tokens.items()
            if token.special or not (token.content in made or not token.content.strip(" \n\t\r\u2581"))
        )

    def encode(self, text: str, genuine: Callable[[Mark, str], bool] | None = None) -> EncodedChat:
        """Ids of `text`, whose marks say which characters the template did not write.

        Args:
            genuine: asked for a mark and an added token's text found on it; true lets it be the token.

        Where no added token is found on marked text the ids are those of the plain tokenizer. Raises
        RenderRefused where it cannot be told who wrote a control token.
        """
        plain = untracked(text)
        ids, offsets = self._tokenizer.encode_with_offsets(plain)
        marks = [mark for mark in marks_of(text) if mark.path[0] != "generation"]
        found = self._matches(plain, ids, offsets)
        if not marks or not found:
            return self._encoded(plain, ids, offsets, ())
        cover = _Cover(marks)
        forged: set[Span] = set()
        for token_id, start, end in found:
            over = cover.over(start, end)
            content = self._tokenizer.added_tokens[token_id].content
            if not over or (genuine is not None and all(genuine(mark, content) for mark in over)):
                continue
            if any(mark.mixed for mark in over):
                raise RenderRefused(
                    f"the text {content!r} is in this conversation, and the chat template changes it so that "
                    "nobody can tell whether it is the conversation's or the template's."
                )
            forged.add((start, end))
        if not forged:
            return self._encoded(plain, ids, offsets, ())
        kept = [(token_id, start, end) for token_id, start, end in found if (start, end) not in forged]
        for start, end in cover.free_stretches(len(plain)):
            if any(a < end and start < b for a, b in forged):
                # A forged token took characters of the template's: look again at those alone.
                kept = [match for match in kept if not start <= match[1] < end]
                inner = self._tokenizer.encode_with_offsets(plain[start:end])
                kept += [
                    (token_id, start + a, start + b)
                    for token_id, a, b in self._matches(plain[start:end], *inner)
                ]
        ids, offsets = self._encode_with(plain, sorted(kept, key=lambda match: match[1]))
        return self._encoded(plain, ids, offsets, tuple(sorted(forged)))

    def _encoded(
        self, text: str, ids: list[int], offsets: list[Span], escaped: tuple[Span, ...]
    ) -> EncodedChat:
        return EncodedChat(ids, offsets, escaped, cores_of(self._tokenizer, text, ids, offsets))

    def _matches(self, text: str, ids: list[int], offsets: list[Span]) -> list[tuple[int, int, int]]:
        """(id, start, end) of every control token, without the blanks that it may take along."""
        matches = []
        for token_id, (start, end) in zip(ids, offsets, strict=True):
            if token_id in self.control_ids:
                span = text[start:end]
                content = self._tokenizer.added_tokens[token_id].content
                at = span.find(content)
                core = content if at >= 0 else span.strip()
                matches.append((token_id, start + span.find(core), start + span.find(core) + len(core)))
        return matches

    def _encode_with(self, text: str, kept: list[tuple[int, int, int]]) -> tuple[list[int], list[Span]]:
        """Encode `text` with these control tokens in their places and everything else as plain text."""
        stand_in = self._stand_in_for(text)
        pieces: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        at = 0
        for token_id, start, end in [*kept, (-1, len(text), len(text))]:
            pieces.append(text[at:start])
            starts += range(at, start)
            ends += range(at + 1, start + 1)
            if token_id >= 0:
                pieces.append(stand_in.characters[token_id])
                starts.append(start)
                ends.append(end)
            at = end
        encoding = stand_in.tokenizer.encode("".join(pieces), add_special_tokens=False)
        ids = [stand_in.original.get(token_id, token_id) for token_id in encoding.ids]
        offsets = [
            (starts[a], ends[b - 1]) if b > a else (starts[a] if a < len(starts) else len(text),) * 2
            for a, b in encoding.offsets
        ]
        controls = [token_id for token_id in ids if token_id in self.control_ids]
        if controls != [token_id for token_id, _, _ in kept]:
            raise RenderRefused(
                "this conversation contains the text of a control token, and the tokenizer makes that token "
                "even out of plain text."
            )
        return ids, offsets

    def _stand_in_for(self, text: str) -> _StandIn:
        for base in _STAND_IN_BASES:
            if not any(base <= ord(character) <= base + _PLANE for character in text):
                if base not in self._stand_ins:
                    self._stand_ins[base] = _StandIn(self._tokenizer, self.control_ids, base)
                return self._stand_ins[base]
        raise RenderRefused("this conversation uses the private-use characters of both Unicode planes.")


class _StandIn:
    """The tokenizer with every control token spelled as one private-use character.

    Written texts of control tokens mean nothing to it, and where its stand-ins are put, the text is
    split exactly as the control tokens would split it.
    """

    def __init__(self, tokenizer: Tokenizer, control_ids: Iterable[int], base: int) -> None:
        import tokenizers

        self.characters = {token_id: chr(base + index) for index, token_id in enumerate(sorted(control_ids))}
        names = {
            tokenizer.added_tokens[token_id].content: character
            for token_id, character in self.characters.items()
        }
        added = []
        for token in tokenizer.json.get("added_tokens") or ():
            if token["content"] in names:
                token = {
                    **token,
                    "content": names[token["content"]],
                    "normalized": False,
                    "single_word": False,
                }
            added.append(token)
        model = renamed_pieces(tokenizer.json.get("model") or {}, names)
        parts = {**tokenizer.json, "added_tokens": added, "model": model, "post_processor": None}
        self.tokenizer: Any = tokenizers.Tokenizer.from_str(json.dumps(parts))
        self.original = {
            self.tokenizer.token_to_id(names.get(token.content, token.content)): token_id
            for token_id, token in tokenizer.added_tokens.items()
        }


class _Cover:
    """Which characters carry a mark."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        self._marks = sorted(marks)
        self._starts = [mark.start for mark in self._marks]
        self._longest = max((mark.end - mark.start for mark in self._marks), default=0)

    def over(self, start: int, end: int) -> list[Mark]:
        """The marks that share a character with [start, end)."""
        low = bisect.bisect_left(self._starts, start - self._longest)
        high = bisect.bisect_left(self._starts, end)
        return [mark for mark in self._marks[low:high] if mark.end > start]

    def free_stretches(self, length: int) -> list[Span]:
        """The longest runs of characters without any mark."""
        stretches, at = [], 0
        for mark in self._marks:
            if mark.start > at:
                stretches.append((at, mark.start))
            at = max(at, mark.end)
        if at < length:
            stretches.append((at, length))
        return stretches
