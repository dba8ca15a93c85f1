"""Rewards: the four cases, the three settings for cut rollouts, the order of the weights."""

from __future__ import annotations

from itertools import product

import pytest

from endstop.outcomes import REWARD_ORDER, REWARD_WEIGHTS
from endstop.train.rewards import Judgement, RewardSettings

RIGHT, WRONG = Judgement(True, True), Judgement(False, True)
CUT_RIGHT, CUT_WRONG = Judgement(True, False), Judgement(False, False)
GAVE_UP = Judgement(False, True, True)


@pytest.mark.parametrize(
    ("judgement", "case"),
    [
        (RIGHT, "verified_finish"),
        (WRONG, "false_finish"),
        (CUT_RIGHT, "silent_failure"),
        (CUT_WRONG, "silent_failure"),
        (GAVE_UP, "honest_unfinished"),
        (Judgement(True, True, True), "verified_finish"),
        (Judgement(False, False, True), "silent_failure"),
    ],
)
def test_every_rollout_is_one_of_four_cases(judgement: Judgement, case: str) -> None:
    assert judgement.case == case


def test_the_stop_shaped_reward_is_the_weight_of_the_case() -> None:
    settings = RewardSettings("stop-shaped", "keep")
    rewards = [settings.of(j) for j in (WRONG, CUT_RIGHT, GAVE_UP, RIGHT)]
    assert rewards == [-1.0, -0.25, 0.0, 1.0]
    assert [REWARD_WEIGHTS["tampering"], *rewards] == [REWARD_WEIGHTS[case] for case in REWARD_ORDER]


@pytest.mark.parametrize(
    ("truncated", "right", "cut_right", "cut_counts"),
    [("keep", 1.0, 1.0, True), ("zero", 1.0, 0.0, True), ("mask", 1.0, 1.0, False)],
)
def test_the_exact_reward_with_each_setting_for_cut_rollouts(
    truncated: str, right: float, cut_right: float, cut_counts: bool
) -> None:
    settings = RewardSettings("exact", truncated)  # type: ignore[arg-type]
    assert settings.of(RIGHT) == right
    assert settings.of(WRONG) == settings.of(GAVE_UP) == settings.of(CUT_WRONG) == 0.0
    assert settings.of(CUT_RIGHT) == cut_right
    assert settings.counts(CUT_RIGHT) is settings.counts(CUT_WRONG) is cut_counts
    assert settings.counts(RIGHT)
    assert settings.counts(WRONG)


def test_a_cut_rollout_is_a_silent_failure_of_the_stop_shaped_reward_with_keep_and_zero() -> None:
    for truncated, judgement in product(("keep", "zero"), (CUT_RIGHT, CUT_WRONG)):
        assert RewardSettings("stop-shaped", truncated).of(judgement) == -0.25  # type: ignore[arg-type]


def test_other_weights_are_taken_in_the_same_order_only() -> None:
    weights = dict(zip(REWARD_ORDER, (-5.0, -4.0, -1.0, 0.5, 2.0), strict=True))
    assert RewardSettings("stop-shaped", weights=weights).of(WRONG) == -4.0  # type: ignore[arg-type]
    for bad in (
        (-1.0, -1.0, -0.5, 0.0, 1.0),
        (-2.0, -0.5, -1.0, 0.0, 1.0),
        (-2.0, -1.0, -0.5, 1.0, 0.0),
        (-1.0, 0.0, 1.0, 2.0, float("nan")),
    ):
        with pytest.raises(ValueError, match="must rise"):
            RewardSettings(weights=dict(zip(REWARD_ORDER, bad, strict=True)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exactly"):
        RewardSettings(weights={"false_finish": 0.0})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="the reward must be one of"):
        RewardSettings("shaped")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="truncated must be one of"):
        RewardSettings(truncated="drop")  # type: ignore[arg-type]
