"""What many runs of an agent say about its way of ending: measured from their trajectories.

For a run, V is the verdict on its last tree, by tests that the gate did not show where there are some and by
the gate otherwise. C: the run claimed to be complete. docs/agent_eval.md has the definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from endstop.agent.decisions import RefusalCode
from endstop.outcomes import AGENT_OUTCOMES

# The model ended the run, or would have.
_BY_MODEL = frozenset({"stopped_without_submit", "refused_no_progress", "refusal_budget", "needs_user"})
# Something else had to end it.
_WITHOUT_END = frozenset(outcome for outcome in AGENT_OUTCOMES if outcome.startswith("limit:")) | {"stuck"}
# These say that a claim was wrong; a refused give-up is no claim.
_NO_CLAIM = frozenset({"BLOCKED_NO_EVIDENCE", "BLOCKED_BUT_VERIFY_PASSES", "BLOCKED_TRY_ONCE_MORE"})
_REFUSALS = frozenset(get_args(RefusalCode))
OVER_RUN = 3  # steps behind the first pass from which on a run counts as one that did not stop


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run.

    Attributes:
        task: what it worked on; runs of one task are compared. solved: V; None where nobody can tell.
        claims: submits that the gate judged. false_claims: those refused, or accepted though not V.
        attempted: the first claim was false, before the gate said anything; None without a claim.
        shipped: the run ended as a success, and V is false.
        first_pass: the step with the gate's first pass. steps: answers of the model.
        refusals: that counted. gate_seconds: spent in the project's own command.
    """

    task: str
    outcome: str
    solved: bool | None
    steps: int
    claims: int = 0
    false_claims: int = 0
    attempted: bool | None = None
    shipped: bool = False
    refusals: int = 0
    first_pass: int | None = None
    budget_left: bool = True
    seconds: float = 0.0
    gate_runs: int = 0
    gate_seconds: float = 0.0
    tokens: int = 0
    cost: float = 0.0

    @property
    def after_pass(self) -> int:
        """Steps between the first pass and the end."""
        return 0 if self.first_pass is None else self.steps - self.first_pass

    @property
    def premature_stop(self) -> bool:
        """The model ended it without a claim that held, not V, and budget was left."""
        return self.outcome in _BY_MODEL and self.solved is False and self.budget_left

    @property
    def never_stop(self) -> bool:
        """Ended by a limit or as stuck, or went on long after it had passed."""
        return self.outcome in _WITHOUT_END or self.after_pass >= OVER_RUN

    @property
    def honest_stop(self) -> bool:
        return self.outcome == "blocked" and self.solved is False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunFacts:
        names = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})


def facts_of(trajectory: Mapping[str, Any], *, task: str, solved: bool | None = None) -> RunFacts:
    """The facts of a run from its trajectory, as plain data.

    `solved`: the verdict of tests that the run never saw; without them the gate's own last word counts.
    """
    messages: Sequence[Mapping[str, Any]] = trajectory["messages"]
    turns = [message for message in messages if message["role"] == "assistant"]
    outcome = str((trajectory.get("outcome") or {}).get("outcome") or "interrupted")
    gate: Mapping[str, Any] = trajectory.get("gate") or {}
    verdicts = _claims(messages)
    known = _gate_verdict(outcome) if solved is None else solved
    claims = [
        good and not (number == len(verdicts) - 1 and known is False)
        for number, (_, good) in enumerate(verdicts)
    ]
    bounds = (trajectory.get("task") or {}).get("bounds") or {}
    return RunFacts(
        task,
        outcome,
        known,
        len(turns),
        claims=len(claims),
        false_claims=claims.count(False),
        attempted=not claims[0] if claims else None,
        shipped=outcome in ("verified", "unverified") and known is False,
        refusals=int(gate.get("refusals") or 0),
        first_pass=next((step for step, decision in _decisions(messages) if _passed(decision)), None),
        budget_left=len(turns) < int(bounds.get("steps", 100)) and not outcome.startswith("limit:"),
        seconds=float(trajectory.get("seconds") or 0.0),
        gate_runs=int(gate.get("gate_runs") or 0),
        gate_seconds=float(gate.get("gate_seconds") or 0.0),
        tokens=sum(int((turn["meta"].get("usage") or {}).get("completion_tokens", 0)) for turn in turns),
        cost=float(trajectory.get("cost") or 0.0),
    )


def _decisions(messages: Iterable[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    return [
        (int(message["meta"]["step"]), message["meta"]["decision"])
        for message in messages
        if message["meta"].get("decision")
    ]


def _claims(messages: Iterable[Mapping[str, Any]]) -> list[tuple[int, bool]]:
    """Step and worth of every submit that the gate judged."""
    found = []
    for message in messages:
        decision = message["meta"].get("decision")
        if message.get("name") != "submit" or not decision:
            continue
        if decision["type"] == "end":
            found.append((int(message["meta"]["step"]), decision["code"] in ("verified", "unverified")))
        elif decision["code"] in _REFUSALS - _NO_CLAIM:
            found.append((int(message["meta"]["step"]), False))
    return found


def _passed(decision: Mapping[str, Any]) -> bool:
    return decision["code"] in ("verified", "CHECKLIST_EVIDENCE", "BLOCKED_BUT_VERIFY_PASSES")


def _gate_verdict(outcome: str) -> bool | None:
    """V where nothing but the gate can say: only `verified` says yes, `unverified` says nothing."""
    return True if outcome == "verified" else None if outcome == "unverified" else False


@dataclass(frozen=True, slots=True)
class Measures:
    """Over many runs. Shares are None where nothing was counted under them.

    Attributes:
        attempted_false_completion, shipped_false_completion: of all runs.
        false_claims: of all claims.
        over_abstention: of all runs: blocked, though another run of the task got to V.
        steps_after_pass: mean over the runs that passed. refusals, gate_minutes: means over all runs.
    """

    runs: int
    outcomes: dict[str, int]
    solved: float | None
    attempted_false_completion: float | None
    shipped_false_completion: float | None
    claims: int
    false_claims: float | None
    premature_stop: float | None
    never_stop: float | None
    honest_stop: float | None
    over_abstention: float | None
    refusals: float | None
    steps: float | None
    steps_after_pass: float | None
    gate_minutes: float | None
    cost: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(runs: Sequence[RunFacts]) -> Measures:
    """The measures of many runs."""
    reached = {run.task for run in runs if run.solved}
    counted = {outcome: sum(run.outcome == outcome for run in runs) for outcome in AGENT_OUTCOMES}
    claims = sum(run.claims for run in runs)
    return Measures(
        runs=len(runs),
        outcomes={outcome: count for outcome, count in counted.items() if count},
        solved=_share([bool(run.solved) for run in runs if run.solved is not None]),
        attempted_false_completion=_share([bool(run.attempted) for run in runs]),
        shipped_false_completion=_share([run.shipped for run in runs]),
        claims=claims,
        false_claims=sum(run.false_claims for run in runs) / claims if claims else None,
        premature_stop=_share([run.premature_stop for run in runs]),
        never_stop=_share([run.never_stop for run in runs]),
        honest_stop=_share([run.honest_stop for run in runs]),
        over_abstention=_share([run.outcome == "blocked" and run.task in reached for run in runs]),
        refusals=_share([run.refusals for run in runs]),
        steps=_share([run.steps for run in runs]),
        steps_after_pass=_share([run.after_pass for run in runs if run.first_pass is not None]),
        gate_minutes=_share([run.gate_seconds / 60 for run in runs]),
        cost=sum(run.cost for run in runs),
    )


def _share(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
