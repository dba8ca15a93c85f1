"""Tasks of reasoning-gym, where it is installed: its generators, its verifiers, our split and our ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from endstop.protocol.errors import EndstopError
from endstop.train.tasks.example import _ATTEMPTS, Drawn, Example, Split, _random, split_of


@dataclass(frozen=True)
class GymTask:
    """A procedural data set of reasoning-gym (Apache-2.0).

    Attributes:
        name: in the registry. dataset: reasoning-gym's name. options: its configuration.
    """

    name: str
    dataset: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def example(self, seed: int, index: int, split: Split) -> Example:
        items = _dataset(self.dataset, tuple(sorted(self.options.items())))
        random = _random(self.name, seed, index, split)
        for _ in range(_ATTEMPTS):
            entry = items[random.randrange(len(items))]
            prompt = str(entry["question"]).strip()
            if split_of(prompt) == split:
                drawn = Drawn(prompt, str(entry["answer"]), entry=entry)
                return Example(self.name, [{"role": "user", "content": prompt}], drawn.answer, drawn)
        raise EndstopError(
            f"the task {self.name} has too few instances to have any on its {split} side; widen its options"
        )

    def score(self, example: Example, text: str) -> bool:
        items = _dataset(self.dataset, tuple(sorted(self.options.items())))
        return bool(items.score_answer(text, example.drawn.entry) >= 1.0)


@lru_cache(maxsize=16)
def _dataset(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise EndstopError(
            "tasks named gym-... need reasoning-gym: pip install 'endstop[train-extra]'"
        ) from error
    # Items are made when they are asked for; some data sets shuffle a list of this size first.
    return reasoning_gym.create_dataset(name, size=100_000, seed=0, **dict(options))
