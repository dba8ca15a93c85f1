"""Text that knows which of its characters came from where.

A chat template is a program: it trims messages, moves them, repeats, splits and escapes them. To know
afterwards which characters of the rendered text are a message's own, the strings that go in carry
marks, and every string operation carries the marks along.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, NamedTuple, SupportsIndex, cast

Path = tuple[str | int, ...]
# Ends the path of a mapping's key; the value has the path without it.
KEY = "<key>"


class Mark(NamedTuple):
    """Characters [start, end) of a text come from characters [source_start, source_end) of `path`.

    `copied`: character for character; otherwise the text was made from the source in another way, escaped
    for JSON, say. `mixed`: text of the template may be among it, and nobody can tell where.
    """

    start: int
    end: int
    path: Path
    source_start: int
    source_end: int
    copied: bool = True
    mixed: bool = False

    def clipped(self, start: int, end: int) -> Mark | None:
        """The mark on the slice [start, end) of its text, None where nothing of it is left."""
        first, last = max(self.start, start), min(self.end, end)
        if first >= last:
            return None
        source_start, source_end = self.source_start, self.source_end
        if self.copied:
            source_end = source_start + last - self.start
            source_start += first - self.start
        return self._replace(
            start=first - start, end=last - start, source_start=source_start, source_end=source_end
        )


class TrackedText(str):
    """A string with marks. Every method that gives a string back keeps them.

    Where it cannot be known which characters come from where, the whole result is marked, and as
    `mixed` if characters without a mark went into it: too much rather than too little.
    """

    __slots__ = ("_marks",)
    _marks: tuple[Mark, ...]

    def __new__(cls, text: str = "", marks: Iterable[Mark] = ()) -> TrackedText:
        self = super().__new__(cls, text)
        self._marks = tuple(marks)
        return self

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: Any) -> str:
        piece = super().__getitem__(key)
        if not isinstance(key, slice):
            at = key.__index__()
            return part(self, at % len(self), at % len(self) + 1)
        start, stop, step = key.indices(len(self))
        return part(self, start, max(start, stop)) if step == 1 else derived(piece, self)

    def __iter__(self) -> Iterator[str]:
        return (part(self, at, at + 1) for at in range(len(self)))

    def __add__(self, other: str) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return joined([self] * max(0, count.__index__()))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return percent(self, values)

    def __rmod__(self, form: Any) -> str:
        return percent(form, self) if isinstance(form, str) else NotImplemented

    def __format__(self, spec: str) -> str:
        return derived(super().__format__(spec), self)

    def join(self, items: Iterable[str]) -> str:
        pieces: list[str] = []
        for item in items:
            if not isinstance(item, str):
                raise TypeError(f"sequence item {len(pieces)}: expected str, {type(item).__name__} found")
            pieces += [self, item] if pieces else [item]
        return joined(pieces)

    def strip(self, chars: str | None = None) -> str:
        return self._stripped(super().lstrip(chars), super().strip(chars))

    def lstrip(self, chars: str | None = None) -> str:
        left = super().lstrip(chars)
        return self._stripped(left, left)

    def rstrip(self, chars: str | None = None) -> str:
        return self._stripped(str.__str__(self), super().rstrip(chars))

    def _stripped(self, from_left: str, result: str) -> str:
        start = len(self) - len(from_left)
        return part(self, start, start + len(result))

    def removeprefix(self, prefix: str) -> str:
        return part(self, len(prefix) if prefix and self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str) -> str:
        return part(self, 0, len(self) - (len(suffix) if suffix and self.endswith(suffix) else 0))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit))

    def splitlines(self, keepends: bool = False) -> list[str]:
        pieces, at = [], 0
        for whole, shown in zip(super().splitlines(True), super().splitlines(keepends), strict=True):
            pieces.append(part(self, at, at + len(shown)))
            at += len(whole)
        return pieces

    def partition(self, sep: str) -> tuple[str, str, str]:
        return cast("tuple[str, str, str]", tuple(self._consecutive(super().partition(sep))))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return cast("tuple[str, str, str]", tuple(self._consecutive(super().rpartition(sep))))

    def _consecutive(self, pieces: Iterable[str]) -> Iterator[str]:
        at = 0
        for piece in pieces:
            yield part(self, at, at + len(piece))
            at += len(piece)

    def _located(self, pieces: Sequence[str]) -> list[str]:
        """Pieces of a split, each found again behind the one before it."""
        located, at = [], 0
        text = untracked(self)
        for piece in pieces:
            at = str.index(text, piece, at)
            located.append(part(self, at, at + len(piece)))
            at += len(piece)
        return located

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        left = count.__index__()
        if not old:
            return derived(super().replace(old, new, left), self, new)
        pieces: list[str] = []
        at = 0
        while left != 0 and (found := self.find(old, at)) >= 0:
            pieces += [part(self, at, found), new]
            at = found + len(old)
            left -= 1
        return joined([*pieces, part(self, at, len(self))])

    def lower(self) -> str:
        return self._recased(super().lower())

    def upper(self) -> str:
        return self._recased(super().upper())

    def capitalize(self) -> str:
        return self._recased(super().capitalize())

    def title(self) -> str:
        return self._recased(super().title())

    def casefold(self) -> str:
        return self._recased(super().casefold())

    def swapcase(self) -> str:
        return self._recased(super().swapcase())

    def _recased(self, text: str) -> str:
        # A few characters change their number with their case.
        return TrackedText(text, self._marks) if len(text) == len(self) else derived(text, self)

    def center(self, width: SupportsIndex, fillchar: str = " ") -> str:
        return derived(super().center(width, fillchar), self, fillchar)

    def ljust(self, width: SupportsIndex, fillchar: str = " ") -> str:
        return derived(super().ljust(width, fillchar), self, fillchar)

    def rjust(self, width: SupportsIndex, fillchar: str = " ") -> str:
        return derived(super().rjust(width, fillchar), self, fillchar)

    def zfill(self, width: SupportsIndex) -> str:
        return derived(super().zfill(width), self)

    def expandtabs(self, tabsize: SupportsIndex = 8) -> str:
        return derived(super().expandtabs(tabsize), self)

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        raise TypeError("bytes do not say where they come from")

    def translate(self, table: Any) -> str:
        return derived(super().translate(table), self)


def marks_of(text: str) -> tuple[Mark, ...]:
    return text._marks if isinstance(text, TrackedText) else ()


def tracked(text: str, path: Path) -> str:
    """`text` as data from `path`."""
    return TrackedText(text, (Mark(0, len(text), path, 0, len(text)),)) if text else text


def untracked(text: str) -> str:
    """The same characters without marks, as a plain str."""
    return str.__str__(text)


def part(text: str, start: int, end: int) -> str:
    """The slice [start, end) with its marks."""
    piece = str.__getitem__(text, slice(start, end))
    clipped = [m for mark in marks_of(text) if (m := mark.clipped(start, end)) is not None]
    # Without marks it is a TrackedText all the same: what is known to be the template's own.
    return TrackedText(piece, clipped) if isinstance(text, TrackedText) else piece


def joined(pieces: Iterable[str]) -> str:
    """Concatenation that keeps marks."""
    pieces = list(pieces)
    if not any(isinstance(piece, TrackedText) for piece in pieces):
        return "".join(pieces)
    marks: list[Mark] = []
    at = 0
    for piece in pieces:
        marks += [m._replace(start=m.start + at, end=m.end + at) for m in marks_of(piece)]
        at += len(piece)
    return TrackedText("".join(pieces), marks)


def leaves(value: Any) -> Iterator[str]:
    """All strings in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(key)
            yield from leaves(item)
    elif isinstance(value, list | tuple | KeysView | ValuesView | ItemsView):
        for item in value:
            yield from leaves(item)


