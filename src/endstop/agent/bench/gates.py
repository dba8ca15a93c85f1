"""Simpler gates, as harnesses have them: each takes the loop's questions and answers with what it believes.

They run the project's command in the workspace as it lies, not in a clean export, and they have no memory. A
give-up is not among the things they know, so they send the model on.
"""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from endstop.agent.decisions import Decision, End, NoticeCode, Refusal, TestReport
from endstop.agent.report import UnreadableReport, read_junit
from endstop.outcomes import AgentOutcome
from endstop.sandbox.command import CommandResult, run_command
from endstop.sandbox.settings import SandboxSettings

SimpleGateName = Literal["hidden", "canary", "junit", "exit-code", "text"]
SIMPLE_GATES: dict[str, str] = {
    "canary": "the command fails at a planted test and at no other",
    "junit": "it exits with 0 and reports a test and no failure",
    "exit-code": "the command exits with 0",
    "text": "the model says so",
    "hidden": "a check passes that neither model nor gates know",
}
_CLAIM = re.compile(
    r"\b(done|fixed|pass(es|ed|ing)?|complete[d]?|works?|green|finished|code 0|agreed)\b", re.I
)


class SimpleGateState:
    """Nothing is remembered; the loop saves it all the same."""

    def to_dict(self) -> dict[str, Any]:
        return {}


class SimpleGate:
    """One of the simpler gates.

    Args:
        root: of the workspace. command: the project's, or the hidden check.
        bind: dependencies. last_text: what the model said in its last turn.
    """

    def __init__(
        self,
        name: SimpleGateName,
        root: Path,
        command: str,
        sandbox: SandboxSettings,
        *,
        seconds: float,
        bind: Mapping[str, Path],
        last_text: Callable[[], str],
        uses_pytest: bool,
    ) -> None:
        self.name, self.root, self.command, self.sandbox = name, root, command, sandbox
        self.seconds, self.bind = seconds, bind
        self.last_text, self.uses_pytest = last_text, uses_pytest
        self.state = SimpleGateState()

    def submit(
        self, summary: str = "", evidence: Mapping[str, str] | None = None, assumptions: Sequence[str] = ()
    ) -> Decision:
        return self._decide(summary)

    def text_only(self) -> Decision:
        """To them the end of the talk is the claim."""
        return self._decide(self.last_text())

    def give_up(self, reason: str, evidence: str, hard: bool = False) -> Decision:
        return Refusal("BLOCKED_TRY_ONCE_MORE", "Go on.")

    def ask_user(self, question: str) -> Decision:
        return Refusal("NO_USER_AVAILABLE", "Nobody is there. Go on.")

    def not_alone(self, name: str) -> Decision:
        return Refusal("SUBMIT_NOT_ALONE", "One after the other.")

    def format_error(self, code: NoticeCode, why: str) -> Decision:
        return Refusal(code, why)

    def good_turn(self) -> None:
        """Nothing is counted."""

    def finish(self, outcome: AgentOutcome, message: str = "") -> End:
        return End(outcome, message)

    def state_block(self) -> str:
        return ""

    def _decide(self, said: str) -> Decision:
        accepted = self._claims(said) if self.name == "text" else self._check()
        return End("verified", "Accepted.") if accepted else Refusal("VERIFY_FAILED", "Not accepted. Go on.")

    def _claims(self, said: str) -> bool:
        return _CLAIM.search(said) is not None

    def _check(self) -> bool:
        if self.name == "hidden":
            return "done" in self._run().output.split()
        if self.name == "exit-code" or not self.uses_pytest:
            return self._run().exit_code == 0
        # A directory that any user may write to: root's commands run as somebody else.
        with tempfile.TemporaryDirectory(prefix="endstop-report-", ignore_cleanup_errors=True) as place:
            Path(place).chmod(0o777)
            path = Path(place, "report.xml")
            options = {"PYTEST_ADDOPTS": f"--junitxml={path}"}
            if self.name == "junit":
                return self._run(options, [Path(place)]).exit_code == 0 and _is_green(_report(path))
            return self._canary(options, path)

    def _canary(self, options: Mapping[str, str], path: Path) -> bool:
        """Exit 1, exactly the planted failure, and the rest green."""
        name = f"test_{secrets.token_hex(8)}"
        planted = self.root / f"{name}.py"
        planted.write_text(
            f"def {name}_fails():\n    assert False\n\n\ndef {name}_passes():\n    assert True\n"
        )
        planted.chmod(0o644)
        try:
            code = self._run(options, [path.parent]).exit_code
        finally:
            with suppress(FileNotFoundError):
                planted.unlink()
        report = _report(path)
        if code in (0, None) or report is None:
            return False
        own = [test for test in report.passed | report.failed if name in test]
        return len(own) == 2 and len(report.failed) == 1 and f"{name}_fails" in next(iter(report.failed))

    def _run(
        self, environment: Mapping[str, str] | None = None, writable: Sequence[Path] = ()
    ) -> CommandResult:
        return run_command(
            self.command,
            self.root,
            self.sandbox,
            # Compiled files are told apart by whole seconds and sizes: a fix may have both of the bug's.
            environment={"PYTHONDONTWRITEBYTECODE": "1", **(environment or {})},
            writable=writable,
            bind=self.bind,
            seconds=self.seconds,
        )


def _report(path: Path) -> TestReport | None:
    try:
        return read_junit(path)
    except UnreadableReport:
        return None


def _is_green(report: TestReport | None) -> bool:
    return report is not None and report.executed > 0 and not report.failed
