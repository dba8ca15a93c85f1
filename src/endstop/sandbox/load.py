"""What running processes use, read from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

# Of a process tree that forks without end no more than this is looked at.
_ENOUGH = 4096


@dataclass(frozen=True, slots=True)
class Load:
    """Processes (threads counted) and resident memory of a command, all together."""

    processes: int = 0
    resident_bytes: int = 0

    def most(self, other: Load) -> Load:
        return Load(max(self.processes, other.processes), max(self.resident_bytes, other.resident_bytes))


def load_below(root: int) -> Load:
    """Of a process and everything below it. Pages that processes share are counted for each."""
    page = os.sysconf("SC_PAGE_SIZE")
    processes, pages = 0, 0
    open_ends = [root]
    while open_ends and processes < _ENOUGH:
        pid = open_ends.pop()
        with contextlib.suppress(OSError, ValueError):
            threads = os.listdir(f"/proc/{pid}/task")
            processes += len(threads)
            with open(f"/proc/{pid}/statm") as file:
                resident, shared = map(int, file.read().split()[1:3])
            pages += resident - shared
            for thread in threads:
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    open_ends += map(int, file.read().split())
    return Load(processes, pages * page)


def processes_of_user(uid: int) -> int:
    """Processes of a user, threads counted."""
    count = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry}/task"))
    return count
