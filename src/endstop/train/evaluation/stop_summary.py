"""How answers ended, against how they should have: counts and rates over records of answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from endstop.outcomes import FinishReason, StopKind

NATURAL_STOPS: tuple[StopKind, ...] = ("eos", "turn_end", "tool_end")
"""The model itself ended its answer."""
_FIRST_BUCKET = 8


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One answer of a model to one question.

    Attributes:
        task, index, sample: which question, and which of its samples.
        prompt: the last message of the prompt. output: visible text. gold: of the right answer.
        finish_reason, stop_kind: how it ended.
        tokens: generated without the terminator. gold_tokens: of the right answer without its terminator,
            None where the template cannot show it behind this prompt.
        correct: judged right by its task. content_ok: right, or it begins with the right answer.
        only, ends: of the example, see ChatExample.
        wrote_output: the model itself wrote the tag in front of a tool's output, which is the runtime's.
        p_stop_at_gold: P(stop) behind the right answer, teacher-forced. p_stop_before_gold: its largest value
            in front of a token of it that the model would say itself.
    """

    task: str
    index: int
    sample: int
    prompt: str
    output: str
    gold: str
    finish_reason: FinishReason
    stop_kind: StopKind
    tokens: int
    gold_tokens: int | None
    correct: bool
    content_ok: bool
    only: bool = False
    ends: bool = True
    wrote_output: bool = False
    p_stop_at_gold: float | None = None
    p_stop_before_gold: float | None = None

    @property
    def stopped(self) -> bool:
        """The model ended it by itself."""
        return self.stop_kind in NATURAL_STOPS

    @property
    def exact(self) -> bool:
        """Right, and ended by the model itself."""
        return self.correct and self.stopped

    @property
    def stop_error(self) -> int | None:
        """Tokens too many (positive) or missing (negative), where it stopped and the length is known."""
        if not self.stopped or not self.only or self.gold_tokens is None:
            return None
        # The same text may be spelled in other tokens.
        return 0 if self.output == self.gold else self.tokens - self.gold_tokens


@dataclass(frozen=True, slots=True)
class StopSummary:
    """Rates over n answers that have an end; None where there was nothing to measure it on.

    Attributes:
        correct, exact, content_ok: as in AnswerRecord.
        natural_stop: ended by the model itself. overrun: ended by the limit.
        known: answers for which the right length is known; premature, late: of them, the share that stopped
            with fewer or more tokens than the right answer; stop_error: mean of tokens too many or missing,
            over those that stopped.
        wrote_output: the model wrote a tool's output by itself.
        p_stop_at_gold: mean of P(stop) behind the right answer; p_stop_before_gold: mean of its largest
            value inside it.
    """

    n: int
    correct: float | None
    exact: float | None
    content_ok: float | None
    natural_stop: float | None
    overrun: float | None
    known: int
    premature: float | None
    late: float | None
    stop_error: float | None
    wrote_output: float | None
    p_stop_at_gold: float | None
    p_stop_before_gold: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summary_of(records: Iterable[AnswerRecord]) -> StopSummary:
    """The rates over those of the records whose answer has an end."""
    found = [record for record in records if record.ends]
    known = [record for record in found if record.only and record.gold_tokens is not None]
    errors = [record.stop_error for record in known if record.stop_error is not None]
    at_gold = [record.p_stop_at_gold for record in found if record.p_stop_at_gold is not None]
    before = [record.p_stop_before_gold for record in found if record.p_stop_before_gold is not None]
    return StopSummary(
        n=len(found),
        correct=_mean([record.correct for record in found]),
        exact=_mean([record.exact for record in found]),
        content_ok=_mean([record.content_ok for record in found]),
        natural_stop=_mean([record.stopped for record in found]),
        overrun=_mean([record.finish_reason == "length" for record in found]),
        known=len(known),
        premature=sum(error < 0 for error in errors) / len(known) if known else None,
        late=sum(error > 0 for error in errors) / len(known) if known else None,
        stop_error=_mean(errors),
        wrote_output=_mean([record.wrote_output for record in found]),
        p_stop_at_gold=_mean(at_gold),
        p_stop_before_gold=_mean(before),
    )


def false_stop_rate(records: Iterable[AnswerRecord]) -> float | None:
    """The share of answers without an end that the model ended all the same."""
    return _mean([record.stopped for record in records if not record.ends])


def by_gold_length(records: Iterable[AnswerRecord]) -> dict[str, StopSummary]:
    """Summaries by the length of the right answer in tokens: `0-8`, `9-16`, `17-32` and so on, doubling."""
    buckets: dict[int, list[AnswerRecord]] = {}
    for record in records:
        if record.ends and record.gold_tokens is not None:
            top = _FIRST_BUCKET
            while top < record.gold_tokens:
                top *= 2
            buckets.setdefault(top, []).append(record)
    return {
        f"{top // 2 + 1 if top > _FIRST_BUCKET else 0}-{top}": summary_of(buckets[top])
        for top in sorted(buckets)
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
