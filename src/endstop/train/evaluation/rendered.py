"""Questions as tokens: the prompt of an example, and its right answer as the model would write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from endstop.protocol.errors import MissingTemplate
from endstop.train.evaluation.chat_tasks import ChatExample, ChatTask
from endstop.train.tasks.example import Content, visible

if TYPE_CHECKING:
    from endstop.protocol.render import ChatRenderer
    from endstop.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Asked:
    """An example as tokens.

    Attributes:
        index: its number in the task.
        prompt_ids: up to where the answer begins.
        gold: visible text of the right answer as this model would give it.
        gold_ids: the right answer without its terminator, None where the template cannot show it there.
        gold_mask: 1 where the model would say the token itself, 0 where the runtime puts it.
    """

    index: int
    example: ChatExample
    prompt_ids: list[int]
    gold: str
    gold_ids: list[int] | None
    gold_mask: list[int]

    @property
    def gold_tokens(self) -> int | None:
        return None if self.gold_ids is None else len(self.gold_ids)


def renderer_of(engine: Engine) -> ChatRenderer:
    """Raises MissingTemplate for an engine without chat template."""
    if engine.chat_format is None:
        raise MissingTemplate(
            "chat tasks need a model with a chat template; a base model is for `endstop eval base`."
        )
    return engine.chat_format.renderer


def rendered(engine: Engine, task: ChatTask, examples: int | None = None) -> tuple[list[Asked], int]:
    """The first `examples` of a task (all by default) as tokens, and how many do not fit into the window."""
    renderer = renderer_of(engine)
    count = len(task.examples) if examples is None else min(examples, len(task.examples))
    asked, skipped = [], 0
    for index in range(count):
        example = task.examples[index]
        prompt = renderer.render(example.messages, add_generation_prompt=True).ids
        if engine.context_len is not None and len(prompt) >= engine.context_len:
            skipped += 1
            continue
        content = content_for(renderer, example.gold)
        gold, mask = _gold(engine, renderer, example, content, prompt)
        asked.append(Asked(index, example, list(prompt), visible(content), gold, mask))
    return asked, skipped


def _gold(
    engine: Engine, renderer: ChatRenderer, example: ChatExample, content: Content, prompt: Sequence[int]
) -> tuple[list[int] | None, list[int]]:
    whole = renderer.render([*example.messages, {"role": "assistant", "content": content}])
    if whole.ids[: len(prompt)] != list(prompt):
        return None, []
    answer = whole.ids[len(prompt) :]
    end = next((at for at, token_id in enumerate(answer) if token_id in engine.stops.ids), len(answer))
    # Only a content in parts has forced tokens, and a mask takes some more renders.
    mask = None if isinstance(content, str) else whole.mask
    own = [1] * end if mask is None else mask[len(prompt) : len(prompt) + end]
    return answer[:end], own


def content_for(renderer: ChatRenderer, content: Content) -> Content:
    """The parts of an answer where the template knows parts, everywhere else its words without the calls."""
    if isinstance(content, str) or "python_output" in renderer.template_for(None):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")
