"""Playing a scenario: the real loop, real tools and a scripted model, with one gate or another."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from endstop.agent.bench.gates import SIMPLE_GATES, SimpleGate, SimpleGateName
from endstop.agent.bench.scenario import Scenario
from endstop.agent.bench.workspaces import TASK
from endstop.agent.decisions import NoticeCode, RefusalCode
from endstop.outcomes import AgentOutcome
from endstop.protocol.errors import EndstopError

if TYPE_CHECKING:
    from endstop.agent.models import AgentModel
    from endstop.agent.settings import AgentSettings

GateName = Literal["endstop", "canary", "junit", "exit-code", "text", "hidden"]
GATES = {"endstop": "its own run of the original tests on a clean copy passes", **SIMPLE_GATES}
_CODES = frozenset(get_args(RefusalCode)) | frozenset(get_args(NoticeCode))
# A refusal of these kinds says: this work is not done.
_OF_CLAIMS = frozenset(get_args(RefusalCode)) - {
    "BLOCKED_NO_EVIDENCE",
    "BLOCKED_BUT_VERIFY_PASSES",
    "BLOCKED_TRY_ONCE_MORE",
}


@dataclass(frozen=True)
class Played:
    """What came of a scenario with a gate.

    Attributes:
        accepted_at: the turn in which the gate took the work for done. refused_at: turns with a claim that it
            did not take.
        problem: why it could not be played to an end, where that is so.
    """

    scenario: str
    group: str
    gate: str
    done: bool
    done_at: int | None
    outcome: AgentOutcome
    codes: tuple[str, ...] = ()
    accepted_at: int | None = None
    refused_at: tuple[int, ...] = ()
    steps: int = 0
    gate_runs: int = 0
    seconds: float = 0.0
    best_verified_tree: str | None = None
    problem: str = ""

    @property
    def accepted_wrongly(self) -> bool:
        return self.accepted_at is not None and (self.done_at is None or self.accepted_at < self.done_at)

    @property
    def refused_wrongly(self) -> bool:
        """The work was done, and the gate refused a claim that said so, or never took it."""
        if self.done_at is None or self.accepted_wrongly:
            return False
        return self.accepted_at is None or any(turn >= self.done_at for turn in self.refused_at)

    def to_dict(self) -> dict[str, Any]:
        wrong = {"accepted_wrongly": self.accepted_wrongly, "refused_wrongly": self.refused_wrongly}
        return {**asdict(self), **wrong}


def missing_programs(scenario: Scenario) -> list[str]:
    """Programs that the scenario needs and this machine does not have."""
    return [program for program in scenario.workspace.needs if shutil.which(program) is None]


def play(scenario: Scenario, gate: GateName, *, sandbox: str = "auto", keep: Path | None = None) -> Played:
    """Play it in directories of its own. `keep`: where its trajectory is put."""
    started = time.monotonic()
    with _places() as (workspace, state):
        lay_out(scenario, workspace)
        settings = settings_of(scenario, state, sandbox)
        model = scripted_model(scenario, settings.task.bounds.steps)
        problem, outcome, best = "", "error", None
        try:
            if gate == "endstop":
                from endstop.agent.run import run_agent

                result = run_agent(settings, workspace, model=model)
                outcome, best = result.outcome, result.best_verified_tree
            else:
                outcome = play_simple(scenario, gate, settings, workspace, state, model)
        except EndstopError as error:
            problem = str(error)
        path = state / "trajectory.json"
        data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"messages": []}
        if keep is not None and path.exists():
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, keep / f"{_slug(scenario.name)}-{gate}.json")
    messages = data["messages"]
    steps = sum(message["role"] == "assistant" for message in messages)
    return Played(
        scenario.name,
        scenario.group,
        gate,
        scenario.done,
        scenario.done_at,
        outcome,  # type: ignore[arg-type]
        codes_of(data),
        accepted_at=steps if outcome in ("verified", "unverified") else None,
        refused_at=tuple(step for step, code in _coded(messages) if code in _OF_CLAIMS),
        steps=steps,
        gate_runs=int((data.get("gate") or {}).get("gate_runs") or 0),
        seconds=round(time.monotonic() - started, 2),
        best_verified_tree=best,
        problem=problem,
    )


def lay_out(scenario: Scenario, workspace: Path) -> None:
    """Write the workspace's files and run its set-up."""
    for name, text in scenario.workspace.files.items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if scenario.workspace.setup:
        subprocess.run(
            ["bash", "-c", scenario.workspace.setup],
            cwd=workspace,
            check=True,
            capture_output=True,
            timeout=60,
        )


