"""Files and trees kept by content, as loose objects of a bare git repository with SHA-256 ids.

Objects are written here, not by git: no filter, attribute, hook, configuration or index of anybody's can
change what is kept, and a tree that has not changed costs no process. git itself only reads what is here,
to make a diff. SHA-256, because an id is evidence: one who may write files may also look for collisions.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple
from uuid import uuid4

from endstop.protocol.errors import EndstopError

Mode = Literal["100644", "100755", "120000", "40000"]

_CHUNK = 1 << 20
_CONFIG = """\
[core]
\trepositoryformatversion = 1
\tbare = true
[extensions]
\tobjectformat = sha256
"""
# Above any attributes that a later git might read out of a tree.
_ATTRIBUTES = "* !text !eol !filter !ident !working-tree-encoding !diff !merge\n"


class Entry(NamedTuple):
    """What a tree has under a name: a file, an executable file, a symbolic link or a directory."""

    mode: Mode
    object_id: str


class ObjectStore:
    """Objects under one directory. Several processes may write to it at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._objects = str(directory / "objects")
        self._known: set[str] = set()
        for part in ("objects", "refs", "info"):
            (directory / part).mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, text in (
            ("HEAD", "ref: refs/heads/none\n"),
            ("config", _CONFIG),
            ("info/attributes", _ATTRIBUTES),
        ):
            if not (directory / name).exists():
                beside = directory / f".{uuid4().hex}"
                beside.write_text(text)
                beside.replace(directory / name)

    def add_file(self, descriptor: int) -> str | None:
        """Keep what an open file holds. None where its size changes while it is read."""
        size = os.fstat(descriptor).st_size
        if size <= _CHUNK:
            content = b"".join(_read_all(descriptor, size + 1))
            return self.add(b"blob", content) if len(content) == size else None
        header = b"blob %d\0" % size
        digest, packer, read = hashlib.sha256(header), zlib.compressobj(0), 0
        with self._new() as kept:
            kept.write(packer.compress(header))
            for chunk in _read_all(descriptor, size + 1):
                read += len(chunk)
                digest.update(chunk)
                kept.write(packer.compress(chunk))
            kept.write(packer.flush())
            if read != size:
                return None
            self._take(kept, digest.hexdigest())
        return digest.hexdigest()

    def add(self, kind: bytes, content: bytes) -> str:
        whole = kind + b" %d\0" % len(content) + content
        object_id = hashlib.sha256(whole).hexdigest()
        if not self._has(object_id):
            with self._new() as kept:
                # Not compressed: what is kept for one run only is written and read faster so.
                kept.write(zlib.compress(whole, 0))
                self._take(kept, object_id)
        return object_id

    def add_tree(self, entries: Iterable[tuple[bytes, Entry]]) -> str:
        """Keep one directory: names with what they stand for."""
        # git's order: a directory sorts as if its name ended with a slash.
        ordered = sorted(entries, key=lambda item: item[0] + (b"/" if item[1].mode == "40000" else b""))
        parts = [
            b"%s %s\0%s" % (entry.mode.encode(), name, bytes.fromhex(entry.object_id))
            for name, entry in ordered
        ]
        return self.add(b"tree", b"".join(parts))

    def tree(self, object_id: str) -> list[tuple[bytes, Entry]]:
        content = self.content(object_id)
        entries = []
        at = 0
        while at < len(content):
            end = content.index(b"\0", at)
            mode, _, name = content[at:end].partition(b" ")
            at = end + 33
            entries.append((name, Entry(mode.decode(), content[end + 1 : at].hex())))  # type: ignore[arg-type]
        return entries

    def content(self, object_id: str) -> bytes:
        return b"".join(self.chunks(object_id))

    def write_to(self, descriptor: int, object_id: str) -> None:
        """Write what is kept under an id to an open file."""
        for chunk in self.chunks(object_id):
            view = memoryview(chunk)
            while view:
                view = view[os.write(descriptor, view) :]

    def chunks(self, object_id: str) -> Iterator[bytes]:
        """What is kept under an id, in pieces. Raises EndstopError where it is not there whole."""
        # Not a Path: a thousand of them are a good part of an export's time.
        path = f"{self._objects}/{object_id[:2]}/{object_id[2:]}"
        unpacker = zlib.decompressobj()
        header, wanted, given = b"", -1, 0
        try:
            with open(path, "rb", buffering=0) as kept:
                while packed := kept.read(_CHUNK):
                    piece = unpacker.decompress(packed)
                    if wanted < 0:
                        header += piece
                        head, found, piece = header.partition(b"\0")
                        if not found:
                            continue
                        wanted = int(head.split()[1])
                    given += len(piece)
                    yield piece
        except (OSError, zlib.error, ValueError, IndexError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise EndstopError(f"the kept file {path} cannot be read: {why}") from error
        if given != wanted:
            raise EndstopError(f"the kept file {path} is cut off: {given} of {wanted} bytes")

    def git(self, *arguments: str, limit: int) -> tuple[str, bool]:
        """Output of a git command that reads this store, and whether it was cut at `limit` bytes."""
        program = shutil.which("git")
        if program is None:
            raise EndstopError("git is not installed: it is needed to show what changed")
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.directory),
            "LC_ALL": "C.UTF-8",
            "GIT_DIR": str(self.directory),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_OPTIONAL_LOCKS": "0",
        }
        with subprocess.Popen(
            [program, "--no-pager", *arguments],
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            output = process.stdout.read(limit + 1)
            cut = len(output) > limit
            if cut:
                process.kill()
            problem = process.stderr.read().decode("utf-8", "replace").strip()
        if process.returncode and not cut:
            raise EndstopError(f"git {arguments[0]} failed in {self.directory}: {problem}")
        return output[:limit].decode("utf-8", "replace"), cut

    def _path(self, object_id: str) -> Path:
        return self.directory / "objects" / object_id[:2] / object_id[2:]

    def _has(self, object_id: str) -> bool:
        if object_id not in self._known:
            if not self._path(object_id).exists():
                return False
            self._known.add(object_id)
        return True

    @contextlib.contextmanager
    def _new(self) -> Iterator[_Kept]:
        path = self.directory / "objects" / f".{uuid4().hex}"
        kept = _Kept(path)
        try:
            yield kept
        finally:
            kept.close()
            path.unlink(missing_ok=True)

    def _take(self, kept: _Kept, object_id: str) -> None:
        kept.close()
        path = self._path(object_id)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        kept.path.rename(path)
        self._known.add(object_id)


class _Kept:
    """A file being written. What fails here is the state's fault, never that of the file that is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=0)

    def write(self, content: bytes) -> None:
        view = memoryview(content)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise EndstopError(f"{self.path.parent} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


def open_regular(name: str, directory: int) -> int | None:
    """A descriptor of a regular file, never of what a link, a pipe or a device leads to."""
    descriptor = os.open(
        name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=directory
    )
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    with contextlib.suppress(OSError):
        os.close(descriptor)
    return None


def _read_all(descriptor: int, limit: int) -> Iterator[bytes]:
    while limit > 0 and (chunk := os.read(descriptor, min(_CHUNK, limit))):
        limit -= len(chunk)
        yield chunk
