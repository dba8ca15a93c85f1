"""Evaluating a chat model: accuracy of each task, and beside it how the answers ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from endstop.protocol.errors import EndstopError
from endstop.train.evaluation.categorical import ChoiceRecord, choose
from endstop.train.evaluation.chat_tasks import ChatTask
from endstop.train.evaluation.generative import answer
from endstop.train.evaluation.in_context import centred
from endstop.train.evaluation.pass_at_k import mean_pass_at_k
from endstop.train.evaluation.rendered import rendered
from endstop.train.evaluation.stop_summary import (
    AnswerRecord,
    StopSummary,
    by_gold_length,
    false_stop_rate,
    summary_of,
)

if TYPE_CHECKING:
    from endstop.models.decoder import Decoder
    from endstop.runtime.engine import Engine

TaskProgress = Callable[[str, int, int], None]
"""Told the task, the questions done and the questions there are."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One task.

    Attributes:
        examples: questions that were asked. skipped: those longer than the window.
        accuracy: share of right answers (of all samples), centred by the baseline; None where answers have no
            end or nothing was asked.
        pass_at: k -> chance that one of k samples is right, for the powers of two up to the samples.
        stop: how answers ended (generative tasks). false_stop: for answers without an end.
        by_length: the same for ranges of the right answer's length in tokens.
        letter_share: mean probability of all letters together (categorical tasks).
        records: the answers themselves.
    """

    name: str
    kind: str
    examples: int
    skipped: int
    baseline: float
    accuracy: float | None
    centred: float | None
    pass_at: Mapping[int, float] = field(default_factory=dict)
    stop: StopSummary | None = None
    false_stop: float | None = None
    by_length: Mapping[str, StopSummary] = field(default_factory=dict)
    letter_share: float | None = None
    records: Sequence[AnswerRecord | ChoiceRecord] = ()


@dataclass(frozen=True, slots=True)
class ChatReport:
    """All tasks.

    Attributes:
        chat_core: mean of the tasks' centred accuracies (nanochat's ChatCORE is this over ARC-Easy,
            ARC-Challenge, MMLU, GSM8K and HumanEval).
        stop: over all generated answers that have an end. false_stop: over those that have none.
        settings: samples, temperature, limits and seed.
    """

    tasks: tuple[TaskReport, ...]
    chat_core: float | None
    stop: StopSummary
    false_stop: float | None
    settings: Mapping[str, Any]
    seconds: float

    def as_dict(self, *, records: bool = True) -> dict[str, Any]:
        """For JSON, with or without the answers themselves."""
        found = asdict(self)
        for task, report in zip(found["tasks"], self.tasks, strict=True):
            del task["records"]
            if records:
                task["records"] = [_record_dict(record) for record in report.records]
        return found


def _record_dict(record: AnswerRecord | ChoiceRecord) -> dict[str, Any]:
    found = asdict(record)
    if isinstance(record, AnswerRecord):
        found |= {"exact": record.exact, "stop_error": record.stop_error}
    return found


def evaluate_chat(
    model: Engine | str | Path,
    tasks: Sequence[ChatTask],
    n: int | None = None,
    seed: int = 0,
    *,
    samples: int = 1,
    temperature: float | None = None,
    top_k: int = 0,
    max_tokens: int | None = None,
    teacher_forced: bool = True,
    progress: TaskProgress | None = None,
) -> ChatReport:
    """Ask a model the first `n` questions of each task (all by default).

    Args:
        model: an engine with a chat template that has nothing else to do, or a model directory, which is
            run in float32.
        seed: fixes every draw.
        samples: answers to each question. temperature: by default 0 for one sample, 1 for several.
        max_tokens: limit of an answer; see `generative.answer`.
        teacher_forced: measure P(stop) along the right answers.
        progress: told a task, how many of its questions are done and how many there are. Tasks that are
            sampled share one batch; what is done is counted as if it came in their order.

    Deterministic: in float32 a question gets the same answers whatever else is asked beside it.
    """
    heat = (0.0 if samples == 1 else 1.0) if temperature is None else temperature
    if samples > 1 and heat == 0:
        raise ValueError("several samples at temperature 0 are all the same; give a temperature above 0")
    if len({task.name for task in tasks}) < len(tasks):
        raise ValueError("a task is there twice")
    if not tasks:
        raise EndstopError("there is no task to evaluate.")
    if isinstance(model, str | Path):
        from endstop.runtime.llm import load_engine

        # In float32 an answer does not depend on which others are computed beside it.
        model = load_engine(model, dtype="float32")
    started = time.monotonic()
    options: dict[str, Any] = {
        "samples": samples,
        "temperature": heat,
        "top_k": top_k,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    asked = [(task, *rendered(model, task, n)) for task in tasks]
    sampled = [(task, found) for task, found, _ in asked if task.kind == "generative"]
    answers = answer(
        model,
        [(task, question) for task, found in sampled for question in found],
        **options,
        teacher_forced=teacher_forced,
        progress=None if progress is None else _in_order(progress, sampled),
    )
    by_task: dict[str, list[AnswerRecord]] = {}
    for record in answers:
        by_task.setdefault(record.task, []).append(record)
    reports = []
    for task, questions, skipped in asked:
        if task.kind == "categorical":
            report = None if progress is None else _for_task(progress, task.name)
            choices = choose(model, task.name, questions, progress=report)
            reports.append(_of_choices(task, skipped, choices))
        else:
            own = by_task.get(task.name, [])
            reports.append(_of_answers(task, len(questions), skipped, own, samples))
    marks = [report.centred for report in reports if report.centred is not None]
    return ChatReport(
        tasks=tuple(reports),
        chat_core=sum(marks) / len(marks) if marks else None,
        stop=summary_of(answers),
        false_stop=false_stop_rate(answers),
        settings={"examples": n, **options},
        seconds=time.monotonic() - started,
    )


def _for_task(progress: TaskProgress, name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(name, done, total)


def _in_order(
    progress: TaskProgress, tasks: Sequence[tuple[ChatTask, Sequence[Any]]]
) -> Callable[[int, int], None]:
    places = [
        (task.name, number, len(questions))
        for task, questions in tasks
        for number in range(1, len(questions) + 1)
    ]
    return lambda done, total: progress(*places[done - 1])


def _of_choices(task: ChatTask, skipped: int, choices: Sequence[ChoiceRecord]) -> TaskReport:
    accuracy = _share([record.correct for record in choices])
    return TaskReport(
        **_common(task, len(choices), skipped, accuracy),
        letter_share=_share([record.letter_share for record in choices]),
        records=choices,
    )


def _of_answers(
    task: ChatTask, asked: int, skipped: int, answers: Sequence[AnswerRecord], samples: int
) -> TaskReport:
    accuracy = _share([record.correct for record in answers]) if task.ends else None
    return TaskReport(
        **_common(task, asked, skipped, accuracy),
        pass_at=_pass_at(answers, samples) if task.ends and samples > 1 else {},
        stop=summary_of(answers) if task.ends else None,
        false_stop=false_stop_rate(answers),
        by_length=by_gold_length(answers),
        records=answers,
    )


def _common(task: ChatTask, asked: int, skipped: int, accuracy: float | None) -> dict[str, Any]:
    return {
        "name": task.name,
        "kind": task.kind,
        "examples": asked,
        "skipped": skipped,
        "baseline": task.baseline,
        "accuracy": accuracy,
        "centred": None if accuracy is None else centred(accuracy, task.baseline),
    }


def _pass_at(answers: Sequence[AnswerRecord], samples: int) -> dict[int, float]:
    right: dict[int, int] = {}
    for record in answers:
        right[record.index] = right.get(record.index, 0) + record.correct
    counts = [(samples, correct) for correct in right.values()]
    found = {}
    k = 1
    while k <= samples:
        value = mean_pass_at_k(counts, k)
        if value is not None:
            found[k] = value
        k *= 2
    return found


def _share(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def engine_of(model: Decoder, tokenizer_directory: str | Path, *, max_rows: int = 64) -> Engine:
    """An engine over a copy of weights that are being trained, with chat template and calculator.

    `tokenizer_directory` holds the tokenizer's files. `engine.load_weights(model.state_dict())` brings it up
    to date later. Weights and cache are float32.
    """
    from endstop.runtime.llm import engine_over
    from endstop.runtime.native import NativeModel

    device = str(next(model.parameters()).device)
    native = NativeModel(
        model.config, model.state_dict(), dtype="float32", device=device, max_rows=2 * max_rows
    )
    return engine_over(native, tokenizer_directory, max_rows=max_rows)
