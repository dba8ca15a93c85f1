"""Searching tags in bytes of which more may come."""

from __future__ import annotations

from collections.abc import Iterable


def earliest_tag(buffer: bytearray, position: int, tags: Iterable[bytes]) -> tuple[int, bytes] | None:
    """The tag that is complete first behind `position`, and where it begins; of equals the longest."""
    best: tuple[int, int, bytes] | None = None
    for tag in tags:
        if not tag:
            continue
        start = buffer.find(tag, position)
        if start >= 0 and (best is None or (start + len(tag), start) < best[:2]):
            best = (start + len(tag), start, tag)
    return None if best is None else (best[1], best[2])


def tag_prefix_length(buffer: bytearray, tags: Iterable[bytes]) -> int:
    """The length of the longest end of `buffer` that a tag begins with."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(buffer)), longest, -1):
            if buffer.endswith(tag[:length]):
                longest = length
                break
    return longest


def common_length(buffer: bytearray, position: int, word: bytes) -> int:
    """How many bytes of `word` stand at `position`."""
    count = 0
    while count < len(word) and position + count < len(buffer) and buffer[position + count] == word[count]:
        count += 1
    return count