def bare(value: Any) -> Any:
    """Plain data with the same strings, without marks."""
    if isinstance(value, str):
        return untracked(value)
    if isinstance(value, Mapping):
        return {bare(key): bare(item) for key, item in value.items()}
    return [bare(item) for item in value] if isinstance(value, list | tuple) else value


def derived(text: str, *sources: Any) -> str:
    """`text`, which was made out of `sources` in a way that hides what came from where."""
    strings = [leaf for leaf in leaves(sources) if leaf]
    marks = [mark for leaf in strings for mark in marks_of(leaf)]
    if not marks or not text:
        return text
    mixed = any(m.mixed for m in marks) or any(not _covered(leaf) for leaf in strings)
    # One mark for each source over the whole text: any of them may be anywhere in it.
    spans: dict[Path, tuple[int, int]] = {}
    for mark in marks:
        low, high = spans.get(mark.path, (mark.source_start, mark.source_end))
        spans[mark.path] = (min(low, mark.source_start), max(high, mark.source_end))
    return TrackedText(text, [Mark(0, len(text), path, *span, False, mixed) for path, span in spans.items()])


def _covered(text: str) -> bool:
    at = 0
    for mark in sorted(marks_of(text)):
        if mark.start > at:
            return False
        at = max(at, mark.end)
    return at >= len(text)


