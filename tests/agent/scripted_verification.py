"""A verification whose verdict stands in the workspace: the file `verdict` holds the code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from endstop.agent.decisions import TestReport, Verdict, VerdictCode, VerifierRun
from endstop.agent.gate import Gate, GateState
from endstop.agent.task import Task
from endstop.agent.tree import Trees

COMMAND = "pytest -q"
GREEN = TestReport(
    passed=frozenset({"tests/test_calc.py::test_add", "tests/test_calc.py::test_zero[0-0]"}),
    skipped=frozenset({"tests/test_calc.py::test_windows"}),
)
RED = TestReport(
    passed=frozenset({"tests/test_calc.py::test_zero[0-0]"}),
    failed=frozenset({"tests/test_calc.py::test_add"}),
)


class ProtectedTests:
    """Everything in tests/ is protected, but for tests/new_*."""

    def changed(self, trees: Any, baseline: str, tree: str, /) -> tuple[Sequence[str], Sequence[str]]:
        paths = [path for path in trees.changed(baseline, tree) if path.startswith("tests/")]
        opened = [path for path in paths if path.startswith("tests/new_")]
        return [path for path in paths if path not in opened], opened


class ScriptedVerification:
    """`reruns` as in VerifySettings: a failing run is followed by so many on the same tree."""

    def __init__(self, trees: Trees, reruns: int = 1) -> None:
        self.trees = trees
        self.reruns = reruns
        self.protected = ProtectedTests()
        self.verified: list[str] = []
        self.always: VerdictCode | None = None

    def verify(self, tree: str, /) -> Verdict:
        self.verified.append(tree)
        written = self.trees.read(tree, "verdict") or b""
        code = self.always or cast(VerdictCode, written.decode().strip())
        red = VerifierRun(COMMAND, 1, "E   assert -1 == 5\n1 failed, 1 passed\n", 0.5, report=RED)
        green = VerifierRun(COMMAND, 0, "2 passed, 1 skipped\n", 0.5, report=GREEN, canary="ok")
        if code == "PASS":
            return Verdict(code, tree, (green,))
        if code == "FLAKY":
            return Verdict(
                code, tree, (red, green), ("tests/test_calc.py::test_add",), "It passed and failed."
            )
        if code == "VERIFY_TIMEOUT":
            slow = VerifierRun(COMMAND, None, "collecting ...\n", 2.0, timed_out=True)
            return Verdict(code, tree, (slow,), problem="It did not end in 2 s.", would_pass="a faster one")
        runs = (red,) * (1 + self.reruns)
        return Verdict(
            code, tree, runs, ("tests/test_calc.py::test_add",), "A test failed.", "all tests pass"
        )


class Bench:
    """A workspace with a gate over it."""

    def __init__(self, place: Path, interactive: bool = False, verified: bool = True, **task: Any) -> None:
        self.root = place / "workspace"
        (self.root / "tests").mkdir(parents=True)
        self.write("verdict", "VERIFY_FAILED")
        self.write("tests/test_calc.py", "def test_add(): ...\n")
        self.trees = Trees(place / "state", self.root)
        self.verification = ScriptedVerification(self.trees)
        self.baseline = self.trees.snapshot()
        self.task = Task(task="make the tests pass", **task)
        self.interactive = interactive
        self.verified = verified
        self.gate = self.gate_of(GateState())

    def gate_of(self, state: GateState) -> Gate:
        verification = self.verification if self.verified else None
        return Gate(self.task, self.trees, verification, state, self.baseline, self.interactive)

    def write(self, path: str, text: str) -> None:
        (self.root / path).write_text(text)

    @property
    def state(self) -> GateState:
        return self.gate.state

    @property
    def tree(self) -> str:
        return self.trees.snapshot()
