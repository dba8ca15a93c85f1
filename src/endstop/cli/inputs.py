"""Text that a person gives in files and on stdin: UTF-8, or one sentence that says where it is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from endstop.protocol.errors import EndstopError

_BOM = "\ufeff"


def read_file(path: Path) -> str:
    """The text of a file; line ends become `\\n`, and a byte order mark is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _no_utf8(str(path), error) from error
    return text.removeprefix(_BOM)


def read_stdin(stdin: TextIO | None = None) -> str:
    """All of stdin, like `read_file`."""
    stream = sys.stdin if stdin is None else stdin
    try:
        text = stream.read()
        # Python keeps bytes that are no text as halves of surrogate pairs in some locales.
        text.encode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_utf8("stdin", error) from error
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise EndstopError(f"stdin is not UTF-8: line {line} holds a byte that is no text.") from error
    return text.removeprefix(_BOM)


def lines(text: str) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1.

    Only a line feed ends a line: U+2028 and its like may stand in a JSON string.
    """
    return [
        (number, line.removesuffix("\r"))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def _no_utf8(name: str, error: UnicodeDecodeError) -> EndstopError:
    line = error.object.count(b"\n", 0, error.start) + 1
    byte = error.object[error.start]
    return EndstopError(f"{name} is not UTF-8: byte 0x{byte:02x} in line {line}.")
