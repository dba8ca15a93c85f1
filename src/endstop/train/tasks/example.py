"""What a task is: seeded examples with a checkable answer, and the rule that keeps train and test apart.

A task draws instances at random; the text of an instance alone decides by its hash whether it belongs to
the training or to the test side. So no test prompt is ever a training prompt, whatever the seeds, the
number of examples or the task it was drawn for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, Protocol, TypeAlias

from endstop.protocol.errors import EndstopError

Split = Literal["train", "test"]
Message: TypeAlias = dict[str, Any]
Part: TypeAlias = dict[str, str]
Content: TypeAlias = str | list[Part]

TEST_SHARE = 10
"""One instance in so many belongs to the test side."""

# Drawing again until the instance lies on the wanted side: 1,000 misses in a row happen with 0.9**1000.
_ATTEMPTS = 1000


def split_of(key: str) -> Split:
    """The side to which an instance belongs, by the text that identifies it."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"


def visible(content: Content) -> str:
    """The text of an assistant message as a reader sees it: the words of all parts, without tags."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def calculated(expression: str, result: str) -> list[Part]:
    """The parts of one calculation: what the model writes, and what the runtime forces behind it."""
    return [{"type": "python", "text": expression}, {"type": "python_output", "text": result}]


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


@dataclass(frozen=True, slots=True)
class Drawn:
    """One exchange as a task draws it.

    Attributes:
        prompt: the user's words.
        answer: the assistant's content.
        accepted: visible texts that are right besides `answer`.
        final: only what stands behind the last "####" must be right, the way to it may differ.
        members: if given, right is every list of as many different members as the answer has.
        entry: what a foreign scorer wants to have back.
    """

    prompt: str
    answer: Content
    accepted: tuple[str, ...] = ()
    final: bool = False
    members: frozenset[str] = frozenset()
    entry: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its right answer.

    Attributes:
        task: the name of its task.
        messages: the prompt; ends with a user turn.
        answer: content of the assistant's next message.
        drawn: the last exchange, with the rule by which answers are checked.
        ends: the answer has an end. Where it has none, `answer` is its beginning.
    """

    task: str
    messages: list[Message]
    answer: Content
    drawn: Drawn
    ends: bool = True

    @property
    def conversation(self) -> list[Message]:
        """The prompt and the answer, to train on."""
        return [*self.messages, {"role": "assistant", "content": self.answer}]

    @property
    def document(self) -> str:
        """The same as plain text without roles, for base training: a line for each message."""
        return "\n".join(_plain(message["content"]) for message in self.conversation)


def _plain(content: Content) -> str:
    if isinstance(content, str):
        return content
    spelled = {"python": "{}", "python_output": "={} ", "text": "{}"}
    return "".join(spelled[part["type"]].format(part["text"]) for part in content)


FINAL_MARK = "####"


def is_right(drawn: Drawn, text: str) -> bool:
    """Whether a complete answer is right, its end included: nothing may be missing or too much."""
    gold = visible(drawn.answer)
    if drawn.final:
        return text.rpartition(FINAL_MARK)[2] == gold.rpartition(FINAL_MARK)[2] and FINAL_MARK in text
    if drawn.members:
        items = text.split(", ")
        return len(set(items)) == len(items) == len(gold.split(", ")) and drawn.members.issuperset(items)
    return text == gold or text in drawn.accepted


class AnyTask(Protocol):
    """What sources, evaluation and rollouts need of a task."""

    @property
    def name(self) -> str: ...

    def example(self, seed: int, index: int, split: Split) -> Example:
        """Example number `index`: always the same for the same name, seed, index and split."""
        ...

    def score(self, example: Example, text: str) -> bool:
        """Whether `text`, the visible text of a finished answer, is right and ends where it must."""
        ...


@dataclass(frozen=True)
class Task:
    """A task of single exchanges.

    Attributes:
        name: unique in the registry.
        draw: draws one exchange; its keyword parameters are the task's knobs.
        end: what decides where the answer ends, in words.
        knobs: values for parameters of `draw` (lengths, digits, counts) other than their defaults.
        ends: answers have an end. Where they have none (`count-on`) there is no right answer, only a
            right beginning.
    """

    name: str
    draw: Callable[..., Drawn]
    end: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    ends: bool = True

    def with_knobs(self, name: str, **knobs: Any) -> Task:
        """The same task under another name with other lengths or sizes."""
        return replace(self, name=name, knobs={**self.knobs, **knobs})

    def example(self, seed: int, index: int, split: Split) -> Example:
        random = _random(self.name, seed, index, split)
        for _ in range(_ATTEMPTS):
            drawn = self.draw(random, **self.knobs)
            if split_of(drawn.prompt) == split:
                messages = [{"role": "user", "content": drawn.prompt}]
                return Example(self.name, messages, drawn.answer, drawn, self.ends)
        raise EndstopError(
            f"the task {self.name} has too few instances to have any on its {split} side; widen its knobs"
        )

    def score(self, example: Example, text: str) -> bool:
        if not self.ends:
            return visible(example.answer).startswith(text) or text.startswith(visible(example.answer))
        return is_right(example.drawn, text)


@dataclass(frozen=True)
class SeveralTurns:
    """Chats in which each turn is an exchange of another task; the last turn is the one to be answered.

    Attributes:
        tasks: drawn from with equal chances.
        turns: fewest and most exchanges.
    """

    name: str
    tasks: Sequence[AnyTask]
    turns: tuple[int, int] = (2, 3)

    def example(self, seed: int, index: int, split: Split) -> Example:
        random = _random(self.name, seed, index, split)
        count = random.randint(*self.turns)
        # Each exchange lies on the side of the whole, so that the chat as a whole does too.
        turns = [
            random.choice(self.tasks).example(random.getrandbits(32), turn, split) for turn in range(count)
        ]
        history = [message for turn in turns[:-1] for message in turn.conversation]
        last = turns[-1]
        return replace(last, task=self.name, messages=[*history, *last.messages])

    def score(self, example: Example, text: str) -> bool:
        return is_right(example.drawn, text)


def _random(name: str, seed: int, index: int, split: Split) -> Random:
    # Seeded by a text, which Python hashes with SHA-512: the same on every machine and version.
    return Random(f"{name}/{seed}/{index}/{split}")
