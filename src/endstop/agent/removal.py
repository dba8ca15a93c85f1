"""Removing directories that untrusted code has filled: as deep as they may be, and never by way of a link."""

from __future__ import annotations

import os
import stat
from uuid import uuid4

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(directory: int, name: str) -> None:
    """Remove whatever has this name in an open directory. Raises OSError where that may not be done."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=directory)
        return
    waiting = [name]
    while waiting:
        emptied = waiting.pop()
        waiting += _emptied(directory, emptied)
        os.rmdir(emptied, dir_fd=directory)


def remove_path(path: str | os.PathLike[str]) -> None:
    parent, name = os.path.split(os.path.abspath(path))
    directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove(directory, name)
    finally:
        os.close(directory)


def _emptied(directory: int, name: str) -> list[str]:
    """Empty a directory: its files are removed, its directories moved up beside it, so that no depth is one
    of calls or of open directories. Returns their new names."""
    moved = []
    # To remove what is in a directory, and to move it, takes rights that its maker may have taken away.
    os.chmod(name, 0o700, dir_fd=directory)
    inner = os.open(name, _DIRECTORY, dir_fd=directory)
    try:
        with os.scandir(inner) as found:
            entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
        for entry, is_directory in entries:
            if not is_directory:
                os.unlink(entry, dir_fd=inner)
                continue
            beside = f".removed-{uuid4().hex}"
            os.rename(entry, beside, src_dir_fd=inner, dst_dir_fd=directory)
            moved.append(beside)
    finally:
        os.close(inner)
    return moved
