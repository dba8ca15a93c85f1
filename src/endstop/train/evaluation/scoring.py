"""What a model thinks of given tokens: nats, greedy choice and P(stop) at each, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError

BATCH_TOKENS = 8192
"""Tokens of one forward pass, padding included."""
_LOGIT_BYTES = 1 << 27

Progress = Callable[[int, int], None]
"""Told how much is done and how much there is."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to be scored in their row.

    ids[start:end] are the targets, each predicted from everything before it: 1 <= start < end <= len(ids).
    """

    ids: Sequence[int]
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 1 <= self.start < self.end <= len(self.ids):
            raise ValueError(
                f"a span of a row of {len(self.ids)} tokens is 1 <= start < end <= {len(self.ids)}, "
                f"got {self.start} and {self.end}"
            )


@dataclass(frozen=True, slots=True)
class SpanScores:
    """Scores of a span's n targets.

    Attributes:
        nats: float64 [n], minus the natural-log probability of each.
        greedy: bool [n], whether it is the most likely token.
        p_stop: float64 [n], the probability of all stop ids together at each.
    """

    nats: Tensor
    greedy: Tensor
    p_stop: Tensor


def score_spans(
    model: Decoder,
    spans: Sequence[Span],
    *,
    stop_ids: Collection[int] = (),
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> list[SpanScores]:
    """The scores of each span, in the order of the spans.

    Rows of about the same length are computed together, padded at their right, which no token before it sees.
    Logits are made for the targets only, 128 MiB of them at once. The model is put into evaluation mode for
    the time of the call. Raises EndstopError where it gives no numbers.
    """
    scores: list[SpanScores | None] = [None] * len(spans)
    stops = sorted(token_id for token_id in set(stop_ids) if token_id < model.config.vocab_size)
    was_training = model.training
    model.eval()
    done = 0
    try:
        with torch.no_grad():
            for batch in _batches(spans, batch_tokens):
                for number, found in zip(
                    batch, _scored(model, [spans[n] for n in batch], stops), strict=True
                ):
                    scores[number] = found
                done += len(batch)
                if progress is not None:
                    progress(done, len(spans))
    finally:
        model.train(was_training)
    return [found for found in scores if found is not None]


def _batches(spans: Sequence[Span], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of spans whose rows are computed together, longest rows first: memory is asked for at once."""
    batch: list[int] = []
    width = 0
    for number in sorted(range(len(spans)), key=lambda number: -spans[number].end):
        width = width or spans[number].end
        if batch and (len(batch) + 1) * width > batch_tokens:
            yield batch
            batch, width = [], spans[number].end
        batch.append(number)
    if batch:
        yield batch


def _scored(model: Decoder, spans: Sequence[Span], stops: Sequence[int]) -> list[SpanScores]:
    device = next(model.parameters()).device
    # The last target is not computed itself.
    width = max(span.end for span in spans) - 1
    ids = torch.zeros(len(spans), width, dtype=torch.long)
    for row, span in enumerate(spans):
        used = torch.tensor(span.ids[: span.end - 1], dtype=torch.long)
        ids[row, : len(used)] = used
    hidden = model.hidden_states(ids.to(device))
    at = torch.cat([row * width + torch.arange(s.start - 1, s.end - 1) for row, s in enumerate(spans)])
    wanted = hidden.flatten(0, 1)[at.to(device)]
    targets = torch.tensor([i for s in spans for i in s.ids[s.start : s.end]], device=device)
    nats, greedy, p_stop = [], [], []
    rows = max(1, _LOGIT_BYTES // (4 * model.config.vocab_size))
    for begin in range(0, len(targets), rows):
        logits = model.logits(wanted[begin : begin + rows])
        target = targets[begin : begin + rows]
        norm = logits.logsumexp(-1)
        nats.append((norm - logits.gather(1, target.unsqueeze(1)).squeeze(1)).double().cpu())
        greedy.append((logits.argmax(-1) == target).cpu())
        stop = (logits[:, stops].logsumexp(-1) - norm).exp() if stops else torch.zeros_like(norm)
        p_stop.append(stop.double().cpu())
    lengths = [span.end - span.start for span in spans]
    if any(bool(part.isnan().any()) for part in nats):
        raise EndstopError("the model gives no numbers (NaN): its weights are damaged.")
    columns = [torch.split(torch.cat(parts), lengths) for parts in (nats, greedy, p_stop)]
    return [SpanScores(*parts) for parts in zip(*columns, strict=True)]
