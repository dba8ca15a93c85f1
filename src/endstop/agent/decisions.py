"""What the gate and the verification say, as data: codes, verdicts, decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from endstop.outcomes import AgentOutcome

# What the gate's own run of the project's command found.
VerdictCode = Literal[
    "PASS",
    "VERIFY_TIMEOUT",
    "VERIFY_FAILED",
    "NO_TESTS_RAN",
    "REQUIRED_NOT_PASSED",
    "FEWER_TESTS",
    "FLAKY",
]
# Refusals of an end. These, and only these, count against the budget of refusals.
RefusalCode = Literal[
    "CHECKLIST_INCOMPLETE",
    "PROTECTED_CHANGED",
    "NO_CHANGE_SINCE_REFUSAL",
    "VERIFY_TIMEOUT",
    "VERIFY_FAILED",
    "NO_TESTS_RAN",
    "REQUIRED_NOT_PASSED",
    "FEWER_TESTS",
    "FLAKY",
    "CHECKLIST_EVIDENCE",
    "BLOCKED_NO_EVIDENCE",
    "BLOCKED_BUT_VERIFY_PASSES",
    "BLOCKED_TRY_ONCE_MORE",
]
# Answers that send the model back without counting as refusals.
NoticeCode = Literal["NO_SUBMIT", "SUBMIT_NOT_ALONE", "NO_USER_AVAILABLE", "TRUNCATED", "BAD_CALL"]


@dataclass(frozen=True, slots=True)
class TestReport:
    """Which tests a run executed, by id. Skipped ones were not executed."""

    __test__ = False  # not a test class for pytest

    passed: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()

    @property
    def executed(self) -> int:
        return len(self.passed) + len(self.failed)


@dataclass(frozen=True, slots=True)
class VerifierRun:
    """One run of the project's command.

    Attributes:
        exit_code: None where it was killed at its timeout. output: head and tail, both streams.
        report: None where the command wrote none that can be read; report_problem then says why.
        canary: `ok`, `none` where the runner has no place for one, or what was wrong with it.
        rewritten: files deciding about the tests that were written to, replaced or removed while it ran.
    """

    command: str
    exit_code: int | None
    output: str
    seconds: float
    timed_out: bool = False
    report: TestReport | None = None
    report_problem: str = ""
    canary: str = "none"
    rewritten: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification says of one tree. `details` names test ids or what else the code is about;
    `problem` is one sentence for the model, `would_pass` what would be accepted."""

    code: VerdictCode
    tree: str
    runs: tuple[VerifierRun, ...]
    details: tuple[str, ...] = ()
    problem: str = ""
    would_pass: str = ""

    @property
    def passed(self) -> bool:
        return self.code == "PASS"

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not accepted: the run goes on. `message` is what the model is told."""

    code: RefusalCode | NoticeCode
    message: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The run is over. `message` is for people; `details` for the record (e.g. the verdict's code)."""

    outcome: AgentOutcome
    message: str
    details: tuple[str, ...] = field(default=())


Decision = Refusal | End
