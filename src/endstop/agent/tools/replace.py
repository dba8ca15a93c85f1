"""One exact replacement in a file's bytes, or why it is none: the rules of edit_file, without files.

`old` must stand in the file exactly once, overlapping places included. Line ends are the file's own: where
neither `old` nor `new` holds a carriage return, they match and are written as the file has them, and every
byte that `old` and `new` have in common at their beginning and end stays as it is. Where one of them holds a
carriage return, every byte counts and is written as it stands.
"""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Sequence
from dataclasses import dataclass

# Places that are named; whether there are more is said.
_PLACES = 20
# Lines that are compared to find the nearest, and characters of each.
_COMPARED_LINES, _COMPARED_CHARACTERS = 10_000, 300
_CANDIDATES, _CANDIDATE_LINES = 2, 12
_ALIKE = 0.6
# Of the lines alike, those whose neighbours are looked at.
_REFINED = 100


@dataclass(frozen=True, slots=True)
class Replacement:
    """The file after it, and which lines (from 1, last included) became which."""

    data: bytes
    old_lines: tuple[int, int]
    new_lines: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """`old` stands at these lines (from 1); `more`: and at others."""

    lines: tuple[int, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """Lines that look like `old`; `blanks_only`: they differ in nothing but white space."""

    first_line: int
    lines: tuple[str, ...]
    blanks_only: bool


@dataclass(frozen=True, slots=True)
class NotFound:
    nearest: tuple[Candidate, ...]
    line_ends: bool = False  # it would be found if carriage returns did not count


def replace_once(data: bytes, old: str, new: str) -> Replacement | Ambiguous | NotFound:
    """Replace `old`, which is not empty, by `new`."""
    before, after = old.encode(), new.encode()
    exact = b"\r" in before or b"\r" in after
    carriage_returns = [] if exact else _carriage_returns(data)
    view = data.replace(b"\r\n", b"\n") if carriage_returns else data
    places = _places(view, before)
    if len(places) > 1:
        lines = tuple(view.count(b"\n", 0, place) + 1 for place in places[:_PLACES])
        return Ambiguous(lines, len(places) > _PLACES)
    if not places:
        wanted = before.replace(b"\r\n", b"\n")
        without = exact and wanted in data.replace(b"\r\n", b"\n")
        return NotFound(nearest(data, old), line_ends=without)
    start, end = places[0], places[0] + len(before)
    first = view.count(b"\n", 0, start) + 1
    same = _common(before, after)
    tail = _common(before[same:][::-1], after[same:][::-1])
    middle = after[same : len(after) - tail]
    if carriage_returns and 2 * len(carriage_returns) > view.count(b"\n"):
        middle = middle.replace(b"\n", b"\r\n")
    made = (
        data[: _in_file(start + same, carriage_returns)]
        + middle
        + data[_in_file(end - tail, carriage_returns) :]
    )
    return Replacement(
        made, (first, first + _line_ends_inside(before)), (first, first + _line_ends_inside(after))
    )


def nearest(data: bytes, old: str) -> tuple[Candidate, ...]:
    """The lines of a file that look most like `old`, the best first."""
    lines = data.decode("utf-8", "backslashreplace").replace("\r\n", "\n").split("\n")
    wanted = old.replace("\r\n", "\n").strip("\n").split("\n")
    count = len(wanted)
    bare = ["".join(line.split()) for line in wanted]
    if any(bare):
        # Line ends at both sides, so that only whole lines match; a search that is linear.
        file_bare = "\n".join(["", *("".join(line.split()) for line in lines), ""])
        at = file_bare.find("\n".join(["", *bare, ""]))
        if at >= 0:
            first = file_bare.count("\n", 0, at)
            return (Candidate(first + 1, _cut(lines[first : first + count]), blanks_only=True),)
    # The longest line says most about where `old` was meant to stand.
    anchor = max(range(min(count, _CANDIDATE_LINES)), key=lambda place: len(wanted[place].strip()))
    wanted = wanted[:_CANDIDATE_LINES]
    best = sorted(_alike(lines[:_COMPARED_LINES], wanted[anchor]), key=lambda entry: -entry[1])
    found = []
    for at, alike in best[:_REFINED]:
        first = max(at - anchor, 0)
        window = lines[first : at - anchor + len(wanted)]
        # Neighbours decide between lines that are equally alike.
        around = sum(line.strip() == other.strip() for line, other in zip(window, wanted, strict=False))
        found.append((alike + around / len(wanted), -first, window))
    found.sort(reverse=True, key=lambda entry: entry[:2])
    return tuple(
        Candidate(1 - first, _cut(window), blanks_only=False) for _, first, window in found[:_CANDIDATES]
    )


def _alike(lines: Sequence[str], wanted: str) -> list[tuple[int, float]]:
    """The places of lines like `wanted`, with how alike they are."""
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted.strip()[:_COMPARED_CHARACTERS])
    found = []
    for place, line in enumerate(lines):
        matcher.set_seq1(line.strip()[:_COMPARED_CHARACTERS])
        if matcher.real_quick_ratio() >= _ALIKE and matcher.quick_ratio() >= _ALIKE:
            ratio = matcher.ratio()
            if ratio >= _ALIKE:
                found.append((place, ratio))
    return found


def _cut(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line[:_COMPARED_CHARACTERS] for line in lines[:_CANDIDATE_LINES])


def _places(data: bytes, part: bytes) -> list[int]:
    """Where `part` begins, overlapping places included; not many more than are shown."""
    places: list[int] = []
    at = data.find(part)
    while at >= 0 and len(places) <= _PLACES:
        places.append(at)
        at = data.find(part, at + 1)
    return places


def _carriage_returns(data: bytes) -> list[int]:
    """For each CRLF, where its line feed stands once all of them are bare line feeds."""
    places: list[int] = []
    at = data.find(b"\r\n")
    while at >= 0:
        places.append(at - len(places))
        at = data.find(b"\r\n", at + 2)
    return places


def _in_file(place: int, carriage_returns: Sequence[int]) -> int:
    """A place in the text with bare line feeds, as a place in the file."""
    return place + bisect.bisect_left(carriage_returns, place)


def _common(one: bytes, other: bytes) -> int:
    """How many bytes are the same at the beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _line_ends_inside(part: bytes) -> int:
    return part[:-1].count(b"\n")
