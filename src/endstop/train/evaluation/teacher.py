"""What a model in an engine would say in given places: logits behind prompts, P(stop) along right answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from endstop.runtime.token_model import LogitsWanted, RowChunk

if TYPE_CHECKING:
    from torch import Tensor

    from endstop.runtime.engine import Engine

_ROWS = 16
_TOKENS = 4096
_LOGIT_BYTES = 1 << 27

Ids = Sequence[int]


def last_logits(engine: Engine, prompts: Sequence[Ids]) -> Iterator[Tensor]:
    """The logits [V] behind each prompt, float32 on the CPU, in their order.

    The engine must have nothing to do meanwhile; the prefixes that it keeps are given up. Raises ValueError
    for a prompt longer than the window.
    """
    for logits in _logits_behind(engine, [(prompt[:-1], prompt[-1:]) for prompt in prompts]):
        yield logits[-1]


def p_stop_along(engine: Engine, prompts: Sequence[Ids], answers: Sequence[Ids]) -> list[list[float]]:
    """P(stop) in front of each token of each answer and behind its last: len(answer) + 1 values each.

    It is the probability of the stop set as a whole. Conditions as for `last_logits`.
    """
    stops = [token_id for token_id in sorted(engine.stops.ids) if token_id < engine.model.vocab_size]
    rows = [(prompt[:-1], [*prompt[-1:], *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    return [logits.softmax(-1)[:, stops].sum(-1).tolist() for logits in _logits_behind(engine, rows)]


def _logits_behind(engine: Engine, rows: Sequence[tuple[Ids, Ids]]) -> Iterator[Tensor]:
    """For each row of (what comes before, tail) the logits behind every token of its tail: [tail, V]."""
    # Nothing else may hold rows of the model, so that what fits is known.
    engine.scheduler.clear_cache()
    for group in _groups(engine, rows):
        handles = [engine.model.open_row() for _ in group]
        try:
            heads = [
                RowChunk(handle, list(head), 0, "none")
                for handle, (head, _) in zip(handles, group, strict=True)
                if head
            ]
            tails = [
                RowChunk(handle, list(tail), len(head), "all")
                for handle, (head, tail) in zip(handles, group, strict=True)
            ]
            _forward(engine, heads, "none")
            found = _forward(engine, tails, "all")
        finally:
            for handle in handles:
                engine.model.close_row(handle)
        yield from found


def _forward(engine: Engine, chunks: Sequence[RowChunk], wanted: LogitsWanted) -> list[Tensor]:
    """The logits of each chunk. One chunk after the other where the model takes no batch."""
    if not engine.model.capabilities.batched and len(chunks) > 1:
        return [logits for chunk in chunks for logits in _forward(engine, [chunk], wanted)]
    if not chunks:
        return []
    logits = engine.model.forward(chunks).logits
    if wanted == "none":
        return []
    if logits is None:
        raise ValueError("this model gives no logits")
    parts: tuple[Tensor, ...] = logits.float().cpu().split([len(chunk.tokens) for chunk in chunks])
    return list(parts)


def _groups(engine: Engine, rows: Sequence[tuple[Ids, Ids]]) -> Iterator[list[tuple[Ids, Ids]]]:
    """Rows that are computed together: few enough for the cache, for one step and for the logits."""
    group: list[tuple[Ids, Ids]] = []
    for row in rows:
        more = [*group, row]
        lengths = [len(head) + len(tail) for head, tail in more]
        logits = 4 * engine.model.vocab_size * sum(len(tail) for _, tail in more)
        full = len(more) > _ROWS or sum(lengths) > _TOKENS or logits > _LOGIT_BYTES
        if group and (full or not engine.model.fits(lengths)):
            yield group
            group = []
        group.append(row)
    if group:
        yield group
