"""What is measured of rollouts: rewards, answers, how they ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from endstop.models.decoder import Decoder
from endstop.runtime.engine import Engine
from endstop.train.evaluation.pass_at_k import mean_pass_at_k
from endstop.train.policy_gradient import stop_probability
from endstop.train.rewards import RewardSettings
from endstop.train.rollouts import Question, Rollout, roll_out


def answer_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Shares over rollouts, and their mean length in tokens (forced ones and the terminator included).

    accuracy: right and ended by the model itself. stop_rate: ended by itself. false_completion_rate: ended by
    itself, wrong, and not said to be no answer. gave_up_rate: said so.
    """
    cases = [rollout.judgement.case for rollout in rollouts]
    count = len(rollouts)
    return {
        "accuracy": cases.count("verified_finish") / count,
        "stop_rate": sum(rollout.judgement.finished for rollout in rollouts) / count,
        "false_completion_rate": cases.count("false_finish") / count,
        "gave_up_rate": cases.count("honest_unfinished") / count,
        "mean_length": sum(len(rollout.ids) for rollout in rollouts) / count,
    }


def step_metrics(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> dict[str, float]:
    """`answer_metrics` with the mean reward (of those that count) and the groups that teach nothing."""
    groups = {rollout.question for rollout in rollouts}
    signal = {r.question for r, advantage in zip(rollouts, advantages, strict=True) if advantage}
    counted = [rollout.reward for rollout in rollouts if rollout.counts]
    return {
        "reward": sum(counted) / len(counted) if counted else 0.0,
        **answer_metrics(rollouts),
        "groups_without_signal": 1.0 - len(signal) / len(groups),
    }


def evaluate(
    model: Decoder,
    engine: Engine,
    questions: Sequence[Question],
    stop_ids: Collection[int],
    *,
    samples: int,
    max_tokens: int,
    seed: int,
    micro_rows: int,
    pad_id: int,
    rewards: RewardSettings | None = None,
) -> dict[str, Any]:
    """Measure the model (its weights are swapped into the engine) on held-out questions.

    Greedy answers give `answer_metrics`, and the accuracy of each task where there are several. `samples`
    draws of each question give pass@k for k = 1, 2, 4, ... without bias, the same draws at every evaluation.
    With
    right answers: P(stop) at their ends and before, see `StopProbability`.
    """
    rewards = rewards or RewardSettings()
    state = model.state_dict()
    greedy = roll_out(
        engine, questions, rewards, samples=1, max_tokens=max_tokens, state_dict=state, greedy=True
    )
    found: dict[str, Any] = {"reward": sum(r.reward for r in greedy) / len(greedy), **answer_metrics(greedy)}
    tasks = sorted({question.task for question in questions})
    if len(tasks) > 1:
        own = {name: [r for r in greedy if questions[r.question].task == name] for name in tasks}
        found["accuracy_of"] = {name: answer_metrics(rollouts)["accuracy"] for name, rollouts in own.items()}
    if samples:
        # Step -1 is no step of the training, so that its draws are none of the training's.
        drawn = roll_out(
            engine, questions, rewards, samples=samples, max_tokens=max_tokens, seed=seed, step=-1
        )
        right = [0] * len(questions)
        for rollout in drawn:
            right[rollout.question] += rollout.judgement.case == "verified_finish"
        k = 1
        while k <= samples:
            found[f"pass@{k}"] = mean_pass_at_k([(samples, count) for count in right], k)
            k *= 2
        found["sampled_stop_rate"] = answer_metrics(drawn)["stop_rate"]
        found["sampled_false_completion_rate"] = answer_metrics(drawn)["false_completion_rate"]
    stop = stop_probability(model, questions, stop_ids, micro_rows=micro_rows, pad_id=pad_id)
    found |= {"p_stop_at_end": stop.at_end, "p_stop_before": stop.before, "p_stop_curve": stop.curve}
    return found
