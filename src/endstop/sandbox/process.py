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

import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from endstop.sandbox.bounded import BoundedOutput
from endstop.sandbox.supervised import supervise

Outcome = Literal["ok", "failed", "timeout", "cpu", "memory", "processes", "killed"]

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
    output = BoundedOutput(limits.output_bytes)
    ended = supervise(argv, directory, environment, {**asdict(limits), "isolate": _ISOLATE}, output.add)
    text, omitted = output.text()
    outcome: Outcome
    if ended.cause in ("timeout", "processes", "cpu"):
        outcome = ended.cause  # type: ignore[assignment]
    elif ended.code < 0:
        outcome = "killed"
    elif ended.code and text.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        outcome = "memory"
    else:
        outcome = "failed" if ended.code else "ok"
    return Finished(outcome, ended.code, text, omitted, ended.seconds)
