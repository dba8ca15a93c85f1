"""Stopping by endstop's rules inside `model.generate` of transformers.

    adapter = StopAdapter(path, tokenizer, SamplingParams(stop=["END"], max_tokens=64))
    output = model.generate(**inputs, **adapter.generate_arguments())
    for row in adapter.results(output):
        print(row.text, row.finish_reason, row.stop_kind)

One StopMachine follows each row of the batch: the criterion ends a row when its machine does, the processor
masks `banned_ids()`, the streamer hands on what may be shown. `generate` keeps its own loop, so a row that
ends early is padded until the others end; the results are exact all the same, because they come from the
machines and not from the padded tensor. How tokens are chosen (temperature, num_beams, ...) is said to
`generate`; of SamplingParams only what concerns the end of a row is taken, anything else is refused.

`generate` has an end-of-sequence test of its own, and fills an eos_token_id of None from the model's
generation_config. `generate_arguments` therefore passes an id that no token has, which switches that test off
without a warning, and a pad_token_id for rows that have ended.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from endstop.protocol.errors import RequestRefused
from endstop.protocol.machine import StopMachine
from endstop.protocol.params import SamplingParams
from endstop.protocol.step import StopStep
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenbytes import TokenBytes
from endstop.runtime.deliver import completion_of_machine
from endstop.runtime.results import CompletionOutput

if TYPE_CHECKING:
    from endstop.protocol.toolcalls import Reasoning, ToolSyntax

NO_TOKEN = 2**31 - 1
"""An id that no vocabulary has: as eos_token_id it is never sampled and never matched."""

# What SamplingParams says about the end of a row. The rest belongs to `generate`.
_STOPPING = frozenset(
    {
        "stop",
        "stop_token_ids",
        "max_tokens",
        "min_tokens",
        "ignore_eos",
        "ban_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "stop_scope",
        "max_time",
        "repetition_detection",
    }
)


class StopAdapter:
    """Follows one call of `generate`; make a new one for the next call.

    Args:
        stops: the model's stop set, or the directory (or name) of the model to read it from.
        tokenizer: knows the bytes of tokens: a TokenBytes, a fast tokenizer of transformers, or a model
            directory.
        params: the stopping fields of SamplingParams; others must have their defaults.
        context_len: tokens of the model's window; where given, rows end there with stop kind `context`.
        prompt_len: tokens of each prompt without its padding, one number or one for each prompt; only
            the window's rest depends on it. Default: the width of the padded prompt.
        pad_token_id: what `generate` writes behind the end of a row. Default: the tokenizer's, else a
            stop id.
        tools, reasoning: the syntax that splits messages, as in StopMachine.
        on_step: called with (row, StopStep) for every token, in the thread of `generate`.

    Works with greedy search, sampling, num_return_sequences, any padding and any batch size. Beam search
    is refused while it runs (its rows change places); use endstop's own.
    """

    def __init__(
        self,
        stops: StopSet | str | Path,
        tokenizer: Any,
        params: SamplingParams | None = None,
        *,
        context_len: int | None = None,
        prompt_len: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        tools: ToolSyntax | None = None,
        reasoning: Reasoning | None = None,
        on_step: Callable[[int, StopStep], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.params = params or SamplingParams()
        defaults = SamplingParams()
        for field in fields(SamplingParams):
            value = getattr(self.params, field.name)
            if field.name not in _STOPPING and value != getattr(defaults, field.name):
                raise RequestRefused(
                    f"{field.name}={value!r} does not concern the end of a row: "
                    "say to generate() how tokens are chosen and how many rows there are"
                )
        self.stops = stops if isinstance(stops, StopSet) else StopSet.from_pretrained(stops)
        self.pieces = token_bytes(tokenizer)
        self.context_len = context_len
        self.prompt_len = prompt_len
        if pad_token_id is None:
            pad_token_id = getattr(tokenizer, "pad_token_id", None)
        self.pad_token_id: int = min(self.stops.ids, default=0) if pad_token_id is None else int(pad_token_id)
        self.tools = tools
        self.reasoning = reasoning
        self.on_step = on_step
        self.machines: list[StopMachine] = []
        self.criterion = StopCriterion(self)
        self.processor = BanProcessor(self)
        self.streamer = StepStreamer(self)
        self._clock = clock
        self._started_at = clock()
        self._width = -1  # columns of the padded prompt, once it is known
        self._seen = 0  # columns behind it that the machines have taken
        self._cancelled = threading.Event()

    @property
    def stopping_criteria(self) -> StoppingCriteriaList:
        return StoppingCriteriaList([self.criterion])

    @property
    def logits_processor(self) -> LogitsProcessorList:
        return LogitsProcessorList([self.processor])

    def generate_arguments(self, *, stream: bool = False) -> dict[str, Any]:
        """The keyword arguments for `generate`; with `stream` the streamer is among them.

        Raises ValueError if neither max_tokens nor context_len limits the output, because `generate` would
        then fall back on a limit of its own (20 tokens).
        """
        limit = self.params.max_tokens
        if limit is None:
            limit = self.context_len
        if limit is None:
            raise ValueError(
                "give max_tokens or context_len, without them generate() cuts at a limit of its own"
            )
        arguments: dict[str, Any] = {
            "stopping_criteria": self.stopping_criteria,
            "logits_processor": self.logits_processor,
            "eos_token_id": NO_TOKEN,
            "pad_token_id": self.pad_token_id,
            "max_new_tokens": limit,
        }
        if stream:
            arguments["streamer"] = self.streamer
        return arguments

    def cancel(self) -> None:
        """End all rows with stop kind `cancelled` at the next token. May come from any thread."""
        self._cancelled.set()

    def results(self, output: Any = None) -> list[CompletionOutput]:
        """One result for each row, in `generate`'s order (num_return_sequences rows for each prompt).

        `output` is what `generate` returned (the tensor, or the object with `sequences`); the machines have
        seen it already, unless the criterion was not passed on. A row that `generate` cut short for reasons
        of its own ends with `max_tokens`.
        """
        sequences = getattr(output, "sequences", output)
        if sequences is not None:
            self.take(sequences)
        self.end()
        chat = self.tools is not None or self.reasoning is not None
        return [
            completion_of_machine(machine, index, chat=chat) for index, machine in enumerate(self.machines)
        ]

    # What criterion, processor and streamer share.

    def begin(self, rows: int, width: int) -> None:
        """The prompt is known: `rows` rows of `width` columns, padding included."""
        if self._width >= 0:
            return
        self._width = width
        given = [self.prompt_len] if isinstance(self.prompt_len, int) else list(self.prompt_len or [width])
        if rows % len(given):
            raise ValueError(f"prompt_len has {len(given)} numbers for {rows} rows")
        copies = rows // len(given)
        self.machines = [
            StopMachine(
                self.stops,
                self.params,
                self.pieces,
                prompt_len=given[row // copies],
                context_len=self.context_len,
                clock=self._clock,
                started_at=self._started_at,
                tools=self.tools,
                reasoning=self.reasoning,
            )
            for row in range(rows)
        ]

    def take(self, input_ids: torch.Tensor) -> None:
        """Give the machines the columns of `input_ids` [rows, columns] that they have not seen."""
        rows, columns = input_ids.shape
        if self._width < 0:
            # Without the processor the criterion comes first, and one token is there by then.
            self.begin(rows, columns - 1)
        self._same_rows(rows, columns)
        if self._seen:
            last = input_ids[:, self._width + self._seen - 1].tolist()
            for machine, token_id in zip(self.machines, last, strict=True):
                if not machine.finished and machine.generated_token_ids[-1] != token_id:
                    raise RequestRefused("the rows have changed places: a StopAdapter follows no beam search")
        self._push(input_ids[:, self._width + self._seen :].tolist())

    def take_last(self, tokens: list[list[int]], count: int) -> None:
        """Give the machines tokens [rows][n], the last of `count` columns, without those they have seen."""
        self._push([row[len(row) - (count - self._seen) :] for row in tokens] if count > self._seen else [])

    def _same_rows(self, rows: int, columns: int) -> None:
        if rows != len(self.machines) or columns < self._width:
            raise RequestRefused(
                "these are not the rows that were begun with: a StopAdapter follows one call of generate() "
                "and no beam search"
            )

    def banned(self, rows: int, columns: int) -> list[frozenset[int]]:
        """The ids that each of `rows` may not sample next, where `columns` columns are there."""
        self._same_rows(rows, columns)
        if all(machine.finished for machine in self.machines):
            raise RequestRefused(
                "these rows have ended: a StopAdapter follows one call of generate(); make another"
            )
        if columns - self._width != self._seen:
            raise RequestRefused(
                "generate() looked at tokens that are not decided (assisted generation), "
                "and the stopping criteria of this adapter must be passed along with its processor"
            )
        return [frozenset() if machine.finished else machine.banned_ids() for machine in self.machines]

    def end(self) -> None:
        """`generate` is over: rows that have not ended were cut by its limit."""
        for row, machine in enumerate(self.machines):
            if not machine.finished:
                self._emit(row, machine.finish("cancelled" if self._cancelled.is_set() else "max_tokens"))

    def _push(self, rows: list[list[int]]) -> None:
        for row, tokens in enumerate(rows):
            machine = self.machines[row]
            if machine.finished or not tokens:
                continue
            if self._cancelled.is_set():
                self._emit(row, machine.finish("cancelled"))
            else:
                self._emit(row, machine.push_many(tokens))
        if rows:
            self._seen += len(rows[0])

    def _emit(self, row: int, step: StopStep) -> None:
        self.streamer.steps.put((row, step))
        if self.on_step is not None:
            self.on_step(row, step)


class StopCriterion(StoppingCriteria):
    """Ends a row of `generate` when its machine has ended."""

    def __init__(self, adapter: StopAdapter) -> None:
        self.adapter = adapter
        # `generate` pads ended rows only if some criterion has this attribute.
        self.eos_token_id = torch.tensor([NO_TOKEN])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """input_ids int64 [rows, columns] -> bool [rows]: the rows that have ended."""
        self.adapter.take(input_ids)
        ended = [machine.finished for machine in self.adapter.machines]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)


class BanProcessor(LogitsProcessor):
    """Masks the ids that a row may not end with yet (min_tokens, ban_eos)."""

    def __init__(self, adapter: StopAdapter) -> None:
        self.adapter = adapter

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids int64 [rows, columns], scores float [rows, V] -> scores with banned ids at -inf.

        A row in which nothing else is possible keeps its scores.
        """
        self.adapter.begin(*input_ids.shape)
        banned = self.adapter.banned(*input_ids.shape)
        if not any(banned):
            return scores
        masked = scores.clone()
        for row, ids in enumerate(banned):
            masked[row, [token_id for token_id in ids if token_id < scores.shape[1]]] = -torch.inf
        hopeless = torch.isneginf(masked).all(dim=-1, keepdim=True)
        return torch.where(hopeless, scores, masked)


