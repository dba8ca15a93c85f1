"""A run again, without its model: the recorded answers on a fresh copy of the baseline, with the real tools,
the real gate and the project's own check. The decisions must come out the same."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from endstop.agent.loop import ANSWERED
from endstop.agent.models import AgentModel, ModelFailed
from endstop.agent.result import AgentResult
from endstop.agent.run import Person, run_agent
from endstop.agent.settings import make_settings, merged
from endstop.agent.trajectory import Trajectory
from endstop.agent.tree import Trees
from endstop.outcomes import AgentOutcome
from endstop.protocol.toolcalls import ToolCall
from endstop.testing import Reply, ScriptedChat

# Ends that depend on the clock, on money, on a person or on the model's server, none of which is there again.
_CIRCUMSTANCES: frozenset[AgentOutcome] = frozenset(
    {"interrupted", "needs_user", "error", "limit:time", "limit:cost", "limit:context"}
)


@dataclass(frozen=True, slots=True)
class Replay:
    """`recorded` and `replayed`: step and code of each decision. `outcomes`: before and now."""

    recorded: tuple[tuple[int, str], ...]
    replayed: tuple[tuple[int, str], ...]
    outcomes: tuple[str | None, str]
    result: AgentResult

    @property
    def same(self) -> bool:
        before, after = self.outcomes
        return self.recorded == self.replayed and (
            before is None or before in _CIRCUMSTANCES or before == after
        )

    @property
    def difference(self) -> str:
        """The first one as a sentence, "" where there is none."""
        for place in range(max(len(self.recorded), len(self.replayed))):
            was, is_now = self.recorded[place : place + 1], self.replayed[place : place + 1]
            if was != is_now:
                return f"decision {place + 1} was {_shown(was)} and is now {_shown(is_now)}"
        before, after = self.outcomes
        return "" if self.same else f"the run ended as {before} and ends as {after} now"


def replay(path: Path, *, changes: Mapping[str, Any] | None = None) -> Replay:
    """Replay the trajectory at `path` (or in the state directory `path`).

    `changes`: settings that replace those of the run, e.g. of a sandbox that this machine has not.
    Raises EndstopError where the trees of the run are gone.
    """
    recorded = Trajectory.load(path)
    data = merged({**recorded.settings, "task": recorded.task}, changes or {})
    # Recorded times and prices are those of another run.
    data = merged(data, {"task": {"bounds": {"seconds": None, "cost": None}}})
    answers = recorded_turns(recorded)
    with tempfile.TemporaryDirectory(prefix="endstop-replay-") as folder:
        workspace, state = Path(folder) / "workspace", Path(folder) / "state"
        trees = Trees(recorded.path.parent, Path(recorded.workspace))
        trees.export(recorded.baseline, workspace)
        for path in recorded.task["dependencies"]:
            (workspace / path).parent.mkdir(parents=True, exist_ok=True)
            (workspace / path).symlink_to(Path(recorded.workspace) / path)
        also_at = (data.get("sandbox") or {}).get("also_at") or []
        data = merged(data, {"sandbox": {"also_at": [*also_at, recorded.workspace]}})
        data["state"] = str(state)
        model = AgentModel(ScriptedChat([*answers, _over]), recorded.model.get("name", ""), "scripted")
        result = run_agent(
            make_settings(data, str(recorded.path)), workspace, model=model, person=_recorded_person(recorded)
        )
        replayed = Trajectory.load(state).decisions()
    before = (recorded.outcome or {}).get("outcome")
    return Replay(tuple(recorded.decisions()), tuple(replayed), (before, result.outcome), result)


def recorded_turns(trajectory: Trajectory) -> list[Reply]:
    """The model's answers as a script. What was a cut answer is one again, whoever found it to be cut."""
    replies = []
    for turn in trajectory.turns:
        meta = turn["meta"]
        functions = [call["function"] for call in turn.get("tool_calls") or ()]
        broken = (meta.get("broken_calls") or [None])[0]
        kind = meta["stop_kind"]
        replies.append(
            Reply(
                turn["content"],
                tuple(ToolCall(f["name"], f["arguments"], f["arguments"]) for f in functions),
                turn.get("reasoning_content", ""),
                "max_tokens"
                if "cut" in meta and kind not in ("max_tokens", "context", "repetition")
                else kind,
                meta["stop_reason"],
                meta.get("open_call", broken),
                meta["usage"]["completion_tokens"],
            )
        )
    return replies


def _recorded_person(trajectory: Trajectory) -> Person:
    """Somebody who says to a question what was said to it then, and nothing where nothing was."""
    calls = {
        call["id"]: call["function"] for turn in trajectory.turns for call in turn.get("tool_calls") or ()
    }
    answers: dict[str, list[str]] = {}
    for message in trajectory.messages:
        function = calls.get(message.get("tool_call_id", ""), {})
        if function.get("name") in ("ask_user", "checkpoint") and message["content"].startswith(ANSWERED):
            arguments = json.loads(function["arguments"])
            asked = arguments.get("question") or arguments.get("note")
            answers.setdefault(asked, []).append(message["content"].removeprefix(ANSWERED))
    return lambda question: answers[question].pop(0) if answers.get(question) else None


def _over(messages: Sequence[Mapping[str, Any]]) -> str:
    raise ModelFailed("the recorded turns are over")


def _shown(decision: tuple[tuple[int, str], ...]) -> str:
    return f"{decision[0][1]} at step {decision[0][0]}" if decision else "none"
