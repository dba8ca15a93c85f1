"""Reading and writing the files of a workspace from outside the sandbox, without being led out of it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from endstop.protocol.errors import EndstopError
from endstop.sandbox.arguments import INSIDE
from endstop.sandbox.beneath import directory_beneath, open_beneath, open_directory, place_file

Kind = Literal["file", "directory", "link", "other"]
# Nothing happens by opening so; where the system lacks it, at least nothing waits.
_LOOK = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
_REASONS = {
    errno.EXDEV: "leads out of the workspace",
    errno.ELOOP: "is a loop of links",
    errno.ENOTDIR: "goes through something that is no directory",
    errno.ENAMETOOLONG: "is too long a name",
    errno.EACCES: "may not be used: permission denied",
    errno.EPERM: "may not be used: not permitted",
    errno.EISDIR: "is a directory",
    errno.EAGAIN: "was moved while it was looked up; try again",
    errno.ENOSPC: "cannot be written: no space is left",
    errno.EFBIG: "cannot be written: it is too large",
    errno.EROFS: "cannot be written: its file system is read-only",
}


class PathRefused(EndstopError):
    """A path that is not read or written; the message says which and why."""


class PathMissing(PathRefused):
    """There is nothing of this name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a directory holds under a name. `size` in bytes."""

    name: str
    kind: Kind
    size: int


class WorkspaceFiles:
    """The files below a directory.

    Paths are relative to it, or absolute below /workspace, which the directory is to commands, or below the
    directory's own path. Reading follows links that stay inside; writing follows none. Devices, pipes, and
    files that have another name outside of the workspace are refused. Holds against processes that change
    the files meanwhile. What root makes belongs to the owner of the directory that it is made in.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))

    def relative(self, path: str) -> str:
        """The path relative to the workspace, as given otherwise. Raises PathRefused."""
        if not path or "\0" in path:
            raise PathRefused(f"{path!r} is no path; give one relative to the workspace")
        for root in (str(self.root), INSIDE):
            if path == root:
                return "."
            if path.startswith(root + "/"):
                path = path[len(root) :].lstrip("/") or "."
        if path.startswith("/"):
            raise PathRefused(f"{path} is outside of the workspace; give a path relative to it")
        return path

    def read(self, path: str, limit: int | None = None, start: int = 0) -> tuple[bytes, int]:
        """Up to `limit` bytes of a file, from its byte `start` on, and the size of the whole."""
        relative = self.relative(path)
        with self._root() as root, _said(path):
            # What it is comes first: opening a device or a pipe can do something by itself.
            descriptor = open_beneath(root, relative, _LOOK)
            try:
                state = os.fstat(descriptor)
                self._regular(path, state)
                self._no_name_outside(root, path, state)
                if hasattr(os, "O_PATH"):
                    readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
                    os.close(descriptor)
                    descriptor = readable
                with open(descriptor, "rb", closefd=False) as file:
                    file.seek(start)
                    content = file.read() if limit is None else file.read(limit)
            finally:
                os.close(descriptor)
        return content, max(state.st_size, start + len(content) if content else 0)

    def write(self, path: str, content: bytes) -> None:
        """Make or replace a file, whole or not at all, with the directories above it."""
        parts = self.relative(path).split("/")
        if parts[-1] in ("", ".", "..") or ".." in parts:
            raise PathRefused(f"{path} cannot be written: end with the file's name, and do without ..")
        *parts, name = (part for part in parts if part not in ("", "."))
        with self._root() as root, _said(path):
            self._no_link(root, path, parts)
            with directory_beneath(root, parts, make=True) as parent:
                state = _state(parent, name)
                if state is not None and stat.S_ISLNK(state.st_mode):
                    target = os.readlink(name, dir_fd=parent)
                    raise PathRefused(f"{path} is a link to {target}; write to the file that it leads to")
                if state is not None:
                    self._regular(path, state)

                def fill(descriptor: int) -> None:
                    with open(descriptor, "wb", closefd=False) as file:
                        file.write(content)

                place_file(parent, name, fill, mode=state.st_mode if state else None, like=state)

    def exists(self, path: str) -> bool:
        """Whether a path leads to something inside the workspace."""
        try:
            relative = self.relative(path)
            with self._root() as root, _said(path):
                os.close(open_beneath(root, relative, _LOOK))
        except PathRefused:
            return False
        return True

    def kind(self, path: str) -> Kind | None:
        """What a path names itself, a link not followed; None for nothing. Raises PathRefused."""
        above, _, name = self.relative(path).rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            return "directory" if self.exists(path) else None
        try:
            with self._root() as root, _said(path):
                parent = open_beneath(root, above or ".", os.O_RDONLY | os.O_DIRECTORY)
                try:
                    state = _state(parent, name)
                finally:
                    os.close(parent)
        except PathMissing:
            return None
        return None if state is None else _kind(state)

    def list(self, path: str = ".") -> tuple[Entry, ...]:
        """What a directory holds, by name."""
        relative = self.relative(path)
        found = []
        with self._root() as root, _said(path):
            directory = open_beneath(root, relative, os.O_RDONLY | os.O_DIRECTORY)
            try:
                for name in sorted(os.listdir(directory)):
                    state = _state(directory, name)
                    if state is not None:
                        found.append(Entry(name, _kind(state), state.st_size))
            finally:
                os.close(directory)
        return tuple(found)

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        try:
            root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise PathRefused(f"the workspace {self.root} cannot be opened: {error.strerror}") from error
        try:
            yield root
        finally:
            os.close(root)

    def _regular(self, path: str, state: os.stat_result) -> None:
        kind = _kind(state)
        if kind == "directory":
            raise PathRefused(f"{path} is a directory")
        if kind != "file":
            raise PathRefused(f"{path} is no regular file (a device, a pipe or a socket)")

    def _no_name_outside(self, root: int, path: str, state: os.stat_result) -> None:
        if state.st_nlink > 1 and _names(root, state, state.st_nlink) < state.st_nlink:
            raise PathRefused(f"{path} has another name (a hard link) outside of the workspace")

    def _no_link(self, root: int, path: str, parts: Sequence[str]) -> None:
        """For the message only: the walk itself follows no link."""
        for count in range(1, len(parts) + 1):
            with contextlib.suppress(OSError), directory_beneath(root, parts[: count - 1]) as parent:
                if stat.S_ISLNK(os.stat(parts[count - 1], dir_fd=parent, follow_symlinks=False).st_mode):
                    link = "/".join(parts[:count])
                    raise PathRefused(f"{path} goes through the link {link}; name the directory it leads to")


@contextlib.contextmanager
def _said(path: str) -> Iterator[None]:
    """The operating system's errors as sentences."""
    try:
        yield
    except FileNotFoundError as error:
        raise PathMissing(f"{path} does not exist in the workspace") from error
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"cannot be used: {error.strerror}")
        raise PathRefused(f"{path} {reason}") from error


def _state(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _kind(state: os.stat_result) -> Kind:
    if stat.S_ISREG(state.st_mode):
        return "file"
    if stat.S_ISDIR(state.st_mode):
        return "directory"
    return "link" if stat.S_ISLNK(state.st_mode) else "other"


def _names(directory: int, wanted: os.stat_result, enough: int) -> int:
    """How many names below a directory a file has, counted up to `enough`."""
    count = 0
    inner = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner.append(entry.name)
            elif entry.inode() == wanted.st_ino:
                state = _state(directory, entry.name)
                count += state is not None and os.path.samestat(state, wanted)
    for name in inner:
        if count >= enough:
            break
        # Too deep a tree: then the names in it count as being outside.
        with contextlib.suppress(OSError, RecursionError):
            descriptor = open_directory(directory, name)
            try:
                count += _names(descriptor, wanted, enough - count)
            finally:
                os.close(descriptor)
    return count
