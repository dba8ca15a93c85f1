"""The RL stage: from a model directory and tasks to a better model directory.

A run is a function of its settings: the questions of step s are numbers s * questions and following, every
draw is fixed by (seed, step, question, sample), and the schedule by the step. So what is killed and resumed
goes on as if nothing had happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from endstop.models.directory import whole_directory
from endstop.models.gguf import ensure_directory
from endstop.models.load import read_config
from endstop.models.save import write_model
from endstop.protocol.errors import EndstopError
from endstop.protocol.render import ChatRenderer
from endstop.protocol.resolve import resolve_model
from endstop.train.checkpoint import (
    Position,
    fingerprint,
    load_checkpoint,
    newest_checkpoint,
    newest_shared,
    save_checkpoint,
)
from endstop.train.distributed import Process, barrier, done_by_main, shared, sums
from endstop.train.exclusive import exclusive
from endstop.train.metrics_log import MetricsLog, cut_metrics
from endstop.train.model_shapes import flops_per_token, parameter_counts
from endstop.train.optimizer import build_optimizer
from endstop.train.questions import Questions, TaskQuestions, tasks_of
from endstop.train.reinforce import PolicyJob, reinforce_step
from endstop.train.rl_settings import RLSettings
from endstop.train.rollouts import rollout_engine
from endstop.train.run_directory import RunDirectory, StageDirectory, write_object
from endstop.train.stages import ALONE
from endstop.train.starting_point import Vocabulary, loaded_model
from endstop.train.tasks.sources import LICENCE, ORIGIN
from endstop.train.training_loop import ending_signals


@dataclass(frozen=True, slots=True)
class RLProgress:
    """What is reported after each step."""

    step: int
    steps: int
    reward: float
    accuracy: float
    stop_rate: float
    seconds_left: float


Report = Callable[[RLProgress], None]


class NoLoader:
    """A checkpoint's loader where the step alone says which data come next."""

    own_shards: list[int] = []  # noqa: RUF012  (a loader's attribute, never changed)

    def next_step(self) -> list[Any]:
        return []

    def state(self, shard: int) -> dict[str, Any]:
        return {}

    def load_state(self, shard: int, state: dict[str, Any]) -> None:
        pass

    def statistics(self) -> dict[str, Any]:
        return {}