def text_of(value: Any) -> str:
    """`str(value)` that keeps marks: exactly for strings, as a whole for lists and mappings of them."""
    return value if isinstance(value, str) else derived(str(value), value)


_SLOT = re.compile("\ue000(\\d+)\ue001")


class Slots:
    """Marked strings that pass through code which would lose their marks, as placeholders."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def put(self, value: Any) -> Any:
        """A placeholder for what holds marks, the value itself for what does not."""
        if not any(marks_of(leaf) for leaf in leaves(value)):
            return value
        self._texts.append(text_of(value))
        return f"\ue000{len(self._texts) - 1}\ue001"

    def fill(self, text: str) -> str:
        pieces = _SLOT.split(text)
        return joined(self._texts[int(p)] if at % 2 else p for at, p in enumerate(pieces))


# Texts stand as they are in `%s`; a width or a precision would count the placeholder.
_PLAIN_FORM = re.compile(r"(?:[^%]|%(?:\(\w+\))?[sdi]|%%)*")


def percent(form: str, values: Any) -> str:
    """`form % values`."""
    if marks_of(form) or not _PLAIN_FORM.fullmatch(form):
        return derived(str.__mod__(untracked(form), values), form, values)
    slots = Slots()
    if isinstance(values, tuple):
        values = tuple(slots.put(value) for value in values)
    elif isinstance(values, Mapping) and "%(" in form:
        values = {key: slots.put(value) for key, value in values.items()}
    else:
        values = slots.put(values)
    return slots.fill(str.__mod__(untracked(form), values))


def json_text(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`json.dumps` that keeps marks: the characters of every string keep where they come from."""
    if not any(marks_of(leaf) for leaf in leaves(value)):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
    between, colon = separators or (", " if indent is None else ",", ": ")
    unit = " " * indent if isinstance(indent, int) else indent

    def quoted(text: str) -> str:
        body = json.dumps(untracked(text), ensure_ascii=ensure_ascii)[1:-1]
        if len(body) == len(text):
            return joined(('"', TrackedText(body, marks_of(text)), '"'))
        return joined(('"', derived(body, text), '"'))

    def lines(depth: int) -> str:
        return "" if unit is None else "\n" + unit * depth

    def wrapped(marks: str, items: list[str], depth: int) -> str:
        if not items:
            return marks
        pieces = [marks[0], lines(depth + 1)]
        for at, item in enumerate(items):
            pieces += [between + lines(depth + 1), item] if at else [item]
        return joined([*pieces, lines(depth), marks[1]])

    def written(item: Any, depth: int) -> str:
        if isinstance(item, str):
            return quoted(item)
        if isinstance(item, Mapping):
            pairs = sorted(item.items()) if sort_keys else item.items()
            entries = [
                joined((quoted(k if isinstance(k, str) else _json_key(k)), colon, written(v, depth + 1)))
                for k, v in pairs
            ]
            return wrapped("{}", entries, depth)
        if isinstance(item, list | tuple):
            return wrapped("[]", [written(entry, depth + 1) for entry in item], depth)
        return json.dumps(item)

    return written(value, 0)


def _json_key(key: Any) -> str:
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    raise TypeError(f"keys must be str, int, float, bool or None, not {type(key).__name__}")


def keeping_marks(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose text result is marked as a whole where it lost the marks of its arguments."""

    def kept(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, str) and not isinstance(result, TrackedText):
            return derived(result, args, kwargs)
        return result

    kept.__dict__.update(getattr(function, "__dict__", {}))
    return kept
