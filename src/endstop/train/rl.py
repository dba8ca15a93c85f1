"""The RL stage: roll out, judge, one update, again.

A run is a function of its settings: the questions of step s are numbers s * questions and following, every
draw is fixed by (seed, step, question, sample), and the schedule by the step. So what is killed and resumed
goes on as if nothing had happened. Several processes (torchrun) share the questions of a step, and each has
a whole model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from endstop.models.decoder import Decoder
from endstop.models.directory import write_json
from endstop.models.load import load_model
from endstop.models.save import save_pretrained
from endstop.protocol.errors import EndstopError
from endstop.protocol.render import ChatRenderer
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenizer import Tokenizer
from endstop.runtime.engine import Engine
from endstop.train.checkpoint import (
    Position,
    fingerprint,
    load_checkpoint,
    newest_checkpoint,
    newest_shared,
    save_checkpoint,
)
from endstop.train.distributed import Process, barrier, shared, summed, sums
from endstop.train.metrics_log import MetricsLog, cut_metrics
from endstop.train.model_shapes import flops_per_token
from endstop.train.optimizer import Optimizers, build_optimizer
from endstop.train.policy_gradient import PolicyStatistics, group_advantages, policy_batches, policy_loss
from endstop.train.questions import Questions, TaskQuestions
from endstop.train.rl_metrics import evaluate, step_metrics
from endstop.train.rl_settings import RLSettings
from endstop.train.rollouts import Question, Rollout, roll_out, rollout_engine
from endstop.train.run_directory import RunDirectory, StageDirectory, tokenizer_files
from endstop.train.tasks.registry import task_named

# Muon's momentum: that of its long run from the beginning, since a step's gradient is mostly noise.
_MOMENTUM = 0.95


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

    own_shards: tuple[int, ...] = ()

    def next_step(self) -> list[Any]:
        raise NotImplementedError("RL makes its own data")

    def state(self, shard: int) -> dict[str, Any]:
        return {}

    def load_state(self, shard: int, state: dict[str, Any]) -> None:
        pass

    def statistics(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Job:
    """Everything a step works with.

    Attributes:
        stop_ids: what ends a row. pad_id: fills rows up, never a target.
        held_out: evaluated on, with their right answers.
    """

    model: Decoder
    optimizers: Optimizers
    engine: Engine
    questions: Questions
    held_out: Sequence[Question]
    stop_ids: frozenset[int]
    pad_id: int
    settings: RLSettings
    process: Process

    def evaluate(self) -> dict[str, Any]:
        settings = self.settings
        return evaluate(
            self.model,
            self.engine,
            self.held_out,
            self.stop_ids,
            samples=settings.evaluation_samples,
            max_tokens=settings.max_tokens,
            seed=settings.seed,
            micro_rows=settings.micro_rows,
            pad_id=self.pad_id,
            rewards=settings.rewards,
        )


def reinforce_step(job: Job, step: int) -> dict[str, float]:
    """One update: its metrics. Raises EndstopError, with the weights as they were, where a number is not
    finite.

    Where every answer of a step is worth the same as the others to its question there is no gradient and no
    update.
    """
    settings, process = job.settings, job.process
    started = time.perf_counter()
    numbers = range(process.rank, settings.questions, process.world)
    first = step * settings.questions
    rollouts = roll_out(
        job.engine,
        [job.questions.question("train", first + number) for number in numbers],
        settings.rewards,
        samples=settings.samples,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        step=step,
        numbers=numbers,
        state_dict=job.model.state_dict(),
    )
    rolled = time.perf_counter()
    advantages = group_advantages(rollouts)
    batches, own_total = policy_batches(
        rollouts,
        advantages,
        job.stop_ids,
        micro_rows=settings.micro_rows,
        pad_id=job.pad_id,
        terminator_in_loss=settings.terminator_in_loss,
    )
    total, signal = sums([float(own_total), float(len(batches))], process)
    statistics = PolicyStatistics()
    job.model.train()
    job.optimizers.zero_grad()
    for batch in batches:
        policy_loss(job.model, batch, int(total), statistics).backward()  # type: ignore[no-untyped-call]
    multiplier = settings.lr_fraction * (1.0 - step / settings.steps)
    norm = 0.0
    if signal:
        _sum_gradients(job.model, process)
        norm = job.optimizers.clip_gradients()
        if not math.isfinite(norm):
            raise EndstopError(f"the gradient of step {step + 1} is {norm}; lower the learning rates.")
        job.optimizers.set_schedule(multiplier, _MOMENTUM)
        job.optimizers.step()
    job.optimizers.zero_grad()
    loss, tokens, entropy, gap = sums(
        [statistics.loss, statistics.tokens, statistics.entropy, statistics.gap], process
    )
    found = _everyones([(rollouts, advantages, statistics.largest_gap)], process)
    everything = [rollout for theirs, _, _ in found for rollout in theirs]
    return {
        **step_metrics(everything, [advantage for _, theirs, _ in found for advantage in theirs]),
        "loss": loss,
        "entropy": entropy / tokens if tokens else 0.0,
        "engine_gap": gap / tokens if tokens else 0.0,
        "engine_gap_max": max(largest for _, _, largest in found),
        "gradient_norm": norm,
        "lr_multiplier": multiplier,
        "tokens": total,
        "generated_tokens": float(sum(len(rollout.ids) for rollout in everything)),
        "rollout_seconds": round(rolled - started, 3),
        "update_seconds": round(time.perf_counter() - rolled, 3),
    }


def _sum_gradients(model: Decoder, process: Process) -> None:
    """Gradients are sums over a step's tokens, divided by all of them already."""
    if process.world == 1:
        return
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        summed(parameter.grad, process)


