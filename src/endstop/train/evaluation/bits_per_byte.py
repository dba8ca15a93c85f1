"""Bits per byte of texts, and beside it what bits per byte cannot see: how well the ends are predicted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from endstop.models.decoder import Decoder
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenbytes import TokenBytes
from endstop.protocol.tokenizer import Tokenizer
from endstop.train.document_encoding import encode_documents, trained_here
from endstop.train.evaluation.scoring import BATCH_TOKENS, Progress, Span, score_spans

# Rows that wait to be scored together.
_ROWS_AT_ONCE = 256
# Of more characters a tokenizer takes more memory than need be; see `document_encoding`.
_LONG_DOCUMENT = 1_000_000


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How documents become tokens.

    Attributes:
        bos_id: stands before a document; end_id: behind it. None where the model has no such token.
        stop_ids: what the runtime stops at, counted together in P(stop).
        token_bytes: bytes of each token id, 0 for special tokens.
    """

    tokenizer: Tokenizer
    bos_id: int | None
    end_id: int | None
    stop_ids: frozenset[int]
    token_bytes: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, stops: StopSet, pieces: TokenBytes) -> TextFormat:
        """For a model's own files. The border between documents is BOS where the model stops at it (as those
        trained here do), else the EOS, which also stands in front where there is no BOS."""
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        end = bos if bos is not None and bos in stops else eos
        lengths = tuple(0 if i in pieces.special else len(pieces[i]) for i in range(len(pieces)))
        return cls(tokenizer, bos if bos is not None else end, end, stops.ids, lengths)

    def encode(self, document: str) -> list[int]:
        """A document's ids with its borders."""
        before = [] if self.bos_id is None else [self.bos_id]
        behind = [] if self.end_id is None else [self.end_id]
        return [*before, *self._text_ids(document), *behind]

    def _text_ids(self, document: str) -> list[int]:
        if len(document) > _LONG_DOCUMENT and trained_here(self.tokenizer.json):
            return encode_documents(self.tokenizer.json)([document])[0]
        return self.tokenizer.encode_text(document)


@dataclass(frozen=True, slots=True)
class TextScores:
    """How well texts are predicted.

    Attributes:
        bits_per_byte: nats of all targets that have bytes / (ln 2 * those bytes), so that it can be compared
            over tokenizers; it does not see special tokens. infinite where there were no bytes.
        nats, bytes, tokens: behind that figure; `tokens` are the targets with bytes.
        documents: how many. ends: document ends among the targets.
        nats_per_end: mean of minus log P of the end token, at the true ends.
        p_stop_at_ends, p_stop_before: mean of P(stop) at the true ends, and at all other targets.
    """

    bits_per_byte: float
    nats: float
    bytes: int
    tokens: int
    documents: int
    ends: int
    nats_per_end: float | None
    p_stop_at_ends: float | None
    p_stop_before: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def score_texts(
    model: Decoder,
    text_format: TextFormat,
    documents: Iterable[str],
    *,
    row_length: int | None = None,
    max_tokens: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> TextScores:
    """Score documents, each alone in its rows.

    A document longer than `row_length` tokens (by default the model's window) is cut into several rows, of
    which each but the first begins with the last token of the one before: every token but the first is a
    target once, with what its row holds before it as context. Documents are taken until `max_tokens` targets
    are reached, and of one that goes far beyond that, its first rows. `progress` is told the targets so far
    and `max_tokens` (0 where it is None).
    """
    length = row_length or model.config.max_position_embeddings
    lengths = torch.tensor(text_format.token_bytes, dtype=torch.long)
    total = _Sums()
    waiting: list[Span] = []
    for ids in _encoded(text_format, documents, max_tokens, length):
        total.documents += 1
        for begin in range(0, len(ids) - 1, length):
            row = ids[begin : begin + length + 1]
            waiting.append(Span(row, 1, len(row)))
            if len(waiting) >= _ROWS_AT_ONCE:
                total.add(model, text_format, waiting, lengths, batch_tokens)
                waiting = []
                if progress is not None:
                    progress(total.targets, max_tokens or 0)
    if waiting:
        total.add(model, text_format, waiting, lengths, batch_tokens)
    if progress is not None:
        progress(total.targets, total.targets)
    return total.result()


def _encoded(
    text_format: TextFormat, documents: Iterable[str], max_tokens: int | None, row_length: int
) -> Iterator[Sequence[int]]:
    left = math.inf if max_tokens is None else max_tokens
    for document in documents:
        if left <= 0:
            return
        ids = text_format.encode(document)
        if max_tokens is not None:
            ids = ids[: int(left) + row_length + 1]
        if len(ids) > 1:
            left -= len(ids) - 1
            yield ids


class _Sums:
    """Sums over all targets so far."""

    def __init__(self) -> None:
        self.documents = self.tokens = self.bytes = self.ends = self.others = self.targets = 0
        self.nats = self.end_nats = self.p_at_ends = self.p_before = 0.0

    def add(
        self,
        model: Decoder,
        text_format: TextFormat,
        spans: Sequence[Span],
        lengths: torch.Tensor,
        batch_tokens: int,
    ) -> None:
        found = score_spans(model, spans, stop_ids=text_format.stop_ids, batch_tokens=batch_tokens)
        targets = torch.tensor([i for span in spans for i in span.ids[1:]])
        nats = torch.cat([scores.nats for scores in found])
        p_stop = torch.cat([scores.p_stop for scores in found])
        size = torch.zeros_like(targets)
        inside = targets < len(lengths)
        size[inside] = lengths[targets[inside]]
        ends = targets == (-1 if text_format.end_id is None else text_format.end_id)
        self.targets += len(targets)
        self.nats += float(nats[size > 0].sum())
        self.bytes += int(size.sum())
        self.tokens += int((size > 0).sum())
        self.ends += int(ends.sum())
        self.others += int((~ends).sum())
        self.end_nats += float(nats[ends].sum())
        self.p_at_ends += float(p_stop[ends].sum())
        self.p_before += float(p_stop[~ends].sum())

    def result(self) -> TextScores:
        def mean(total: float, count: int) -> float | None:
            return total / count if count else None

        return TextScores(
            bits_per_byte=self.nats / (math.log(2) * self.bytes) if self.bytes else math.inf,
            nats=self.nats,
            bytes=self.bytes,
            tokens=self.tokens,
            documents=self.documents,
            ends=self.ends,
            nats_per_end=mean(self.end_nats, self.ends),
            p_stop_at_ends=mean(self.p_at_ends, self.ends),
            p_stop_before=mean(self.p_before, self.others),
        )
