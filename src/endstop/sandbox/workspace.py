"""Where the commands of a run work: in the workspace itself or, for root's commands, in a copy of it.

Root's commands run as another user, who can write nothing of root's. They get a copy that is his, and what
changes in it is brought back to the workspace after each command, file by file, each whole; owners and
modes there stay as they were. No file of the workspace ever belongs to the other user, so nothing is left to
repair when the run is killed: the next one makes the copy anew.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from endstop.protocol.errors import EndstopError
from endstop.sandbox.beneath import (
    directory_beneath,
    left_half,
    make_directory,
    open_directory,
    place_file,
)
from endstop.sandbox.modes import drops_user
from endstop.sandbox.settings import SandboxSettings

_CHUNK = 1 << 24
# Directories below this many others are not brought back: no work has them, attacks do.
_DEEPEST = 200


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file, directory or link of the copy as it was when it last agreed with the workspace.

    The time of the last change of state cannot be set by a command, so no change goes unseen.
    """

    mode: int
    size: int
    modified: int
    changed: int
    inode: int

    @staticmethod
    def of(state: os.stat_result) -> _Seen:
        if stat.S_ISDIR(state.st_mode):
            # What it holds is seen for itself.
            return _Seen(state.st_mode, 0, 0, 0, 0)
        return _Seen(state.st_mode, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.mode)


class WorkingCopy:
    """Use as a context manager, or close it.

    Attributes:
        root: where commands, file tools and snapshots work.
        conflicts: paths that sync_back could not bring back, since the workspace holds something there that
            the run does not know.
    """

    def __init__(
        self, workspace: Path, root: Path, seen: dict[str, _Seen], exclude: Sequence[str] = ()
    ) -> None:
        self.workspace, self.root = workspace, root
        self._exclude = tuple(exclude)
        self.conflicts: list[str] = []
        self._seen = seen

    @classmethod
    def open(
        cls, workspace: Path, state: Path, settings: SandboxSettings, *, exclude: Sequence[str] = ()
    ) -> WorkingCopy:
        """`state`: a directory of the run outside of the workspace, where a copy is made if one is needed.
        `exclude`: paths in the workspace that are left out of the copy (dependencies that are bound)."""
        workspace = Path(os.path.realpath(workspace))
        if not workspace.is_dir():
            raise EndstopError(f"the workspace {workspace} is no directory")
        if not drops_user(settings):
            _remove_left_half(workspace)
            return cls(workspace, workspace, {})
        state = Path(os.path.realpath(state))
        if state.is_relative_to(workspace):
            raise EndstopError(f"the state {state} lies in the workspace {workspace}; choose another place")
        if workspace.is_relative_to(state):
            # The copy would be made in the place of what is copied.
            raise EndstopError(f"the workspace {workspace} lies in the state {state}; choose another place")
        _remove_left_half(workspace)
        root = state / "workspace"
        _remove(root)
        root.mkdir(parents=True)
        left_out = {os.path.normpath(path) for path in exclude}
        try:
            with _opened(workspace) as source, _opened(root) as target:
                os.fchown(target, settings.uid, settings.uid)
                os.fchmod(target, 0o755)
                _copy(source, target, "", left_out, settings.uid)
                seen = {path: _Seen.of(state) for path, state in _walk(target)}
        except (OSError, RecursionError) as error:
            _remove(root)
            raise EndstopError(
                f"the workspace {workspace} cannot be copied to {root}: {_why(error)}"
            ) from error
        return cls(workspace, root, seen, sorted(left_out))

    def sync_back(self) -> list[str]:
        """Bring what has changed since the last time to the workspace: the paths, sorted.

        Nothing may run in the copy meanwhile. Directories count only when they are new or gone. Raises
        EndstopError where nothing can be written there (a full disk, one that is read-only).
        """
        if self.root == self.workspace:
            return []
        with _opened(self.root) as source, _opened(self.workspace) as target:
            now = {path: _Seen.of(state) for path, state in _walk(source) if not self._is_excluded(path)}
            gone = [p for p, seen in self._seen.items() if p not in now or now[p].kind != seen.kind]
            fresh = [path for path, seen in now.items() if self._seen.get(path) != seen]
            failed = set()
            # Children before their directory, and directories before their children.
            for path in sorted(gone, reverse=True):
                if not _take_away(target, path):
                    failed.add(path)
            for path in sorted(set(fresh) - failed):
                try:
                    brought = self._bring(source, target, path, now[path])
                except OSError as error:
                    raise EndstopError(
                        f"{path} cannot be brought back to the workspace {self.workspace}: {error.strerror}"
                    ) from error
                if not brought:
                    failed.add(path)
        self.conflicts += sorted(failed)
        self._seen = now
        return sorted({*gone, *fresh} - failed)

    def _is_excluded(self, path: str) -> bool:
        """What stands in the copy where something is bound for commands says nothing about the workspace."""
        return any(path == place or path.startswith(f"{place}/") for place in self._exclude)

    def close(self) -> None:
        """Remove the copy. What was not synced is lost."""
        if self.root != self.workspace:
            _remove(self.root)

    def __enter__(self) -> WorkingCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bring(self, source: int, target: int, path: str, now: _Seen) -> bool:
        *parts, name = path.split("/")
        before = self._seen.get(path)
        mode_changed = before is None or before.kind != now.kind or before.mode != now.mode
        try:
            with directory_beneath(source, parts) as inner, directory_beneath(target, parts) as outer:
                there = _state(outer, name)
                if there is not None and stat.S_IFMT(there.st_mode) != now.kind:
                    # A directory is never removed for a file here: what is known of it is gone already.
                    if stat.S_ISDIR(there.st_mode):
                        return False
                    os.unlink(name, dir_fd=outer)
                    there = None
                if now.kind == stat.S_IFDIR:
                    _bring_directory(outer, name, there, now.mode if mode_changed else None)
                elif now.kind == stat.S_IFLNK:
                    _bring_link(outer, name, os.readlink(name, dir_fd=inner))
                else:
                    mode = now.mode if mode_changed or there is None else there.st_mode
                    _bring_file(inner, outer, name, mode, there, now.modified)
        except (NotADirectoryError, FileNotFoundError, FileExistsError, IsADirectoryError):
            return False
        return True


