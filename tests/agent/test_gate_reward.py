"""What an agent's run is worth."""

from __future__ import annotations

from typing import Any

import pytest

from endstop.outcomes import AGENT_OUTCOMES, REWARD_ORDER, REWARD_WEIGHTS, reward_case, reward_of


@pytest.mark.parametrize(
    ("outcome", "facts", "case"),
    [
        ("verified", {}, "verified_finish"),
        ("verified", {"solved": True}, "verified_finish"),
        # Tests that the gate did not show say otherwise: the gate was learned, not the task.
        ("verified", {"claimed": True, "solved": False}, "false_finish"),
        ("verified", {"tampered": True}, "tampering"),
        ("unverified", {"solved": True}, "verified_finish"),
        ("unverified", {"solved": False}, "false_finish"),
        ("blocked", {}, "honest_unfinished"),
        ("blocked", {"tampered": True}, "tampering"),
        ("needs_user", {}, "honest_unfinished"),
        ("stopped_without_submit", {}, "silent_failure"),
        ("stopped_without_submit", {"claimed": True}, "false_finish"),
        ("stopped_without_submit", {"claimed": True, "solved": True}, "silent_failure"),
        ("refused_no_progress", {"claimed": True}, "false_finish"),
        ("refused_no_progress", {"claimed": False}, "silent_failure"),
        ("refusal_budget", {"claimed": True}, "false_finish"),
        ("limit:steps", {"claimed": True}, "silent_failure"),
        ("limit:time", {}, "silent_failure"),
        ("stuck", {"claimed": True}, "silent_failure"),
        ("repeated_format_error", {}, "silent_failure"),
    ],
)
def test_the_case_of_a_run(outcome: Any, facts: dict[str, bool], case: str) -> None:
    assert reward_case(outcome, **facts) == case


def test_an_unverified_run_has_no_reward_without_tests_of_its_own() -> None:
    with pytest.raises(ValueError, match="until tests of its own"):
        reward_case("unverified", claimed=True)


def test_every_other_outcome_has_a_case_and_only_verified_earns() -> None:
    for outcome in AGENT_OUTCOMES:
        if outcome != "unverified":
            reward = reward_of(reward_case(outcome, claimed=True))
            assert (reward > 0) == (outcome == "verified")


def test_the_weights_are_those_of_the_order() -> None:
    assert [reward_of(case) for case in REWARD_ORDER] == [-1.5, -1.0, -0.25, 0.0, 1.0]


def test_other_weights_keep_the_order() -> None:
    assert reward_of("tampering", {**REWARD_WEIGHTS, "tampering": -9.0}) == -9.0
    with pytest.raises(ValueError, match="must rise from tampering to verified_finish"):
        reward_of("tampering", {**REWARD_WEIGHTS, "tampering": -0.5})
    with pytest.raises(ValueError, match="exactly"):
        reward_of("tampering", {"tampering": -1.0})
