"""What the model is told: refusals with the raw result, reminders, and the state that the harness owns.

A refusal carries its code, the command and its exit, the end of the raw output, what would pass, the
checklist with its open items, and how many refusals are left. No text of a model is in it but what it
attached, and nothing in it was summarised by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from endstop.agent.checklist import ItemStatus
from endstop.agent.decisions import RefusalCode, Verdict, VerifierRun
from endstop.agent.task import Task

TAIL = 2000
WAYS_ON = "You may edit and submit again, or call give_up with a reason and the fact that shows it."

_WHAT_WOULD_PASS: dict[RefusalCode, str] = {
    "CHECKLIST_INCOMPLETE": "evidence for every item: a test that passes, or a path that is there.",
    "CHECKLIST_EVIDENCE": "evidence that names a test that passed in the run above, or a path that is there.",
    "PROTECTED_CHANGED": "the same work with these paths as they were at the start.",
    "NO_CHANGE_SINCE_REFUSAL": "a tree that differs from the one that was refused, and passes.",
    "BLOCKED_NO_EVIDENCE": "give_up with a reason and a fact that was observed: a command and its "
    "output, two tests that contradict each other, a file that is missing.",
    "BLOCKED_BUT_VERIFY_PASSES": "submit: the project's check passes on this tree.",
    "BLOCKED_TRY_ONCE_MORE": "one more try at the task. If it still cannot be done, call give_up again with "
    "the same reason, word for word.",
}
_WHAT_IS_WRONG: dict[RefusalCode, str] = {
    "CHECKLIST_INCOMPLETE": "These items have no evidence: {details}. The project's check was not run.",
    "CHECKLIST_EVIDENCE": "The project's check passes, but the evidence does not hold for: {details}.",
    "PROTECTED_CHANGED": "Protected paths were changed: {details}. The project's check was not run.",
    "NO_CHANGE_SINCE_REFUSAL": "Nothing has changed since this was refused, so the check was not run again.",
    "BLOCKED_NO_EVIDENCE": "To give up takes a reason and an observed fact; {details}.",
    "BLOCKED_BUT_VERIFY_PASSES": "The project's check passes on this tree.",
    "BLOCKED_TRY_ONCE_MORE": "The reason is recorded: {details}.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict as it is kept and shown: small enough for every saved state."""

    code: str
    tree: str
    command: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    output: str = ""
    details: tuple[str, ...] = ()
    problem: str = ""
    would_pass: str = ""
    counts: str = ""
    runs: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, verdict: Verdict) -> Finding:
        run = _to_show(verdict)
        report = run.report if run is not None else None
        counts = ""
        if report is not None:
            counts = (
                f"{len(report.passed)} passed, {len(report.failed)} failed, {len(report.skipped)} skipped"
            )
        return cls(
            code=verdict.code,
            tree=verdict.tree,
            command=run.command if run is not None else "",
            exit_code=run.exit_code if run is not None else None,
            timed_out=run is not None and run.timed_out,
            output=tail(run.output) if run is not None else "",
            details=verdict.details,
            problem=verdict.problem,
            would_pass=verdict.would_pass,
            counts=counts,
            runs=_counted(verdict),
            seconds=verdict.seconds,
        )

    @property
    def passed(self) -> bool:
        return self.code == "PASS"

    @property
    def line(self) -> str:
        """`VERIFY_FAILED on tree 1a2b3c4d5e6f (1 passed, 1 failed, 0 skipped)`."""
        counts = f" ({self.counts})" if self.counts else ""
        return f"{self.code} on tree {short(self.tree)}{counts}"

    @property
    def raw(self) -> str:
        """Command, exit and the end of the output, as it was."""
        if not self.command:
            return ""
        ended = "Killed." if self.exit_code is None else f"Exit {self.exit_code}."
        if self.timed_out:
            ended = "Killed at its time limit."
        output = self.output.rstrip("\n") or "(none)"
        return f"Command: {self.command}\n{ended}\nOutput (tail):\n{output}\n(end of output)"