def train_rl(
    run: RunDirectory,
    settings: RLSettings,
    *,
    process: Process = ALONE,
    resume: bool = False,
    questions: Questions | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Train RUN/rl; the summary, as it is in summary.json. Every process of a torchrun must call it.

    resume: go on from the newest checkpoint, or from the beginning where there is none yet.
    questions: in the place of those of `settings.tasks`.
    The summary of a stage that was told to end early (SIGTERM, SIGINT) has "finished": false, and no model is
    written. Raises EndstopError for a stage that exists already, settings that were changed, a model that is
    not there, numbers that are not finite, or a full disk; the last good checkpoint stays.
    """
    with exclusive(run.stage("rl").path, process):
        return _train_rl(run.stage("rl"), settings, process, resume, questions, report)


def _train_rl(
    directory: StageDirectory,
    settings: RLSettings,
    process: Process,
    resume: bool,
    questions: Questions | None,
    report: Report | None,
) -> dict[str, Any]:
    job, files = _prepare(settings, process, questions)
    position = _begin(job, directory, files, resume)
    try:
        position, finished = _loop(job, directory, position, files, report)
    except EndstopError as error:
        kept = newest_checkpoint(directory.checkpoints)
        if kept is None or str(kept) in str(error):
            raise
        raise EndstopError(f"{error} The last good checkpoint is {kept}.") from error
    finally:
        job.engine.close()
    summary = _summary(job, position, finished)
    if process.main and finished:
        with whole_directory(directory.model, replace=True) as place:
            write_model(job.model.state_dict(), job.model.config, place, files=files)
        write_object(directory.summary, summary)
    barrier(process)
    return summary


def _prepare(
    settings: RLSettings, process: Process, questions: Questions | None
) -> tuple[PolicyJob, dict[str, bytes]]:
    source = ensure_directory(resolve_model(settings.init_from))
    config = read_config(source)
    model = loaded_model(source, config).to(process.device)
    vocabulary = Vocabulary.of(source, config.vocab_size)
    if questions is None:
        renderer = ChatRenderer(vocabulary.tokenizer, stops=vocabulary.stops)
        tasks = tasks_of(settings.tasks, settings.dataset_place)
        questions = TaskQuestions(tasks, renderer, seed=settings.seed, give_up=settings.give_up)
    pad_id = vocabulary.tokenizer.pad_token_id
    rows = max(settings.questions * settings.samples // process.world, settings.evaluation_questions)
    held_out = [
        questions.question("test", index, gold=True) for index in range(settings.evaluation_questions)
    ]
    job = PolicyJob(
        model=model,
        optimizers=build_optimizer(model, settings.optimizer),
        engine=rollout_engine(source, max_rows=min(256, rows), device=str(process.device)),
        questions=questions,
        held_out=held_out,
        stop_ids=frozenset(token_id for token_id in vocabulary.stops.ids if token_id < config.vocab_size),
        pad_id=0 if pad_id is None else pad_id,
        settings=settings,
        process=process,
    )
    fit = [question for question in held_out if job.fits(question)]
    if not fit:
        raise EndstopError(
            f"each of the {len(held_out)} held-out questions is longer than the window of "
            f"{job.engine.context_len} tokens: ask other tasks, or train a model with a longer window."
        )
    return replace(job, held_out=fit), vocabulary.files


def _begin(job: PolicyJob, directory: StageDirectory, files: Mapping[str, bytes], resume: bool) -> Position:
    """Where the run starts: at the newest checkpoint if it is resumed, else at its beginning."""
    settings = job.settings
    tokenizer = fingerprint(files)
    if resume:
        changed = settings.changed(directory.read_settings())
        if changed:
            raise EndstopError(
                f"{directory.path} was begun with other settings: {'; '.join(changed)}. Resume with the same "
                "ones, or begin another run."
            )

    def take() -> None:
        directory.remove_partial()
        if not resume:
            directory.begin(settings.to_json())

    done_by_main(take, job.process)
    position = Position(steps=settings.steps, settings=settings.to_json(), tokenizer=tokenizer)
    newest = newest_shared(directory.checkpoints, job.process) if resume else None
    if newest is not None:
        found = load_checkpoint(newest, job.model, job.optimizers, NoLoader(), tokenizer)
        position = replace(found, settings=settings.to_json())
    if job.process.main:
        # Without a checkpoint everything is done again, the evaluation before the first step too.
        cut_metrics(directory.metrics, -1 if newest is None else position.step)
    return position


def _loop(
    job: PolicyJob,
    directory: StageDirectory,
    position: Position,
    files: Mapping[str, bytes],
    report: Report | None,
) -> tuple[Position, bool]:
    """All steps from a position on. Returns the position reached, with its checkpoint written, and whether
    the run is finished. Its statistics hold the evaluations before and after, and the tokens generated."""
    settings, process = job.settings, job.process
    log = MetricsLog(directory.metrics) if process.main else None
    clock = _Clock(position)
    statistics: dict[str, Any] = {"generated_tokens": 0, "skipped_questions": 0, **position.statistics}

    def look() -> None:
        if log is not None:
            found = job.evaluate()
            log.write("eval", position.step, **found)
            statistics["before" if position.step == 0 else "after"] = found
        barrier(process)

    try:
        with ending_signals() as told:
            if position.step == 0:
                look()
            while position.step < settings.steps:
                metrics = reinforce_step(job, position.step)
                for counted in ("generated_tokens", "skipped_questions"):
                    statistics[counted] += int(metrics[counted])
                tokens = position.tokens + int(metrics["tokens"])
                position = replace(position, step=position.step + 1, tokens=tokens, seconds=clock.seconds())
                if log is not None:
                    log.write("train", position.step, **metrics, seconds=round(position.seconds, 2))
                if report is not None and process.main:
                    report(_progress(position, settings, metrics, clock))
                last = position.step == settings.steps
                ending = bool(sums([float(bool(told))], process)[0])
                if last or _due(settings.evaluate_every, position.step):
                    look()
                if last or ending or _due(settings.save_every, position.step):
                    _check_finite(job, position.step)
                    position = replace(
                        position, statistics=shared(statistics, process), seconds=clock.seconds()
                    )
                    save_checkpoint(
                        directory.checkpoints,
                        position,
                        job.model,
                        job.optimizers,
                        NoLoader(),
                        files,
                        process,
                        keep=settings.keep_checkpoints,
                    )
                if ending and not last:
                    return position, False
    finally:
        if log is not None:
            log.close()
    return position, True


class _Clock:
    """Time of the run: what was spent before this process, and since."""

    def __init__(self, position: Position) -> None:
        self._before, self._begun = position.seconds, time.perf_counter()
        self.first_step = position.step

    def seconds(self) -> float:
        return self._before + self.here()

    def here(self) -> float:
        return time.perf_counter() - self._begun


def _progress(
    position: Position, settings: RLSettings, metrics: Mapping[str, float], clock: _Clock
) -> RLProgress:
    of_a_step = clock.here() / (position.step - clock.first_step)
    return RLProgress(
        position.step,
        settings.steps,
        metrics["reward"],
        metrics["accuracy"],
        metrics["stop_rate"],
        of_a_step * (settings.steps - position.step),
    )


def _check_finite(job: PolicyJob, step: int) -> None:
    """Raises EndstopError for weights that must not become a checkpoint."""
    if not all(bool(parameter.isfinite().all()) for parameter in job.model.parameters()):
        raise EndstopError(f"the result of step {step} is not finite; lower the learning rates.")


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _summary(job: PolicyJob, position: Position, finished: bool) -> dict[str, Any]:
    """summary.json. Its metrics are the last evaluation, with the first one's figures as `..._before`."""
    config, settings, statistics = job.model.config, job.settings, position.statistics
    before = {
        f"{name}_before": value
        for name, value in statistics.get("before", {}).items()
        if isinstance(value, float)
    }
    lengths = [len(question.prompt_ids) + len(question.gold_ids) for question in job.held_out]
    per_token = flops_per_token(config, max(1, sum(lengths) // len(lengths)))
    generated, skipped = (statistics.get(name, 0) for name in ("generated_tokens", "skipped_questions"))
    return {
        "stage": "rl",
        "finished": finished,
        "settings": settings.to_json(),
        "metrics": {**statistics.get("after", {}), **before},
        "steps": position.step,
        "seconds": round(position.seconds, 1),
        "tokens": position.tokens,
        "parameters": parameter_counts(config),
        # An update costs three forward passes over its tokens, generation one over its own.
        "flops": position.tokens * per_token + generated * per_token / 3,
        "data": {
            "sources": [_source(name) for name in settings.tasks],
            "statistics": {
                "questions": position.step * settings.questions,
                "skipped_questions": skipped,
                "skipped_held_out": settings.evaluation_questions - len(job.held_out),
                "rollouts": (position.step * settings.questions - skipped) * settings.samples,
                "generated_tokens": generated,
            },
        },
    }


def _source(task: str) -> dict[str, Any]:
    if task == "gsm8k":
        from endstop.train.evaluation.datasets import DATASETS

        return {"name": task, "licence": DATASETS[task].licence, "origin": DATASETS[task].repository}
    return {"name": task, "licence": LICENCE, "origin": ORIGIN}
