"""Untrusted Python in a process of its own, with limits on what it uses and a hard end for all it starts.

Contained: time, CPU, memory (of each process), size of files, number of processes, output; the environment
(empty but for a few fixed variables), stdin (null) and the working directory (temporary, removed behind the
run). Processes that the program leaves behind are killed on Linux wherever they went; elsewhere only those
of its session.

NOT contained: the program reads and writes every file that this user may, with this user's rights. The
network is closed, and other processes are out of reach, only on Linux and where the kernel lets this user
make namespaces; everywhere else both are open. Memory in total is bounded only by the number of processes
times the memory of each. This keeps the accidents of generated code (endless loops, memory, fork bombs) away
from the machine, it does not keep an attacker out.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["ok", "failed", "timeout", "cpu", "memory", "processes", "killed"]

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
# Beyond the program's own time, for the supervisor to end everything.
_GRACE = 8.0
_CHUNK = 1 << 16
# Off in tests of what happens where namespaces cannot be had.
_ISOLATE = True


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use. Raises ValueError for what is not positive.

    Attributes:
        seconds: wall clock. cpu_seconds: of each process, rounded to whole seconds.
        memory_bytes: address space of each process (not on macOS).
        file_bytes: of each file that it writes. open_files: at once.
        processes: at once, itself included.
        output_bytes: kept of stdout and stderr together, half from the beginning and half from the end.
    """

    seconds: float = 5.0
    cpu_seconds: float = 5.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 16 << 20
    open_files: int = 64
    processes: int = 16
    output_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended.

    Attributes:
        outcome: `ok` (exit code 0), `failed` (another one), `timeout`, `cpu`, `memory` (it ended with a
            MemoryError), `processes` (too many at once), `killed` (by a signal).
        exit_code: minus the signal's number where a signal ended it.
        output: stdout and stderr as they came; where the middle was dropped a line says how much.
        omitted_bytes: of output, dropped. seconds: wall clock.
    """

    outcome: Outcome
    exit_code: int
    output: str
    omitted_bytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


def run_python(code: str, *, limits: Limits | None = None) -> Finished:
    """Run a program to its end or to a limit; nothing that it started runs on behind it.

    Raises OSError where no process can be started, NotImplementedError on Windows.
    """
    if os.name != "posix":
        raise NotImplementedError("untrusted code is run only on Linux and macOS")
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="endstop-sandbox-", ignore_cleanup_errors=True) as place:
        # Beside the working directory, so that the program starts in an empty one.
        program = Path(place, "program.py")
        program.write_text(code, encoding="utf-8", errors="surrogatepass")
        work = Path(place, "work")
        work.mkdir()
        return _run([sys.executable, "-I", "-B", str(program)], work, limits)


def _run(argv: list[str], directory: Path, limits: Limits) -> Finished:
    environment = {
        "HOME": str(directory),
        "TMPDIR": str(directory),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
    status_read, status_write = os.pipe()
    try:
        supervisor = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                str(_SUPERVISOR),
                json.dumps({**asdict(limits), "isolate": _ISOLATE}),
                str(status_write),
                *argv,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=environment,
            pass_fds=(status_write,),
            start_new_session=True,
        )
    except BaseException:
        os.close(status_read)
        raise
    finally:
        os.close(status_write)
    started = time.monotonic()
    output = _Bounded(limits.output_bytes)
    status = b""
    try:
        status = _read(supervisor, status_read, output, started + limits.seconds + _GRACE)
    finally:
        # Closes the supervisor's stdin, at which it ends the program and itself.
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        supervisor.stdin.close()
        _wait(supervisor, status)
        supervisor.stdout.close()
        os.close(status_read)
    return _finished(status, output, time.monotonic() - started)


def _read(supervisor: subprocess.Popen[bytes], status_fd: int, output: _Bounded, until: float) -> bytes:
    """Take in output and status as they come, until both are closed or it has taken too long."""
    assert supervisor.stdout is not None
    status = b""
    with selectors.DefaultSelector() as selector:
        selector.register(supervisor.stdout, selectors.EVENT_READ)
        selector.register(status_fd, selectors.EVENT_READ)
        while selector.get_map():
            left = until - time.monotonic()
            if left <= 0:
                return status
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    selector.unregister(key.fileobj)
                    if key.fd == status_fd and _end_session(status):
                        until = min(until, time.monotonic() + 1.0)
                elif key.fd == status_fd:
                    status += chunk
                else:
                    output.add(chunk)
    return status


def _wait(supervisor: subprocess.Popen[bytes], status: bytes) -> None:
    try:
        supervisor.wait(_GRACE)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()
    _end_session(status)


def _end_session(status: bytes) -> bool:
    """Where the supervisor was killed before it had a result, at least the program's session ends here."""
    child, _, result = status.partition(b"\n")
    if not child.isdigit() or result:
        return False
    with contextlib.suppress(OSError):
        os.killpg(int(child), signal.SIGKILL)
    return True


def _finished(status: bytes, output: _Bounded, seconds: float) -> Finished:
    text, omitted = output.text()
    lines = status.splitlines()
    if len(lines) < 2:
        # The program has killed its supervisor.
        return Finished("killed", -signal.SIGKILL, text, omitted, seconds)
    result = json.loads(lines[1])
    cause, code = str(result["cause"]), int(result["code"])
    outcome: Outcome
    if cause in ("timeout", "processes", "cpu"):
        outcome = cause  # type: ignore[assignment]
    elif code < 0:
        outcome = "killed"
    elif code and text.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        outcome = "memory"
    else:
        outcome = "failed" if code else "ok"
    return Finished(outcome, code, text, omitted, float(result["seconds"]))


class _Bounded:
    """The beginning and the end of a stream of bytes, whatever its length."""

    def __init__(self, limit: int) -> None:
        self._first, self._last = limit - limit // 2, limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self._omitted = 0

    def add(self, chunk: bytes) -> None:
        room = self._first - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:] if room > 0 else chunk
        over = len(self._tail) - self._last
        if over > 0:
            del self._tail[:over]
            self._omitted += over

    def text(self) -> tuple[str, int]:
        head, tail = self._head.decode("utf-8", "replace"), self._tail.decode("utf-8", "replace")
        if not self._omitted:
            return (self._head + self._tail).decode("utf-8", "replace"), 0
        return f"{head}\n[{self._omitted} bytes left out]\n{tail}", self._omitted
