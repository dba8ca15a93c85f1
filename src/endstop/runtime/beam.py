"""Beam search: a driver of its own over TokenModel; each beam has a forked machine and a forked cache row.

The rules are those of transformers' `generate(num_beams=...)`, so that results compare: of the
max(2, 1 + number of ending ids) x width likeliest continuations those among the first `width` that end are
finished with the score  log P / generated tokens ** length_penalty;  the best `width` that do not end run on.
`early_stopping`: True ends when `width` beams have finished; False when the best running beam, at its
present length, cannot beat the worst finished one; "never" compares with the longest possible length where a
positive penalty favours length. The stop rules are the machine's, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from endstop.protocol.errors import RequestRefused
from endstop.protocol.machine import StopMachine
from endstop.protocol.params import SamplingParams
from endstop.runtime.sampler import edited
from endstop.runtime.sequence import Request
from endstop.runtime.token_model import RowChunk, TokenModel


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How to search. `length_penalty` is an exponent: above 0 it favours long results."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if isinstance(self.width, bool) or not isinstance(self.width, int) or self.width < 1:
            raise ValueError(f"the beam width must be an integer of at least 1, got {self.width!r}")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping must be true, false or 'never', got {self.early_stopping!r}")


@dataclass(slots=True, eq=False)
class Beam:
    """One hypothesis. `score` is the sum of its tokens' logprobs; it is a row for the sampler's edits."""

    machine: StopMachine
    score: float
    params: SamplingParams
    prompt_token_ids: list[int]
    stop_ids: Sequence[int]
    bad_words: Sequence[Sequence[int]]
    generated_token_ids: list[int] = field(default_factory=list)
    row: int | None = None
    final: float = 0.0  # the score with the length penalty, once it has finished
    seed: int = 0
    index: int = 0
    sampled: int = 0
    sampler_state: Any = None

    def banned_ids(self) -> frozenset[int]:
        return self.machine.banned_ids()

    def extended(self, token_id: int, score: float) -> Beam:
        machine = self.machine.fork()
        machine.push(token_id)
        generated = [*self.generated_token_ids, token_id]
        return Beam(
            machine, score, self.params, self.prompt_token_ids, self.stop_ids, self.bad_words, generated
        )


class BeamSearch:
    """The search for one request. `step` computes and extends all beams by one token until `done`.

    `room`: lengths that its rows may grow to. They are the group's whole need, to be reserved before the
    first step. `max_batch_tokens`: the prompt is computed in chunks of that size.
    """

    def __init__(
        self,
        model: TokenModel,
        request: Request,
        beam: BeamParams,
        max_batch_tokens: int,
        window: int | None,
    ) -> None:
        check_beam_request(model, request.params, beam)
        choice = request.choices[0]
        self.model = model
        self.request = request
        self.beam = beam
        self.max_batch_tokens = max_batch_tokens
        self.prompt = request.prompt_token_ids
        params = request.params
        # Like the machine's: visible tokens fill the window.
        limits = [params.max_tokens, None if window is None else window - len(self.prompt)]
        known = [limit for limit in limits if limit is not None]
        if not known:
            raise RequestRefused("beam search needs max_tokens, as this model has no window")
        self.longest = min(known)
        self.room = [len(self.prompt) + self.longest] * beam.width
        ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(choice.stop_ids))
        self.candidates = max(2, 1 + len(ending)) * beam.width
        self.running = [Beam(choice.machine, 0.0, params, self.prompt, choice.stop_ids, choice.bad_words)]
        self.finished: list[Beam] = []
        self.computed = 0  # tokens of the prompt
        self.length = 0  # generated tokens of the running beams
        self.done = False

    @torch.inference_mode()
    def step(self) -> int:
        """One forward call: a chunk of the prompt, or one token for every running beam.

        Returns the number of computed tokens.
        """
        if self.running[0].row is None:
            self.running[0].row = self.model.open_row()
        chunks = self._chunks()
        logits = self._forward(chunks)
        if self.request.cancelled:
            self.end("cancelled")
        elif logits is not None and bool((logits.isnan() | (logits == torch.inf)).any()):
            self.end("error")
        elif logits is not None:
            # The log-softmax of a row without any continuation is NaN.
            none = (logits == -torch.inf).all(dim=-1, keepdim=True)
            self._extend(torch.log_softmax(logits.float(), dim=-1).masked_fill(none, -torch.inf))
        return sum(len(chunk.tokens) for chunk in chunks)

    def end(self, kind: Literal["cancelled", "deadline", "error"]) -> None:
        """End from outside: the best running beam is delivered as it is."""
        best = self.running[0]
        best.machine.finish(kind)
        best.final = best.score
        self.finished = [best]
        self.done = True
        self.close()

    def close(self) -> None:
        """Free all rows."""
        for beam in self.running:
            if beam.row is not None:
                self.model.close_row(beam.row)
                beam.row = None

    def _chunks(self) -> list[RowChunk]:
        """What comes next: of the prompt's row, or of every running beam."""
        if self.length == 0:
            tokens = self.prompt[self.computed : self.computed + self.max_batch_tokens]
            last = self.computed + len(tokens) == len(self.prompt)
            chunk = RowChunk(_row(self.running[0]), tokens, self.computed, "last" if last else "none")
            self.computed += len(tokens)
            return [chunk]
        start = len(self.prompt) + self.length - 1
        return [RowChunk(_row(beam), beam.generated_token_ids[-1:], start) for beam in self.running]

    def _forward(self, chunks: list[RowChunk]) -> torch.Tensor | None:
        """Logits [beams, V] behind every beam, None while the prompt is not computed to its end."""
        calls = [chunks] if self.model.capabilities.batched else [[chunk] for chunk in chunks]
        parts: list[Any] = [self.model.forward(call).logits for call in calls]
        if chunks[0].logits == "none":
            return None
        if any(part is None for part in parts):
            raise RequestRefused("beam search needs logits, this model gives token ids only")
        logits: torch.Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return logits

    def _extend(self, logprobs: torch.Tensor) -> None:
        logprobs = edited(logprobs, self.running, [beam.banned_ids() for beam in self.running])
        scores = logprobs + torch.tensor([[beam.score] for beam in self.running], device=logprobs.device)
        size = scores.shape[-1]
        top = torch.topk(scores.flatten(), min(self.candidates, scores.numel()))
        self.length += 1
        going: list[tuple[Beam, Beam]] = []  # parent, child
        ended: list[Beam] = []
        best_first = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        for rank, (score, place) in enumerate(best_first):
            if score == -torch.inf:
                break
            parent = self.running[place // size]
            child = parent.extended(place % size, score)
            if not child.machine.finished:
                going.append((parent, child))
            elif rank < self.beam.width:
                child.final = score / self.length**self.beam.length_penalty
                ended.append(child)
        self.finished = sorted([*self.finished, *ended], key=lambda beam: -beam.final)[: self.beam.width]
        if not going and not self.finished:  # nothing legal can follow
            best = self.running[0]
            needed = len(best.generated_token_ids) < best.params.min_tokens
            best.machine.finish("error" if needed else "grammar")
            best.final = best.score / max(1, self.length - 1) ** self.beam.length_penalty
            self.finished = [best]
        self._move_rows(going[: self.beam.width])
        self.done = not self.running or not self._can_improve()
        if self.done:
            self.close()

    def _move_rows(self, going: list[tuple[Beam, Beam]]) -> None:
        """Each first child inherits its parent's row, its siblings fork it; other rows are closed."""
        parents = {id(parent) for parent, _ in going}
        for beam in self.running:
            if id(beam) not in parents and beam.row is not None:
                self.model.close_row(beam.row)
        computed = len(self.prompt) + self.length - 1
        heirs: dict[int, int] = {}
        for parent, child in going:
            if id(parent) in heirs:
                child.row = self.model.fork_row(heirs[id(parent)], computed)
            else:
                child.row = heirs[id(parent)] = _row(parent)
        self.running = [child for _, child in going]

    def _can_improve(self) -> bool:
        if len(self.finished) < self.beam.width:
            return True
        if self.beam.early_stopping is True:
            return False
        far = self.beam.early_stopping == "never" and self.beam.length_penalty > 0
        length = self.longest if far else self.length
        best_possible: float = self.running[0].score / length**self.beam.length_penalty
        return best_possible > self.finished[-1].final


def check_beam_request(model: TokenModel, params: SamplingParams, beam: BeamParams) -> None:
    """Raises RequestRefused for what beam search cannot do."""
    if not model.capabilities.fork:
        raise RequestRefused("beam search forks cache rows, which this model's backend cannot do")
    if params.n > beam.width:
        raise RequestRefused(f"n is {params.n}, but a beam width of {beam.width} gives {beam.width} results")
    drawn = params.temperature not in (0, 1) or params.top_k or params.top_p < 1 or params.min_p
    if drawn or params.seed is not None:
        raise RequestRefused(
            "beam search draws nothing: temperature, top_k, top_p, min_p and seed have no use"
        )
    if params.trace or params.logprobs is not None or params.prompt_logprobs is not None:
        raise RequestRefused("beam search gives cumulative_logprob only, no logprobs and no trace")


def _row(beam: Beam) -> int:
    assert beam.row is not None
    return beam.row
