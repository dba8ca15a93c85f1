"""Rewards of rollouts: right or wrong, or shaped by how the answer ended.

Two facts about a rollout decide: is its answer right, and did the model end its turn by itself? Out of them
come four of the cases of `endstop.outcomes.RewardCase` (tampering needs a workspace, which a rollout has
not). The exact reward looks at the answer alone (1 or 0); the stop-shaped one gives each case its weight, in
the order

    tampering < false_finish < silent_failure < honest_unfinished < verified_finish

so that an answer that is declared finished and is wrong costs more than one that never came to an end, and
that costs more than one that says it is not finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from endstop.outcomes import REWARD_WEIGHTS, RewardCase, check_reward_weights

RewardKind = Literal["exact", "stop-shaped"]
Truncated = Literal["keep", "zero", "mask"]
REWARD_KINDS: tuple[RewardKind, ...] = get_args(RewardKind)
TRUNCATED: tuple[Truncated, ...] = get_args(Truncated)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known about a rollout's answer.

    Attributes:
        correct: the answer is right.
        finished: the model ended its turn by itself; False where a limit did.
        gave_up: the answer says that it is none (the task knows the words).
    """

    correct: bool
    finished: bool
    gave_up: bool = False

    @property
    def case(self) -> RewardCase:
        """The one of the four cases that this is. An answer that is right has not given up."""
        if not self.finished:
            return "silent_failure"
        if self.correct:
            return "verified_finish"
        return "honest_unfinished" if self.gave_up else "false_finish"


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """How rollouts are rewarded.

    Attributes:
        kind: `exact` gives 1 for a right answer, else 0. `stop-shaped` gives the case's weight.
        truncated: what a rollout is worth that ran into its limit.
            `keep`: its answer is judged as it stands, as in nanochat's RL: no pressure to stop behind it.
            `zero`: nothing, whatever it says.
            `mask`: it is left out of the loss and of its group's mean, as if it had not been drawn
            (the overlong filtering of DAPO, arXiv 2503.14476; there the mean still counts it).
            The stop-shaped reward has a case of its own for such rollouts; `keep` and `zero` are the same
            there.
        weights: of the stop-shaped reward, one for each case, rising in REWARD_ORDER (`endstop.outcomes`).

    Raises ValueError for unknown names, and for weights that are not in order.
    """

    kind: RewardKind = "exact"
    truncated: Truncated = "zero"
    weights: Mapping[RewardCase, float] = field(default_factory=lambda: dict(REWARD_WEIGHTS))

    def __post_init__(self) -> None:
        if self.kind not in REWARD_KINDS:
            raise ValueError(f"the reward must be one of {', '.join(REWARD_KINDS)}, got {self.kind!r}")
        if self.truncated not in TRUNCATED:
            raise ValueError(f"truncated must be one of {', '.join(TRUNCATED)}, got {self.truncated!r}")
        check_reward_weights(self.weights)

    def of(self, judgement: Judgement) -> float:
        """The reward. Of no meaning where `counts` is False."""
        if self.kind == "stop-shaped":
            return self.weights[judgement.case]
        earned = judgement.correct and (judgement.finished or self.truncated != "zero")
        return 1.0 if earned else 0.0

    def counts(self, judgement: Judgement) -> bool:
        """Whether the rollout is in the loss and in its group's mean."""
        return judgement.finished or self.truncated != "mask"
