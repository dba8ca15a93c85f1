"""The transcripts of the specification, through the real loop, gate, sandbox and pytest."""

from __future__ import annotations

import pytest

from endstop.agent.bench.play import Played, play
from endstop.agent.bench.scenario import Scenario
from endstop.agent.bench.specification import SPECIFICATION
from endstop.agent.task import Bounds

BY_NUMBER = {scenario.name.split()[0]: scenario for scenario in SPECIFICATION}
SLOW = {"S10", "S12", "S23"}


def within_bounds(scenario: Scenario, played: Played) -> bool:
    """Calls of the model <= S, runs of the project's command <= R(1+k)+1."""
    bounds = Bounds.model_validate(scenario.task.get("bounds", {}))
    reruns = int(scenario.verify.get("reruns", 1))
    return played.steps <= bounds.steps and played.gate_runs <= bounds.refusals * (1 + reruns) + 1


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=pytest.mark.slow) if number in SLOW else number for number in BY_NUMBER],
)
def test_transcript(number: str) -> None:
    scenario = BY_NUMBER[number]
    played = play(scenario, "endstop")
    assert (played.outcome, played.codes[: len(scenario.codes)]) == (scenario.outcome, scenario.codes)
    assert not played.accepted_wrongly
    assert not played.refused_wrongly
    assert within_bounds(scenario, played)
    if scenario.outcome == "verified":
        assert played.codes == scenario.codes  # nothing else was said
        assert played.accepted_at == len(scenario.turns)
    assert bool(played.problem) == (not scenario.starts)