class StepStreamer(BaseStreamer):
    """A streamer of `generate` that is an iterator of (row, StopStep): run `generate` in another thread.

    The texts of a row's steps concatenate to its text, whatever ended it.
    """

    def __init__(self, adapter: StopAdapter) -> None:
        self.adapter = adapter
        self.steps: queue.SimpleQueue[tuple[int, StopStep] | None] = queue.SimpleQueue()
        self._columns = -1  # the first call brings the prompt

    def put(self, value: torch.Tensor) -> None:
        if self._columns < 0:
            self._columns = 0
            if value.dim() == 2:
                self.adapter.begin(*value.shape)
            return
        tokens = value.unsqueeze(1) if value.dim() == 1 else value
        self._columns += tokens.shape[1]
        self.adapter.take_last(tokens.tolist(), self._columns)

    def end(self) -> None:
        self.adapter.end()
        self.steps.put(None)

    def __iter__(self) -> Iterator[tuple[int, StopStep]]:
        while (item := self.steps.get()) is not None:
            yield item


def token_bytes(tokenizer: Any) -> TokenBytes:
    """The bytes of tokens: of a TokenBytes, a fast tokenizer of transformers, or a model directory."""
    if isinstance(tokenizer, TokenBytes):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        return TokenBytes.from_pretrained(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no tokenizer.json inside: give a fast tokenizer, "
            "a TokenBytes or a model directory"
        )
    return TokenBytes.from_tokenizer_json(json.loads(backend.to_str()))
