"""Programs under supervisor.py: limits, and a hard end for all that they start, without bubblewrap."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
# Beyond the program's own time, for the supervisor to end everything.
_GRACE = 8.0
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Supervised:
    """How a program ended: by itself (`exit`, a signal's number negative) or by what the supervisor did.

    `cause` is `exit`, `timeout`, `cpu`, `memory`, `processes`, `cancelled`, or `killed` where the program has
    killed its supervisor.
    """

    cause: str
    code: int
    seconds: float


def supervise(
    argv: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    limits: Mapping[str, float],
    add: Callable[[bytes], None],
) -> Supervised:
    """Run a program to its end or to a limit; nothing that it started runs on behind it.

    `limits`: those of process.Limits by name, `isolate` (leave the namespaces where it can be had),
    `network` (keep the host's all the same), `resident_bytes` (of all processes together). `add` is given the
    output as it comes. Raises OSError where no process can be started.
    """
    status_read, status_write = os.pipe()
    try:
        supervisor = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                str(_SUPERVISOR),
                json.dumps(dict(limits)),
                str(status_write),
                *argv,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=dict(environment),
            pass_fds=(status_write,),
            start_new_session=True,
        )
    except BaseException:
        os.close(status_read)
        raise
    finally:
        os.close(status_write)
    started = time.monotonic()
    status = b""
    try:
        status = _read(supervisor, status_read, add, started + limits["seconds"] + _GRACE)
    finally:
        # Closes the supervisor's stdin, at which it ends the program and itself.
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        supervisor.stdin.close()
        _wait(supervisor, status)
        supervisor.stdout.close()
        os.close(status_read)
    lines = status.splitlines()
    if len(lines) < 2:
        return Supervised("killed", -signal.SIGKILL, time.monotonic() - started)
    result = json.loads(lines[1])
    return Supervised(str(result["cause"]), int(result["code"]), float(result["seconds"]))


def namespaces_available() -> bool:
    """Whether the kernel gives this user PID and network namespaces of his own."""
    probe = subprocess.run([sys.executable, "-I", "-S", str(_SUPERVISOR), "probe"], stdin=subprocess.DEVNULL)
    return probe.returncode == 0


def _read(
    supervisor: subprocess.Popen[bytes], status_fd: int, add: Callable[[bytes], None], until: float
) -> bytes:
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
                    add(chunk)
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
