"""What an agent is asked to do, and what will prove that it is done: task.yaml."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from endstop.agent.reading import read_mapping, validation_sentence
from endstop.protocol.errors import EndstopError

VerifierName = Literal["pytest", "unittest", "node", "jest", "vitest", "go", "cargo", "command"]


class Strict(BaseModel):
    """Settings: no unknown key, and no number that is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _says_something(text: str) -> str:
    if not text.strip():
        raise ValueError("it says nothing")
    if "\0" in text:
        raise ValueError("it holds a NUL character")
    return text


def _each_its_own(items: tuple[ChecklistItem, ...]) -> tuple[ChecklistItem, ...]:
    ids = [item.id for item in items]
    for item in ids:
        if ids.count(item) > 1:
            raise ValueError(f"two items have the id {item}, and each needs one of its own")
    return items


def _inner(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} must be a path inside of the workspace, relative to it and without `..`")
    return str(PurePosixPath(path))


# Inside of the workspace: what a task names is removed, bound or left out by the harness, on the host.
InnerPath = Annotated[str, AfterValidator(_inner)]
# As long as the system can wait.
Seconds = Annotated[float, Field(gt=0, le=2_000_000)]


class ChecklistItem(Strict):
    """One thing that must be so at the end. The model may only attach evidence to it, never tick it off."""

    id: Annotated[str, Field(min_length=1, pattern=r"^[\w.-]+$")]
    text: str = ""


class VerifySettings(Strict):
    """The project's own check.

    Attributes:
        command: run by the gate in a clean export, in a shell, e.g. `pytest -q`. None: found from the
            project.
        verifier: how its result is read; None: told from the command.
        required: ids of tests that must have passed.
        timeout: seconds of one run.
        reruns: of a failing run on the same tree, to tell a flaky test from a broken one.
        report: for `command`: path, relative to the export, of a JUnit XML file that the command writes.
    """

    command: Annotated[str, AfterValidator(_says_something)] | None = None
    verifier: VerifierName | None = None
    required: tuple[str, ...] = ()
    timeout: Seconds = 600.0
    reruns: Annotated[int, Field(ge=0)] = 1
    report: InnerPath | None = None


class Bounds(Strict):
    """When a run ends in spite of the model.

    Attributes:
        refusals: the R-th refusal in all ends the run. unchanged: the U-th on one tree.
        reminders: N text-only ends, or questions without a user, are answered; the next ends the run.
        format_errors: the F-th in a row. repeats: of one call with one result.
        steps: calls of the model. seconds: wall clock. cost: in the price's currency.
    """

    refusals: Annotated[int, Field(ge=1)] = 5
    unchanged: Annotated[int, Field(ge=1)] = 2
    reminders: Annotated[int, Field(ge=0)] = 2
    format_errors: Annotated[int, Field(ge=1)] = 3
    repeats: Annotated[int, Field(ge=2)] = 4
    steps: Annotated[int, Field(ge=1)] = 100
    seconds: Seconds | None = None
    cost: Annotated[float, Field(gt=0)] | None = None


class Task(Strict):
    """A task file.

    Attributes:
        protected: patterns beyond the verifier's own. allow: patterns that are opened again; each opening is
            in the result.
        dependencies: paths in the workspace that are bound read-only from the baseline, left out of the
            fingerprint, and listed in the result as unprotected inputs (node_modules, .venv, target).
        evidence_file: where an agent that has no submit tool writes what belongs to one; left out of the
            fingerprint.
    """

    task: Annotated[str, AfterValidator(_says_something)]
    verify: VerifySettings = VerifySettings()
    checklist: Annotated[tuple[ChecklistItem, ...], AfterValidator(_each_its_own)] = ()
    protected: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    dependencies: tuple[InnerPath, ...] = ()
    evidence_file: InnerPath = ".endstop/evidence.json"
    bounds: Bounds = Bounds()


def load_task(path: Path) -> Task:
    """Read a task file. Raises EndstopError for one that cannot be read or does not fit."""
    if not path.exists():
        raise EndstopError(f"there is no task file {path}")
    data = read_mapping(path, "task")
    if not data:
        raise EndstopError(f"{path} holds no task: it must be a mapping with a key task")
    try:
        return Task.model_validate(data)
    except ValidationError as error:
        raise EndstopError(f"{path}: {validation_sentence(error, Task)}") from error
