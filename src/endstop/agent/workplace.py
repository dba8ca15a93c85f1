"""Where a run works: the sandbox, a copy of the workspace where one is needed, the trees, the check."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from endstop.agent.dependencies import Dependencies
from endstop.agent.gate import Gate
from endstop.agent.protected import Protected
from endstop.agent.settings import AgentSettings
from endstop.agent.task import Task
from endstop.agent.trajectory import Trajectory
from endstop.agent.tree import Trees
from endstop.agent.verification import Verification
from endstop.agent.verifiers import resolved
from endstop.agent.virtualenv import at_home, dependencies_of, find_virtualenv, with_virtualenv
from endstop.protocol.errors import EndstopError
from endstop.sandbox.arguments import INSIDE
from endstop.sandbox.command import run_command
from endstop.sandbox.modes import describe, given_mode
from endstop.sandbox.settings import CommandLimits, SandboxSettings
from endstop.sandbox.workspace import WorkingCopy

Watch = Callable[[str, Any], None]

# Names of variables whose values are secrets wherever they come from.
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


@dataclass(slots=True)
class Workplace:
    """What a run works on.

    Attributes:
        root: where commands, file tools and snapshots work: the workspace, or the copy of it.
        task: with the check filled in that was found in the project.
        baseline: tree at the start of the run.
        verification: None where the project has no check.
        bind: path in the workspace -> host path that is seen there, read-only (dependencies).
        gate, spend: set when the loop begins; what the oracle is told, and who pays for it.
    """

    task: Task
    workspace: Path
    root: Path
    sandbox: SandboxSettings
    trees: Trees
    working: WorkingCopy
    baseline: str
    verification: Verification | None
    protected: Protected
    bind: dict[str, Path] = field(default_factory=dict)
    gate: Gate | None = None
    spend: Callable[[float], None] | None = None

    @property
    def sandbox_mode(self) -> str:
        return given_mode(self.sandbox)[0]

    @property
    def sandbox_description(self) -> str:
        return describe(self.sandbox)

    @property
    def directory(self) -> str:
        """The workspace as commands see it."""
        return INSIDE if self.sandbox_mode == "bubblewrap" else str(self.root)

    @property
    def verify_command(self) -> str:
        """What proves that the work is done, "" where nothing does."""
        return (self.task.verify.command or "") if self.verification is not None else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is weaker here than it could be."""
        baseline = self.verification.baseline if self.verification is not None else None
        notes = list(baseline.notes) if baseline is not None else []
        if self.working.conflicts:
            notes.append(f"could not be brought back to the workspace: {', '.join(self.working.conflicts)}")
        return tuple(notes)

    def bring_back(self) -> None:
        """What was changed in the copy goes to the workspace."""
        self.working.sync_back()


@contextlib.contextmanager
def open_workplace(
    settings: AgentSettings,
    workspace: Path,
    state: Path,
    trajectory: Trajectory | None,
    watch: Watch,
) -> Iterator[Workplace]:
    """Make the workspace ready to work in.

    `trajectory`: of a run that goes on; its baseline is not verified again. Raises EndstopError for a sandbox
    that cannot be had, and for a check that runs no test on the baseline.
    """
    task = settings.task
    sandbox = at_home(sandbox_settings(settings), workspace)
    watch("sandbox", describe(sandbox))
    # Where commands can write the virtualenv all the same, what they do to it has to be seen.
    if given_mode(sandbox)[0] == "bubblewrap":
        named = dependencies_of(task.dependencies, sandbox, workspace)
        task = task.model_copy(update={"dependencies": named})
    bind = _dependencies(task.dependencies, workspace)
    with WorkingCopy.open(workspace, state, sandbox, exclude=task.dependencies) as working:
        _must_run(sandbox, working.root)
        trees = Trees(state, working.root, exclude=task.dependencies)
        baseline = trajectory.baseline if trajectory is not None else trees.snapshot()
        if not settings.unverified:
            task = task.model_copy(update={"verify": resolved(task.verify, workspace)})
        verification = None
        # In weaker modes programs write to dependencies as they please.
        watched = Dependencies(
            bind if given_mode(sandbox)[0] == "bubblewrap" else {}, state / "dependencies.json"
        )
        watched.remember()
        protected = Protected.of(task, watched=watched.changed)
        checked = task.verify.command is not None and not settings.unverified
        watch("verify", task.verify if checked else None)
        if checked:
            if trajectory is not None and trajectory.verification is not None:
                verification = Verification.from_dict(
                    trajectory.verification, trees, task.verify, protected, sandbox, state, bind
                )
            else:
                verification = Verification(trees, task.verify, protected, baseline, sandbox, state, bind)
            if verification.baseline is None:
                watch("baseline", None)
                watch("baseline", verification.start())
        yield Workplace(
            task, workspace, working.root, sandbox, trees, working, baseline, verification, protected, bind
        )


