"""Prefix reuse: rows whose request has ended stay in the cache as long as there is room.

A new sequence that begins with the same tokens (the next turn of a conversation, another choice of the
same request, a shared system prompt) takes such a row over or forks it, and computes only what is new.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from endstop.runtime.token_model import TokenModel


@dataclass(frozen=True, slots=True)
class Reuse:
    """How to get a row whose first `length` tokens are computed already.

    `take` makes the idle row the sequence's own, `fork` copies it and leaves the original.
    """

    row: int
    length: int
    way: Literal["take", "fork"]


class PrefixCache:
    """Idle rows, the least recently used first."""

    def __init__(self, model: TokenModel, max_rows: int) -> None:
        self.model = model
        self.max_rows = max_rows
        self.rows: dict[int, list[int]] = {}  # row -> its computed tokens

    def put(self, row: int, tokens: list[int]) -> None:
        """Keep a row whose sequence has ended; the cache closes it some day."""
        if not tokens or self.max_rows == 0:
            self.model.close_row(row)
            return
        self.rows[row] = tokens
        while len(self.rows) > self.max_rows:
            self.evict()

    def evict(self, keep: int | None = None) -> bool:
        """Close the least recently used row except `keep`; False if there is none."""
        for row in self.rows:
            if row != keep:
                del self.rows[row]
                self.model.close_row(row)
                return True
        return False

    def clear(self) -> None:
        while self.evict():
            pass

    def find(self, tokens: list[int], busy: Iterable[tuple[int, list[int]]]) -> Reuse | None:
        """The best source for a sequence that begins with `tokens`, of which the last must be computed anew.

        `busy` are rows in use and their computed tokens: these can only be forked.
        """
        can = self.model.capabilities
        usable = len(tokens) - 1
        best: Reuse | None = None
        for row, computed in self.rows.items():
            length = min(common_prefix(tokens, computed), usable)
            if length == len(computed):
                way: Literal["take", "fork"] = "take"
            elif can.fork:
                way = "fork"
            elif can.truncate and 2 * length >= len(computed):  # else it would destroy more than it saves
                way = "take"
            else:
                continue
            if length and (best is None or length >= best.length):
                best = Reuse(row, length, way)
        if can.fork:
            for row, computed in busy:
                length = min(common_prefix(tokens, computed), usable)
                if length and (best is None or length > best.length):
                    best = Reuse(row, length, "fork")
        return best

    def use(self, reuse: Reuse) -> int:
        """Carry out `reuse`; returns the row, which now belongs to the caller."""
        computed = self.rows.get(reuse.row)
        if reuse.way == "fork":
            if computed is not None:  # used last: to the end of the order
                self.rows[reuse.row] = self.rows.pop(reuse.row)
            return self.model.fork_row(reuse.row, reuse.length)
        computed = self.rows.pop(reuse.row)
        if reuse.length < len(computed):
            self.model.truncate_row(reuse.row, reuse.length)
        return reuse.row


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of leading tokens that two lists share."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    return next(i for i in range(size) if left[i] != right[i])
