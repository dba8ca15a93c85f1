"""A suite: many tasks, each run once or more, and what their runs say together.

Every run has a directory of its own below `out` with a copy of the task's workspace. `result.json` in it
marks the run as finished; a suite that is started again does the others, and goes on with those that were cut
short.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from endstop.agent.executor import ExecutorName, run_all
from endstop.agent.held_out import HeldOut, copy_workspace, solved_by
from endstop.agent.measures import Measures, RunFacts, facts_of, measure
from endstop.protocol.errors import EndstopError

if TYPE_CHECKING:
    from endstop.agent.settings import AgentSettings

logger = logging.getLogger(__name__)

_Name = Annotated[str, Field(pattern=r"^[\w][\w.-]*$")]


class SuiteTask(BaseModel):
    """One task of a suite.

    Attributes:
        workspace: a directory; every run works on a copy of it. task: a task file, or what would be in one.
        settings: of this task's runs, over those of the suite.
        held_out: tests that no run sees, which decide whether it is solved.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: _Name
    workspace: Path
    task: Path | dict[str, Any]
    settings: dict[str, Any] = Field(default_factory=dict)
    held_out: HeldOut | None = None


class Suite(BaseModel):
    """A suite file. Paths in it are relative to the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: Annotated[tuple[SuiteTask, ...], Field(min_length=1)]
    settings: dict[str, Any] = Field(default_factory=dict)
    repeat: Annotated[int, Field(ge=1)] = 1


@dataclass(frozen=True)
class PlannedRun:
    """One run that is to be done, as plain data that another process or machine can take."""

    task: SuiteTask
    number: int
    settings: Mapping[str, Any]
    place: Path


@dataclass(frozen=True)
class SuiteRun:
    """A run that is done. `problem`: why it could not be run; such a run is tried again the next time."""

    task: str
    number: int
    place: Path
    facts: RunFacts | None
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        facts = None if self.facts is None else self.facts.to_dict()
        return {
            "task": self.task,
            "number": self.number,
            "place": str(self.place),
            "problem": self.problem,
            "facts": facts,
        }


@dataclass(frozen=True)
class SuiteReport:
    """All runs of a suite, in the order of its tasks."""

    runs: tuple[SuiteRun, ...]

    @property
    def facts(self) -> list[RunFacts]:
        return [run.facts for run in self.runs if run.facts is not None]

    @property
    def measures(self) -> Measures:
        return measure(self.facts)

    def by_task(self) -> dict[str, Measures]:
        names = dict.fromkeys(run.task for run in self.runs)
        return {name: measure([facts for facts in self.facts if facts.task == name]) for name in names}

    def to_dict(self) -> dict[str, Any]:
        return {
            "measures": self.measures.to_dict(),
            "tasks": {name: measures.to_dict() for name, measures in self.by_task().items()},
            "runs": [run.to_dict() for run in self.runs],
        }


def read_suite(path: Path) -> Suite:
    """Read a suite file (YAML, JSON or TOML). Raises EndstopError with one sentence for what does not fit."""
    from endstop.agent.reading import read_mapping, validation_sentence
    from endstop.agent.settings import anchored_part

    try:
        suite = Suite.model_validate(read_mapping(path))
    except ValidationError as error:
        raise EndstopError(f"{path}: {validation_sentence(error, Suite)}") from error
    twice = [name for name, count in Counter(task.id for task in suite.tasks).items() if count > 1]
    if twice:
        raise EndstopError(f"{path}: two tasks have the id {twice[0]!r}; every task needs one of its own.")
    folder = path.resolve().parent
    tasks = tuple(_resolved(task, folder, path) for task in suite.tasks)
    for task in tasks:
        if not task.workspace.is_dir():
            raise EndstopError(f"{path}: the workspace of {task.id}, {task.workspace}, is no directory.")
    settings = anchored_part(suite.settings, folder, f"{path}: settings")
    return suite.model_copy(update={"tasks": tasks, "settings": settings})


def run_suite(
    suite: Suite,
    out: Path,
    *,
    over: Mapping[str, Any] | None = None,
    repeat: int | None = None,
    executor: ExecutorName = "joblib",
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SuiteReport:
    """Do the runs that are not done yet, and report on all.

    `over`: settings over those of the suite and its tasks. Raises EndstopError where `out` holds runs of
    another suite or of other settings.
    """
    for task in suite.tasks:
        if out.resolve().is_relative_to(task.workspace.resolve()):
            raise EndstopError(f"{out} must not lie in {task.workspace}, the workspace of {task.id}.")
    planned = _plan(suite, out, over or {}, repeat or suite.repeat)
    _claim(out, planned)
    done: dict[int, SuiteRun] = {}
    open_places = []
    for place, run in enumerate(planned):
        finished = _finished(run)
        if finished is None:
            open_places.append(place)
        else:
            done[place] = finished
    progress(len(done), len(planned))
    for index, result in run_all(
        do_run, [planned[place] for place in open_places], executor=executor, jobs=jobs
    ):
        done[open_places[index]] = result
        progress(len(done), len(planned))
    return SuiteReport(tuple(done[place] for place in range(len(planned))))


def do_run(run: PlannedRun) -> SuiteRun:
    """Do one run, or go on with it, and write its result."""
    from endstop.agent.run import resume_agent, run_agent
    from endstop.agent.trajectory import Trajectory

    workspace, state = run.place / "workspace", run.place / "state"
    try:
        settings = _settings(run, state)
        if (state / "trajectory.json").exists() and Trajectory.load(state).verification is not None:
            ended = (Trajectory.load(state).outcome or {}).get("outcome")
            if ended in (None, "interrupted"):
                resume_agent(state)
        else:
            shutil.rmtree(run.place, ignore_errors=True)
            copy_workspace(run.task.workspace, workspace)
            run_agent(settings, workspace)
        trajectory = json.loads((state / "trajectory.json").read_text(encoding="utf-8"))
        if (trajectory["outcome"] or {}).get("outcome") == "interrupted":
            raise KeyboardInterrupt  # the loop kept it so that the run can go on; it is not done
        held_out = run.task.held_out
        solved = (
            None if held_out is None else solved_by(held_out, workspace, run.place / "held_out", settings)
        )
    except EndstopError as error:
        return SuiteRun(run.task.id, run.number, run.place, None, str(error))
    except Exception as error:
        # One run must not take the others with it.
        logger.exception("%s, run %d", run.task.id, run.number)
        problem = f"{type(error).__name__}: {error}"
        return SuiteRun(run.task.id, run.number, run.place, None, problem)
    facts = facts_of(trajectory, task=run.task.id, solved=solved)
    _write(run.place / "result.json", facts.to_dict())
    return SuiteRun(run.task.id, run.number, run.place, facts)


def _plan(suite: Suite, out: Path, over: Mapping[str, Any], repeat: int) -> list[PlannedRun]:
    from endstop.agent.settings import anchored_part, merged

    out, over = out.resolve(), anchored_part(over, Path.cwd(), "the settings")
    return [
        PlannedRun(
            task,
            number,
            merged(merged(suite.settings, task.settings), over),
            out / "runs" / task.id / str(number),
        )
        for task in suite.tasks
        for number in range(1, repeat + 1)
    ]


def _settings(run: PlannedRun, state: Path) -> AgentSettings:
    from endstop.agent.reading import read_mapping
    from endstop.agent.settings import make_settings, merged

    task = run.task.task if isinstance(run.task.task, dict) else read_mapping(run.task.task)
    data = merged({"task": task}, {**run.settings, "state": str(state), "interactive": False})
    # Where the task's workspace stands a virtualenv may have installed it from.
    also_at = (data.get("sandbox") or {}).get("also_at") or []
    data = merged(data, {"sandbox": {"also_at": [*also_at, str(run.task.workspace)]}})
    return make_settings(data, f"the task {run.task.id}")


def _claim(out: Path, planned: Sequence[PlannedRun]) -> None:
    """Say in `out` which runs its results are of. More repetitions may be asked for later, nothing else."""
    kinds = {
        run.task.id: {"task": run.task.model_dump(mode="json"), "settings": dict(run.settings)}
        for run in planned
    }
    text = json.dumps(kinds, sort_keys=True, default=str)
    own = hashlib.sha256(text.encode()).hexdigest()
    path = out / "suite.json"
    out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _write(path, {"fingerprint": own, "tasks": kinds})
    elif _written(path).get("fingerprint") != own:
        raise EndstopError(f"{out} holds runs of another suite or of other settings; name another directory.")


def _finished(run: PlannedRun) -> SuiteRun | None:
    path = run.place / "result.json"
    if not path.exists():
        return None
    try:
        facts = RunFacts.from_dict(_written(path))
    except TypeError as error:
        raise EndstopError(f"{path} is no result of a run; remove it to do the run again.") from error
    return SuiteRun(run.task.id, run.number, run.place, facts)


def _written(path: Path) -> dict[str, Any]:
    """What `_write` wrote. Raises EndstopError for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EndstopError(f"{path} is damaged ({error}); remove it to begin anew.") from error
    if not isinstance(data, dict):
        raise EndstopError(f"{path} is damaged; remove it to begin anew.")
    return data


def _resolved(task: SuiteTask, folder: Path, path: Path) -> SuiteTask:
    """The task with paths that hold wherever it is run."""
    from endstop.agent.settings import anchored_part

    held_out = task.held_out
    if held_out is not None:
        held_out = held_out.model_copy(update={"files": folder / held_out.files})
    return task.model_copy(
        update={
            "workspace": folder / task.workspace,
            "task": task.task if isinstance(task.task, dict) else folder / task.task,
            "held_out": held_out,
            "settings": anchored_part(task.settings, folder, f"{path}: settings of {task.id}"),
        }
    )


def _write(path: Path, data: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(data, indent=1, default=str), encoding="utf-8")
    part.replace(path)
