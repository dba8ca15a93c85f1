"""Which rows compute how many tokens in the next step.

Continuous batching with chunked prefill: every running row with one pending token decodes, what is left of
`max_batch_tokens` goes to longer pending runs (prompts, tool results, recomputation) in order of arrival,
then new rows are admitted in order of arrival. When the cache would not hold the step, idle prefixes are
evicted, then the youngest row is preempted: it gives its cache row back and is computed again later; its
tokens, draws and text are not touched.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace

from endstop.runtime.prefix import PrefixCache
from endstop.runtime.sequence import Sequence
from endstop.runtime.token_model import RowChunk, TokenModel


@dataclass(slots=True)
class Scheduled:
    """The next `count` pending tokens of a sequence are computed in this step."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether nothing is pending afterwards, so that a token can be sampled."""
        return self.count == self.sequence.pending

    def chunk(self) -> RowChunk:
        """What the model is asked for: logits of the last token if the next one is to be drawn, of all
        tokens while the prompt is scored."""
        sequence = self.sequence
        assert sequence.row is not None
        start, end = sequence.computed, sequence.computed + self.count
        tokens = sequence.token_ids[start:end]
        scores = sequence.request.prompt_logprobs if sequence.index == 0 else None
        if scores is not None and len(scores) <= min(end, len(sequence.prompt_token_ids) - 1):
            return RowChunk(sequence.row, tokens, start, "all")
        return RowChunk(sequence.row, tokens, start, "last" if self.completes else "none")


