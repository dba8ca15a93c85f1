"""The training loop of base, mid and SFT: batches, loss, gradients, optimiser, metrics, checkpoints.

A run is a function of its settings and its data: killed at any moment and resumed, it takes the same steps
with the same numbers, on one process in float32 bit for bit.
"""

from __future__ import annotations

import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from endstop.protocol.errors import EndstopError
from endstop.train.checkpoint import Loader, Position, newest_checkpoint, save_checkpoint
from endstop.train.distributed import Parallel, Process, shared, summed, sums
from endstop.train.flops import peak_flops
from endstop.train.metrics_log import MetricsLog, read_metrics
from endstop.train.model_shapes import flops_per_token
from endstop.train.objective import LossSums, Objective
from endstop.train.optimizer import Optimizers
from endstop.train.run_directory import StageDirectory
from endstop.train.schedule import learning_rate_multiplier, muon_momentum
from endstop.train.settings import StageSettings

# A run of so many seconds is timed over this share of them, and over this many steps at least and at most.
_TIMED_SHARE, _TIMED_STEPS = 0.04, (4, 40)
_UNKNOWN = 1 << 40


@dataclass(frozen=True, slots=True)
class Progress:
    """What is reported after each step. seconds_left is None while the length of the run is not known."""

    step: int
    steps: int | None
    loss: float
    tokens_per_second: float
    seconds_left: float | None


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Job:
    """Everything a loop works with.

    Attributes:
        evaluate: measures the model as it is; called by every process, its result counts in the main one.
            What it has under "samples" become lines of their own.
        files: the tokenizer's files for the checkpoints. dtype: of the computation.
    """

    parallel: Parallel
    optimizers: Optimizers
    objective: Objective
    loader: Loader
    settings: StageSettings
    process: Process
    directory: StageDirectory
    files: Mapping[str, bytes]
    dtype: torch.dtype
    evaluate: Callable[[], dict[str, Any]] | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        """The context to compute in."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.process.device.type, dtype=self.dtype)


def train(job: Job, position: Position, report: Report | None = None) -> tuple[Position, bool]:
    """Take all steps from a position on; every process must call it.

    Returns the position reached, with its checkpoint written, and whether the run is finished: it is not
    where the process was told to end (SIGTERM, SIGINT). Raises EndstopError for a loss or gradient that is
    not finite, data without labels, or a full disk; the last good checkpoint stays.
    """
    settings, process = job.settings, job.process
    log = MetricsLog(job.directory.metrics) if process.main else None
    clock = _Clock(position)
    saved = position.step if position.step else -1
    peak = peak_flops(process.device, job.dtype) * process.world
    flops = flops_per_token(job.parallel.model.config, settings.row_length) * settings.batch_tokens
    known = log is not None and position.step in (
        line["step"] for line in read_metrics(log.path) if line["kind"] == "eval"
    )
    evaluated = position.step if shared(known, process) else -1

    def evaluate() -> None:
        nonlocal evaluated
        if job.evaluate is not None and evaluated != position.step:
            started = time.perf_counter()
            found = job.evaluate()
            clock.evaluation = time.perf_counter() - started
            evaluated = position.step
            if log is not None:
                samples = found.pop("samples", ())
                log.write("eval", position.step, **found)
                for sample in samples:
                    log.write("sample", position.step, **sample)

    def save() -> None:
        nonlocal saved
        if saved != position.step:
            _check_finite(job, position.step)
            save_checkpoint(
                job.directory.checkpoints,
                replace(position, seconds=clock.seconds(), statistics=job.loader.statistics()),
                job.parallel.model,
                job.optimizers,
                job.loader,
                job.files,
                process,
                keep=settings.keep_checkpoints,
            )
            saved = position.step

    try:
        with ending_signals() as told:
            if position.step == 0:
                evaluate()
            while position.steps is None or position.step < position.steps:
                clock.begin_step()
                losses, norm, multiplier, ending = training_step(job, position, bool(told))
                seconds = clock.end_step()
                position = replace(position, step=position.step + 1, tokens=position.tokens + losses.tokens)
                if position.steps is None:
                    position = replace(
                        position, steps=shared(clock.steps_of(settings, position.step), process)
                    )
                rate = settings.batch_tokens / seconds
                if log is not None and position.step % settings.log_every == 0:
                    log.write(
                        "train",
                        position.step,
                        **losses.metrics(),
                        gradient_norm=norm,
                        lr_multiplier=multiplier,
                        tokens_per_second=round(rate, 1),
                        mfu=round(flops / seconds / peak, 4),
                        seconds=round(clock.seconds(), 2),
                    )
                if report is not None and process.main:
                    left = clock.seconds_left(settings, position)
                    report(Progress(position.step, position.steps, losses.loss, rate, left))
                if clock.steps_here == 1:
                    # What lives now lives to the end: the collector need not look at it again.
                    gc.collect()
                    gc.freeze()
                if _due(settings.evaluate_every, position.step):
                    evaluate()
                if ending or _due(settings.save_every, position.step):
                    save()
                if ending:
                    return replace(position, seconds=clock.seconds()), False
            evaluate()
            save()
    finally:
        gc.unfreeze()
        if log is not None:
            log.close()
    return replace(position, seconds=clock.seconds(), statistics=job.loader.statistics()), True


def training_step(job: Job, position: Position, told: bool = False) -> tuple[LossSums, float, float, bool]:
    """One optimiser step: its losses, gradient norm and rate multiplier, and whether any process was told
    to end. Raises EndstopError, with the weights as they were, where a number is not finite."""
    step, schedule = position.step, job.settings.schedule
    batches = job.loader.next_step()
    own = job.objective.weight_sum(batch.targets for batch in batches)
    divisor, ending = sums([own, float(told)], job.process)
    if divisor <= 0:
        raise EndstopError(
            f"step {step + 1} has no supervised token with a weight: look at the data's labels."
        )
    multiplier = learning_rate_multiplier(
        step,
        position.steps or _UNKNOWN,
        warmup_steps=min(schedule.warmup_steps, position.steps or _UNKNOWN),
        warmdown_fraction=schedule.warmdown_fraction,
        final_fraction=schedule.final_fraction,
        initial_fraction=schedule.initial_fraction,
    )
    momentum = muon_momentum(step, warmup_steps=schedule.momentum_warmup_steps)
    job.optimizers.set_schedule(multiplier, momentum)
    total: torch.Tensor | None = None
    for index, batch in enumerate(batches):
        batch = batch.to(job.process.device)
        with job.parallel.micro_batch(last=index == len(batches) - 1):
            with job.autocast():
                loss, found = job.parallel.loss(batch.input_ids, batch.targets, batch.document_ids, divisor)
            loss.backward()
        total = found if total is None else total + found
    assert total is not None
    losses = LossSums.of(summed(total, job.process))
    if not math.isfinite(losses.loss):
        raise EndstopError(_not_finite(job, "loss", losses.loss, step))
    norm = job.optimizers.clip_gradients()
    if not math.isfinite(norm):
        raise EndstopError(_not_finite(job, "gradient", norm, step))
    job.optimizers.step()
    job.optimizers.zero_grad()
    return losses, norm, multiplier, bool(ending)


def _check_finite(job: Job, step: int) -> None:
    """Raises EndstopError for weights that must not become a checkpoint."""
    local = (getattr(p, "_local_tensor", p) for p in job.parallel.model.parameters())
    (broken,) = sums([float(not all(bool(p.isfinite().all()) for p in local))], job.process)
    if broken:
        raise EndstopError(_not_finite(job, "result", float("nan"), step - 1))


def _not_finite(job: Job, what: str, value: float, step: int) -> str:
    last = newest_checkpoint(job.directory.checkpoints)
    kept = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
    return f"the {what} of step {step + 1} is {value}; {kept}. Lower the learning rates or look at the data."


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


class _Clock:
    """Time of the run: what was spent before this process, and what a step takes."""

    def __init__(self, position: Position) -> None:
        self._before, self._begun = position.seconds, time.perf_counter()
        self._step_begun = self._begun
        self._lengths: list[float] = []
        self.evaluation = 0.0
        self.steps_here = 0

    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._begun

    def begin_step(self) -> None:
        self._step_begun = time.perf_counter()

    def end_step(self) -> float:
        seconds = time.perf_counter() - self._step_begun
        self.steps_here += 1
        if self.steps_here > 1:
            # The first step compiles, allocates and warms up.
            self._lengths = [*self._lengths[-199:], seconds]
        return seconds

    def _mean(self) -> float:
        return sum(self._lengths) / len(self._lengths) if self._lengths else 0.0

    def steps_of(self, settings: StageSettings, step: int) -> int | None:
        """How many steps fit into the seconds of the settings, once enough were timed."""
        assert settings.seconds is not None
        least, most = _TIMED_STEPS
        timed = len(self._lengths)
        late = self.seconds() >= settings.seconds
        if not late and (
            timed < least or (sum(self._lengths) < _TIMED_SHARE * settings.seconds and timed < most)
        ):
            return None
        left = settings.seconds - self.seconds() - self.evaluation
        evaluation = self.evaluation / settings.evaluate_every if settings.evaluate_every else 0.0
        return step + max(0, int(left / ((self._mean() + evaluation) or 1.0)))

    def seconds_left(self, settings: StageSettings, position: Position) -> float | None:
        if position.steps is None:
            return None if settings.seconds is None else max(0.0, settings.seconds - self.seconds())
        return (position.steps - position.step) * self._mean()


@contextmanager
def ending_signals() -> Iterator[list[int]]:
    """A list that gets the signals that ask the process to end; a second Ctrl-C interrupts at once."""
    told: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield told
        return

    def handle(number: int, frame: Any) -> None:
        if told and number == signal.SIGINT:
            raise KeyboardInterrupt
        told.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
