"""Questions for RL, made of tasks: prompts as ids, and the task's own judgement of an answer.

A task is anything with `name`, `example(seed, index, split)` and `score(example, text)`: those of
`train.tasks`, and the data sets of `train.evaluation`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from endstop.protocol.errors import EndstopError
from endstop.protocol.labels import chat_rows
from endstop.train.rollouts import Question

if TYPE_CHECKING:
    from endstop.protocol.render import ChatRenderer
    from endstop.train.tasks.example import AnyTask, Example

GIVE_UP = ("I do not know.",)
"""Answers that say that they are none."""


class Questions(Protocol):
    """Where questions come from: numbered without end, each always the same."""

    def question(self, split: Literal["train", "test"], index: int, *, gold: bool = False) -> Question:
        """Question `index`; with its right answer as ids where `gold` asks for it."""
        ...


class TaskQuestions:
    """Questions of one task or several in turn.

    Args:
        give_up: texts that are taken as giving up, blanks around them aside.

    Raises EndstopError where there is no task.
    """

    def __init__(
        self,
        tasks: Sequence[AnyTask],
        renderer: ChatRenderer,
        *,
        seed: int = 0,
        give_up: Collection[str] = GIVE_UP,
    ) -> None:
        if not tasks:
            raise EndstopError("RL needs at least one task to take its questions from.")
        self._tasks = tuple(tasks)
        self._renderer = renderer
        self._seed = seed
        self._give_up = frozenset(text.strip() for text in give_up)

    def question(self, split: Literal["train", "test"], index: int, *, gold: bool = False) -> Question:
        task = self._tasks[index % len(self._tasks)]
        example = task.example(self._seed, index // len(self._tasks), split)
        prompt = self._renderer.render(example.messages, add_generation_prompt=True).ids
        ids, mask = self._gold(example, prompt) if gold else ([], [])
        return Question(prompt, ids, mask, partial(task.score, example), self._gave_up, task.name)

    def _gold(self, example: Example, prompt: list[int]) -> tuple[list[int], list[int]]:
        rows = chat_rows(self._renderer, example.conversation).rows if example.ends else []
        if not rows or rows[-1].ids[: len(prompt)] != prompt:
            return [], []
        behind = slice(len(prompt), None)
        return rows[-1].ids[behind], [int(label >= 0) for label in rows[-1].labels[behind]]

    def _gave_up(self, text: str) -> bool:
        return text.strip() in self._give_up
