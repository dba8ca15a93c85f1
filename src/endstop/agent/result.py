"""What a run leaves: how it ended, the diff, and what was weaker than it could be."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from endstop.agent.decisions import End
from endstop.agent.gate import Gate
from endstop.agent.trajectory import Trajectory, storable
from endstop.agent.tree import Trees, shown
from endstop.agent.workplace import Workplace
from endstop.outcomes import EXIT_CODES, AgentOutcome

_DIFF_CHARACTERS = 100_000
_NAMED = 10


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How a run ended, and what it left.

    Attributes:
        message, details: of the end. exit_code: what a shell is told.
        summary, assumptions: of the last submit; words of the model, no evidence.
        diff: from the start to the files as they are. best_verified_tree, best_diff: the last tree that
            passed, with what it changed; where a later edit broke it, that is what is worth keeping.
        opened: protected paths that the task allowed and the run changed. unprotected: inputs of the
            verification that nobody guards (dependencies). notes: what is weaker than it could be.
        sandbox: the mode and why it is no stronger. warnings: e.g. an empty diff.
    """

    outcome: AgentOutcome
    message: str
    details: tuple[str, ...]
    exit_code: int
    id: str
    trajectory: Path
    steps: int
    seconds: float
    cost: float
    verify: str
    sandbox: str
    tree: str
    baseline: str
    best_verified_tree: str | None = None
    summary: str = ""
    assumptions: tuple[str, ...] = ()
    diff: str = ""
    best_diff: str = ""
    changed: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    unprotected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refusals: int = 0
    gate_runs: int = 0
    gate_seconds: float = 0.0
    codes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = storable({**asdict(self), "trajectory": str(self.trajectory)})
        return plain


def _left_out(trees: Trees) -> tuple[str, ...]:
    """What no tree holds, and so no check has seen."""
    told = [f"{shown(path)} ({why})" for path, why in sorted(trees.left_out.items())]
    if not told:
        return ()
    more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    return (f"not looked at, neither by the check nor in the diff: {', '.join(told[:_NAMED])}{more}",)


def make_result(trajectory: Trajectory, place: Workplace, gate: Gate, end: End) -> AgentResult:
    """Make the result, and close the record with it."""
    state, trees = gate.state, place.trees
    tree = trees.snapshot()
    best = state.best_verified_tree
    result = AgentResult(
        outcome=end.outcome,
        message=storable(end.message, trajectory.secrets),
        details=end.details,
        exit_code=EXIT_CODES[end.outcome],
        id=trajectory.id,
        trajectory=trajectory.path,
        steps=trajectory.steps,
        seconds=round(trajectory.seconds, 3),
        cost=trajectory.cost,
        verify=place.verify_command,
        sandbox=place.sandbox_description,
        tree=tree,
        baseline=trajectory.baseline,
        best_verified_tree=best,
        summary=state.summary,
        assumptions=tuple(state.assumptions),
        diff=trees.diff(trajectory.baseline, tree),
        best_diff=trees.diff(trajectory.baseline, best) if best is not None and best != tree else "",
        changed=tuple(trees.changed(trajectory.baseline, tree)),
        opened=tuple(state.openings),
        unprotected=place.task.dependencies,
        notes=(*place.notes, *_left_out(trees)),
        warnings=tuple(detail for detail in end.details if detail == "EMPTY_DIFF"),
        refusals=state.refusals,
        gate_runs=state.gate_runs,
        gate_seconds=round(state.gate_seconds, 3),
        codes=tuple(state.codes),
    )
    folder = trajectory.path.parent
    for name, diff in (("changes.diff", result.diff), ("best.diff", result.best_diff)):
        if diff:
            (folder / name).write_text(diff, encoding="utf-8", errors="surrogateescape")
    data = result.to_dict()
    data.pop("trajectory")
    for name in ("diff", "best_diff"):
        if len(data[name]) > _DIFF_CHARACTERS:
            data[name] = data[name][:_DIFF_CHARACTERS] + "\n[the rest is in the state directory]\n"
    trajectory.outcome = data
    trajectory.gate = state.to_dict()
    if place.verification is not None:
        trajectory.verification = place.verification.to_dict()
    trajectory.save()
    trajectory.watch("end", result)
    return result
