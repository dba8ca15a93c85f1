"""One step of RL: roll out, judge, update.

Several processes (torchrun) share the questions of a step, and each has a whole model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError
from endstop.runtime.engine import Engine
from endstop.train.distributed import Process, summed, sums
from endstop.train.optimizer import Optimizers
from endstop.train.policy_gradient import PolicyStatistics, group_advantages, policy_batches, policy_loss
from endstop.train.questions import Questions
from endstop.train.rl_metrics import evaluate, step_metrics
from endstop.train.rl_settings import RLSettings
from endstop.train.rollouts import Question, roll_out

# Muon's momentum: that of its long run from the beginning, since a step's gradient is mostly noise.
_MOMENTUM = 0.95


@dataclass(frozen=True)
class PolicyJob:
    """Everything a step works with.

    Attributes:
        stop_ids: what ends a row. pad_id: fills rows up, never a target.
        held_out: evaluated on, with their right answers.
    """

    model: Decoder
    optimizers: Optimizers
    engine: Engine
    questions: Questions
    held_out: Sequence[Question]
    stop_ids: frozenset[int]
    pad_id: int
    settings: RLSettings
    process: Process

    def fits(self, question: Question) -> bool:
        """Whether the window leaves room for an answer."""
        window = self.engine.context_len
        return window is None or len(question.prompt_ids) < window

    def evaluate(self) -> dict[str, Any]:
        settings = self.settings
        return evaluate(
            self.model,
            self.engine,
            self.held_out,
            self.stop_ids,
            samples=settings.evaluation_samples,
            max_tokens=settings.max_tokens,
            seed=settings.seed,
            micro_rows=settings.micro_rows,
            pad_id=self.pad_id,
            rewards=settings.rewards,
        )


def reinforce_step(job: PolicyJob, step: int) -> dict[str, float]:
    """One update: its metrics. Raises EndstopError, with the weights as they were, where a number is not
    finite, or no question fits into the window; questions that do not are left out and counted.

    Where every answer of a step is worth the same as the others to its question there is no gradient and no
    update.
    """
    settings, process = job.settings, job.process
    started = time.perf_counter()
    first = step * settings.questions
    shares = range(process.rank, settings.questions, process.world)
    drawn = {number: job.questions.question("train", first + number) for number in shares}
    numbers = [number for number, question in drawn.items() if job.fits(question)]
    rollouts = roll_out(
        job.engine,
        [drawn[number] for number in numbers],
        settings.rewards,
        samples=settings.samples,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        step=step,
        numbers=numbers,
        state_dict=job.model.state_dict(),
    )
    rolled = time.perf_counter()
    advantages = group_advantages(rollouts)
    batches, own_total = policy_batches(
        rollouts,
        advantages,
        job.stop_ids,
        micro_rows=settings.micro_rows,
        pad_id=job.pad_id,
        terminator_in_loss=settings.terminator_in_loss,
    )
    total, signal, kept = sums([float(own_total), float(len(batches)), float(len(numbers))], process)
    if not kept:
        raise EndstopError(
            f"every question of step {step + 1} is longer than the window of {job.engine.context_len} "
            "tokens: ask other tasks, or train a model with a longer window."
        )
    statistics = PolicyStatistics()
    job.model.train()
    job.optimizers.zero_grad()
    for batch in batches:
        policy_loss(job.model, batch, int(total), statistics).backward()  # type: ignore[no-untyped-call]
    multiplier = settings.lr_fraction * (1.0 - step / settings.steps)
    norm = 0.0
    if signal:
        _sum_gradients(job.model, process)
        norm = job.optimizers.clip_gradients()
        if not math.isfinite(norm):
            raise EndstopError(f"the gradient of step {step + 1} is {norm}; lower the learning rates.")
        job.optimizers.set_schedule(multiplier, _MOMENTUM)
        job.optimizers.step()
    job.optimizers.zero_grad()
    loss, tokens, entropy, gap = sums(
        [statistics.loss, statistics.tokens, statistics.entropy, statistics.gap], process
    )
    found = _everyones([(rollouts, advantages, statistics.largest_gap)], process)
    everything = [rollout for theirs, _, _ in found for rollout in theirs]
    return {
        **step_metrics(everything, [advantage for _, theirs, _ in found for advantage in theirs]),
        "loss": loss,
        "entropy": entropy / tokens if tokens else 0.0,
        "engine_gap": gap / tokens if tokens else 0.0,
        "engine_gap_max": max(largest for _, _, largest in found),
        "gradient_norm": norm,
        "lr_multiplier": multiplier,
        "tokens": total,
        "skipped_questions": settings.questions - kept,
        "generated_tokens": float(sum(len(rollout.ids) for rollout in everything)),
        "rollout_seconds": round(rolled - started, 3),
        "update_seconds": round(time.perf_counter() - rolled, 3),
    }


def _sum_gradients(model: Decoder, process: Process) -> None:
    """Gradients are sums over a step's tokens, divided by all of them already."""
    if process.world == 1:
        return
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        summed(parameter.grad, process)


def _everyones(own: list[Any], process: Process) -> list[Any]:
    if process.world == 1:
        return own
    found: list[Any] = [None] * process.world
    dist.all_gather_object(found, own)
    return [item for theirs in found for item in theirs]
