"""The engine's core: many requests, one batch, each row until its own end.

A step takes in what came from other threads (arrivals, cancellations, tool results), lets the scheduler
plan, runs the model once, draws one token for each row that has nothing pending, and pushes it into the
row's StopMachine. Where a row ends is decided there and nowhere else; the engine carries it out in the same
step. This module imports no torch: logits are only handed on to the sampler.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from endstop.outcomes import StopKind
from endstop.protocol.errors import RequestRefused
from endstop.protocol.params import SamplingParams
from endstop.protocol.step import StopStep
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenbytes import TokenBytes
from endstop.runtime.deliver import delta_of, output_of, text_of, with_text
from endstop.runtime.requests import Prompt, RequestMaker, RequestOptions
from endstop.runtime.results import RequestOutput
from endstop.runtime.sampled import Sampled, draw_tokens
from endstop.runtime.scheduler import Scheduled, Scheduler
from endstop.runtime.sequence import Request, Sequence
from endstop.runtime.stats import EngineStats
from endstop.runtime.token_model import ForwardResult, RowChunk, TokenModel
from endstop.runtime.trace import TraceStep

logger = logging.getLogger(__name__)

_TOOL_WAIT = 0.01  # seconds that a step may wait when all rows wait for their tools
_TOOL_THREADS = 4


class EngineCore:
    """Continuous batching over a TokenModel: add, abort, step. Thread-safe.

    Args:
        model: rows in, logits out.
        stops: the model's stop set. pieces: the bytes of every token.
        encode: text -> ids of a raw prompt, BOS and EOS as the model's tokenizer adds them. Without it
            prompts are token ids. encode_text: text -> ids with nothing added, for bad_words.
        max_rows: rows computed at once. max_batch_tokens: tokens computed in one step.
        prefix_rows: rows kept after their end for reuse; None is max_rows, 0 turns reuse off.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: TokenModel,
        stops: StopSet | None = None,
        pieces: TokenBytes | None = None,
        *,
        encode: Callable[[str], list[int]] | None = None,
        encode_text: Callable[[str], list[int]] | None = None,
        max_rows: int = 32,
        max_batch_tokens: int = 2048,
        prefix_rows: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_rows < 1 or max_batch_tokens < 1:
            raise ValueError(
                f"max_rows and max_batch_tokens must be at least 1, got {max_rows} and {max_batch_tokens}"
            )
        self.model = model
        self.stops = stops if stops is not None else StopSet.of({})
        self.pieces = pieces if pieces is not None else TokenBytes([])
        self.clock = clock
        self.maker = RequestMaker(model, self.stops, self.pieces, encode, encode_text, clock)
        self.scheduler = Scheduler(
            model,
            window=self.maker.context_len,
            max_rows=max_rows,
            max_batch_tokens=max_batch_tokens,
            prefix_rows=max_rows if prefix_rows is None else prefix_rows,
        )
        self._stats = EngineStats()
        self._requests: dict[str, Request] = {}
        self._searches: dict[str, Request] = {}  # beam searches, which look at `cancelled` themselves
        self._arrived: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._ready: list[RequestOutput] = []
        self._timed: set[Sequence] = set()  # unfinished, with a deadline
        self._waiting: set[Sequence] = set()  # their tool runs
        self._lock = threading.RLock()  # held by the one thread that steps
        self._in_step = False
        self._closed = threading.Event()
        self._wake = threading.Event()  # a tool has finished, something arrived or was cancelled
        self._tool_threads: ThreadPoolExecutor | None = None

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        return replace(
            self._stats,
            preemptions=self.scheduler.preemptions,
            prefix_tokens_reused=self.scheduler.tokens_reused,
        )

    @property
    def context_len(self) -> int | None:
        """The window: what the model allows and the memory of its cache holds for one row."""
        return self.maker.context_len

    # What any thread may call at any time.

    def add(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> str:
        """Queue a request and return its id; `options` are the fields of RequestOptions.

        The terminal result goes to `on_output`, or without that to whoever calls `step`.
        Raises RequestRefused or ValueError for what this model cannot serve.
        """
        return self.submit(prompt, params or SamplingParams(), RequestOptions(**options)).id

    def submit(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """`add` for callers that follow the request itself."""
        if self._closed.is_set():
            raise RequestRefused("the engine is closed")
        request = self.maker.make(prompt, params, options)
        if self._requests.setdefault(request.id, request) is not request:
            raise RequestRefused(f"the request id {request.id!r} is in use")
        self._arrived.append(request)
        self._wake.set()
        if self._closed.is_set():  # closed in between: nobody would step for it
            self.cancel([request])
        return request

    def abort(self, request_id: str) -> bool:
        """Cancel a request: it gets its one terminal result, with the text so far.

        False if the id is unknown or the request is over. Returns at once: where a step is under way, that
        step or the next one ends it.
        """
        request = self._requests.get(request_id) or self._searches.get(request_id)
        if request is None:
            return False
        request.cancelled = True
        if request.id in self._searches:
            return True
        self._cancelled.append(request)
        self._wake.set()
        if self._lock.acquire(blocking=False):
            try:
                if not self._in_step:
                    self._take_in()
            finally:
                self._lock.release()
        return True

    def has_unfinished(self) -> bool:
        """Whether a further `step` has something to do or to deliver."""
        return bool(self._requests or self._ready)

    # The step.

    def step(self) -> list[RequestOutput]:
        """One step for all rows. Returns the results that are ready, of requests without `on_output`."""
        with self._lock:
            self._in_step = True
            try:
                self._take_in()
                plan = self.scheduler.schedule()
                for sequence, error in self.scheduler.take_failed():
                    self._fail(sequence, error)
                if plan:
                    self._run(plan)
                elif self._waiting:
                    self._wake.wait(_TOOL_WAIT)
                self._wake.clear()
            finally:
                self._in_step = False
            ready, self._ready = self._ready, []
            return ready

    def _take_in(self) -> None:
        """Arrivals, cancellations, deadlines and tool results, before anything is planned."""
        while self._arrived:
            for sequence in self._arrived.popleft().choices:
                self.scheduler.add(sequence)
                if sequence.params.max_time is not None:
                    self._timed.add(sequence)
        while self._cancelled:
            for sequence in self._cancelled.popleft().choices:
                if not sequence.finished:
                    self._end(sequence, "cancelled")
        for sequence in list(self._timed):
            # The machine tests the deadline with every token. This is for rows that get none: they are
            # queued, wait for a tool, or compute a long prompt.
            limit = sequence.params.max_time
            overdue = limit is not None and self.clock() - sequence.request.arrived >= limit
            if overdue and not sequence.finished:
                self._end(sequence, "deadline")
        for sequence in list(self._waiting):
            if sequence.job is not None and sequence.job.done():
                self._force(sequence)

    def _run(self, plan: list[Scheduled]) -> None:
        self._stats.steps += 1
        for batch in [plan] if self.model.capabilities.batched else [[item] for item in plan]:
            chunks = [item.chunk() for item in batch]
            self._stats.rows_computed_after_stop += sum(item.sequence.finished for item in batch)
            try:
                result = self.model.forward(chunks)
                self._stats.tokens_computed += sum(item.count for item in batch)
                self._take_results(batch, chunks, result)
            except Exception as error:
                logger.exception("a step failed on %d rows", len(batch))
                for item in batch:
                    if not item.sequence.finished:
                        self._fail(item.sequence, error)
            except BaseException:  # Ctrl-C: what these rows have in the cache is not known now
                for item in batch:
                    if not item.sequence.finished:
                        self.scheduler.preempt(item.sequence)
                raise

    def _take_results(self, batch: list[Scheduled], chunks: list[RowChunk], result: ForwardResult) -> None:
        rows: list[Sequence] = []  # nothing is pending, so their next token is drawn
        ids: list[int | None] = []
        places: list[int] = []  # of their logits
        place = with_logits = 0
        for item, chunk in zip(batch, chunks, strict=True):
            sequence = item.sequence
            sequence.computed += item.count
            if chunk.logits == "none":
                continue
            if chunk.logits == "all":
                self._score_prompt(sequence, chunk, result, place)
                if sequence.finished:
                    with_logits += 1
                    continue
            place += item.count if chunk.logits == "all" else 1
            if sequence.pending == 0:
                rows.append(sequence)
                places.append(place - 1)
                ids.append(None if result.token_ids is None else result.token_ids[with_logits])
            with_logits += 1
        if not rows:
            return
        for sequence, outcome in zip(rows, draw_tokens(rows, ids, places, place, result.logits), strict=True):
            if sequence.request.cancelled:
                self._end(sequence, "cancelled")
            elif outcome.end is not None:
                sequence.error = outcome.error
                self._end(sequence, outcome.end)
            else:
                self._commit(sequence, outcome)

    def _commit(self, sequence: Sequence, outcome: Sampled) -> None:
        """A sampled token becomes visible; the machine says whether it is the last one."""
        token_id = outcome.token_id
        sequence.append(token_id)
        sequence.sampled += 1
        self._stats.tokens_sampled += 1
        if sequence.request.first_token is None:
            sequence.request.first_token = self.clock()
        if sequence.logprobs is not None:
            sequence.logprobs.append(with_text(outcome.logprobs, self.pieces))
        if outcome.trace is not None:
            self._record(sequence, outcome.trace)
        self._push(sequence, token_id)
        if sequence.tool is not None and not sequence.finished:
            try:
                job = sequence.tool.push(token_id)
            except Exception as error:  # a broken tool costs its own row only
                self._fail(sequence, error)
                return
            if job is not None:
                sequence.job = self._threads().submit(job)
                sequence.job.add_done_callback(lambda _: self._wake.set())
                self._waiting.add(sequence)

    def _force(self, sequence: Sequence) -> None:
        """The tool's answer: its tokens are committed at once, and computed as one chunk."""
        job, sequence.job = sequence.job, None
        self._waiting.discard(sequence)
        assert job is not None
        error = job.exception()
        answer: list[int] = []
        if error is None:
            try:
                answer = [operator.index(token_id) for token_id in job.result()]
            except TypeError:
                error = ValueError("a tool gave something else than a list of token ids")
            unknown = [token_id for token_id in answer if not 0 <= token_id < self.model.vocab_size]
            if unknown:
                error = ValueError(f"a tool gave the token id {unknown[0]}, which the model does not have")
        if error is not None:
            self._fail(sequence, error)
            return
        for token_id in answer:
            sequence.append(token_id)
            self._stats.tokens_forced += 1
            if sequence.logprobs is not None:
                sequence.logprobs.append(None)
            self._record(sequence, TraceStep(token_id, forced=True))
            self._push(sequence, token_id, forced=True)
            if sequence.finished:
                return

    def _record(self, sequence: Sequence, step: TraceStep) -> None:
        if sequence.trace is None:
            return
        step.token = text_of(self.pieces, step.token_id)
        step.visible, step.computed, step.pending = sequence.visible, sequence.computed, sequence.pending
        sequence.trace.steps.append(step)

    def _push(self, sequence: Sequence, token_id: int, forced: bool = False) -> None:
        step = sequence.machine.push(token_id, forced)
        if step.finished:
            self._leave(sequence)
        self._deliver(sequence, step)

    def _end(self, sequence: Sequence, kind: StopKind) -> None:
        """An end that does not come from a token."""
        step = sequence.machine.finish(kind)
        self._leave(sequence)
        self._deliver(sequence, step)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        if sequence.request.cancelled:  # cancelled comes first
            self._end(sequence, "cancelled")
            return
        sequence.error = f"{type(error).__name__}: {error}"
        self._end(sequence, "error")

    def _leave(self, sequence: Sequence) -> None:
        """Out of the batch, in the step that ends the row; its tool ends with it."""
        self.scheduler.remove(sequence, keep_prefix=sequence.machine.finish_reason not in ("abort", "error"))
        self._timed.discard(sequence)
        self._waiting.discard(sequence)
        if sequence.tool is not None:
            try:
                sequence.tool.close()
            except Exception:  # the row has its end, whatever the tool says to that
                logger.exception("the tool of request %s failed to close", sequence.request.id)
        if sequence.job is not None:
            sequence.job.cancel()
        sequence.tool = sequence.job = None

    def _deliver(self, sequence: Sequence, step: StopStep) -> None:
        request = sequence.request
        if request.on_delta is not None:
            delta = delta_of(sequence, step)
            if delta is not None:
                self._hand_over(request, request.on_delta, delta)
        if not step.finished or not all(choice.finished for choice in request.choices):
            return
        request.output = output = output_of(request, self.clock())
        request.choices = []
        del self._requests[request.id]
        self._stats.requests_finished += 1
        if request.on_output is not None:
            self._hand_over(request, request.on_output, output)
        else:
            self._ready.append(output)

    def _hand_over(self, request: Request, consumer: Callable[[Any], None], item: Any) -> None:
        try:
            consumer(item)
        except Exception:  # a broken consumer costs its own request only
            logger.exception("the consumer of request %s failed, so the request is cancelled", request.id)
            request.on_delta = None
            request.cancelled = True
            self._cancelled.append(request)

    def _score_prompt(self, sequence: Sequence, chunk: RowChunk, result: ForwardResult, place: int) -> None:
        """Prompt logprobs: the logits of position p are about prompt token p + 1."""
        prompt, known = sequence.prompt_token_ids, sequence.request.prompt_logprobs
        wanted = sequence.params.prompt_logprobs
        assert known is not None
        assert wanted is not None
        first = len(known) - 1
        last = min(chunk.start + len(chunk.tokens), len(prompt) - 1)
        if result.logits is None:
            self._fail(sequence, RequestRefused("prompt_logprobs needs logits, this model gives ids only"))
            return
        from endstop.runtime.sampler import given_logprobs

        logits = result.logits[place + first - chunk.start : place + last - chunk.start]
        for entry in given_logprobs(logits, prompt[first + 1 : last + 1], wanted):
            known.append(with_text(entry, self.pieces))

    def cancel(self, requests: Iterable[Request]) -> None:
        """End what is unfinished of these requests before returning; within a step, with the next one."""
        unfinished = [request for request in requests if request.output is None]
        if not unfinished:
            return
        for request in unfinished:
            request.cancelled = True
            self._cancelled.append(request)
        with self._lock:
            if not self._in_step:
                self._take_in()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Keeps other threads from stepping, so that the caller may use model and scheduler."""
        with self._lock:
            self._take_in()
            yield

    @contextmanager
    def search_registered(self, request: Request) -> Iterator[None]:
        """Makes a beam search known by its id, for `abort`."""
        if request.id in self._requests or self._searches.setdefault(request.id, request) is not request:
            raise RequestRefused(f"the request id {request.id!r} is in use")
        try:
            yield
        finally:
            del self._searches[request.id]

    def count_search(self, rows_after_stop: int, tokens: int) -> None:
        """What a beam search gave the model in one of its steps."""
        self._stats.rows_computed_after_stop += rows_after_stop
        self._stats.tokens_computed += tokens

    def step_for_one(self) -> None:
        """A step for who waits for one result: what else gets ready stays for those who call `step`."""
        with self._lock:
            ready = self.step()
            self._ready = ready + self._ready

    def wait_for_work(self, seconds: float) -> None:
        """Sleep until something arrives or is cancelled, `wake` is called, or the time is over."""
        if self._wake.wait(seconds):
            self._wake.clear()

    def wake(self) -> None:
        """End a `wait_for_work` in another thread."""
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """End everything that is unfinished with `error`."""
        with self._lock:
            self._take_in()
            for request in list(self._requests.values()):
                for sequence in request.choices:
                    if not sequence.finished:
                        self._fail(sequence, error)

    def load_weights(self, state_dict: Mapping[str, Any]) -> None:
        """Swap the model's weights (Hugging Face names) and empty the prefix cache.

        Rows under way give their cache back and go on with the new weights. Raises RequestRefused while a
        beam search runs, which could not.
        """
        with self._lock:
            if self._searches:
                raise RequestRefused("weights cannot be swapped while a beam search runs")
            self.scheduler.clear_cache()
            self.model.load_weights(state_dict)

    def close(self) -> None:
        """Cancel what is unfinished, free every row, end the tool threads. Refuses requests from then on."""
        self._closed.set()
        with self._lock:
            self.cancel(list(self._requests.values()))
            self.scheduler.clear_cache()
            if self._tool_threads is not None:
                self._tool_threads.shutdown(wait=False, cancel_futures=True)
                self._tool_threads = None

    def _threads(self) -> ThreadPoolExecutor:
        if self._tool_threads is None:
            self._tool_threads = ThreadPoolExecutor(_TOOL_THREADS, thread_name_prefix="endstop-tool")
        return self._tool_threads
