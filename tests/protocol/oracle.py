"""The rules of stopping, written as slowly and plainly as possible, to hold the machine against.

Nothing here is incremental: after every token everything is looked at again from the start.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field


@dataclass
class Expected:
    text: str = ""
    shown: list[str] = field(default_factory=list)
    """All text that may be visible after each token."""
    token_ids: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    kind: str | None = None
    reason: int | str | None = None


def whole(data: bytes) -> bytes:
    """`data` without an unfinished character at its end, as Python's own decoder sees it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return data[: len(data) - len(decoder.getstate()[0])]


def run(
    tokens: list[tuple[int, bool]],
    pieces: list[bytes],
    *,
    special: set[int],
    stop_set: dict[int, str],
    stop: list[str],
    stop_token_ids: list[int],
    include: bool,
    hide: bool,
    min_tokens: int,
    max_tokens: int | None,
    ignore_eos: bool,
    room: int | None,
    late_from: int | None = None,
    repetition: tuple[int, int, int] | None = None,
) -> Expected:
    expected = Expected()
    patterns = [text.encode() for text in dict.fromkeys(stop)]
    written: list[tuple[int, bool, int]] = []  # byte, hidden, index of its token
    border = 0  # index into `written`: no match may begin before it

    def shown_before(end: int) -> bytes:
        return bytes(byte for byte, hidden, _ in written[:end] if not hidden)

    def starts_of(pattern: bytes, end: int) -> list[int]:
        """Where `pattern` would begin, if it completes at written[end - 1]: spelled and shown."""
        found = []
        if (
            end - len(pattern) >= border
            and bytes(b for b, _, _ in written[end - len(pattern) : end]) == pattern
        ):
            found.append(end - len(pattern))
        shown = [i for i in range(border, end) if not written[i][1]]
        if shown and shown[-1] == end - 1 and len(shown) >= len(pattern):
            last = shown[-len(pattern) :]
            if bytes(written[i][0] for i in last) == pattern:
                found.append(last[0])
        return found

    def hold_start() -> int:
        """Where the longest text begins that is a proper start of a stop string."""
        end = len(written)
        best = end
        for pattern in patterns:
            for size in range(1, len(pattern)):
                head = pattern[:size]
                if end - size >= border and bytes(b for b, _, _ in written[end - size :]) == head:
                    best = min(best, end - size)
                shown = [i for i in range(border, end) if not written[i][1]][-size:]
                if len(shown) == size and bytes(written[i][0] for i in shown) == head:
                    best = min(best, shown[0])
        return best

    def finish(kind: str, reason: int | str | None, cut: int, drop_last: bool) -> Expected:
        expected.kind, expected.reason = kind, reason
        expected.text = shown_before(cut).decode("utf-8", "replace")
        kept = []
        for index, token in enumerate(expected.generated):
            own = [i for i, (_, _, owner) in enumerate(written) if owner == index]
            before = (
                own[0] < cut
                if own
                else index == 0 or all(i < cut for i, (_, _, owner) in enumerate(written) if owner < index)
            )
            if before:
                kept.append(token)
            else:
                break
        if drop_last:
            kept = kept[: len(expected.generated) - 1]
        expected.token_ids = kept
        expected.shown.append(expected.text)
        return expected

    for token, forced in tokens:
        index = len(expected.generated)
        expected.generated.append(token)
        hidden = hide and token in special
        piece = pieces[token] if token < len(pieces) else b""
        if forced:
            border = len(written)
        active = not forced and index + 1 > min_tokens
        for byte in piece:
            written.append((byte, hidden, index))
            if not active:
                continue
            matches = [(-len(p), start, p) for p in patterns for start in starts_of(p, len(written))]
            if matches:
                _, start, pattern = min(matches)
                cut = len(written) if include else start
                return finish("stop_string", pattern.decode(), cut, not include)
        if not forced:
            in_set = token in stop_set and not ignore_eos
            if in_set or token in stop_token_ids:
                cut = len(written) if include else len(written) - len(piece)
                kind = stop_set[token] if in_set else "stop_token"
                return finish(kind, token, cut, not include)
        if max_tokens is not None and index + 1 >= max_tokens:
            return finish("max_tokens", None, len(written), False)
        if room is not None and index + 1 >= room:
            return finish("context", None, len(written), False)
        if late_from is not None and index >= late_from:
            return finish("deadline", None, len(written), False)
        if repetition is not None and not forced and index + 1 >= min_tokens:
            most, least, count = repetition
            for size in range(least, most + 1):
                end = expected.generated[-size * count :]
                if len(end) == size * count and end == end[:size] * count:
                    return finish("repetition", None, len(written), False)
        if forced or index + 1 == min_tokens:
            border = len(written)
        held = len(written) if include or index + 1 < min_tokens else hold_start()
        settled = len(whole(shown_before(len(written))))
        expected.shown.append(shown_before(held)[:settled].decode("utf-8", "replace"))
    expected.text = shown_before(len(written)).decode("utf-8", "replace")
    expected.token_ids = list(expected.generated)
    return expected
