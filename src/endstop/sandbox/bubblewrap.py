"""Running a command under bubblewrap: whatever happens, nothing of it is left when this returns."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from endstop.sandbox import arguments
from endstop.sandbox.arguments import Layout
from endstop.sandbox.load import Load, load_below, processes_of_user
from endstop.sandbox.seccomp import filter_program
from endstop.sandbox.settings import CommandLimits, SandboxSettings

_CHUNK = 1 << 16
_LOOK = 0.2  # seconds between two looks at what a command uses
_START = 20.0  # seconds in which the sandbox must stand
_DEATH = 10.0  # seconds in which everything must be dead after SIGKILL
_PASSWD = (
    "root:x:0:0:root:/root:/usr/sbin/nologin\n"
    f"sandbox:x:{arguments.INSIDE_UID}:{arguments.INSIDE_UID}:sandbox:{arguments.HOME}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
)
_GROUP = f"root:x:0:\nsandbox:x:{arguments.INSIDE_UID}:\nnogroup:x:65534:\n"
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"
# Reads what nobody writes, so it goes on when endstop is gone; "0" is all of its process group.
_GUARD = ("/bin/sh", "-c", "read -r end; kill -9 0")


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether bubblewrap can be used here; `reason` says why not."""

    available: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Attributes:
        cause: `exit`, `timeout`, `memory`, `disk` or, where no command came to run, `start`; `problem` then
            has what was said instead.
        code: as the shell counts, 128 and the signal. load: the most that was seen.
    """

    cause: str
    code: int | None
    seconds: float
    problem: str = ""
    load: Load = field(default_factory=Load)


@functools.cache
def probe() -> Probe:
    """Try all of it once, with `true` for a command."""
    if not sys.platform.startswith("linux"):
        return Probe(False, "bubblewrap is for Linux")
    for name in ("bwrap", "prlimit", *(("setpriv", "unshare", "mount") if os.geteuid() == 0 else ())):
        if shutil.which(name) is None:
            return Probe(False, f"{name} is not installed")
    settings = SandboxSettings(limits=CommandLimits(seconds=10.0))
    try:
        layout = Layout(Path("/usr"))
        ended = run_bubblewrapped(["true"], layout, settings, {}, lambda _: None, stage_all=True)
    except OSError as error:
        return Probe(False, f"bubblewrap cannot be started ({error})")
    if (ended.cause, ended.code) == ("exit", 0):
        return Probe(True)
    said = " ".join(ended.problem.split()) or f"`true` ended with {ended.cause} {ended.code}"
    return Probe(False, f"bubblewrap does not work here: {said}")


def run_bubblewrapped(
    argv: Sequence[str],
    layout: Layout,
    settings: SandboxSettings,
    environment: Mapping[str, str],
    add: Callable[[bytes], None],
    *,
    stage_all: bool = False,
) -> Ended:
    """Run a command. `add` is given its output as it comes. Raises OSError where no process starts."""
    as_root = os.geteuid() == 0
    sources: dict[Path, Path] = {}
    if as_root:
        hidden = [p for p in layout.sources() if stage_all or not arguments.reachable(p, settings.uid)]
        sources = {path: arguments.STAGE / str(i) for i, path in enumerate(dict.fromkeys(hidden))}
        if sources:
            arguments.STAGE.mkdir(mode=0o711, exist_ok=True)
    with contextlib.ExitStack() as files:
        data = {"/etc/passwd": _PASSWD, "/etc/group": _GROUP}
        if not settings.network:
            data["/etc/hosts"] = _HOSTS
        contents = {path: _file(files, text.encode()) for path, text in data.items()}
        told = arguments.options(layout, settings, environment, sources=sources, data=contents)
        # By a file, so that no value of the environment stands on a command line.
        told_file = _file(files, b"".join(os.fsencode(word) + b"\0" for word in told))
        passed = [*contents.values(), told_file]
        command = ["bwrap", "--args", str(told_file)]
        if program := filter_program():
            passed.append(_file(files, program))
            command += ["--seccomp", str(passed[-1])]
        # No pipe: bwrap would die of it, half done, when its reader is gone.
        info = _file(files, b"")
        command += ["--info-fd", str(info), "--"]
        others = (
            0 if _limits_are_per_namespace() else processes_of_user(settings.uid if as_root else os.getuid())
        )
        command += arguments.waiting(argv, settings.limits, others)
        if as_root:
            command = arguments.dropped(command, settings.uid)
        if sources:
            command = arguments.staged(command, list(sources))
        guard = files.enter_context(_guard())
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"PATH": os.environ.get("PATH", arguments.PATH)},
            pass_fds=(*passed, info),
            process_group=guard,
            bufsize=0,
        )
        run = _Run(process, guard, info, layout.workspace, settings.limits, add)
        try:
            return run.to_its_end()
        finally:
            run.end()


class _Run:
    """One bwrap process and the first process of its PID namespace, with which all others end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        group: int,
        info: int,
        workspace: Path,
        limits: CommandLimits,
        add: Callable[[bytes], None],
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._group, self._info = process, group, info
        self._limits, self._add = limits, add
        self._stdin, self._output = process.stdin, process.stdout
        self._workspace = workspace
        self._first: int | None = None
        self._first_handle: int | None = None
        self._load = Load()

    def to_its_end(self) -> Ended:
        began = time.monotonic()
        said = self._until_it_waits(began + _START)
        if said is not None:
            return Ended("start", None, time.monotonic() - began, problem=said)
        began = time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(b"\n")
        cause = self._until_it_ends(began + self._limits.seconds)
        self.end()
        # Every process that could write is dead, so the end of the pipe is near.
        self._drain()
        code = self._process.returncode if cause == "exit" else None
        if code is not None and code < 0:
            code = 128 - code
        return Ended(cause, code, time.monotonic() - began, load=self._load)

    def end(self) -> None:
        """Kill everything and wait until it is dead."""
        if self._process.returncode is None:
            self._hold()
        if self._first_handle is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._first_handle, signal.SIGKILL)
            # It is gone only when every other process of its namespace is.
            with selectors.DefaultSelector() as selector:
                selector.register(self._first_handle, selectors.EVENT_READ)
                selector.select(_DEATH)
            os.close(self._first_handle)
            self._first_handle = None
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._group, signal.SIGKILL)
            self._process.wait()
        self._stdin.close()

    def _until_it_waits(self, until: float) -> str | None:
        """None when the command stands ready; otherwise what was said in place of that."""
        said = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while selector.select(max(0.0, until - time.monotonic())):
                chunk = os.read(self._output.fileno(), _CHUNK)
                said += chunk
                if said.endswith(b"\0") and self._hold():
                    return None
                if not chunk:
                    break
        return said.decode("utf-8", "replace") or "the sandbox did not come up in time"

    def _hold(self) -> bool:
        """Take hold of the first process; whether its number is known."""
        if self._first_handle is None:
            with contextlib.suppress(ValueError, KeyError, OSError):
                self._first = int(json.loads(os.pread(self._info, _CHUNK, 0))["child-pid"])
                self._first_handle = os.pidfd_open(self._first)
        return self._first_handle is not None

    def _until_it_ends(self, until: float) -> str:
        handle = os.pidfd_open(self._process.pid)
        look = time.monotonic() + _LOOK
        reserve = self._limits.free_bytes
        roomy = _free_bytes(self._workspace) > reserve
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(handle, selectors.EVENT_READ)
                selector.register(self._output, selectors.EVENT_READ)
                while True:
                    now = time.monotonic()
                    if now >= until:
                        return "timeout"
                    if now >= look:
                        look = now + _LOOK
                        self._load = self._load.most(load_below(self._first or 0))
                        if self._load.resident_bytes > self._limits.memory_bytes:
                            return "memory"
                        if roomy and _free_bytes(self._workspace) < reserve:
                            return "disk"
                    for key, _ in selector.select(min(until, look) - now):
                        if key.fd == handle:
                            self._process.wait()
                            return "exit"
                        chunk = os.read(key.fd, _CHUNK)
                        if chunk:
                            self._add(chunk)
                        else:
                            selector.unregister(self._output)
        finally:
            os.close(handle)

    def _drain(self) -> None:
        until = time.monotonic() + 1.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while selector.select(max(0.0, until - time.monotonic())):
                chunk = os.read(self._output.fileno(), _CHUNK)
                if not chunk:
                    break
                self._add(chunk)
        self._output.close()


@contextlib.contextmanager
def _guard() -> Iterator[int]:
    """The process group to start bwrap in: it is killed when this process is gone.

    bwrap's own --die-with-parent is not enough. When it is killed before its sandbox stands, its child waits
    for it for ever; and only from then on does the child's death follow from its parent's.
    """
    guard = subprocess.Popen(
        _GUARD,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        process_group=0,
    )
    try:
        yield guard.pid
    finally:
        # The whole group, which keeps its number until this process has waited.
        with contextlib.suppress(OSError):
            os.killpg(guard.pid, signal.SIGKILL)
        guard.communicate()


def _file(files: contextlib.ExitStack, content: bytes) -> int:
    """A descriptor of a file with this content that has no name."""
    descriptor = os.memfd_create("endstop")
    files.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _free_bytes(place: Path) -> int:
    state = os.statvfs(place)
    return state.f_bavail * state.f_frsize


@functools.cache
def _limits_are_per_namespace() -> bool:
    """Since Linux 5.14 the processes of a user namespace are counted apart from its user's others."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)
