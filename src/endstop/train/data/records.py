"""Local files as records with random access: lines of JSON, rows of Parquet, texts. Nothing is read ahead."""

from __future__ import annotations

import codecs
import json
import mmap
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from endstop.protocol.errors import EndstopError

Split = Literal["file", "blank", "%"]


class BadDocument(EndstopError):
    """A document cannot be read; the message names its file and place. Loaders may count it and go on."""


class Records(Protocol):
    """Records by number.

    `blocks` is None, or the first record of each block that is read at once, and the number of records.
    """

    @property
    def blocks(self) -> Sequence[int] | None: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def where(self, index: int, /) -> str:
        """The place of a record, for messages."""
        ...


class TextFiles:
    """One text for each file."""

    blocks = None

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        path = self._paths[index]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BadDocument(f"{path} cannot be read: {error.strerror or error}.") from error
        return _decoded(content, path, 0)

    def where(self, index: int) -> str:
        return str(self._paths[index])


class TextEntries:
    """The texts of one file between blank lines, or between lines that are `%` alone (as fortune files have
    it)."""

    blocks = None

    def __init__(self, path: Path, split: Split) -> None:
        self._path = path
        self._content = _mapped(path)
        self._bounds = array("q")
        start = end = 0
        for line_start, line_end in _lines(self._content):
            line = self._content[line_start : min(line_end, line_start + 1024)].strip()
            border = (not line and line_end - line_start <= 1024) if split == "blank" else line == b"%"
            if border:
                self._add(start, end)
                start = end = line_end
            else:
                end = line_end
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        if end > start and self._content[start:end].strip():
            self._bounds.extend((start, end))

    def __len__(self) -> int:
        return len(self._bounds) // 2

    def __getitem__(self, index: int) -> str:
        start, end = _bounds_at(self._bounds, index)
        return _decoded(self._content[start:end], self._path, start).strip("\r\n")

    def where(self, index: int) -> str:
        return f"{self._path}, entry {index + 1}"


class JsonLines:
    """The lines of a JSON Lines file; blank lines do not count."""

    blocks = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = _mapped(path)
        self._bounds = array("q")
        self._numbers = array("q")
        for number, (start, end) in enumerate(_lines(self._content), 1):
            if end - start > 64 or self._content[start:end].strip():
                self._bounds.extend((start, end))
                self._numbers.append(number)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        start, end = _bounds_at(self._bounds, index)
        text = _decoded(self._content[start:end], self._path, start)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            what = (
                f"{error.msg}, column {error.colno}"
                if isinstance(error, json.JSONDecodeError)
                else str(error)
            )
            raise BadDocument(f"{self.where(index)}: this is not JSON ({what}).") from error

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._numbers[index]}"


class ParquetRows:
    """Rows of Parquet files as dicts of some columns. Row groups are read whole, the last few are kept.

    `also` are columns that a file may have. Raises EndstopError for a file that is no Parquet or lacks all of
    `columns`.
    """

    def __init__(self, paths: Sequence[Path], columns: Sequence[str], also: Sequence[str] = ()) -> None:
        self._paths = list(paths)
        self._columns = list(columns)
        self._also = list(also)
        self._groups: list[tuple[int, int]] = []
        self.blocks: list[int] = [0]
        for number, path in enumerate(self._paths):
            metadata = self._file(path).metadata
            for group in range(metadata.num_row_groups):
                self._groups.append((number, group))
                self.blocks.append(self.blocks[-1] + metadata.row_group(group).num_rows)
        self._group = lru_cache(maxsize=8)(self._read_group)
        self._open = lru_cache(maxsize=8)(self._file)

    def __len__(self) -> int:
        return self.blocks[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no row {index} among {len(self)}")
        block = bisect_right(self.blocks, index) - 1
        columns = self._group(block)
        return {name: column[index - self.blocks[block]].as_py() for name, column in columns.items()}

    def where(self, index: int) -> str:
        block = bisect_right(self.blocks, index) - 1
        number, _ = self._groups[block]
        first = next(at for at, (file, _) in enumerate(self._groups) if file == number)
        return f"{self._paths[number]}, row {index - self.blocks[first]}"

    def _file(self, path: Path) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            said = str(error).removesuffix(".")
            raise EndstopError(f"{path} cannot be read as Parquet: {said}.") from error
        names = file.schema_arrow.names
        if not set(self._columns) & set(names):
            raise EndstopError(
                f"{path} has no column {' or '.join(map(repr, self._columns))}; it has {', '.join(names)}."
            )
        return file

    def _read_group(self, block: int) -> dict[str, Any]:
        import pyarrow

        number, group = self._groups[block]
        file = self._open(self._paths[number])
        columns = [name for name in (*self._columns, *self._also) if name in file.schema_arrow.names]
        try:
            table = file.read_row_group(group, columns=columns, use_threads=False)
        except (pyarrow.ArrowException, OSError) as error:
            said = str(error).removesuffix(".")
            raise EndstopError(
                f"{self._paths[number]}, row group {group}, cannot be read: {said}."
            ) from error
        return {name: table.column(name).combine_chunks() for name in columns}


class Joined:
    """Several records one behind the other."""

    def __init__(self, members: Sequence[Records]) -> None:
        self._members = list(members)
        self._starts = [0]
        for member in self._members:
            self._starts.append(self._starts[-1] + len(member))
        self.blocks: list[int] | None = None
        if any(member.blocks is not None for member in self._members):
            inner = [member.blocks or [0, len(member)] for member in self._members]
            pairs = zip(self._starts, inner, strict=False)
            self.blocks = [*(start + at for start, blocks in pairs for at in blocks[:-1]), self._starts[-1]]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no record {index} among {len(self)}")
        member = bisect_right(self._starts, index) - 1
        return self._members[member][index - self._starts[member]]

    def where(self, index: int) -> str:
        member = bisect_right(self._starts, index) - 1
        return self._members[member].where(index - self._starts[member])


def _bounds_at(bounds: array[int], index: int) -> tuple[int, int]:
    if not 0 <= index < len(bounds) // 2:
        raise IndexError(f"there is no record {index} among {len(bounds) // 2}")
    return bounds[2 * index], bounds[2 * index + 1]


def _mapped(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            if not path.stat().st_size:
                return b""
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise EndstopError(f"{path} cannot be read: {error.strerror or error}.") from error
    if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise EndstopError(f"{path} is UTF-16, not UTF-8; convert it, with `iconv` for example.")
    return content


def _lines(content: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each line, its line feed included."""
    start = 0
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end + 1
        yield start, end
        start = end


def _decoded(content: bytes, path: Path, start: int) -> str:
    """`content`, which stands at byte `start` of a file, as text; a byte order mark at its beginning is
    dropped."""
    try:
        return content.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        at = start + error.start
        raise BadDocument(
            f"{path}, byte {at}: {content[error.start]:#04x} is not UTF-8; convert the file, with "
            "`iconv` for example."
        ) from error
