"""Running one command of an agent in its workspace, in the sandbox that this machine gives."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from endstop.sandbox.arguments import HOME, INSIDE, PATH, Layout
from endstop.sandbox.bounded import BoundedOutput
from endstop.sandbox.bubblewrap import Ended, run_bubblewrapped
from endstop.sandbox.interpreters import with_interpreters
from endstop.sandbox.modes import GivenMode, given_mode
from endstop.sandbox.settings import CommandLimits, SandboxSettings
from endstop.sandbox.supervised import supervise

Cause = Literal["exit", "timeout", "cpu", "memory", "processes", "disk", "killed", "start"]
# The longest argument that Linux takes.
_LONGEST = (128 << 10) - 1
_NO_NETWORK = re.compile(
    r"network is unreachable|could not resolve host|(temporary )?failure in name resolution|EAI_AGAIN"
    r"|ENETUNREACH|failed to connect to (?!localhost|127\.)"
    r"|unable to resolve host|no address associated with hostname",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|cannot allocate memory|out of memory|std::bad_alloc", re.IGNORECASE
)
_NO_PROCESS = re.compile(
    r"fork: (retry: )?resource temporarily unavailable|can't start new thread|cannot fork", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended. Everything that it started is dead.

    Attributes:
        exit_code: as the shell counts (128 and the signal); None where something else ended the command.
        output: stdout and stderr as they came; where the middle was dropped a line says how much.
        cause: `exit` (by itself, whatever the code), `killed` (by a signal), `start` (it never ran; output
            says why), or the limit that it met; memory and processes also by its own error's last words.
        mode: of the sandbox. net_attempt: by its output it wanted the network that it did not have.
    """

    exit_code: int | None
    output: str
    omitted_bytes: int
    seconds: float
    cause: Cause
    mode: GivenMode
    net_attempt: bool = False


def run_command(
    command: str | Sequence[str],
    workspace: Path,
    settings: SandboxSettings,
    *,
    directory: str = ".",
    writable: Sequence[Path] = (),
    read_only_inside: Sequence[str] = (),
    bind: Mapping[str, Path] | None = None,
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
    output_bytes: int | None = None,
    on_output: Callable[[bytes], None] | None = None,
) -> CommandResult:
    """Run a command to its end or to a limit.

    Args:
        command: a line for the shell, or a program with its arguments.
        workspace: the only place that outlives the command, /workspace under bubblewrap.
        directory: where it starts, relative to the workspace.
        writable: further directories of the host, at their own place (where a report is to be written).
        read_only_inside: paths in the workspace that are not to be written (bubblewrap only).
        bind: path in the workspace -> path of the host that is seen there, read-only (dependencies). In
            weaker modes a link stands there for the time of the command.
        environment: besides that of the settings. seconds, output_bytes: in place of those of the limits.
        on_output: given the output as it comes.

    Raises EndstopError where the mode asked for cannot be had, OSError where no process can be started. What
    a command alone is to blame for is a result.
    """
    limits = settings.limits
    limits = replace(
        limits, seconds=seconds or limits.seconds, output_bytes=output_bytes or limits.output_bytes
    )
    settings = replace(settings, limits=limits)
    mode, _ = given_mode(settings)
    output = BoundedOutput(limits.output_bytes)

    def add(chunk: bytes) -> None:
        output.add(chunk)
        if on_output is not None:
            on_output(chunk)

    workspace = Path(os.path.realpath(workspace))
    argv = [_shell(), "-c", command] if isinstance(command, str) else list(command)
    variables = {**settings.environment, **(environment or {})}
    inside = _Inside(workspace, directory, read_only_inside, bind or {})
    problem = _too_long(argv) or inside.problem()
    if problem:
        return CommandResult(None, problem, 0, 0.0, "start", mode)
    if mode == "bubblewrap":
        layout = Layout(
            workspace=workspace,
            directory=inside.directory,
            read_only=with_interpreters(settings.read_only),
            writable=[Path(os.path.abspath(path)) for path in writable],
            bind={**inside.bind, **inside.behind_links},
            read_only_inside=[path for path in inside.read_only if os.path.lexists(workspace / path)],
            also_at=[Path(os.path.abspath(path)) for path in settings.also_at],
        )
        seen = layout.inside()
        # What is bound there by `bind` is bound once, since there may be a link.
        left = [path for path in layout.read_only if seen.get(path) not in inside.asked]
        with inside.prepared([place for place in seen.values() if place not in inside.asked], links=False):
            fixed = _environment(settings, HOME, "/tmp")
            layout = replace(layout, read_only=left)
            ended = run_bubblewrapped(argv, layout, settings, {**fixed, **variables}, add)
    else:
        with inside.prepared([], links=True):
            ended = _run_supervised(argv, inside, settings, variables, add, mode)
    text, omitted = output.text()
    if ended.cause == "start":
        return CommandResult(None, ended.problem, 0, ended.seconds, "start", mode)
    missed = mode != "process" and not settings.network and bool(_NO_NETWORK.search(text))
    return CommandResult(ended.code, text, omitted, ended.seconds, _cause(ended, text, limits), mode, missed)