class Scheduler:
    """Queue and running rows. Not thread-safe: the engine's step owns it."""

    def __init__(
        self,
        model: TokenModel,
        *,
        window: int | None,
        max_rows: int,
        max_batch_tokens: int,
        prefix_rows: int,
    ) -> None:
        self.model = model
        self.window = window
        self.max_rows = max_rows
        self.max_batch_tokens = max_batch_tokens
        self.prefix = PrefixCache(model, prefix_rows)
        self.reuse = prefix_rows > 0
        self.queue: list[Sequence] = []  # in order of arrival
        self.running: list[Sequence] = []  # with a cache row, in order of arrival
        self.reserved: dict[int, list[int]] = {}  # arrival number of a group -> lengths it may grow to
        self.holding: list[int] = []  # arrival numbers of groups that wait for room
        self.preemptions = 0
        self.tokens_reused = 0
        self.failed: list[tuple[Sequence, Exception]] = []  # the model could not open a row for them

    def add(self, sequence: Sequence) -> None:
        insort(self.queue, sequence, key=lambda s: s.order)

    def take_failed(self) -> list[tuple[Sequence, Exception]]:
        failed, self.failed = self.failed, []
        return failed

    def clear_cache(self) -> None:
        """Close every row; sequences under way are computed again later."""
        for sequence in list(self.running):
            self.preempt(sequence)
        self.prefix.clear()

    def schedule(self) -> list[Scheduled]:
        """The plan of the next step, at most one entry for a sequence."""
        preempted = False
        plan = self._plan()
        while not self.model.fits(self._lengths(plan)):
            if self.prefix.evict():
                continue
            self.preempt(self.running[-1])
            preempted = True
            plan = self._plan()
        if not preempted:
            self._admit(plan)
        return plan

    def remove(self, sequence: Sequence, keep_prefix: bool) -> None:
        """Take an ended sequence out, in the step that ends it."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.queue:
            self.queue.remove(sequence)
        if sequence.row is None:
            return
        row, sequence.row = sequence.row, None
        if keep_prefix:
            self.prefix.put(row, sequence.token_ids[: sequence.computed])
        else:
            self.model.close_row(row)

    def preempt(self, sequence: Sequence) -> None:
        """Give the cache row back; the sequence is queued again, at its place in order of arrival."""
        self.running.remove(sequence)
        if sequence.row is not None:
            row, sequence.row = sequence.row, None
            self.model.close_row(row)
        sequence.computed = 0
        self.preemptions += 1
        self.add(sequence)

    def reserve(self, number: int, lengths: list[int]) -> bool:
        """Room for a group of rows that run outside the batch, up to these lengths; False: not now.

        Rows that run already are older than the group and keep the room for their longest length.
        """
        grown = [Scheduled(s, self._longest(s) - s.computed) for s in self.running]
        older = any(s.request.number < number for s in self.queue) or any(h < number for h in self.holding)
        while not older and not self.model.fits(self._lengths(grown) + lengths):
            older = not self.prefix.evict()
        if older or len(self.running) + self._reserved_rows() + len(lengths) > self.max_rows:
            if number not in self.holding:
                insort(self.holding, number)
            return False
        self.release(number)
        self.reserved[number] = lengths
        return True

    def _longest(self, sequence: Sequence) -> int:
        """Computed tokens that a sequence can come to; its present ones where nothing limits it."""
        limits = [sequence.visible if self.window is None else self.window]
        if sequence.params.max_tokens is not None:
            limits.append(len(sequence.prompt_token_ids) + sequence.params.max_tokens - 1)
            limits = limits[1:] if self.window is None else limits
        return max(sequence.computed, min(limits))

    def release(self, number: int) -> None:
        self.reserved.pop(number, None)
        if number in self.holding:
            self.holding.remove(number)

    def _plan(self) -> list[Scheduled]:
        budget = self.max_batch_tokens
        ready = [s for s in self.running if not s.waiting]
        plan = [Scheduled(s, 1) for s in ready if s.pending == 1][:budget]
        budget -= len(plan)
        for sequence in ready:
            if budget == 0:
                break
            if sequence.pending > 1:
                plan.append(Scheduled(sequence, min(sequence.pending, budget)))
                budget -= plan[-1].count
        return plan

    def _lengths(self, plan: list[Scheduled]) -> list[int]:
        """Length of every row in the cache after the step."""
        growth = {id(item.sequence): item.count for item in plan}
        lengths = [s.computed + growth.get(id(s), 0) for s in self.running]
        lengths.extend(len(tokens) for tokens in self.prefix.rows.values())
        for group in self.reserved.values():
            lengths.extend(group)
        return lengths

    def _reserved_rows(self) -> int:
        return sum(len(lengths) for lengths in self.reserved.values())

    def _admit(self, plan: list[Scheduled]) -> None:
        budget = self.max_batch_tokens - sum(item.count for item in plan)
        waiting_in_queue = 0
        while budget > 0 and waiting_in_queue < len(self.queue):
            sequence = self.queue[waiting_in_queue]
            if sequence.waiting:  # preempted while its tool runs: it has nothing to compute yet
                waiting_in_queue += 1
                continue
            if len(self.running) + self._reserved_rows() >= self.max_rows:
                return
            if self.holding and self.holding[0] < sequence.request.number:
                return
            if self._choice_before_computes_prompt(sequence):
                return
            if not self._open_row(sequence, plan):
                return
            self.queue.remove(sequence)
            if sequence.row is None:
                continue
            insort(self.running, sequence, key=lambda s: s.order)
            plan.append(Scheduled(sequence, min(sequence.pending, budget)))
            budget -= plan[-1].count

    def _choice_before_computes_prompt(self, sequence: Sequence) -> bool:
        """Another choice of the request is about to have the prompt in its cache: fork that instead."""
        if not (self.reuse and self.model.capabilities.fork) or sequence.generated_token_ids:
            return False
        usable = len(sequence.prompt_token_ids) - 1
        return any(s.request is sequence.request and s.computed < usable for s in self.running)

    def _busy_rows(self) -> list[tuple[int, list[int]]]:
        if not self.model.capabilities.fork:
            return []
        return [(s.row, s.token_ids[: s.computed]) for s in self.running if s.row is not None]

    def _open_row(self, sequence: Sequence, plan: list[Scheduled]) -> bool:
        """Give the sequence a cache row, with a reused prefix where there is one. False: no room now."""
        reuse = None
        # The logits behind every prompt token are asked for, so every prompt token must be computed.
        if self.reuse and (sequence.params.prompt_logprobs is None or sequence.index > 0):
            reuse = self.prefix.find(sequence.token_ids, self._busy_rows())
        while True:
            lengths = self._lengths(plan)
            if reuse is not None and reuse.way == "take":
                lengths.remove(len(self.prefix.rows[reuse.row]))
            if self.model.fits([*lengths, sequence.visible]):
                break
            if self.prefix.evict(keep=reuse.row if reuse is not None else None):
                continue
            if reuse is None or reuse.way == "take":
                return False
            # Original and copy do not fit together.
            idle = reuse.row in self.prefix.rows
            can_take = idle and self.model.capabilities.truncate
            reuse = replace(reuse, way="take") if can_take else None
            if reuse is None and not idle:
                return False
        try:
            sequence.row = self.model.open_row() if reuse is None else self.prefix.use(reuse)
        except Exception as error:  # out of memory, say: it ends this sequence, not the engine
            self.failed.append((sequence, error))
            return True
        sequence.computed = 0 if reuse is None else reuse.length
        self.tokens_reused += sequence.computed
        if sequence.index == 0 and not sequence.generated_token_ids:
            sequence.request.cached_tokens = sequence.computed
        return True
