"""Text of a row where what is shown and what was written differ.

A hidden special token is not shown, but a stop string may name it. So there are two automaton
states, one over the shown bytes and one over the bytes with specials spelled out; either match
ends generation, and what is held back is what the longer of the two needs. Rows use this only
around a hidden token, a forced token, or where regions (reasoning, tool calls) are tracked.

Offsets are in spelled bytes from the start of the completion.
"""

from __future__ import annotations

from typing import NamedTuple

from endstop.protocol.automaton import NO_MATCH, ROOT, StopAutomaton, incomplete_tail

# A run of released bytes and whether they are those of a hidden token.
Run = tuple[bytes, bool]


class Found(NamedTuple):
    """A completed stop string and the spelled offsets of its first byte and of the byte behind it."""

    pattern: int
    start: int
    end: int


class SpelledText:
    """The end of a row's text, byte by byte, with two automaton states."""

    __slots__ = (
        "_hidden",
        "_released",
        "_shown_node",
        "_spelled_node",
        "_start",
        "_tail",
        "automaton",
        "include",
    )

    def __init__(
        self, automaton: StopAutomaton, include: bool, node: int, prefix: bytes, held: bytes, end: int
    ) -> None:
        """`prefix` is the node's text, `held` what was not shown yet; both end at offset `end`."""
        self.automaton = automaton
        self.include = include
        self._shown_node = node
        self._spelled_node = node
        self._tail = bytearray(max(prefix, held, key=len))
        self._hidden = bytearray(len(self._tail))
        self._start = end - len(self._tail)
        self._released = end - len(held)

    @property
    def end(self) -> int:
        return self._start + len(self._tail)

    @property
    def released(self) -> int:
        """The offset up to which everything has been shown."""
        return self._released

    def copy(self) -> SpelledText:
        other = SpelledText(self.automaton, self.include, self._spelled_node, b"", b"", self.end)
        other._shown_node = self._shown_node
        other._tail, other._hidden = self._tail[:], self._hidden[:]
        other._start, other._released = self._start, self._released
        return other

    def reset(self, automaton: StopAutomaton) -> None:
        """A border: text before it cannot begin a later match, and other strings may apply behind it."""
        self.automaton = automaton
        self._shown_node = self._spelled_node = ROOT

    def append(self, data: bytes, hidden: bool) -> None:
        """Adds bytes that are not matched (forced tokens)."""
        self._tail += data
        self._hidden += bytes([hidden]) * len(data)

    def feed(self, data: bytes, hidden: bool) -> Found | None:
        """Adds bytes up to the first one that completes a stop string."""
        automaton = self.automaton
        for byte in data:
            self._tail.append(byte)
            self._hidden.append(hidden)
            self._spelled_node = automaton.step(self._spelled_node, byte)
            if not hidden:
                self._shown_node = automaton.step(self._shown_node, byte)
            found = self._completed(hidden)
            if found is not None:
                return found
        return None

    def _completed(self, hidden: bool) -> Found | None:
        """The longest string that completes at the last byte; of equal ones the cut that shows less."""
        candidates: list[Found] = []
        patterns, end = self.automaton.patterns, self.end
        spelled = self.automaton.longest[self._spelled_node]
        if spelled != NO_MATCH:
            candidates.append(Found(spelled, end - len(patterns[spelled]), end))
        shown = NO_MATCH if hidden else self.automaton.longest[self._shown_node]
        if shown != NO_MATCH:
            candidates.append(Found(shown, self._shown_offset(len(patterns[shown])), end))
        return min(candidates, key=lambda found: (-len(patterns[found.pattern]), found.start), default=None)

    def _shown_offset(self, count: int) -> int:
        """The offset of the shown byte that has `count - 1` shown bytes behind it."""
        if count == 0:
            return self.end
        for index in range(len(self._tail) - 1, -1, -1):
            count -= not self._hidden[index]
            if count == 0:
                return self._start + index
        return self._start

    def _match_start(self) -> int:
        """Where the longest text begins that may still become a match."""
        depth = self.automaton.depth
        return min(self.end - depth[self._spelled_node], self._shown_offset(depth[self._shown_node]))

    def release(self) -> list[Run]:
        """What can no longer become a match, to whole characters; it counts as shown from now on."""
        match_start = self._match_start()
        shown = bytes(byte for byte, hidden in zip(*self._unreleased(self.end), strict=True) if not hidden)
        settled = self._shown_offset(incomplete_tail(shown))
        upto = min(settled, self.end if self.include else match_start)
        runs = self.flush(upto)
        keep = min(upto, match_start) - self._start
        if keep > 0:
            del self._tail[:keep], self._hidden[:keep]
            self._start += keep
        return runs

    def flush(self, upto: int) -> list[Run]:
        """Everything before the offset `upto` that was not shown yet, as it is."""
        data, flags = self._unreleased(upto)
        self._released = max(self._released, upto)
        runs: list[Run] = []
        begin = 0
        for index in range(1, len(data) + 1):
            if index == len(data) or flags[index] != flags[begin]:
                runs.append((bytes(data[begin:index]), bool(flags[begin])))
                begin = index
        return runs

    def _unreleased(self, upto: int) -> tuple[bytearray, bytearray]:
        """The bytes before `upto` that were not shown yet, and whether each is hidden."""
        part = slice(self._released - self._start, max(upto, self._released) - self._start)
        return self._tail[part], self._hidden[part]

    def plain(self) -> tuple[int, bytes] | None:
        """The node and held bytes if shown and spelled text no longer differ, else None."""
        if any(self._hidden):
            return None
        return self._spelled_node, bytes(self._tail[self._released - self._start :])


def shown_text(runs: list[Run]) -> str:
    """What a reader sees of released runs."""
    return b"".join(data for data, hidden in runs if not hidden).decode("utf-8", "replace")
