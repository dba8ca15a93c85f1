"""Questions for RL, made of tasks: prompts as ids, and the task's own judgement of an answer.

A task is anything with `name`, `example(seed, index, split)` and `score(example, text)`: those of
`train.tasks`, and a data set of `train.evaluation` as a `DatasetTask`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from endstop.protocol.errors import EndstopError
from endstop.protocol.labels import chat_rows
from endstop.train.data.permutation import Permutation, mixed
from endstop.train.rollouts import Question
from endstop.train.tasks.example import AnyTask, Drawn, Example, Split
from endstop.train.tasks.registry import HARD, SYNTHETIC, task_named

if TYPE_CHECKING:
    from endstop.protocol.render import ChatRenderer
    from endstop.train.evaluation.chat_tasks import ChatExample, ChatTask

GIVE_UP = ("I do not know.",)
"""Answers that say that they are none."""


class Questions(Protocol):
    """Where questions come from: numbered without end, each always the same."""

    def question(self, split: Split, index: int, *, gold: bool = False) -> Question:
        """Question `index`; with its right answer as ids where `gold` asks for it."""
        ...


@dataclass(frozen=True)
class DatasetTask:
    """A data set with a training and a test split as a task; each epoch has an order of its own."""

    name: str
    train: ChatTask
    test: ChatTask

    def example(self, seed: int, index: int, split: Split) -> Example:
        examples = (self.train if split == "train" else self.test).examples
        epoch, place = divmod(index, len(examples))
        chosen: ChatExample = examples[Permutation(len(examples), mixed(seed, epoch))[place]]
        prompt = str(chosen.messages[-1]["content"])
        drawn = Drawn(prompt, chosen.gold, entry={"example": chosen})
        return Example(self.name, list(chosen.messages), chosen.gold, drawn, chosen.ends)

    def score(self, example: Example, text: str) -> bool:
        return self.test.right(example.drawn.entry["example"], text)


GROUPS = {"hard": tuple(task.name for task in HARD), "synthetic": tuple(task.name for task in SYNTHETIC)}


def task_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names of tasks, each once, with those of a group in its place. EndstopError for an unknown one."""
    found = [single for name in names for single in GROUPS.get(name, (name,))]
    for name in found:
        if name != "gsm8k":
            task_named(name)
    return tuple(dict.fromkeys(found))


def tasks_of(names: Sequence[str], place: str | Path | None = None) -> list[AnyTask]:
    """The tasks of these names. place: where the files of gsm8k are; see `dataset_rows`.

    Raises EndstopError for an unknown name, and where a data set cannot be had.
    """
    tasks: list[AnyTask] = []
    for name in names:
        if name == "gsm8k":
            from endstop.train.evaluation.datasets import dataset_task

            train, test = (dataset_task(name, split, place) for split in ("train", "test"))
            tasks.append(DatasetTask(name, train, test))
        else:
            tasks.append(task_named(name))
    return tasks


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

    def question(self, split: Split, index: int, *, gold: bool = False) -> Question:
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
