"""What a chat model is asked: questions with their right answers, made or read, in one form for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from endstop.train.tasks.example import AnyTask, Content, Message, Split

Kind = Literal["generative", "categorical"]


@dataclass(frozen=True, slots=True)
class ChatExample:
    """One question.

    Attributes:
        messages: the prompt; ends with a user turn.
        gold: a right answer, content of the assistant's next message.
        only: `gold` is the only right answer, so that it is known where an answer must end.
        ends: the answer has an end. Where it has none, `gold` is its beginning, and a stop is a false one.
        letters: what the answer is chosen from (categorical tasks).
        fields: what the task needs to judge an answer.
    """

    messages: Sequence[Message]
    gold: Content
    only: bool = False
    ends: bool = True
    letters: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatTask:
    """Questions of one kind, and how answers are judged.

    Attributes:
        name: unique in a report.
        examples: by number, always the same.
        right: whether the visible text of an answer is right (special tokens hidden, a tool's answers shown).
        kind: `generative` is sampled, `categorical` chooses among `letters` by their logits.
        baseline: accuracy of guessing.
        max_tokens: limit of an answer, None for what its right answer suggests.
    """

    name: str
    examples: Sequence[ChatExample]
    right: Callable[[ChatExample, str], bool]
    kind: Kind = "generative"
    baseline: float = 0.0
    max_tokens: int | None = None

    @property
    def ends(self) -> bool:
        """Its answers have an end; where they have none there is no accuracy, only a rate of false stops."""
        return len(self.examples) == 0 or self.examples[0].ends


class GeneratedExamples(Sequence[ChatExample]):
    """Examples of a task of `endstop.train.tasks`, made when they are asked for."""

    def __init__(self, task: AnyTask, seed: int, size: int, split: Split = "test") -> None:
        self.task, self.seed, self.size, self.split = task, seed, size, split

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(f"example {index} of {self.size}")
        example = self.task.example(self.seed, index, self.split)
        drawn = example.drawn
        return ChatExample(
            example.messages,
            example.answer,
            only=not (drawn.accepted or drawn.final or drawn.members or drawn.entry),
            ends=example.ends,
            fields={"example": example},
        )


def generated_task(task: AnyTask, *, seed: int = 0, size: int = 100, split: Split = "test") -> ChatTask:
    """A task of `endstop.train.tasks` as one of the evaluation, `size` examples from its test side."""

    def right(example: ChatExample, text: str) -> bool:
        return task.score(example.fields["example"], text)

    return ChatTask(task.name, GeneratedExamples(task, seed, size, split), right)
