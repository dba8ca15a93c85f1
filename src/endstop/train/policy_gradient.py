"""The objective of RL: REINFORCE with the mean of each group as its baseline.

With reward r_i of rollout i, the mean r of the rollouts that answer the same question, and N the number of
all tokens that count in the step (sampled by the model, in rollouts that count),

    A_i = r_i - mean(r),    loss = - sum_i sum_t m_it A_i log p(y_it | ...) / N

No KL term, no ratio and no clip: there is one update for each set of rollouts, so the policy is the one that
was sampled. No division by the group's standard deviation, which gives questions that are nearly always (or
never) answered right the largest weight, and no mean over each rollout, which makes a token of a long wrong
answer cheaper than one of a short wrong answer (both: "Dr. GRPO", arXiv 2503.20783); one N for the whole
step is DAPO's token-level loss (arXiv 2503.14476).

The terminator is a token that the model sampled, and it is in the loss like any other: it is where stopping
gets its credit. Leaving it out, as nanochat's chat_rl does, is an option that exists to be compared with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from endstop.models.decoder import Decoder
from endstop.protocol.labels import IGNORE
from endstop.train.rollouts import Question, Rollout


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """Rollouts side by side, filled up at the right.

    Attributes:
        input_ids: int64 [B, T]. targets: int64 [B, T], shifted; IGNORE where no token counts.
        advantages: float32 [B]. engine_logprobs: float32 [B, T], of the targets; 0 where none counts.
    """

    input_ids: Tensor
    targets: Tensor
    advantages: Tensor
    engine_logprobs: Tensor


@dataclass(slots=True)
class PolicyStatistics:
    """Sums over the tokens of a step that were computed.

    entropy: nats, of the policy at each token. gap: absolute difference of the trainer's and the engine's
    log-probabilities; largest_gap: its maximum.
    """

    loss: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    gap: float = 0.0
    largest_gap: float = 0.0


def group_advantages(rollouts: Sequence[Rollout]) -> list[float]:
    """A_i of each rollout; 0.0 for one that does not count, which is not in its group's mean either."""
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        if rollout.counts:
            groups.setdefault(rollout.question, []).append(rollout.reward)
    means = {question: sum(rewards) / len(rewards) for question, rewards in groups.items()}
    # Of equal rewards the difference is 0 exactly, which their rounded mean need not give.
    flat = {question for question, rewards in groups.items() if min(rewards) == max(rewards)}
    return [
        0.0 if not rollout.counts or rollout.question in flat else rollout.reward - means[rollout.question]
        for rollout in rollouts
    ]


def trained_mask(
    rollout: Rollout, stop_ids: Collection[int], *, terminator_in_loss: bool = True
) -> list[int]:
    """1 for each generated token that is in the loss: those the model sampled, if the rollout counts.

    Without `terminator_in_loss` the token that ended the answer is left out.
    """
    if not rollout.counts:
        return [0] * len(rollout.ids)
    mask = list(rollout.mask)
    if not terminator_in_loss and rollout.finish_reason == "stop" and rollout.ids[-1] in stop_ids:
        mask[-1] = 0
    return mask


def policy_batches(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    stop_ids: Collection[int],
    *,
    micro_rows: int,
    pad_id: int,
    terminator_in_loss: bool = True,
) -> tuple[list[PolicyBatch], int]:
    """The micro-batches of a step, and N.

    Rollouts whose advantage is 0 have no gradient and are not computed, but their tokens are in N. Those of
    like length are put together; the order has no influence but on rounding.
    """
    masks = [trained_mask(r, stop_ids, terminator_in_loss=terminator_in_loss) for r in rollouts]
    total = sum(map(sum, masks))
    chosen = [i for i, advantage in enumerate(advantages) if advantage and any(masks[i])]
    chosen.sort(key=lambda i: (len(rollouts[i].prompt_ids) + len(rollouts[i].ids), i))
    batches = []
    for begin in range(0, len(chosen), micro_rows):
        members = chosen[begin : begin + micro_rows]
        width = max(len(rollouts[i].prompt_ids) + len(rollouts[i].ids) for i in members) - 1
        input_ids = torch.full((len(members), width), pad_id)
        targets = torch.full((len(members), width), IGNORE)
        engine = torch.zeros(len(members), width)
        for row, i in enumerate(members):
            rollout, mask = rollouts[i], torch.tensor(masks[i], dtype=torch.bool)
            ids = torch.tensor(rollout.prompt_ids + rollout.ids)
            input_ids[row, : len(ids) - 1] = ids[:-1]
            place = slice(len(rollout.prompt_ids) - 1, len(ids) - 1)
            targets[row, place] = torch.where(mask, torch.tensor(rollout.ids), IGNORE)
            engine[row, place] = torch.where(mask, torch.tensor(rollout.logprobs), 0.0)
        batches.append(
            PolicyBatch(input_ids, targets, torch.tensor([advantages[i] for i in members]), engine)
        )
    return batches, total