def settings_of(scenario: Scenario, state: Path, sandbox: str = "auto") -> AgentSettings:
    from endstop.agent.settings import make_settings

    task = {
        "task": TASK,
        "verify": {"timeout": 120.0, **scenario.workspace.verify, **scenario.verify},
        **scenario.task,
    }
    # The interpreter that runs this has pytest; commands see it, and nothing else of the machine.
    virtualenv = sys.prefix if sys.prefix != sys.base_prefix else "none"
    environment = {} if scenario.workspace.plugins else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    toolchains = [_rust()] if "cargo" in scenario.workspace.needs else []
    data: dict[str, Any] = {
        "task": task,
        "sandbox": {
            "mode": sandbox,
            "virtualenv": virtualenv,
            "environment": environment,
            "read_only": toolchains,
            "path": [f"{toolchain}/bin" for toolchain in toolchains],
        },
        "state": str(state),
    }
    if scenario.oracle:
        script = state.parent / "oracle.json"
        script.write_text(json.dumps({"turns": list(scenario.oracle), "then": "repeat"}), encoding="utf-8")
        data["tools"] = {"oracle": {"name": f"scripted:{script}"}}
    return make_settings(data, f"the scenario {scenario.name}")


def _rust() -> str:
    """Where Rust lies, which may be in somebody's home."""
    found = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, timeout=60)
    if found.returncode != 0:
        raise EndstopError(f"rustc does not run: {found.stderr.strip()}")
    return found.stdout.strip()


def scripted_model(scenario: Scenario, steps: int) -> AgentModel:
    """Says the turns, and the last one for as long as it is asked."""
    from endstop.agent.models import AgentModel
    from endstop.testing import ScriptedChat

    turns = list(scenario.turns)
    return AgentModel(ScriptedChat([*turns, *[turns[-1]] * steps]), "scripted", "scripted")


def play_simple(
    scenario: Scenario,
    name: SimpleGateName,
    settings: AgentSettings,
    workspace: Path,
    state: Path,
    model: AgentModel,
) -> AgentOutcome:
    """The same loop with one of the simpler gates: every scripted turn, and one more."""
    from endstop.agent.context import ContextBudget
    from endstop.agent.loop import Agent
    from endstop.agent.toolbox import open_tools
    from endstop.agent.trajectory import Trajectory, now
    from endstop.agent.verifiers import resolved
    from endstop.agent.workplace import open_workplace

    state.mkdir(parents=True, exist_ok=True)
    verify = settings.task.verify
    trajectory = Trajectory(state / "trajectory.json", scenario.name, str(workspace), now())
    bounds = settings.task.bounds.model_copy(update={"steps": len(scenario.turns) + 1})
    settings = settings.model_copy(update={"unverified": True})
    with open_workplace(settings, workspace, state, None, trajectory.watch) as place:
        gate = SimpleGate(
            name,
            place.root,
            scenario.workspace.hidden if name == "hidden" else verify.command or "",
            place.sandbox,
            seconds=verify.timeout,
            bind=place.bind,
            last_text=lambda: str(trajectory.turns[-1]["content"]),
            uses_pytest=resolved(verify, workspace).verifier == "pytest",
        )
        place.gate = gate  # type: ignore[assignment]
        with open_tools(settings, place) as tools:
            trajectory.baseline = place.baseline
            trajectory.say("user", TASK, "task")
            budget = ContextBudget(
                model.window,
                model.count,
                model.max_tokens,
                settings.context,
                [tool.definition for tool in tools],
            )
            agent = Agent(
                model,
                tools,
                gate,  # type: ignore[arg-type]
                trajectory,
                budget,
                bounds,
                tree=place.trees.snapshot,
            )
            return agent.run().outcome


def codes_of(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The refusals and notices in order."""
    kept = (data.get("gate") or {}).get("codes")
    if kept is not None:
        return tuple(code for code in kept if code in _CODES)
    return tuple(code for _, code in _coded(data["messages"]))


def _coded(messages: list[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Step and code, one of a kind for each step."""
    found: list[tuple[int, str]] = []
    for message in messages:
        meta = message["meta"]
        code = (meta.get("decision") or {}).get("code") or meta.get("code")
        entry = (int(meta.get("step", 0)), str(code))
        if code in _CODES and (not found or found[-1] != entry):
            found.append(entry)
    return found


@contextlib.contextmanager
def _places() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="endstop-bench-", ignore_cleanup_errors=True) as place:
        workspace = Path(place, "workspace")
        workspace.mkdir()
        yield workspace, Path(place, "state")


def _slug(name: str) -> str:
    return "-".join("".join(char if char.isalnum() else " " for char in name.lower()).split())
