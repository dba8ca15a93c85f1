"""A look at the labels before anything is trained on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from endstop.protocol.errors import EndstopError
from endstop.protocol.label_audit import Audit, audit
from endstop.protocol.labels import ChatRows, Row
from endstop.train.settings import StageSettings
from endstop.train.starting_point import Vocabulary

if TYPE_CHECKING:
    from endstop.protocol.render import ChatRenderer

logger = logging.getLogger(__name__)

AUDITED = 300
"""Conversations whose labels are looked at before a stage begins."""


def check_labels(
    conversations: Any,
    renderer: ChatRenderer,
    vocabulary: Vocabulary,
    settings: StageSettings,
    transform: Callable[[Row], Row] | None,
) -> Audit:
    """Look at the labels of the first conversations before anything is trained.

    Raises EndstopError where nothing is supervised, or where a turn's end is not and no fault was asked for.
    """
    rows: list[Row] = []
    refusals: list[str] = []
    for row, messages in first_rows(conversations, renderer, settings, AUDITED, refusals):
        if not rows and logger.isEnabledFor(logging.INFO):
            _show(messages, renderer)
        rows.append(row if transform is None else transform(row))
    found = audit(
        rows, vocabulary.ends, vocabulary.tokenizer.pad_token_id, vocab_size=len(vocabulary.events.table)
    )
    for problem in found.problems() if rows else ():
        logger.warning("labels of the first %d rows: %s", len(rows), problem)
    seen = min(AUDITED, len(conversations))
    if rows and all(row.cut for row in rows) and transform is None:
        longer = sum(len(row.ids) > settings.row_length for row in rows)
        raise EndstopError(
            f"none of the first {seen} conversations has an answer with its end: {longer} are longer than a "
            f"row of {settings.row_length} tokens, which longer rows (row_length) would help; "
            f"{len(rows) - longer} say themselves that they were cut off (complete is false)."
        )
    if not found.supervised_tokens:
        because = f"; {len(refusals)} are refused, the first because {refusals[0]}" if refusals else "."
        raise EndstopError(
            f"none of the first {seen} conversations has a supervised token to train on{because}"
        )
    if settings.masked and transform is None and found.supervised_stop_rate < 1.0:
        raise EndstopError(
            f"only {found.stopped_turns} of {found.turns} turns have a supervised end: the model would not "
            "be taught to stop. Look at the chat template and the stop set (`endstop stops`)."
        )
    return found


def first_rows(
    conversations: Any,
    renderer: ChatRenderer,
    settings: StageSettings,
    count: int,
    refusals: list[str] | None = None,
) -> Iterable[tuple[Row, Sequence[Any]]]:
    """The rows of the first conversations, each with its messages; why there are none goes to `refusals`."""
    from endstop.train.data.messages import training_rows
    from endstop.train.data.mixture import ShardReader
    from endstop.train.data.records import BadDocument

    reader = ShardReader(conversations.order(settings.seed), 0, 1)
    for _ in range(min(count, len(conversations))):
        try:
            messages = reader.item(reader.next_place())
        except BadDocument as error:
            if not settings.skip_bad:
                raise
            made, messages = ChatRows([], [str(error)]), []
        else:
            made = training_rows(renderer, messages, settings.row_length + 1, **settings.template_options)
        if refusals is not None:
            refusals += made.refusals
        for row in made.rows:
            yield row, messages


def _show(messages: Sequence[Any], renderer: ChatRenderer) -> None:
    """The first conversation on stderr with what is supervised in colour, for the person who trains."""
    from rich.console import Console

    from endstop.view.conversation import rendered_text

    Console(stderr=True, highlight=False, markup=False).print(
        rendered_text(renderer.render(messages, **getattr(messages, "render_options", {}))), soft_wrap=True
    )
