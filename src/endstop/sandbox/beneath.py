"""Opening paths below a directory so that nothing, no link and no race, leads out of it.

Every step is taken from a directory that is held open. On Linux the kernel does it (openat2 with
RESOLVE_BENEATH); elsewhere it is done here, one component after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import secrets
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence

_SYS_OPENAT2 = 437  # on every architecture that CPython is built for, but alpha
_RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 0x02, 0x08
_LINKS = 40  # as many as the kernel follows
_RETRIES = 128  # the kernel gives up (EAGAIN) when something was renamed meanwhile
# What a file is called until it is whole, with the number of the process that writes it.
TEMPORARY = ".endstop-write-"


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_beneath(root: int, path: str, flags: int) -> int:
    """Open what a relative path names below the directory `root`, following links that stay below it.

    Raises OSError, with EXDEV for what leads out.
    """
    flags |= os.O_CLOEXEC
    return _openat2(root, path, flags) if _kernel_does_it() else step_beneath(root, path, flags)


def step_beneath(root: int, path: str, flags: int) -> int:
    """The same as open_beneath, component by component."""
    todo = deque(part for part in path.split("/") if part not in ("", "."))
    held = [os.dup(root)]
    links = 0
    try:
        while todo:
            part = todo.popleft()
            if part == "..":
                if len(held) == 1:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                os.close(held.pop())
                continue
            if not stat.S_ISLNK(os.stat(part, dir_fd=held[-1], follow_symlinks=False).st_mode):
                if not todo:
                    return os.open(part, flags | os.O_NOFOLLOW, dir_fd=held[-1])
                held.append(open_directory(held[-1], part))
                continue
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            target = os.readlink(part, dir_fd=held[-1])
            if target.startswith("/"):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            todo.extendleft(reversed([step for step in target.split("/") if step not in ("", ".")]))
        return os.open(".", flags, dir_fd=held[-1])
    finally:
        for descriptor in held:
            os.close(descriptor)


def open_directory(parent: int, name: str) -> int:
    """A directory in a directory that is held open; not a link to one."""
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


@contextlib.contextmanager
def directory_beneath(root: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """The directory that the names lead to, without any link; with `make` what is missing is made, owned by
    the owner of what it is made in."""
    held = os.dup(root)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    make_directory(held, part)
            inner = open_directory(held, part)
            os.close(held)
            held = inner
        yield held
    finally:
        os.close(held)


def make_directory(parent: int, name: str) -> None:
    os.mkdir(name, dir_fd=parent)
    if os.geteuid() == 0:
        inner = open_directory(parent, name)
        try:
            give(inner, os.fstat(parent))
        finally:
            os.close(inner)


def give(descriptor: int, like: os.stat_result) -> None:
    """Make root's new file its directory's owner's; others cannot and need not."""
    if os.geteuid() == 0:
        os.fchown(descriptor, like.st_uid, like.st_gid)


def place_file(
    parent: int, name: str, fill: Callable[[int], None], *, mode: int | None, like: os.stat_result | None
) -> None:
    """Put a file in the place of `name`, whole or not at all.

    Args:
        fill: writes the content to a descriptor.
        mode: of the file; None: what the umask leaves, or that of the file that is replaced.
        like: whose owner the file gets; None: the directory's.
    """
    temporary = f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666, dir_fd=parent)
    try:
        try:
            fill(descriptor)
            give(descriptor, like or os.fstat(parent))
            if mode is not None:
                os.fchmod(descriptor, mode & 0o777)
        finally:
            os.close(descriptor)
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise


def left_half(name: str) -> bool:
    """Whether a file of this name was being written by a process that is gone."""
    pid = name.removeprefix(TEMPORARY).partition("-")[0]
    if not name.startswith(TEMPORARY) or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


def _openat2(root: int, path: str, flags: int) -> int:
    how = _How(flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    for _ in range(_RETRIES):
        descriptor = int(
            _libc().syscall(_SYS_OPENAT2, root, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
        )
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), path)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


@functools.cache
def _kernel_does_it() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        os.close(_openat2(root, ".", os.O_PATH | os.O_CLOEXEC))
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(root)
