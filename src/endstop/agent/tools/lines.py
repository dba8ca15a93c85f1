"""Lines of a file for read_file, out of files of any size and content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from endstop.agent.tools.context import readable_size
from endstop.sandbox.files import WorkspaceFiles

_CHUNK = 4 << 20
# Bytes that are read to find a line, or to count all of them.
_FARTHEST = 256 << 20
_PROBED = 8192
_BOM = b"\xef\xbb\xbf"
_NUMBER_WIDTH = 7


@dataclass(slots=True)
class Shown:
    """Text for the model, what it should know about it, or why there is none."""

    text: str = ""
    notes: list[str] = field(default_factory=list)
    problem: str = ""


class LineReader:
    """Reads lines of one file, at most `limit` bytes of text."""

    def __init__(self, files: WorkspaceFiles, path: str, limit: int, numbers: bool) -> None:
        self.files, self.path, self.limit, self.numbers = files, path, limit, numbers
        self.size = 0
        self._beyond = False  # the lines go on behind what is read

    def read(self, first: int, last: int | None) -> Shown:
        """Lines `first` to `last`, from 1, both included. Raises PathRefused."""
        start, self.size = self.files.read(self.path, _PROBED)
        kind = _not_text(start)
        if kind:
            return Shown(
                problem=f"{self.path} is {kind} ({readable_size(self.size)}), which is not shown. "
                "Use bash to look at it."
            )
        if not start:
            return Shown(notes=["the file is empty"])
        return self._collected(first, last)

    def _collected(self, first: int, last: int | None) -> Shown:
        kept: list[bytes] = []
        room, total = self.limit, 0
        full = False
        for number, line in self._lines():
            total = number
            if number < first:
                continue
            width = len(line) + (_NUMBER_WIDTH if self.numbers else 0)
            behind = last is not None and number > last
            if full or behind or width > room:
                if not kept:
                    return self._long_line(number, line)
                full = full or not behind
                if self.size > _CHUNK:  # counting the lines of what is larger takes too long
                    return self._shown(kept, first, None, full)
                continue
            room -= width
            kept.append(line)
        if kept:
            return self._shown(kept, first, None if self._beyond else total, full)
        if self._beyond:
            have = f"line {first} lies behind the first {readable_size(_FARTHEST)}; use bash (sed -n)"
        else:
            have = f"it has {total} line{'s' * (total != 1)}, so there is no line {first}"
        return Shown(problem=f"Nothing of {self.path} is shown: {have}.")

    def _shown(self, kept: list[bytes], first: int, total: int | None, full: bool) -> Shown:
        end = first + len(kept) - 1
        notes = []
        if first == 1 and kept[0].startswith(_BOM):
            kept[0] = kept[0][len(_BOM) :]
            notes.append("begins with a byte order mark, which is not shown")
        crlf = sum(line.endswith(b"\r\n") for line in kept)
        if crlf:
            every = crlf == sum(line.endswith(b"\n") for line in kept)
            notes.append(f"line ends are CRLF{'' if every else ' in some lines'}, shown as plain ones")
        data = b"".join(kept).replace(b"\r\n", b"\n")
        wrong = _wrong_bytes(data)
        if wrong:
            notes.append(f"not UTF-8: {wrong} byte{'s' * (wrong != 1)} shown as \\x codes")
        text = data.decode("utf-8", "backslashreplace").removesuffix("\n")
        if self.numbers:
            text = "\n".join(f"{number:>6}\t{row}" for number, row in enumerate(text.split("\n"), first))
        if total is None:
            notes.append(f"lines {first} to {end} of a file of {readable_size(self.size)}")
        elif first > 1 or end < total:
            notes.append(f"lines {first} to {end} of {total}")
        if full:
            notes[-1] += f"; read on with first_line={end + 1}"
        return Shown(text, notes)

    def _long_line(self, number: int, line: bytes) -> Shown:
        text = line[: self.limit].decode("utf-8", "ignore")
        note = (
            f"line {number} is longer than can be shown, this is its beginning; use bash (cut -c) for the "
            f"rest, read on with first_line={number + 1}"
        )
        return Shown(text, [note])

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines with their ends; of a line that is too long to be shown only the beginning."""
        number, start = 0, 0
        rest = b""
        while start < _FARTHEST:
            chunk, self.size = self.files.read(self.path, _CHUNK, start)
            start += len(chunk)
            if not chunk:
                if rest:
                    yield number + 1, rest
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                number += 1
                yield number, line + b"\n"
            # Enough to say that it is too long.
            rest = rest[: self.limit + 1]
        self._beyond = True


def _not_text(start: bytes) -> str:
    """What a file is that is no text, or ""."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text"
    return "a binary file" if b"\0" in start else ""


def _wrong_bytes(data: bytes) -> int:
    """Bytes that are no part of UTF-8 text."""
    wrong = 0
    while data:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            wrong += error.end - error.start
            data = data[error.end :]
        else:
            return wrong
    return wrong
