"""All stop strings of a request as one automaton over bytes.

Aho and Corasick, "Efficient string matching: an aid to bibliographic search" (CACM 18(6), 1975): a
trie of the patterns with failure links. Each byte costs constant work however many patterns there
are, the depth of the current node is the longest suffix of the text that may still become a match,
and a match is seen at the byte that completes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

ROOT = 0
NO_MATCH = -1


class Scan(NamedTuple):
    """Where a scan ended: the node, the pattern that completed (or NO_MATCH), and the bytes read."""

    node: int
    pattern: int
    read: int


class StopAutomaton:
    """The automaton of some byte patterns.

    Attributes:
        patterns: what is searched, in the order given.
        depth: for each node how many bytes it stands for.
        longest: for each node the longest pattern that ends there, or NO_MATCH.
    """

    __slots__ = ("_failure", "_moves", "_owner", "depth", "longest", "patterns")

    def __init__(self, patterns: Sequence[bytes]) -> None:
        self.patterns = tuple(patterns)
        self.depth: list[int] = [0]
        self.longest: list[int] = [NO_MATCH]
        self._owner: list[int] = [NO_MATCH]  # the first pattern that runs through the node
        self._moves: list[dict[int, int]] = [{}]
        for index, pattern in enumerate(self.patterns):
            self._insert(pattern, index)
        self._failure = [ROOT] * len(self.depth)
        self._link()
        # Most bytes are read at the root, so it knows all of them from the start.
        self._moves[ROOT] = dict.fromkeys(range(256), ROOT) | self._moves[ROOT]

    def _insert(self, pattern: bytes, index: int) -> None:
        node = ROOT
        for length, byte in enumerate(pattern, 1):
            child = self._moves[node].get(byte)
            if child is None:
                child = len(self.depth)
                self._moves[node][byte] = child
                self._moves.append({})
                self.depth.append(length)
                self._owner.append(index)
                self.longest.append(NO_MATCH)
            node = child
        self.longest[node] = index

    def _link(self) -> None:
        """Failure links, breadth first; a node without a pattern of its own inherits its suffix's."""
        queue = deque(self._moves[ROOT].values())
        while queue:
            node = queue.popleft()
            if self.longest[node] == NO_MATCH:
                self.longest[node] = self.longest[self._failure[node]]
            for byte, child in self._moves[node].items():
                suffix = self._failure[node]
                while suffix != ROOT and byte not in self._moves[suffix]:
                    suffix = self._failure[suffix]
                self._failure[child] = self._moves[suffix].get(byte, ROOT)
                queue.append(child)

    def prefix(self, node: int) -> bytes:
        """The bytes that a node stands for."""
        return self.patterns[self._owner[node]][: self.depth[node]] if node else b""

    def step(self, node: int, byte: int) -> int:
        """The node after one more byte."""
        child = self._moves[node].get(byte)
        if child is None:
            # Following the failure links once and remembering the answer keeps a byte at one lookup.
            suffix = self._failure[node]
            while suffix != ROOT and byte not in self._moves[suffix]:
                suffix = self._failure[suffix]
            child = self._moves[suffix].get(byte, ROOT)
            self._moves[node][byte] = child
        return child

    def scan(self, node: int, data: bytes) -> Scan:
        """Reads `data` up to the first byte that completes a pattern, or to its end."""
        if not self.patterns:
            return Scan(ROOT, NO_MATCH, len(data))
        moves, longest = self._moves, self.longest
        for read, byte in enumerate(data, 1):
            child = moves[node].get(byte)
            node = self.step(node, byte) if child is None else child
            pattern = longest[node]
            if pattern >= 0:
                return Scan(node, pattern, read)
        return Scan(node, NO_MATCH, len(data))


def held_back(automaton: StopAutomaton, node: int, text: bytes, include: bool) -> int:
    """How many bytes at the end of `text`, which ends at `node`, may not be shown yet.

    An unfinished character, and what may still become a stop string unless the string is kept. A stop
    string begins with the first byte of a character, so a cut there splits none.
    """
    hold = incomplete_tail(text)
    return hold if include or node == ROOT else max(hold, automaton.depth[node])


@lru_cache(maxsize=512)
def compile_stop_strings(stop: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these strings, built once for all requests that use them."""
    return StopAutomaton([text.encode("utf-8") for text in stop])


def incomplete_tail(data: bytes) -> int:
    """How many bytes at the end of `data` begin a UTF-8 character that is not finished yet, 0 to 3.

    Bytes that cannot begin or continue a character are not held: they are already known to be
    broken (Unicode 15, table 3-7, "well-formed UTF-8 byte sequences").
    """
    size = len(data)
    if not size or data[-1] < 0x80:
        return 0
    for back in range(1, min(3, size) + 1):
        byte = data[size - back]
        if byte < 0x80:
            return 0
        if byte < 0xC0:
            continue
        need = 2 if 0xC2 <= byte <= 0xDF else 3 if 0xE0 <= byte <= 0xEF else 4 if 0xF0 <= byte <= 0xF4 else 0
        if need <= back:
            return 0
        if back >= 2:
            second = data[size - back + 1]
            low, high = _SECOND_BYTE.get(byte, (0x80, 0xBF))
            if not low <= second <= high:
                return 0
        return back
    return 0


_SECOND_BYTE = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
