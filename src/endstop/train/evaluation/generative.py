"""Answering freely: each question is sampled through the engine, calculator included, and judged."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from endstop.protocol.errors import EndstopError
from endstop.protocol.params import SamplingParams
from endstop.train.chat_format import OUTPUT_START
from endstop.train.evaluation.chat_tasks import ChatTask
from endstop.train.evaluation.rendered import Asked
from endstop.train.evaluation.scoring import Progress
from endstop.train.evaluation.stop_summary import NATURAL_STOPS, AnswerRecord
from endstop.train.evaluation.teacher import p_stop_along
from endstop.train.tasks.example import visible

if TYPE_CHECKING:
    from endstop.runtime.engine import Engine
    from endstop.runtime.results import CompletionOutput

# Where the right answer cannot be shown as tokens, and its length says nothing.
UNKNOWN_LENGTH = 512
_ROOM = 32

Question = tuple[ChatTask, Asked]


def answer(
    engine: Engine,
    questions: Sequence[Question],
    *,
    samples: int = 1,
    temperature: float = 0.0,
    top_k: int = 0,
    max_tokens: int | None = None,
    seed: int = 0,
    teacher_forced: bool = True,
    progress: Progress | None = None,
) -> list[AnswerRecord]:
    """`samples` answers to each question, in the order of the questions.

    Args:
        questions: of one task or several: they share the engine's batch.
        max_tokens: limit of an answer. None is the task's own, else twice the right answer and 32 more; never
            more than the window leaves.
        seed: fixes every draw, together with the task's name and the question's number.
        teacher_forced: measure P(stop) along the right answer, too.

    Raises EndstopError where a row fails (weights that are no numbers, say).
    """
    params = [
        SamplingParams(
            n=samples,
            temperature=temperature,
            top_k=top_k,
            max_tokens=max_tokens or _limit(task, asked),
            seed=_seed(seed, task.name, asked.index),
        )
        for task, asked in questions
    ]
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, len(questions))

    results = engine.generate([asked.prompt_ids for _, asked in questions], params, on_output=count)
    along = _p_stops(engine, questions) if teacher_forced else {}
    return [
        _record(engine, task, asked, output, along.get(number, (None, None)))
        for number, ((task, asked), result) in enumerate(zip(questions, results, strict=True))
        for output in result.outputs
    ]


def _limit(task: ChatTask, asked: Asked) -> int:
    if task.max_tokens is not None:
        return task.max_tokens
    if asked.gold_tokens is None:
        return UNKNOWN_LENGTH
    # What has no end must not go on for ever.
    return 2 * asked.gold_tokens + _ROOM if asked.example.ends else max(1, asked.gold_tokens)


def _seed(seed: int, task: str, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{task}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _p_stops(engine: Engine, questions: Sequence[Question]) -> dict[int, tuple[float | None, float | None]]:
    """P(stop) behind the right answer, and its largest value in front of a token that is the model's own, by
    the place of the question; only for those that have an end and fit into the window."""
    window = engine.context_len
    fit: list[tuple[int, Asked, list[int]]] = []
    for number, (_, asked) in enumerate(questions):
        gold = asked.gold_ids
        if gold is None or not asked.example.ends:
            continue
        if window is None or len(asked.prompt_ids) + len(gold) <= window:
            fit.append((number, asked, gold))
    along = p_stop_along(engine, [asked.prompt_ids for _, asked, _ in fit], [gold for _, _, gold in fit])
    found: dict[int, tuple[float | None, float | None]] = {}
    for (number, asked, _), values in zip(fit, along, strict=True):
        own = [value for value, mine in zip(values, asked.gold_mask, strict=False) if mine]
        found[number] = (values[-1], max(own, default=None))
    return found


def _record(
    engine: Engine,
    task: ChatTask,
    asked: Asked,
    output: CompletionOutput,
    p_stop: tuple[float | None, float | None],
) -> AnswerRecord:
    if output.stop_kind == "error":
        raise EndstopError(f"an answer failed: {output.error or 'the model gave no numbers'}.")
    example, gold = asked.example, asked.gold
    correct = task.right(example, output.text)
    ids = output.generated_token_ids
    ended = output.stop_kind in NATURAL_STOPS and bool(ids) and ids[-1] in engine.stops.ids
    return AnswerRecord(
        task=task.name,
        index=asked.index,
        sample=output.index,
        prompt=visible(example.messages[-1]["content"]),
        output=output.text,
        gold=gold,
        finish_reason=output.finish_reason,
        stop_kind=output.stop_kind,
        tokens=len(ids) - ended,
        gold_tokens=asked.gold_tokens,
        correct=correct,
        content_ok=correct or (example.only and output.text.startswith(gold)),
        only=example.only,
        ends=example.ends,
        wrote_output=_wrote(engine, output, OUTPUT_START),
        p_stop_at_gold=p_stop[0],
        p_stop_before_gold=p_stop[1],
    )


def _wrote(engine: Engine, output: CompletionOutput, tag: str) -> bool:
    """Whether the model itself wrote a special token."""
    assert engine.chat_format is not None
    token_id = engine.chat_format.tokenizer.token_to_id(tag)
    pairs = zip(output.generated_token_ids, output.generated_mask, strict=True)
    return token_id is not None and any(own and found == token_id for found, own in pairs)
