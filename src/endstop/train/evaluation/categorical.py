"""Choosing a letter: the one with the largest logit where the answer begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from endstop.protocol.errors import EndstopError
from endstop.train.evaluation.rendered import Asked
from endstop.train.evaluation.scoring import Progress
from endstop.train.evaluation.teacher import last_logits

if TYPE_CHECKING:
    from endstop.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class ChoiceRecord:
    """One choice. `letter_share`: probability of all letters together in the whole distribution, which is low
    where the model would not have answered with a letter at all."""

    task: str
    index: int
    chosen: str
    gold: str
    correct: bool
    letter_share: float


def choose(
    engine: Engine, task: str, asked: Sequence[Asked], *, progress: Progress | None = None
) -> list[ChoiceRecord]:
    """The choices of a model. Raises EndstopError where two letters begin with the same token, and where the
    model gives no numbers."""
    records = []
    ids: dict[str, int] = {}
    for question, logits in zip(
        asked, last_logits(engine, [question.prompt_ids for question in asked]), strict=True
    ):
        if bool(logits.isnan().any()):
            raise EndstopError("the model gives no numbers (NaN): its weights are damaged.")
        letters = question.example.letters
        for letter in letters:
            if letter not in ids:
                ids[letter] = _first_token(engine, letter)
        places = [ids[letter] for letter in letters]
        if len(set(places)) < len(places):
            raise EndstopError(f"the tokenizer cannot tell the letters {', '.join(letters)} apart.")
        chosen = letters[int(logits[places].argmax())]
        gold = str(question.example.gold)
        share = float(logits.softmax(-1)[places].sum())
        records.append(ChoiceRecord(task, question.index, chosen, gold, chosen == gold, share))
        if progress is not None:
            progress(len(records), len(asked))
    return records


def _first_token(engine: Engine, letter: str) -> int:
    assert engine.chat_format is not None
    ids = engine.chat_format.tokenizer.encode_text(letter)
    if not ids:
        raise EndstopError(f"the tokenizer has no token for the letter {letter!r}.")
    return ids[0]