def _everyones(own: list[Any], process: Process) -> list[Any]:
    if process.world == 1:
        return own
    found: list[Any] = [None] * process.world
    dist.all_gather_object(found, own)
    return [item for theirs in found for item in theirs]


def train_rl(
    run: RunDirectory,
    settings: RLSettings,
    process: Process,
    *,
    resume: bool = False,
    questions: Questions | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Train RUN/rl to its end; the summary. Every process of a torchrun must call it.

    resume: go on from the newest checkpoint, or begin where there is none yet; a finished stage gives its
    summary.
    questions: in the place of those of `settings.tasks`.
    Raises EndstopError for a stage that exists already, settings that were changed, or a model that is not
    there.
    """
    directory = run.stage("rl")
    if process.main:
        _begin(directory, settings, resume)
    barrier(process)
    source = settings.init_from
    files = tokenizer_files_of(source)
    model = load_model(source, dtype=torch.float32, device=process.device)
    job = _job(model, settings, process, questions)
    position = Position(steps=settings.steps, settings=settings.to_json(), tokenizer=fingerprint(files))
    checkpoint = newest_shared(directory.checkpoints, process) if resume else None
    if checkpoint is not None:
        found = load_checkpoint(checkpoint, model, job.optimizers, NoLoader(), position.tokenizer)
        position = replace(found, settings=position.settings, steps=settings.steps)
    if process.main:
        cut_metrics(directory.metrics, position.step)
    position, measured = _loop(job, directory, position, files, report)
    summary = _summary(job, position, measured)
    if process.main:
        save_pretrained(model, directory.model, files=files, replace=True)
        write_json(directory.summary, summary)
    barrier(process)
    return summary


def tokenizer_files_of(source: str) -> dict[str, bytes]:
    """The tokenizer's files of a model directory; EndstopError where it has none."""
    from pathlib import Path

    files = tokenizer_files(Path(source))
    if "tokenizer.json" not in files:
        raise EndstopError(f"{source} is no model directory with a tokenizer; finish the SFT stage first.")
    return files


def _begin(directory: StageDirectory, settings: RLSettings, resume: bool) -> None:
    if not resume or not directory.settings.exists():
        directory.begin(settings.to_json())
        return
    changed = settings.changed(directory.read_settings())
    if changed:
        raise EndstopError(f"a resumed run keeps its settings, but these differ: {'; '.join(changed)}.")


def _job(model: Decoder, settings: RLSettings, process: Process, questions: Questions | None) -> Job:
    tokenizer = Tokenizer.from_pretrained(settings.init_from)
    stops = StopSet.from_pretrained(settings.init_from)
    if questions is None:
        renderer = ChatRenderer(tokenizer, stops=stops)
        tasks = [task_named(name) for name in settings.tasks]
        questions = TaskQuestions(tasks, renderer, seed=settings.seed, give_up=settings.give_up)
    pad_id = tokenizer.pad_token_id
    rows = max(settings.questions * settings.samples // process.world, settings.evaluation_questions)
    return Job(
        model=model,
        optimizers=build_optimizer(model, settings.optimizer),
        engine=rollout_engine(settings.init_from, max_rows=min(256, rows), device=str(process.device)),
        questions=questions,
        held_out=[
            questions.question("test", index, gold=True) for index in range(settings.evaluation_questions)
        ],
        stop_ids=frozenset(token_id for token_id in stops.ids if token_id < model.config.vocab_size),
        pad_id=0 if pad_id is None else pad_id,
        settings=settings,
        process=process,
    )


def _loop(
    job: Job,
    directory: StageDirectory,
    position: Position,
    files: Mapping[str, bytes],
    report: Report | None,
) -> tuple[Position, dict[str, Any]]:
    """All steps from a position on; the position reached, and the evaluations before and after."""
    settings, process = job.settings, job.process
    log = MetricsLog(directory.metrics) if process.main else None
    begun, before = time.perf_counter(), position.seconds
    measured: dict[str, Any] = dict(position.statistics)
    generated = int(measured.get("generated_tokens", 0))
    first = position.step

    def look() -> None:
        if process.main and log is not None:
            found = job.evaluate()
            log.write("eval", position.step, **found)
            measured["before" if position.step == 0 else "after"] = found
        barrier(process)

    try:
        if position.step == 0:
            look()
        while position.step < settings.steps:
            metrics = reinforce_step(job, position.step)
            generated += int(metrics["generated_tokens"])
            seconds = before + time.perf_counter() - begun
            position = replace(
                position,
                step=position.step + 1,
                tokens=position.tokens + int(metrics["tokens"]),
                seconds=seconds,
            )
            if log is not None:
                log.write("train", position.step, **metrics, seconds=round(seconds, 2))
            if report is not None and process.main:
                rate = (seconds - before) / (position.step - first)
                report(
                    RLProgress(
                        position.step,
                        settings.steps,
                        metrics["reward"],
                        metrics["accuracy"],
                        metrics["stop_rate"],
                        rate * (settings.steps - position.step),
                    )
                )
            last = position.step == settings.steps
            if last or _due(settings.evaluate_every, position.step):
                look()
            if last or _due(settings.save_every, position.step):
                measured["generated_tokens"] = generated
                position = replace(position, statistics=shared(measured, process))
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
    except EndstopError as error:
        kept = newest_checkpoint(directory.checkpoints)
        raise EndstopError(f"{error} The last good checkpoint is {kept}." if kept else str(error)) from error
    finally:
        job.engine.close()
        if log is not None:
            log.close()
    return position, dict(position.statistics)


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _summary(job: Job, position: Position, measured: Mapping[str, Any]) -> dict[str, Any]:
    """summary.json: the last evaluation, with the first one's figures behind `_before`."""
    before = {
        f"{name}_before": value for name, value in measured["before"].items() if isinstance(value, float)
    }
    config, settings = job.model.config, job.settings
    lengths = [len(question.prompt_ids) + len(question.gold_ids) for question in job.held_out]
    per_token = flops_per_token(config, max(1, sum(lengths) // len(lengths)))
    # An update costs three forward passes over its tokens, generation one over its own.
    flops = position.tokens * per_token + measured["generated_tokens"] * per_token / 3
    return {
        "stage": "rl",
        "settings": settings.to_json(),
        "metrics": {**measured["after"], **before},
        "seconds": round(position.seconds, 2),
        "tokens": position.tokens,
        "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
        "flops": flops,
        "data": {
            "sources": [{"name": name, "licence": "generated"} for name in settings.tasks],
            "statistics": {
                "questions": settings.steps * settings.questions,
                "rollouts": settings.steps * settings.questions * settings.samples,
                "generated_tokens": measured["generated_tokens"],
            },
        },
    }
