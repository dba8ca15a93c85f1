"""What passes between engine and sampler. Without torch, so that scripted models need none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from endstop.protocol.params import SamplingParams
from endstop.runtime.results import Logprob, TokenLogprobs
from endstop.runtime.trace import TraceStep, certain


class SampledRow(Protocol):
    """What the sampler must know about a row.

    `bad_words`: token sequences; the last id of one is banned behind the others. `stop_ids`: the model's
    stop set. `index` and `sampled` are j and i of the draw: which choice of its request, and how many tokens
    were sampled in it so far. `sampler_state` belongs to the sampler.
    """

    params: SamplingParams
    prompt_token_ids: list[int]
    generated_token_ids: list[int]
    bad_words: Sequence[Sequence[int]]
    stop_ids: Sequence[int]
    seed: int
    index: int
    sampled: int
    sampler_state: Any

    def banned_ids(self) -> frozenset[int]: ...


@dataclass(slots=True)
class Sampled:
    """The outcome for one row: a token, or the reason why there is none."""

    token_id: int = -1
    end: Literal["grammar", "error"] | None = None
    logprobs: TokenLogprobs | None = None
    trace: TraceStep | None = None
    error: str | None = None


def _scripted(row: SampledRow, token_id: int) -> Sampled:
    """An id that bypasses the sampler: a distribution with all its mass on it."""
    logprobs = {token_id: Logprob(0.0, 1)} if row.params.logprobs is not None else None
    return Sampled(
        token_id, logprobs=logprobs, trace=certain(row.stop_ids, token_id) if row.params.trace else None
    )


def draw_tokens(
    rows: Sequence[SampledRow], ids: list[int | None], places: list[int], total: int, logits: Any
) -> list[Sampled]:
    """One outcome for each row: its scripted id, or a sample from its logits (row `places[i]` of `total`)."""
    if None not in ids:
        return [
            _scripted(row, token_id) for row, token_id in zip(rows, ids, strict=True) if token_id is not None
        ]
    from endstop.runtime.sampler import sample

    open_rows = [i for i, token_id in enumerate(ids) if token_id is None]
    wanted = [places[i] for i in open_rows]
    drawn = iter(sample(logits if len(wanted) == total else logits[wanted], [rows[i] for i in open_rows]))
    return [
        next(drawn) if token_id is None else _scripted(row, token_id)
        for row, token_id in zip(rows, ids, strict=True)
    ]
