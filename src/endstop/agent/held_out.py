"""Tests that a run never saw: whether they pass says whether its task was solved, whatever the gate said."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from endstop.agent.task import VerifierName, VerifySettings
from endstop.protocol.errors import EndstopError

if TYPE_CHECKING:
    from endstop.agent.settings import AgentSettings


class HeldOut(BaseModel):
    """Held-out tests of a task.

    Attributes:
        files: a directory that is laid over a copy of the finished workspace.
        command: run there, like a task's own; all its tests must pass. verifier: how its result is read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: Path
    command: str
    verifier: VerifierName | None = None
    timeout: Annotated[float, Field(gt=0)] = 600.0


def solved_by(held_out: HeldOut, workspace: Path, place: Path, settings: AgentSettings) -> bool:
    """Whether the held-out tests pass on a workspace. `place`: a directory for the copy, made anew.

    They are run as the gate runs a project's own: in the sandbox, with a report and a canary. Raises
    EndstopError where they cannot be run at all.
    """
    from endstop.agent.protected import Protected
    from endstop.agent.tree import Trees
    from endstop.agent.verification import Verification
    from endstop.agent.verifiers import resolved
    from endstop.agent.workplace import sandbox_settings

    if not held_out.files.is_dir():
        raise EndstopError(f"the held-out tests {held_out.files} are no directory.")
    shutil.rmtree(place, ignore_errors=True)
    copy = place / "workspace"
    copy_workspace(workspace, copy)
    lay_over(held_out.files, copy)
    wanted = VerifySettings(
        command=held_out.command, verifier=held_out.verifier, timeout=held_out.timeout, reruns=0
    )
    verify = resolved(wanted, copy)
    dependencies = {path: workspace / path for path in settings.task.dependencies}
    trees = Trees(place / "state", copy, exclude=tuple(dependencies))
    tree = trees.snapshot()
    protected = Protected.of(settings.task.model_copy(update={"verify": verify}))
    sandbox = sandbox_settings(settings)
    verification = Verification(trees, verify, protected, tree, sandbox, place / "state", dependencies)
    try:
        return verification.verify(tree).passed
    except EndstopError:
        return False  # no test ran: what the run left cannot even be loaded


def copy_workspace(source: Path, target: Path) -> None:
    """All of a workspace but pipes, sockets and devices."""

    def special(directory: str, names: list[str]) -> set[str]:
        kinds = {name: os.lstat(os.path.join(directory, name)).st_mode for name in names}
        plain = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
        return {name for name, mode in kinds.items() if not any(kind(mode) for kind in plain)}

    try:
        shutil.copytree(source, target, symlinks=True, ignore=special)
    except shutil.Error as error:
        path, _, why = error.args[0][0]
        raise EndstopError(f"the workspace {source} cannot be copied: {path}: {why}.") from error
    except OSError as error:
        raise EndstopError(f"the workspace {source} cannot be copied: {error.strerror}.") from error


def lay_over(files: Path, workspace: Path) -> None:
    """Copy files into a workspace. A link or a directory that a run has put in their place gives way, so that
    nothing is written anywhere else."""
    for source in sorted(files.rglob("*")):
        target = workspace / source.relative_to(files)
        if source.is_dir():
            if target.is_symlink() or (target.exists() and not target.is_dir()):
                target.unlink()
            target.mkdir(exist_ok=True)
            continue
        if target.is_symlink() or not target.is_dir():
            target.unlink(missing_ok=True)
        else:
            shutil.rmtree(target)
        shutil.copy(source, target)
