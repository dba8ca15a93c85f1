"""Everything that decides what the RL stage does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from endstop.outcomes import REWARD_WEIGHTS, RewardCase
from endstop.protocol.errors import EndstopError
from endstop.train.optimizer import OptimizerSettings
from endstop.train.questions import GIVE_UP
from endstop.train.rewards import RewardKind, RewardSettings, Truncated

# May change between the parts of a run: when it looks around, and what it runs on.
HARMLESS = ("evaluate_every", "save_every", "keep_checkpoints", "micro_rows", "device", "dataset_place")


@dataclass(frozen=True, slots=True)
class RLSettings:
    """The RL stage.

    Attributes:
        init_from: the directory of the model to begin with.
        tasks: names in the task registry, or gsm8k; their questions come in turn.
        dataset_place: where the files of gsm8k are, None for the Hub.
        steps: updates. questions: of each step, none twice. samples: answers to each question.
        max_tokens: limit of one answer.
        reward, truncated, reward_weights: see `RewardSettings`. give_up: answers that say that they are none.
        terminator_in_loss: False leaves the token that ends an answer out, as nanochat's chat_rl does.
        lr_fraction: of the optimizer's rates at the first step; from there linear to 0.
        micro_rows: rollouts that are computed at a time in the update.
        evaluate_every, save_every: in steps, None for only before and after, and only at the end.
        evaluation_questions: of the held-out side, answered greedily, and `evaluation_samples` times by
            drawing for pass@k (0: not at all).
        keep_checkpoints: the newest so many are kept.
        seed: of questions and draws.

    Raises ValueError for numbers out of range.
    """

    init_from: str
    tasks: tuple[str, ...]
    dataset_place: str | None = None
    steps: int = 100
    questions: int = 16
    samples: int = 16
    max_tokens: int = 256
    reward: RewardKind = "exact"
    truncated: Truncated = "zero"
    reward_weights: Mapping[RewardCase, float] = field(default_factory=lambda: dict(REWARD_WEIGHTS))
    give_up: tuple[str, ...] = GIVE_UP
    terminator_in_loss: bool = True
    lr_fraction: float = 0.05
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    micro_rows: int = 32
    evaluate_every: int | None = None
    save_every: int | None = None
    evaluation_questions: int = 128
    evaluation_samples: int = 8
    keep_checkpoints: int = 2
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        object.__setattr__(self, "give_up", tuple(self.give_up))
        if not self.tasks:
            raise ValueError("RL needs at least one task")
        for name in (
            *("steps", "questions", "max_tokens", "micro_rows", "evaluate_every", "save_every"),
            *("evaluation_questions", "keep_checkpoints"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.samples < 2:
            raise ValueError(
                f"samples must be at least 2, got {self.samples}: an answer is compared with others to the "
                "same question"
            )
        if self.evaluation_samples < 0:
            raise ValueError(f"evaluation_samples must not be negative, got {self.evaluation_samples}")
        if not 0.0 <= self.lr_fraction < math.inf:
            raise ValueError(f"lr_fraction must be 0 or more, got {self.lr_fraction}")
        if not all(text.strip() for text in self.give_up):
            raise ValueError("a text that says that it is no answer must not be empty")
        assert self.rewards

    @property
    def rewards(self) -> RewardSettings:
        """How rollouts are rewarded; ValueError as there."""
        return RewardSettings(self.reward, self.truncated, self.reward_weights)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        values = asdict(self)
        return {"stage": "rl", **values, "tasks": list(self.tasks), "give_up": list(self.give_up)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RLSettings:
        """What `to_json` gave. Raises EndstopError for what it cannot have given."""
        known = {each.name for each in fields(cls)}
        values = {name: item for name, item in value.items() if name != "stage"}
        foreign = sorted(set(values) - known)
        if value.get("stage") != "rl" or foreign:
            wrong = f"no {foreign[0]!r}" if foreign else "the stage rl"
            raise EndstopError(f"these are no settings of RL, which have {wrong}.")
        try:
            values["optimizer"] = OptimizerSettings(**values["optimizer"])
            return cls(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise EndstopError(f"the settings of RL are damaged: {error}.") from error

    def changed(self, before: Mapping[str, Any]) -> list[str]:
        """Settings that differ from those of an earlier part of the run and that it may not change."""
        now = self.to_json()
        return [
            f"{name} ({before.get(name)!r} before, {now[name]!r} now)"
            for name in now
            if name not in HARMLESS and before.get(name) != now[name]
        ]
