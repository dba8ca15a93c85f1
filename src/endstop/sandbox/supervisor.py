"""What stands between endstop and an untrusted program: starts it under limits, ends all that it started.

This file is run by its path in an interpreter of its own (`python -I -S supervisor.py LIMITS STATUS ARGV...`,
STATUS a file descriptor) and imports only the standard library. Where the Linux kernel lets this user, the
program is the first process of its own PID namespace, so that all it has started ends with it, and its
network namespace has no interface. Otherwise this process is (on Linux) the subreaper of everything below it:
processes that leave their session or whose parents die come back to it, so that none outlives the run. Its
stdin is a pipe from endstop, which closes when endstop no longer wants the program or is gone itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import time

try:
    import resource
except ImportError:  # Windows: refused by process.py before it comes to this
    resource = None  # type: ignore[assignment]

PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
TICK = 0.05  # seconds between two counts of the processes
LAST_RESORT = 5.0  # seconds in which everything must be dead after SIGKILL


def main() -> None:
    if sys.argv[1:] == ["probe"]:
        sys.exit(0 if _leave_namespaces() else 1)
    limits = json.loads(sys.argv[1])
    status = int(sys.argv[2])
    argv = sys.argv[3:]
    os.set_inheritable(status, False)
    apart = bool(limits["isolate"]) and _leave_namespaces(network=bool(limits.get("network")))
    reaper = _become_subreaper()
    _before_all_others()
    others = _tasks_of_user()
    child = os.fork()
    if child == 0:
        try:
            _enter(limits, others)
            os.execv(argv[0], argv)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(127)
    os.write(status, f"{child}\n".encode())
    # The program's output pipe is its own: this end would keep it open.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    started = time.monotonic()
    cause, code = _watch(child, limits, started, reaper)
    seconds = time.monotonic() - started
    _end_all(child, apart, reaper)
    if code is None:
        code = -signal.SIGKILL
    os.write(status, json.dumps({"cause": cause, "code": code, "seconds": seconds}).encode() + b"\n")


def _enter(limits: dict[str, float], others: int | None) -> None:
    """In the new process, before the program: its own session, limits, no stdin."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_AS", limits["memory_bytes"])
    _limit("RLIMIT_FSIZE", limits["file_bytes"])
    _limit("RLIMIT_NOFILE", limits["open_files"])
    # At the hard limit it is SIGKILL; SIGXCPU at a soft one could be ignored.
    _limit("RLIMIT_CPU", max(1, round(limits["cpu_seconds"])))
    if others is not None:
        # The kernel counts all processes of the user, those outside this run too, and exempts root.
        _limit("RLIMIT_NPROC", others + limits["processes"])


def _limit(name: str, value: float) -> None:
    # macOS refuses some of them (RLIMIT_AS); a lower hard limit that is there already stays.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        wanted = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(number, (wanted, wanted))


def _become_subreaper() -> bool:
    """Whether orphans below this process will become its children."""
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError, ImportError):
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    return False


def _before_all_others() -> None:
    """For root, whose processes the kernel does not limit: be scheduled while a program forks without end."""
    with contextlib.suppress(OSError, AttributeError):
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(1))


def _leave_namespaces(*, network: bool = False) -> bool:
    """Whether the next process forked here is alone in a new PID namespace and, unless it is to have the
    network, in a new network namespace."""
    if not sys.platform.startswith("linux"):
        return False
    user, group = os.getuid(), os.getgid()
    wanted = CLONE_NEWPID if network else CLONE_NEWPID | CLONE_NEWNET
    with contextlib.suppress(OSError, AttributeError, ImportError):
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(wanted) == 0:
            return True
        if libc.unshare(CLONE_NEWUSER | wanted) == 0:
            # The user stays who he was; without this he would be nobody to himself.
            for name, line in (
                ("uid_map", f"{user} {user} 1"),
                ("setgroups", "deny"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                    file.write(line)
            return True
    return False


def _watch(child: int, limits: dict[str, float], started: float, reaper: bool) -> tuple[str, int | None]:
    """Wait for the program or for what ends it: (`exit` or the cause, its exit code or None)."""
    deadline = started + limits["seconds"]
    waiting = [0]
    with contextlib.suppress(OSError, AttributeError):
        waiting.append(os.pidfd_open(child))
    while True:
        pid, state, used = os.wait4(child, os.WNOHANG)
        if pid == child:
            code = os.waitstatus_to_exitcode(state)
            # The kernel samples what it holds against the limit; what it reports here is measured.
            spent = used.ru_utime + used.ru_stime >= 0.75 * max(1, round(limits["cpu_seconds"]))
            return "cpu" if spent and code in (-signal.SIGKILL, -signal.SIGXCPU) else "exit", code
        left = deadline - time.monotonic()
        if left <= 0:
            return "timeout", None
        ready, _, _ = select.select(waiting, [], [], min(left, TICK if len(waiting) == 2 else 0.01))
        if 0 in ready and not os.read(0, 1):
            return "cancelled", None
        if reaper:
            below = _below(os.getpid(), limits["processes"])
            if len(below) > limits["processes"]:
                return "processes", None
            if "resident_bytes" in limits and _resident_bytes(below) > limits["resident_bytes"]:
                return "memory", None


def _end_all(child: int, apart: bool, reaper: bool) -> None:
    """Stop, then kill everything that the program started, and collect it."""
    if apart:
        # The kernel ends a PID namespace with its first process, and this waits for it.
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(child, 0)
        return
    if not reaper:
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(child, 0)
        return
    me = os.getpid()
    until = time.monotonic() + LAST_RESORT
    while time.monotonic() < until:
        # Frozen first and from the top, so that nothing forks away while the others are killed.
        frozen: set[int] = set()
        while fresh := set(_below(me, stop=True)) - frozen:
            frozen |= fresh
        for pid in frozen:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not _collected():
            return
        time.sleep(0.002)


def _collected() -> bool:
    """Reap what is dead; whether children are left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _below(root: int, enough: float = math.inf, *, stop: bool = False) -> list[int]:
    """All living processes below `root` by /proc, or more than `enough` of them; with `stop` each is stopped
    before its children are looked for."""
    found: list[int] = []
    open_ends = [root]
    while open_ends and len(found) <= enough:
        parent = open_ends.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = [int(pid) for pid in file.read().split()]
            except OSError:
                continue
            for child in children if stop else ():
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGSTOP)
            found += children
            open_ends += children
    return found


def _resident_bytes(pids: list[int]) -> int:
    """Memory of processes that is their own and not swapped out."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/statm") as file:
            resident, shared = file.read().split()[1:3]
            pages += int(resident) - int(shared)
    return pages * os.sysconf("SC_PAGE_SIZE")


def _tasks_of_user() -> int | None:
    """Processes and threads of this user, None where there is no /proc."""
    user = os.getuid()
    count = 0
    try:
        entries = os.listdir("/proc")
    except OSError:
        return None
    for entry in entries:
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}").st_uid == user:
                    count += len(os.listdir(f"/proc/{entry}/task"))
    return count or None


if __name__ == "__main__":
    main()
