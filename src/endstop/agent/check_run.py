"""One run of the project's command on an export of one tree, in the sandbox, and what it left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from endstop.agent.decisions import VerifierRun
from endstop.agent.removal import remove_path
from endstop.agent.report import UnreadableReport
from endstop.agent.task import VerifySettings
from endstop.agent.tree import Owner, Trees
from endstop.agent.verifiers.verifier import Canary, Finished, Place, Verifier
from endstop.sandbox.arguments import INSIDE
from endstop.sandbox.command import CommandResult, run_command
from endstop.sandbox.modes import drops_user, given_mode
from endstop.sandbox.settings import SandboxSettings

# Of a run's output, kept to be read by a verifier that finds its report there.
_OUTPUT_LIMIT = 64 << 20
# Apart from the project's own repository, whose settings are the agent's.
_INIT = """\
{ git init -q . && git add -A && git -c user.name=check -c user.email= commit -q -m files; } >/dev/null 2>&1
"""
_CAUSES: Mapping[str, str] = {
    "cpu": "it used all the CPU time that it may",
    "memory": "it used all the memory that it may",
    "processes": "it used all the processes that it may",
    "disk": "the disk is full",
    "killed": "a signal ended it",
    "start": "it could not be started",
}
NOT_STARTED = _CAUSES["start"]


@dataclass(frozen=True, slots=True)
class CheckRun:
    """How the project's command is run on a tree.

    Attributes:
        weak: whether there is no report to be read. directory: where exports are made, one for each run.
        dependencies: path in the workspace -> path of the host, bound read-only.
        repository: whether an export is made a git repository with its files as the only commit.
    """

    trees: Trees
    settings: VerifySettings
    verifier: Verifier
    weak: bool
    sandbox: SandboxSettings
    directory: Path
    dependencies: Mapping[str, Path]
    repository: bool = False

    def __call__(
        self,
        tree: str,
        *,
        canary: Canary | None = None,
        lenient: bool = False,
        guarded: Callable[[str], bool] = lambda path: False,
    ) -> VerifierRun:
        """`guarded`: of the tree's paths those whose change during the run is to be told."""
        bubblewrapped = given_mode(self.sandbox)[0] == "bubblewrap"
        owner = Owner(self.sandbox.uid, self.sandbox.uid) if drops_user(self.sandbox) else None
        with _new_directory(self.directory) as directory:
            root, gate, told = (directory / name for name in ("export", "gate", "report"))
            self.trees.export(tree, root, owner=owner)
            for made in (gate, told):
                made.mkdir()
                made.chmod(0o755)
            if owner is not None:
                os.chown(told, owner.uid, owner.gid)
            place = Place(
                root=root,
                inside=INSIDE if bubblewrapped else str(root),
                gate=gate,
                report=told / "report.xml",
                files=frozenset(self.trees.paths(tree)),
                lenient=lenient,
            )
            before = {path: _stamp(root / path) for path in place.files if guarded(path)}
            run = self._run_in(place, canary)
            rewritten = sorted(path for path, stamp in before.items() if _stamp(root / path) != stamp)
            return replace(run, rewritten=tuple(rewritten))

    def _run_in(self, place: Place, canary: Canary | None) -> VerifierRun:
        raw = bytearray()

        def collect(chunk: bytes) -> None:
            if len(raw) < _OUTPUT_LIMIT:
                raw.extend(chunk)

        prepared = self.verifier.prepare(self.settings, place, canary, self.sandbox.environment)
        limits = self.sandbox.limits
        cpu_seconds = max(limits.cpu_seconds, self.settings.timeout * (os.cpu_count() or 1))
        sandbox = replace(
            self.sandbox,
            read_only=(*self.sandbox.read_only, place.gate),
            limits=replace(limits, cpu_seconds=cpu_seconds),
        )
        result = run_command(
            _INIT + prepared.command if self.repository else prepared.command,
            place.root,
            sandbox,
            writable=[place.report.parent],
            bind=self.dependencies,
            environment={"REPORT": str(place.report), **prepared.environment},
            seconds=self.settings.timeout,
            on_output=collect,
        )
        return self._told(result, Finished(result.exit_code, bytes(raw), place, self.settings, canary))

    def _told(self, result: CommandResult, finished: Finished) -> VerifierRun:
        report, problem = None, ""
        if result.cause not in ("timeout", "start"):
            try:
                report = self.verifier.read(finished)
            except UnreadableReport as error:
                problem = str(error)
        if result.cause not in ("exit", "timeout"):
            problem = f"{_CAUSES[result.cause]}{'; report: ' + problem if problem else ''}"
        output = result.output
        if self.verifier.text is not None:
            output = self.verifier.text(finished)[-self.sandbox.limits.output_bytes :]
        return VerifierRun(
            command=self.settings.command or "",
            exit_code=result.exit_code,
            output=output,
            seconds=result.seconds,
            timed_out=result.cause == "timeout",
            report=None if self.weak else report,
            report_problem=problem,
        )


def make_places_for_caches(packages: Path) -> None:
    """In a node_modules that is to be bound read-only, the directories that Vite makes itself when it starts:
    they are where a command's own, empty ones are seen."""
    if packages.name != "node_modules" or not (packages / "vite").exists():
        return
    owner = packages.stat()
    for name in (".vite-temp", ".vite"):
        with contextlib.suppress(OSError):
            (packages / name).mkdir()
            os.chown(packages / name, owner.st_uid, owner.st_gid)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What no program can give back to a file that it has changed."""
    try:
        state = path.lstat()
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_ctime_ns


@contextlib.contextmanager
def _new_directory(parent: Path) -> Iterator[Path]:
    """A directory for one run, locked so that another process knows that it is in use."""
    parent.mkdir(parents=True, exist_ok=True)
    directory = parent / uuid4().hex[:12]
    directory.mkdir()
    directory.chmod(0o755)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield directory
    finally:
        with contextlib.suppress(OSError):
            remove_path(directory)
        os.close(descriptor)


def clear_left_over(parent: Path) -> None:
    """Remove directories of runs that were killed."""
    if not parent.is_dir():
        return
    for directory in parent.iterdir():
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            with contextlib.suppress(OSError):
                remove_path(directory)
        finally:
            os.close(descriptor)
