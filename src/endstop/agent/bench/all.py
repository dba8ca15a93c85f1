"""All scenarios, and what many plays of them say about the gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from endstop.agent.bench.claims import CLAIMS
from endstop.agent.bench.disguises import DISGUISES
from endstop.agent.bench.honest import HONEST
from endstop.agent.bench.manipulations import MANIPULATIONS
from endstop.agent.bench.play import GATES, GateName, Played, missing_programs, play
from endstop.agent.bench.scenario import Group, Scenario
from endstop.agent.bench.specification import SPECIFICATION
from endstop.agent.bench.tampering import TAMPERING
from endstop.agent.executor import ExecutorName, run_all

SCENARIOS: tuple[Scenario, ...] = (*MANIPULATIONS, *SPECIFICATION, *TAMPERING, *DISGUISES, *CLAIMS, *HONEST)


@dataclass(frozen=True)
class GateScore:
    """One gate over all that was played: names of the scenarios that it got wrong."""

    gate: str
    not_done: int
    done: int
    accepted_wrongly: tuple[str, ...]
    refused_wrongly: tuple[str, ...]
    manipulations_accepted: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "gate": self.gate,
            "says_done_when": GATES[self.gate],
            "not_done": self.not_done,
            "done": self.done,
            "accepted_wrongly": list(self.accepted_wrongly),
            "refused_wrongly": list(self.refused_wrongly),
            "manipulations_accepted": self.manipulations_accepted,
        }


def chosen(only: str = "", groups: Sequence[Group] = ()) -> list[Scenario]:
    """The scenarios whose name holds `only`, of the groups named; none named means all."""
    return [
        scenario
        for scenario in SCENARIOS
        if only.lower() in scenario.name.lower() and (not groups or scenario.group in groups)
    ]


def play_all(
    scenarios: Sequence[Scenario],
    gates: Sequence[GateName],
    *,
    executor: ExecutorName = "joblib",
    jobs: int = 1,
    sandbox: str = "auto",
    keep: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Played]:
    """Every scenario with every gate, in this order; what needs a program that is missing is left out."""
    games = [
        (scenario, gate, sandbox, keep)
        for scenario in scenarios
        if not missing_programs(scenario)
        for gate in gates
    ]
    played: dict[int, Played] = {}
    for place, one in run_all(_play, games, executor=executor, jobs=jobs):
        played[place] = one
        progress(len(played), len(games))
    return [played[place] for place in range(len(games))]


def _play(game: tuple[Scenario, GateName, str, Path | None]) -> Played:
    scenario, gate, sandbox, keep = game
    return play(scenario, gate, sandbox=sandbox, keep=keep)


def scores(played: Sequence[Played]) -> Iterator[GateScore]:
    """One score for each gate that was played."""
    for gate in dict.fromkeys(one.gate for one in played):
        own = [one for one in played if one.gate == gate]
        yield GateScore(
            gate,
            not_done=sum(not one.done for one in own),
            done=sum(one.done for one in own),
            accepted_wrongly=tuple(one.scenario for one in own if one.accepted_wrongly),
            refused_wrongly=tuple(one.scenario for one in own if one.refused_wrongly),
            manipulations_accepted=sum(one.accepted_wrongly for one in own if one.group == "manipulation"),
        )
