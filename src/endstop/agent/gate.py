"""The gate: what stands between "done" and the end of a run.

Every attempt to end goes through a list of checks, and the first that fails answers. What the model ran or
said counts for nothing: the gate runs the project's own check, on the tree as it is at that moment, and
evidence belongs to that tree.

Bounds: the U-th refusal of an attempt that changed nothing ends the run, the R-th refusal in all does, the
F-th format error in a row does; N reminders are given and the next ends it. So the project's check is run at
most R(1+k)+1 times, k being its reruns on one tree.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

from pydantic import TypeAdapter, ValidationError

from endstop.agent import refusals
from endstop.agent.checklist import Checklist, ItemStatus
from endstop.agent.decisions import Decision, End, NoticeCode, Refusal, RefusalCode, Verdict
from endstop.agent.reading import first_fault
from endstop.agent.refusals import Finding
from endstop.agent.task import Task
from endstop.outcomes import AgentOutcome
from endstop.protocol.errors import EndstopError


class Snapshots(Protocol):
    """What the gate asks of `endstop.agent.tree.Trees`."""

    def snapshot(self) -> str: ...
    def diff(self, before: str, after: str, /) -> str: ...
    def present(self, tree: str, /) -> set[str]: ...


class Protects(Protocol):
    """What the gate asks of `endstop.agent.protected.Protected`."""

    def changed(self, trees: Any, baseline: str, tree: str, /) -> tuple[Sequence[str], Sequence[str]]:
        """Protected paths that differ from the baseline, and those that the task opened."""
        ...


class Verifies(Protocol):
    """What the gate asks of `endstop.agent.verification.Verification`."""

    @property
    def protected(self) -> Protects: ...

    def verify(self, tree: str, /) -> Verdict: ...


@dataclass
class GateState:
    """All that the gate remembers. A round trip through JSON at any point changes no decision.

    Attributes:
        refusals: in all. refused: how often, by what was refused. reminders, questions: answered so far.
        format_errors: in a row. reasons: of give-ups that were sent back once.
        findings: verdicts by tree. last_tree: whose verdict is the last one.
        best_verified_tree: passes the project's check with protected paths untouched.
        evidence, flaws: what the last submit attached, and what was wrong with it on `flaws_tree`.
        openings: protected paths that the task opened and the model changed. tampered: other protected
            paths that were changed when the gate last looked; it looks at every end.
        claimed: the last attempt to end was a submit. codes: every decision, in order.
    """

    refusals: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    reminders: int = 0
    questions: int = 0
    format_errors: int = 0
    reasons: list[str] = field(default_factory=list)
    findings: dict[str, Finding] = field(default_factory=dict)
    last_tree: str = ""
    best_verified_tree: str | None = None
    evidence: dict[str, str] = field(default_factory=dict)
    flaws: dict[str, str] = field(default_factory=dict)
    flaws_tree: str = ""
    summary: str = ""
    assumptions: list[str] = field(default_factory=list)
    openings: list[str] = field(default_factory=list)
    tampered: list[str] = field(default_factory=list)
    claimed: bool = False
    gate_runs: int = 0
    gate_seconds: float = 0.0
    codes: list[str] = field(default_factory=list)
    outcome: AgentOutcome | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GateState:
        """Raises EndstopError for what was not made by `to_dict`."""
        try:
            return TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            raise EndstopError(f"the saved state of the gate is damaged: {first_fault(error)}") from error


@dataclass(frozen=True)
class Submit:
    """One attempt to end as done: the tree at that moment and what was attached."""

    tree: str
    evidence: Mapping[str, str]

    @property
    def key(self) -> str:
        return f"{self.tree} {_digest(sorted(self.evidence.items()))}"


@dataclass(frozen=True)
class GiveUp:
    """One attempt to end as not possible."""

    tree: str
    reason: str
    evidence: str
    hard: bool

    @property
    def key(self) -> str:
        return f"{self.tree} {_digest([same_words(self.reason), same_words(self.evidence), self.hard])}"


class Gate:
    """Answers every attempt of a model to end its run.

    Args:
        verification: None: the project has no check, and a submit can only end as `unverified`.
        baseline: the tree at the start. interactive: somebody is there to answer questions.

    An End is final, but for those that a run is resumed from: `needs_user`, limits, `interrupted`, `error`.
    """

    def __init__(
        self,
        task: Task,
        trees: Snapshots,
        verification: Verifies | None,
        state: GateState,
        baseline: str,
        interactive: bool = False,
    ) -> None:
        self.task = task
        self.trees = trees
        self.verification = verification
        self.state = state
        self.baseline = baseline
        self.interactive = interactive
        self.checklist = Checklist(task.checklist)

    # Attempts to end

    def submit(
        self, summary: str, evidence: Mapping[str, str] | None = None, assumptions: Sequence[str] = ()
    ) -> Decision:
        """The model says that it is done."""
        self._must_be_open()
        attempt = Submit(
            self.trees.snapshot(), {name: text.strip() for name, text in (evidence or {}).items()}
        )
        self.state.claimed = True
        self.state.summary = summary
        if attempt.evidence != self.state.evidence:
            self.state.evidence, self.state.flaws, self.state.flaws_tree = dict(attempt.evidence), {}, ""
        self.state.assumptions += [text for text in assumptions if text not in self.state.assumptions]
        checks: tuple[Callable[[Submit], Decision | None], ...] = (
            self._every_item_has_evidence,
            self._protected_paths_are_the_baselines,
            self._something_changed_since_its_refusal,
            self._there_is_a_check,
            self._the_check_passes,
            self._the_evidence_holds,
        )
        for check in checks:
            answer = check(attempt)
            if answer is not None:
                return answer
        return self._end("verified", self._verified(attempt.tree), self._warnings(attempt.tree), attempt.tree)

    def give_up(self, reason: str, evidence: str, hard: bool = False) -> Decision:
        """The model says that it cannot be done. `hard`: nothing it could try again would change that
        (a credential or hardware that is missing, a contradiction)."""
        self._must_be_open()
        attempt = GiveUp(self.trees.snapshot(), reason.strip(), evidence.strip(), hard)
        self.state.claimed = False
        checks: tuple[Callable[[GiveUp], Decision | None], ...] = (
            self._a_reason_and_a_fact_are_given,
            self._the_check_does_not_pass,
            self._it_was_tried_once_more,
        )
        for check in checks:
            answer = check(attempt)
            if answer is not None:
                return answer
        return self._end(
            "blocked",
            f"Not done, and said so: {attempt.reason.rstrip('.!')}. Observed: {attempt.evidence}",
            ("hard",) if hard else (),
            attempt.tree,
        )

    def text_only(self) -> Decision:
        """A turn without a call: it ends nothing. After N reminders the check is run once for the record."""
        self._must_be_open()
        self.state.reminders += 1
        number = self.state.reminders + self.state.questions
        if number <= self.task.bounds.reminders:
            return self._notice("NO_SUBMIT", refusals.reminder(number, self.task.bounds.reminders), raw=True)
        tree = self.trees.snapshot()
        code = self._for_the_record(tree)
        return self._end(
            "stopped_without_submit",
            f"The model stopped without a submit. The project's check, run for the record: {code}.",
            (code,),
            tree,
        )

    def ask_user(self, question: str) -> Decision:
        """A question. With somebody there the run waits; else it goes on, N times."""
        self._must_be_open()
        if self.interactive:
            return self._end("needs_user", question)
        self.state.questions += 1
        number = self.state.reminders + self.state.questions
        if number <= self.task.bounds.reminders:
            return self._notice("NO_USER_AVAILABLE", refusals.no_user(number, self.task.bounds.reminders))
        tree = self.trees.snapshot()
        code = self._for_the_record(tree)
        return self._end("needs_user", f"Nobody was there to answer: {question}", (code,), tree)

    def not_alone(self, name: str) -> Decision:
        """A call that ends, beside others: they ran, and it is not looked at."""
        self._must_be_open()
        return self._notice("SUBMIT_NOT_ALONE", refusals.not_alone(name))

    def format_error(self, code: NoticeCode, why: str) -> Decision:
        """A turn that was cut or cannot be parsed: none of its calls ran. The F-th in a row ends the run."""
        self._must_be_open()
        self.state.format_errors += 1
        number, limit = self.state.format_errors, self.task.bounds.format_errors
        if number >= limit:
            return self._end(
                "repeated_format_error",
                f"{number} turns in a row were cut off or could not be read; the last: {why}",
                (code,),
            )
        return self._notice(code, refusals.format_error(code, why, number, limit))

    def good_turn(self) -> None:
        """A turn that was whole: the row of format errors is broken."""
        self.state.format_errors = 0

    def finish(self, outcome: AgentOutcome, message: str = "") -> End:
        """An end that is not the model's: a limit, `stuck`, `error`, `interrupted`."""
        if outcome in ("verified", "unverified", "blocked"):
            raise ValueError(f"{outcome} is for the gate to say, after its checks")
        return self._end(outcome, message)

    # The checks of a submit, in this order

    def _every_item_has_evidence(self, attempt: Submit) -> Decision | None:
        missing = self.checklist.missing(attempt.evidence)
        return self._refuse("CHECKLIST_INCOMPLETE", missing, attempt.tree, attempt.key) if missing else None

    def _protected_paths_are_the_baselines(self, attempt: Submit) -> Decision | None:
        changed = self._protected_changes(attempt.tree)
        return self._refuse("PROTECTED_CHANGED", changed, attempt.tree, attempt.tree) if changed else None

    def _something_changed_since_its_refusal(self, attempt: Submit) -> Decision | None:
        for key in (attempt.tree, attempt.key):
            if key in self.state.refused:
                return self._refuse("NO_CHANGE_SINCE_REFUSAL", (), attempt.tree, key)
        return None

    def _there_is_a_check(self, attempt: Submit) -> Decision | None:
        if self.verification is not None:
            return None
        return self._end(
            "unverified",
            "Submitted, and nothing was checked: this run has no verifier.",
            self._warnings(attempt.tree),
            attempt.tree,
        )

    def _the_check_passes(self, attempt: Submit) -> Decision | None:
        finding = self._finding(attempt.tree, rerun_a_pass=True)
        if finding.passed:
            return None
        return self._refuse(cast(RefusalCode, finding.code), finding.details, attempt.tree, attempt.tree)

    def _the_evidence_holds(self, attempt: Submit) -> Decision | None:
        if not self.state.flaws:
            return None
        return self._refuse("CHECKLIST_EVIDENCE", tuple(self.state.flaws), attempt.tree, attempt.key)

    # The checks of a give_up, in this order

    def _a_reason_and_a_fact_are_given(self, attempt: GiveUp) -> Decision | None:
        missing = [name for name in ("reason", "evidence") if not getattr(attempt, name)]
        if not missing:
            return None
        return self._refuse(
            "BLOCKED_NO_EVIDENCE", [f"there is no {n}" for n in missing], attempt.tree, attempt.key
        )

    def _the_check_does_not_pass(self, attempt: GiveUp) -> Decision | None:
        if self.verification is None or not self._finding(attempt.tree).passed:
            return None
        return self._refuse("BLOCKED_BUT_VERIFY_PASSES", (), attempt.tree, attempt.key)

    def _it_was_tried_once_more(self, attempt: GiveUp) -> Decision | None:
        reason = same_words(attempt.reason)
        if attempt.hard or reason in self.state.reasons:
            return None
        self.state.reasons.append(reason)
        return self._refuse("BLOCKED_TRY_ONCE_MORE", (attempt.reason,), attempt.tree, attempt.key)

    # What the checks stand on

    def _finding(self, tree: str, *, rerun_a_pass: bool = False) -> Finding:
        """The verdict on a tree. One that failed stays: another run of it could only be luck. One that passed
        is run again for a submit, whose evidence is held against that run's report."""
        assert self.verification is not None
        known = self.state.findings.get(tree)
        if known is not None and not (known.passed and rerun_a_pass):
            self.state.last_tree = tree
            return known
        verdict = self.verification.verify(tree)
        finding = Finding.of(verdict)
        self.state.findings[tree] = finding
        self.state.last_tree = tree
        self.state.gate_runs += finding.runs
        self.state.gate_seconds += finding.seconds
        run = verdict.runs[-1] if verdict.runs else None
        self.state.flaws_tree = tree
        self.state.flaws = self.checklist.unproven(
            self.state.evidence,
            run.report if run is not None else None,
            self.trees.present(tree),
            tuple(text for text in (self.task.verify.command, run and run.command) if text),
        )
        if finding.passed and not self._protected_changes(tree):
            self.state.best_verified_tree = tree
        elif self.state.best_verified_tree == tree:
            self.state.best_verified_tree = None
        return finding

    def _protected_changes(self, tree: str) -> tuple[str, ...]:
        if self.verification is None:
            return ()
        changed, opened = self.verification.protected.changed(self.trees, self.baseline, tree)
        self.state.tampered = list(changed)
        self.state.openings = list(opened)
        return tuple(changed)

    def _for_the_record(self, tree: str) -> str:
        if self.verification is None:
            return "NO_VERIFIER"
        return "PROTECTED_CHANGED" if self._protected_changes(tree) else self._finding(tree).code

    # Answers

    def _refuse(self, code: RefusalCode, details: Sequence[str], tree: str, key: str) -> Decision:
        """Count the refusal; the U-th of this key and the R-th in all end the run."""
        state, bounds = self.state, self.task.bounds
        state.refusals += 1
        state.refused[key] = state.refused.get(key, 0) + 1
        state.codes.append(code)
        details = tuple(details)
        if state.refused[key] >= bounds.unchanged:
            message = f"Refused {state.refused[key]} times without a change; the last refusal: {code}."
            return self._end("refused_no_progress", message, (code, *details), tree)
        if state.refusals >= bounds.refusals:
            message = f"All {bounds.refusals} refusals are used up; the last: {code}."
            return self._end("refusal_budget", message, (code, *details), tree)
        items = self.items(tree)
        text = refusals.refusal_text(
            code, details, state.refusals, bounds.refusals, state.findings.get(tree), items
        )
        return Refusal(code, f"{text}\n\n{self.state_block(tree, raw=False)}", details)

    def _notice(self, code: NoticeCode, text: str, *, raw: bool = False) -> Refusal:
        self.state.codes.append(code)
        return Refusal(code, f"{text}\n\n{self.state_block(raw=raw)}" if raw else text)

    def _end(self, outcome: AgentOutcome, message: str, details: Sequence[str] = (), tree: str = "") -> End:
        best = self.state.best_verified_tree
        # After an error the workspace may not be readable, and that must not hide the error.
        if outcome not in ("verified", "error", "interrupted"):
            tree = tree or self.trees.snapshot()
            self._protected_changes(tree)
        self.state.outcome = outcome
        self.state.codes.append(f"END {outcome}")
        if outcome not in ("verified", "unverified") and best is not None:
            what = "The files as they are" if best == tree else "An earlier state of the files, since edited,"
            what = what if tree else "A state of the files"
            message = f"{message} {what} passed the project's check (best_verified_tree {best}).".strip()
        return End(outcome, message, tuple(details))

    def _must_be_open(self) -> None:
        if self.state.outcome is not None and not _may_go_on(self.state.outcome):
            raise RuntimeError(f"the run has ended as {self.state.outcome}")
        self.state.outcome = None

    def _verified(self, tree: str) -> str:
        finding = self.state.findings[tree]
        counts = f": {finding.counts}" if finding.counts else ""
        return f"`{finding.command}` passes on tree {tree[:12]}{counts}."

    def _warnings(self, tree: str) -> tuple[str, ...]:
        """What a person should know of a success."""
        return (
            *(("EMPTY_DIFF",) if tree == self.baseline else ()),
            *(f"OPENED:{path}" for path in self.state.openings),
            *(f"UNKNOWN_ITEM:{name}" for name in self.checklist.unknown(self.state.evidence)),
        )

    # What others show

    def items(self, tree: str) -> tuple[ItemStatus, ...]:
        """Where every item of the checklist stands on this tree."""
        looked_at = self.state.flaws_tree == tree
        return self.checklist.status(self.state.evidence, self.state.flaws if looked_at else None)

    def state_block(self, tree: str | None = None, *, raw: bool = True) -> str:
        """The harness's own state as text, for the end of a long context."""
        tree = self.trees.snapshot() if tree is None else tree
        last = self.state.findings.get(self.state.last_tree)
        return refusals.state_block(self.task, self.items(tree), last, tree, raw=raw)

    def best_diff(self) -> str:
        """What `best_verified_tree` changed since the start; empty where there is none."""
        best = self.state.best_verified_tree
        return "" if best is None else self.trees.diff(self.baseline, best)


def same_words(text: str) -> str:
    """Text without what does not make it another reason: case, spacing, punctuation, forms of a letter."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(char if char.isalnum() else " " for char in folded).split())


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()[:16]


def _may_go_on(outcome: AgentOutcome) -> bool:
    """Ends that a run can be resumed from: nobody judged the work."""
    return outcome in ("needs_user", "error", "interrupted") or outcome.startswith("limit:")