def give_to_sandbox(path: Path, settings: SandboxSettings) -> None:
    """Let commands write below a directory that was made for them (an export, a place for reports): all of it
    becomes theirs. Does nothing where commands run as this user."""
    if not drops_user(settings):
        return
    owner = f"{settings.uid}:{settings.uid}"
    subprocess.run(["chown", "--recursive", "--no-dereference", "--", owner, str(path)], check=True)


def _copy(source: int, target: int, prefix: str, left_out: set[str], uid: int) -> None:
    """All of a directory but what is no file, directory or link."""
    for name in os.listdir(source):
        path = prefix + name
        state = _state(source, name)
        if state is None or path in left_out:
            continue
        if stat.S_ISDIR(state.st_mode):
            os.mkdir(name, dir_fd=target)
            inner, copied = open_directory(source, name), open_directory(target, name)
            try:
                _copy(inner, copied, path + "/", left_out, uid)
                os.fchmod(copied, state.st_mode & 0o777)
                os.fchown(copied, uid, uid)
                os.utime(copied, ns=(state.st_atime_ns, state.st_mtime_ns))
            finally:
                os.close(inner)
                os.close(copied)
        elif stat.S_ISLNK(state.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            os.chown(name, uid, uid, dir_fd=target, follow_symlinks=False)
        elif stat.S_ISREG(state.st_mode):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            copied = os.open(name, flags, 0o600, dir_fd=target)
            try:
                _pour(source, name, copied)
                os.fchmod(copied, state.st_mode & 0o777)
                os.fchown(copied, uid, uid)
                os.utime(copied, ns=(state.st_atime_ns, state.st_mtime_ns))
            finally:
                os.close(copied)


def _pour(parent: int, name: str, target: int) -> None:
    """The content of a file into a descriptor, shared with the file where the file system can do that."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    source = os.open(name, flags, dir_fd=parent)
    try:
        try:
            while os.copy_file_range(source, target, _CHUNK):
                pass
        except OSError:
            # Not between these file systems. It copies nothing before it refuses.
            with open(source, "rb", closefd=False) as from_file, open(target, "wb", closefd=False) as to_file:
                shutil.copyfileobj(from_file, to_file, 1 << 20)
    finally:
        os.close(source)


def _bring_directory(outer: int, name: str, there: os.stat_result | None, mode: int | None) -> None:
    if there is None:
        make_directory(outer, name)
    if mode is not None:
        inner = open_directory(outer, name)
        try:
            os.fchmod(inner, mode & 0o777)
        finally:
            os.close(inner)


def _bring_link(outer: int, name: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=outer)
    os.symlink(target, name, dir_fd=outer)
    owner = os.fstat(outer)
    os.chown(name, owner.st_uid, owner.st_gid, dir_fd=outer, follow_symlinks=False)


def _bring_file(
    inner: int, outer: int, name: str, mode: int, there: os.stat_result | None, modified: int
) -> None:
    def fill(descriptor: int) -> None:
        _pour(inner, name, descriptor)
        # What is built from files is held against their times.
        os.utime(descriptor, ns=(modified, modified))

    place_file(outer, name, fill, mode=mode, like=there)


def _take_away(target: int, path: str) -> bool:
    """Remove a file, a link or an empty directory; whether it is gone."""
    *parts, name = path.split("/")
    try:
        with directory_beneath(target, parts) as parent:
            state = _state(parent, name)
            if state is None:
                return True
            if stat.S_ISDIR(state.st_mode):
                os.rmdir(name, dir_fd=parent)
            else:
                os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _walk(root: int) -> Iterator[tuple[str, os.stat_result]]:
    """Files, directories and links below a directory, each directory before what it holds."""
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        parts = waiting.pop()
        with directory_beneath(root, parts) as directory:
            for name in os.listdir(directory):
                state = _state(directory, name)
                kind = stat.S_IFMT(state.st_mode) if state else 0
                if state and kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                    yield "/".join((*parts, name)), state
                if kind == stat.S_IFDIR and len(parts) < _DEEPEST:
                    waiting.append((*parts, name))


def _why(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


def _remove_left_half(workspace: Path) -> None:
    """What a killed run was writing, as far as this user may look."""
    with contextlib.suppress(OSError), _opened(workspace) as root:
        for path, state in _walk(root):
            if stat.S_ISREG(state.st_mode) and left_half(path.rpartition("/")[2]):
                _take_away(root, path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _state(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        # Not shutil.rmtree, which fails in a tree of a thousand directories in each other.
        subprocess.run(["rm", "-rf", "--", str(path)], check=True)
