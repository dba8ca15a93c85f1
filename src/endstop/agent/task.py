"""What an agent is asked to do, and what will prove that it is done: task.yaml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

VerifierName = Literal["pytest", "unittest", "node", "jest", "vitest", "go", "cargo", "command"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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
    timeout: Annotated[float, Field(gt=0)] = 600.0
    reruns: Annotated[int, Field(ge=0)] = 1
    report: str | None = None


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
    seconds: Annotated[float, Field(gt=0)] | None = None
    cost: Annotated[float, Field(gt=0)] | None = None


class Task(_Strict):
    """A task file.

    Attributes:
        protected: patterns beyond the verifier's own. allow: patterns that are opened again; each opening is
            in the result.
        dependencies: paths in the workspace that are bound read-only from the baseline, left out of the
            fingerprint, and listed in the result as unprotected inputs (node_modules, .venv, target).
    """

    task: str
    verify: VerifySettings = VerifySettings()
    checklist: tuple[ChecklistItem, ...] = ()
    protected: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    dependencies: tuple[str, ...] = ()
    bounds: Bounds = Bounds()
