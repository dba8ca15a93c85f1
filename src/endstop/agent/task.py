"""What an agent is asked to do, and what will prove that it is done: task.yaml."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from endstop.protocol.errors import EndstopError

VerifierName = Literal["pytest", "unittest", "node", "jest", "vitest", "go", "cargo", "command"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _inner(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} must be a path inside of the workspace, relative to it and without `..`")
    return str(PurePosixPath(path))


# Inside of the workspace: what a task names is removed, bound or left out by the harness, on the host.
InnerPath = Annotated[str, AfterValidator(_inner)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ChecklistItem(_Strict):
    """One thing that must be so at the end. The model may only attach evidence to it, never tick it off."""

    id: Annotated[str, Field(min_length=1, pattern=r"^[\w.-]+$")]
    text: str = ""


class VerifySettings(_Strict):
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

    command: str | None = None
    verifier: VerifierName | None = None
    required: tuple[str, ...] = ()
    timeout: Seconds = 600.0
    reruns: Annotated[int, Field(ge=0)] = 1
    report: InnerPath | None = None


class Bounds(_Strict):
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


class Task(_Strict):
    """A task file.

    Attributes:
        protected: patterns beyond the verifier's own. allow: patterns that are opened again; each opening is
            in the result.
        dependencies: paths in the workspace that are bound read-only from the baseline, left out of the
            fingerprint, and listed in the result as unprotected inputs (node_modules, .venv, target).
        evidence_file: where an agent that has no submit tool writes what belongs to one; left out of the
            fingerprint.
    """

    task: str
    verify: VerifySettings = VerifySettings()
    checklist: tuple[ChecklistItem, ...] = ()
    protected: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    dependencies: tuple[InnerPath, ...] = ()
    evidence_file: InnerPath = ".endstop/evidence.json"
    bounds: Bounds = Bounds()


def load_task(path: Path) -> Task:
    """Read a task file. Raises EndstopError for one that cannot be read or does not fit."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EndstopError(f"there is no task file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EndstopError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise EndstopError(f"{path} holds no task: it must be a mapping with a key task")
    try:
        return Task.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EndstopError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from error
