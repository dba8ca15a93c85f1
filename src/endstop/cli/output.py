"""Where things go: the answer to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from endstop.protocol.errors import EndstopError
from endstop.view.marks import readable

if TYPE_CHECKING:
    from rich.console import Console


def write_answer(text: str) -> None:
    """A piece of model text to stdout at once.

    A terminal obeys control characters, and a model can be talked into making them: there they are
    shown as codes. A file or a pipe gets the text as it is.
    """
    if text:
        sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def for_terminal(text: str) -> str:
    """`text` with everything but line ends and tabs that is not printable shown as a code."""
    return "".join(char if char in "\n\t" else readable(char) for char in text)


def write_line(text: str = "") -> None:
    """A line of a result to stdout."""
    print(text, flush=True)


def write_json(value: Any, indent: int | None = 2) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=indent), flush=True)


def check_place(path: Path | None) -> None:
    """Refuse a file that cannot be written before a model has worked for it."""
    if path is None:
        return
    if path.is_dir():
        raise EndstopError(f"{path} cannot be written: it is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise EndstopError(f"{path} cannot be written: there is no folder {path.parent}.")
    folder = path.resolve().parent
    if (path.is_file() or not path.exists()) and not os.access(folder, os.W_OK):
        raise EndstopError(f"{path} cannot be written: nothing may be written into {folder}.")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path`: it appears whole, or stays as it was.

    A device or a pipe is written to directly, and a link keeps pointing where it does.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()
    part = target.with_name(f"{target.name}.part")
    try:
        yield part
        part.replace(target)
    except OSError as error:
        # Where only a write has failed, the system does not say what was written.
        error.filename = error.filename or str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def note(text: str = "") -> None:
    """Something for the person, not for the pipe."""
    print(text, file=sys.stderr, flush=True)


def counted(number: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def console(stderr: bool = False) -> Console:
    """A rich console; NO_COLOR and pipes are its business. Model text goes in as Text, never as markup."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False)