def refusal_text(
    code: RefusalCode,
    details: Sequence[str],
    number: int,
    limit: int,
    finding: Finding | None,
    items: Sequence[ItemStatus],
) -> str:
    """`Not accepted (2 of 5): VERIFY_FAILED. ...`, without the state block."""
    wrong = _WHAT_IS_WRONG.get(code, "").format(details=", ".join(details))
    would_pass = _WHAT_WOULD_PASS.get(code, "")
    parts = []
    if finding is not None:
        own = finding.code == code
        wrong = wrong or finding.problem or ", ".join(finding.details)
        would_pass = would_pass or finding.would_pass
        if not own and not finding.passed:
            names = f": {', '.join(finding.details)}" if finding.details else ""
            parts.append(f"The check's result on this tree was {finding.code}{names}.")
        if finding.problem and finding.problem not in (wrong, ""):
            parts.append(finding.problem)
        parts.append(finding.raw)
    left = limit - number
    parts = [
        f"Not accepted ({number} of {limit}): {code}. {wrong}".rstrip(),
        *parts,
        f"What would pass: {would_pass}" if would_pass else "",
        _open_items(items),
        f"{WAYS_ON} {left} refusal{'' if left == 1 else 's'} left; after that the run ends without success.",
    ]
    return "\n".join(part for part in parts if part)


def state_block(
    task: Task, items: Sequence[ItemStatus], finding: Finding | None, tree: str, *, raw: bool = True
) -> str:
    """The state that the harness owns: it stands above anything remembered or summarised.

    Args:
        finding: the last verdict. tree: the present one. raw: with the verdict's output.
    """
    lines = [
        "State, kept by the harness. It holds over anything remembered or summarised.",
        f"Task: {task.task.strip()}",
    ]
    if items:
        lines += ["Checklist:", *(f"- {item.line}" for item in items)]
    lines.append(f"Present tree: {short(tree)}")
    if finding is None:
        lines.append("Last verification: none yet")
    else:
        stale = "" if finding.tree == tree else "; the files have changed since, so it says nothing of them"
        lines.append(f"Last verification: {finding.line}{stale}")
        if raw and finding.raw:
            lines.append(finding.raw)
    return "\n".join(lines)


def reminder(number: int, limit: int) -> str:
    return (
        f"NO_SUBMIT (reminder {number} of {limit}): a turn without a tool call ends nothing. If the task is "
        "done, call submit with evidence for every checklist item; if it cannot be done, call give_up with a "
        "reason and the fact that shows it; otherwise go on. If no change is needed, submit: it is a success."
    )


def no_user(number: int, limit: int) -> str:
    return (
        f"NO_USER_AVAILABLE (reminder {number} of {limit}): nobody can answer in this run. Assume what is "
        "most likely, go on, and name it in submit's `assumptions`; or call give_up with the reason."
    )


def not_alone(name: str) -> str:
    return (
        f"SUBMIT_NOT_ALONE: {name} has to be the only call of its turn. The other calls ran; look at their "
        f"results, then call {name} by itself."
    )


def format_error(code: str, why: str, number: int, limit: int) -> str:
    cut = "Write it again in smaller pieces." if code == "TRUNCATED" else "Write the call again."
    return f"{code} ({number} of {limit} in a row): {why.rstrip('.')}. No call of that turn ran. {cut}"


def _to_show(verdict: Verdict) -> VerifierRun | None:
    """Of a flaky tree the run in which the tests failed, else the last one."""
    failed = set(verdict.details)
    for run in verdict.runs if verdict.code == "FLAKY" else ():
        if run.report is not None and run.report.failed & failed:
            return run
    return verdict.runs[-1] if verdict.runs else None


def _counted(verdict: Verdict) -> int:
    """Runs of the command. The canary's own run is kept with a verdict only where it shows a flaky test that
    had passed before, and is none of them."""
    first = verdict.runs[0].report if verdict.runs else None
    canarys = verdict.code == "FLAKY" and first is not None and not first.failed
    return len(verdict.runs) - canarys


def tail(text: str) -> str:
    return text if len(text) <= TAIL else f"[{len(text) - TAIL} characters left out]\n{text[-TAIL:]}"


def short(tree: str) -> str:
    return tree[:12]


def _open_items(items: Sequence[ItemStatus]) -> str:
    pending = [item.line for item in items if item.state in ("open", "unproven")]
    return f"Open items: {'; '.join(pending)}" if pending else ""
