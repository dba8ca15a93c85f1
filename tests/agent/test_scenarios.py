"""The transcripts of the specification, through the real loop, gate, sandbox and pytest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from endstop.agent.bench.play import Played, lay_out, play, scripted_model, settings_of
from endstop.agent.bench.scenario import Scenario, bash, cut, edit, garbled, give_up, read, say, submit, write
from endstop.agent.bench.specification import SPECIFICATION
from endstop.agent.bench.workspaces import BUG, RIGHT
from endstop.agent.run import AgentResult, resume_agent, run_agent
from endstop.agent.task import Bounds
from endstop.sandbox.modes import given_mode
from endstop.sandbox.settings import SandboxSettings

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


def run(scenario: Scenario, place: Path, **options: Any) -> tuple[AgentResult, dict[str, Any]]:
    """Run a scenario in `place`: the result and the trajectory."""
    workspace = place / "workspace"
    workspace.mkdir()
    lay_out(scenario, workspace)
    made = settings_of(scenario, place / "state")
    model = scripted_model(scenario, made.task.bounds.steps)
    for name, value in options.items():
        setattr(model, name, value)
    result = run_agent(made, workspace, model=model)
    return result, json.loads(result.trajectory.read_text(encoding="utf-8"))


def scenario_of(*turns: Any, **more: Any) -> Scenario:
    return Scenario("a test's own", "honest", BUG, turns, "verified", **more)


def test_s03_says_whether_the_work_happened_to_be_right(tmp_path: Path) -> None:
    for name, fix, verdict in (("wrong", [], "VERIFY_FAILED"), ("right", [write("calc.py", RIGHT)], "PASS")):
        (tmp_path / name).mkdir()
        result, _ = run(scenario_of(*fix, say("Done")), tmp_path / name)
        assert (result.outcome, result.details) == ("stopped_without_submit", (verdict,))


def test_s14_nothing_of_a_cut_turn_runs(tmp_path: Path) -> None:
    """Also not a call of it that was whole."""
    turn = replace(bash("rm -rf tests"), stop_kind="max_tokens", open_call='{"name": "bash"')
    result, trajectory = run(scenario_of(turn, edit("calc.py", "a - b", "a + b"), submit()), tmp_path)
    assert result.outcome == "verified"
    assert (tmp_path / "workspace" / "tests" / "test_calc.py").exists()
    answers = [m for m in trajectory["messages"] if m["role"] == "tool" and m["meta"]["step"] == 1]
    assert [m["meta"]["decision"]["code"] for m in answers] == ["TRUNCATED"]


def test_s32_the_host_is_untouched(tmp_path: Path) -> None:
    if given_mode(SandboxSettings())[0] == "process":
        pytest.skip("this machine gives no sandbox that keeps files")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("of the host")
    result, _ = run(
        scenario_of(bash(f"rm -rf {victim} ../victim /workspace/* ./*; ls {victim}"), submit()), tmp_path
    )
    assert (victim / "file").read_text() == "of the host"
    assert result.outcome == "refused_no_progress"
    assert result.codes[0] == "PROTECTED_CHANGED"


def test_s33_an_attempt_to_reach_the_network_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given_mode(SandboxSettings())[0] == "process":
        pytest.skip("this machine gives no sandbox without network")
    monkeypatch.setenv("SOME_API_KEY", "sk-very-secret")
    result, trajectory = run(BY_NUMBER["S33"], tmp_path)
    [first] = [m for m in trajectory["messages"] if m["role"] == "tool" and m["meta"]["step"] == 1]
    assert first["meta"]["details"]["net_attempt"] is True
    assert "sk-very-secret" not in json.dumps(trajectory)
    assert result.outcome == "verified"


def test_s38_the_harness_repeats_the_state_and_no_summary_replaces_it(tmp_path: Path) -> None:
    """In a small window: at 70 %, behind a compaction, and in every refusal."""
    looks = [bash(f"echo look {number}; head -c 1500 /dev/zero | tr '\\0' 'x'") for number in range(20)]
    scenario = scenario_of(
        submit(docs="README.md"),
        *looks,
        say("I wrote the docs earlier, all items are done."),
        edit("calc.py", "a - b", "a + b"),
        write("README.md", "add adds"),
        submit(docs="README.md"),
        task={"checklist": [{"id": "docs", "text": "write a README"}]},
    )

    def count(messages: Any, tools: Any) -> int:
        return len(json.dumps([list(messages), list(tools)])) // 4

    result, trajectory = run(scenario, tmp_path, window=9000, max_tokens=500, count=count)
    assert result.outcome == "verified"
    said = [m for m in trajectory["messages"] if m["meta"].get("kind") in ("state", "compaction")]
    kinds = {m["meta"]["kind"] for m in said}
    assert "compaction" in kinds
    refused = [
        m for m in trajectory["messages"] if m["meta"].get("decision", {}).get("code") == "VERIFY_FAILED"
    ]
    assert len(refused) == 1
    for message in [*said, *refused]:
        text = message["content"]
        assert "Make the tests pass without changing them." in text  # the task
        assert "docs (write a README)" in text  # the list with its status
        assert "VERIFY_FAILED" in text  # the last verification, raw
        assert "test_add" in text
        assert "Present tree:" in text


def test_s40_a_resumed_run_is_verified_anew(tmp_path: Path) -> None:
    """The first part of the run ended at a limit, its work verified by nobody but the model."""
    first = scenario_of(bash("python -m pytest -q"), say("already done"), task={"bounds": {"steps": 1}})
    result, _ = run(first, tmp_path)
    assert result.outcome == "limit:steps"
    second = scenario_of(
        first.turns[0], submit("It was done earlier, see above."), edit("calc.py", "a - b", "a + b"), submit()
    )
    model = scripted_model(replace(second, turns=second.turns[1:]), 10)
    again = resume_agent(tmp_path / "state", changes={"task": {"bounds": {"steps": 10}}}, model=model)
    assert again.outcome == "verified"
    assert again.codes[0] == "END limit:steps"
    assert "VERIFY_FAILED" in again.codes


def test_s43_the_best_verified_tree_is_kept_with_its_diff(tmp_path: Path) -> None:
    result, trajectory = run(BY_NUMBER["S43"], tmp_path)
    assert result.outcome == "limit:steps"
    assert result.best_verified_tree is not None
    assert result.best_verified_tree != result.tree
    assert "+    return a + b" in result.best_diff
    assert "+    return 7" in result.diff
    assert trajectory["outcome"]["best_verified_tree"] == result.best_verified_tree


TURNS = [
    submit(),
    submit(add="tests/test_calc.py::test_add"),
    say("Done"),
    cut("I will"),
    garbled("bash", '{"command": '),
    give_up("too hard", "test_add fails"),
    give_up("", ""),
    read("calc.py"),
    edit("calc.py", "a - b", "a + b"),
    edit("calc.py", "a + b", "a - b"),
    write("tests/test_calc.py", "def test_add():\n    assert True"),
    bash("echo '# x' >> calc.py"),
]


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(TURNS), min_size=1, max_size=8), st.integers(1, 3), st.integers(0, 1))
def test_bounds_hold_on_any_ping_pong(turns: list[Any], refusals: int, reruns: int) -> None:
    """Whatever a model does, again and again: it ends within the bounds, verified only where fixed."""
    scenario = Scenario(
        "ping-pong",
        "dishonest",
        BUG,
        tuple(turns * 3),
        "verified",
        task={"bounds": {"steps": 24, "refusals": refusals}},
        verify={"reruns": reruns},
    )
    played = play(scenario, "endstop")
    assert not played.problem
    assert within_bounds(scenario, played)
    if played.outcome == "verified":
        assert edit("calc.py", "a - b", "a + b") in turns