def _must_run(sandbox: SandboxSettings, root: Path) -> None:
    """Find at the start that the settings leave no command a chance."""
    result = run_command(["bash", "-c", "true"], root, sandbox)
    if result.exit_code != 0 and result.cause != "timeout":
        said = result.output.strip() or f"exit code {result.exit_code}"
        raise EndstopError(f"no command can be run in the sandbox as the settings have it: {said}")


def sandbox_settings(settings: AgentSettings) -> SandboxSettings:
    """The sandbox of a run. Its environment has what the settings name and nothing else; secrets are refused
    in it unless they are allowed by name."""
    section = settings.sandbox
    environment = dict(section.environment)
    for name in section.pass_env:
        if name not in os.environ:
            raise EndstopError(f"sandbox.pass_env names {name}, which is not set.")
        environment[name] = os.environ[name]
    for name in environment:
        if _is_secret(name, settings) and name not in section.allow_secrets:
            raise EndstopError(
                f"{name} is a secret and does not enter the sandbox; "
                f"where it must, name it in sandbox.allow_secrets."
            )
    given = section.model_dump(include={"seconds", "memory_bytes", "processes", "file_bytes", "tmp_bytes"})
    limits = CommandLimits(**{name: value for name, value in given.items() if value is not None})
    sandbox = SandboxSettings(
        mode=section.mode,
        limits=limits,
        network=section.network,
        read_only=section.read_only,
        environment=environment,
        path_entries=section.path,
        also_at=section.also_at,
    )
    return with_virtualenv(sandbox, find_virtualenv(section.virtualenv, Path.cwd()))


def secret_values(settings: AgentSettings) -> tuple[str, ...]:
    """Values that must not be written: those of the variables that are named secrets, longest first."""
    names = {*settings.secrets, *settings.sandbox.allow_secrets}
    values = {os.environ.get(name, "") for name in names}
    for model in filter(None, (settings.model, settings.tools.oracle)):
        values.add(os.environ.get(model.api_key_env or "", ""))
        values.add(urlsplit(model.base_url or "").password or "")
    values |= {value for name, value in settings.sandbox.environment.items() if _is_secret(name, settings)}
    for server in settings.tools.mcp.values():
        values |= _secrets_of_server(server, settings)
    # A value of a letter or two is no secret, and leaving it out would leave nothing of the record.
    # A line end behind it is sent to nobody.
    found = {value.strip() for value in values}
    return tuple(sorted((value for value in found if len(value) >= 4), key=len, reverse=True))


def _is_secret(name: str, settings: AgentSettings) -> bool:
    models = (settings.model, settings.tools.oracle)
    keys = {model.api_key_env for model in models if model is not None}
    return name in settings.secrets or name in keys or _SECRET_NAME.search(name) is not None


def _secrets_of_server(server: Mapping[str, Any], settings: AgentSettings) -> set[str]:
    """Of an MCP server: what its environment and headers hold, by themselves or by `${NAME}`."""
    values: set[str] = set()
    for name, value in {**(server.get("env") or {}), **(server.get("headers") or {})}.items():
        named = re.findall(r"\$\{(\w+)\}", str(value))
        if not named and (_is_secret(name, settings) or name.lower() == "authorization"):
            values.add(str(value))
        values |= {os.environ.get(other, "") for other in named if _is_secret(other, settings)}
    return values


def _dependencies(paths: tuple[str, ...], workspace: Path) -> dict[str, Path]:
    bind = {}
    for path in paths:
        host = workspace / path
        if not host.exists():
            raise EndstopError(f"the dependency {path} is not in the workspace {workspace}.")
        bind[path] = host
    return bind