def _run_supervised(
    argv: list[str],
    inside: _Inside,
    settings: SandboxSettings,
    variables: Mapping[str, str],
    add: Callable[[bytes], None],
    mode: GivenMode,
) -> Ended:
    start = Path(os.path.realpath(inside.workspace / inside.directory))
    if not start.is_relative_to(inside.workspace) or not start.is_dir():
        return Ended("start", None, 0.0, problem=f"{inside.directory} is no directory of the workspace")
    limits = {
        **asdict(settings.limits),
        "memory_bytes": settings.limits.address_bytes,
        "resident_bytes": settings.limits.memory_bytes,
        "isolate": mode == "namespaces",
        "network": settings.network,
    }
    with tempfile.TemporaryDirectory(prefix="endstop-home-", ignore_cleanup_errors=True) as home:
        values = {**_environment(settings, home, home), **variables}
        program = shutil.which(argv[0], path=values["PATH"])
        if program is None:
            add(f"{argv[0]}: not found\n".encode())
            return Ended("exit", 127, 0.0)
        line = [program, *argv[1:]]
        if mode == "namespaces":
            # Signals do not end the first process of a PID namespace, so it is not the command's.
            line = ["/bin/sh", "-c", '"$@"; exit $?', "sh", *line]
        ended = supervise(line, start, values, limits, add)
    if ended.cause not in ("exit", "killed", "cpu"):
        return Ended(ended.cause, None, ended.seconds)
    code = ended.code if ended.code >= 0 else 128 - ended.code
    return Ended("cpu" if ended.cause == "cpu" else "exit", code, ended.seconds)


def _cause(ended: Ended, text: str, limits: CommandLimits) -> Cause:
    """What ended it, where that can be told from its code, its last words and what it used."""
    if ended.cause != "exit":
        return ended.cause  # type: ignore[return-value]
    if ended.code == 128 + signal.SIGXCPU:
        return "cpu"
    last = "\n".join(text[-2000:].rstrip().splitlines()[-3:])
    if ended.code and _NO_MEMORY.search(last):
        return "memory"
    if ended.code and (_NO_PROCESS.search(last) or ended.load.processes >= limits.processes):
        return "processes"
    return "killed" if ended.code in (128 + signal.SIGKILL, 128 + signal.SIGTERM) else "exit"


class _Inside:
    """The paths in the workspace that a command is run with, none of which may be a way out of it."""

    def __init__(
        self, workspace: Path, directory: str, read_only: Sequence[str], bind: Mapping[str, Path]
    ) -> None:
        if directory == INSIDE or directory.startswith(INSIDE + "/"):
            directory = directory[len(INSIDE) + 1 :] or "."
        self.workspace = workspace
        self.directory = os.path.normpath(directory)
        self.read_only = [os.path.normpath(path) for path in read_only]
        self.bind = {os.path.normpath(path): Path(os.path.realpath(host)) for path, host in bind.items()}
        self.asked = frozenset(self.bind)
        self.behind_links: dict[str, Path] = {}
        for path, host in list(self.bind.items()):
            # The link stays, and leads to the same inside as outside.
            link = workspace / path
            if link.is_symlink() and Path(os.path.realpath(link)) == host:
                del self.bind[path]
                place = os.path.normpath(os.path.join(INSIDE, os.path.dirname(path), os.readlink(link)))
                if not place.startswith((INSIDE + "/", "/usr/")):
                    self.behind_links[place] = host

    def problem(self) -> str:
        for path in (self.directory, *self.read_only, *self.bind):
            if os.path.isabs(path) or path.split(os.sep)[0] == ".." or "\0" in path:
                return f"{path} is not inside the workspace"
        for path in (*self.read_only, *self.bind):
            # What is bound is followed on the host: a link here would show the command what it points to.
            for part in [*reversed(Path(path).parents), Path(path)]:
                if (self.workspace / part).is_symlink():
                    return f"{part} must not be a link, since it is bound into the sandbox; remove the link"
        if not (self.workspace / self.directory).is_dir():
            return f"{self.directory} is no directory of the workspace"
        return ""

    @contextlib.contextmanager
    def prepared(self, more: Sequence[str], *, links: bool) -> Iterator[None]:
        """With a link to what cannot be bound; behind it the empty places of bindings are removed, those at
        `more` paths too."""
        missing = []
        for path in (*self.bind, *more):
            for part in [*reversed(Path(path).parents), Path(path)]:
                if not os.path.lexists(self.workspace / part):
                    missing.append(self.workspace / part)
        for path, host in self.bind.items() if links else ():
            if not os.path.lexists(self.workspace / path):
                (self.workspace / path).parent.mkdir(parents=True, exist_ok=True)
                (self.workspace / path).symlink_to(host)
        try:
            yield
        finally:
            for place in reversed(missing):
                with contextlib.suppress(OSError):
                    if place.is_dir() and not place.is_symlink():
                        place.rmdir()
                    elif place.is_symlink() or place.stat().st_size == 0:
                        place.unlink()


def _environment(settings: SandboxSettings, home: str, temporary: str) -> dict[str, str]:
    return {
        "PATH": ":".join([*settings.path_entries, PATH]),
        "HOME": home,
        "TMPDIR": temporary,
        "LANG": "C.UTF-8",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "TERM": "dumb",
    }


def _too_long(argv: Sequence[str]) -> str:
    longest = max(len(os.fsencode(word)) for word in argv)
    if longest > _LONGEST:
        return f"the command has {longest} bytes, {_LONGEST} are possible; put it into a file and run that"
    return "the command holds a NUL character" if any("\0" in word for word in argv) else ""


def _shell() -> str:
    return next((shell for shell in ("/bin/bash", "/usr/bin/bash") if os.path.exists(shell)), "/bin/sh")