def policy_loss(
    model: Decoder, batch: PolicyBatch, total: int, statistics: PolicyStatistics | None = None
) -> Tensor:
    """This batch's part of the loss, a scalar with gradient; the parts of a step add up. total: N.

    Adds what it sees to `statistics`.
    """
    device = model.lm_head.weight.device
    counted = (batch.targets != IGNORE).to(device)
    hidden = model.hidden_states(batch.input_ids.to(device))
    # Logits only where a token counts: prompts and forced tokens need none.
    log_probabilities = torch.log_softmax(model.logits(hidden[counted]), dim=-1)
    targets = batch.targets.to(device)[counted]
    chosen = log_probabilities.gather(1, targets[:, None])[:, 0]
    advantages = batch.advantages.to(device)[:, None].expand(counted.shape)[counted]
    loss = -(advantages * chosen).sum() / total
    if statistics is not None:
        with torch.no_grad():
            gaps = (chosen - batch.engine_logprobs.to(device)[counted]).abs()
            statistics.loss += float(loss.detach())
            statistics.tokens += len(targets)
            statistics.entropy -= float((log_probabilities.exp() * log_probabilities).sum())
            statistics.gap += float(gaps.sum())
            statistics.largest_gap = max(statistics.largest_gap, float(gaps.max()))
    return loss


@dataclass(frozen=True, slots=True)
class StopProbability:
    """P(any id of the stop set) along right answers.

    at_end: where the terminator stands, the mean over the answers. before: the mean over all places before
    it at which the model samples. curve: the mean at each relative place, tenths of the answer, the last one
    the end. None where no answer has such a place.
    """

    at_end: float | None
    before: float | None
    curve: list[float | None] = field(default_factory=list)


@torch.no_grad()
def stop_probability(
    model: Decoder, questions: Sequence[Question], stop_ids: Collection[int], *, micro_rows: int, pad_id: int
) -> StopProbability:
    """How sure the model is of the end along the right answers, given all of the answer before it.

    Questions without a right answer of their own are left out.
    """
    device = model.lm_head.weight.device
    stops = torch.tensor(sorted(stop_ids), device=device)
    known = [question for question in questions if question.gold_ids]
    ends, before = [], []
    tenths: list[list[float]] = [[] for _ in range(11)]
    for begin in range(0, len(known), micro_rows):
        members = known[begin : begin + micro_rows]
        rows = [question.prompt_ids + question.gold_ids[:-1] for question in members]
        width = max(map(len, rows))
        input_ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows], device=device)
        probabilities = torch.softmax(model(input_ids), dim=-1)[..., stops].sum(-1).tolist()
        for question, row, values in zip(members, rows, probabilities, strict=True):
            answer = values[len(question.prompt_ids) - 1 : len(row)]
            ends.append(answer[-1])
            last = len(answer) - 1
            for place, (value, sampled) in enumerate(zip(answer, question.gold_mask, strict=True)):
                if sampled:
                    tenths[10 * place // last if last else 10].append(value)
                    if place < last:
                        before.append(value)
    return StopProbability(_mean(ends), _mean(before), [_mean(values) for values in tenths])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
