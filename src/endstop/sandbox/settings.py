"""What commands of an agent may see and use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

# `auto` takes the first that this machine gives: bubblewrap, namespaces, process.
SandboxMode = Literal["auto", "bubblewrap", "namespaces", "process"]
MiB, GiB = 1 << 20, 1 << 30
# Nobody's uid on common systems. Root's commands run as it: the kernel limits no process of root.
SANDBOX_UID = 61234


@dataclass(frozen=True, slots=True)
class CommandLimits:
    """What one command, with everything that it starts, may use. Raises ValueError for what is not positive.

    Attributes:
        seconds: wall clock. cpu_seconds: of each process, rounded to whole seconds.
        memory_bytes: resident memory of all processes together, looked at a few times a second.
        address_bytes: address space of each process. A JVM reserves 4 GiB that it never uses, node 10 GiB
            for each WebAssembly module.
        file_bytes: of each file that is written. open_files: at once, of each process.
        processes: at once, threads counted.
        tmp_bytes: of /tmp and of /dev/shm. home_bytes: of the home directory. Both are memory, new for
            each command, and only so bounded under bubblewrap.
        free_bytes: the command ends when the file system of its workspace has less left than this.
        output_bytes: kept of stdout and stderr together, half from the beginning and half from the end.
    """

    seconds: float = 120.0
    cpu_seconds: float = 600.0
    memory_bytes: int = 4 * GiB
    address_bytes: int = 64 * GiB
    file_bytes: int = 256 * MiB
    open_files: int = 1024
    processes: int = 256
    tmp_bytes: int = 64 * MiB
    home_bytes: int = 512 * MiB
    free_bytes: int = 256 * MiB
    output_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """How commands are kept in.

    Attributes:
        network: whether commands have the host's network. Without it they have a loopback of their own.
        read_only: host paths that are to be seen at their own place, never written: a virtualenv, a
            toolchain. What a virtualenv's interpreter needs comes with it.
        also_at: host paths that lead to the workspace as /workspace does, by a link (bubblewrap only): a
            package that is installed as editable names the place that it was installed from.
        environment: the only variables besides PATH, HOME and what is fixed; nothing is taken from the host.
        path_entries: directories put before /usr/local/bin:/usr/bin:/bin in PATH.
        uid: the user that root's commands run as, under bubblewrap.
    """

    mode: SandboxMode = "auto"
    limits: CommandLimits = CommandLimits()
    network: bool = False
    read_only: tuple[Path, ...] = ()
    also_at: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    path_entries: tuple[str, ...] = ()
    uid: int = SANDBOX_UID
