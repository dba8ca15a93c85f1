"""What the labels of training rows say about stopping, counted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from endstop.protocol.labels import IGNORE, Batch, Row


@dataclass(frozen=True, slots=True)
class Audit:
    """Counts over rows.

    Attributes:
        rows, cut_rows: all rows, and those known to be cut by a limit.
        turns: runs of supervised tokens; a turn that a limit has cut is not among them.
        stopped_turns: those that end with a supervised stop id.
        supervised_tokens, supervised_stops: labels that count, and those among them that are stop ids.
        rows_without_labels: rows in which nothing is supervised.
        rows_without_stop: rows without any supervised stop id.
        double_stops: two supervised stop ids with nothing but blanks between them.
        runs_past_stop: supervised text behind a supervised stop id, as when user turns are trained on.
        supervised_headers: supervised tokens that only open turns of others.
        labelled_padding: labels on padding.
        foreign_labels: labels that are not the token's own id.
        out_of_range: stop ids, ids and labels beyond the model's rows.
        unused_stops: stop ids that no row holds.
        pad_in_stop_set: the padding token is a stop id: safe only where padding is masked by position.
    """

    rows: int
    cut_rows: int
    turns: int
    stopped_turns: int
    supervised_tokens: int
    supervised_stops: int
    rows_without_labels: int
    rows_without_stop: int
    double_stops: int
    runs_past_stop: int
    supervised_headers: int
    labelled_padding: int
    foreign_labels: int
    out_of_range: tuple[int, ...]
    unused_stops: tuple[int, ...]
    pad_in_stop_set: bool

    @property
    def supervised_stop_rate(self) -> float:
        """Share of the turns (cut ones aside) whose end is trained; 1.0 is right, 0 of 0 counts as 0."""
        return self.stopped_turns / self.turns if self.turns else 0.0

    @property
    def censored_rate(self) -> float:
        """Share of the rows that a limit has cut."""
        return self.cut_rows / self.rows if self.rows else 0.0

    def problems(self, max_empty: float = 0.0, max_censored: float = 0.1) -> list[str]:
        """What is wrong, one sentence each; empty where all is well.

        `max_empty`: share of rows that may have nothing supervised. `max_censored`: that may be cut.
        """
        found = []
        if not self.rows:
            return ["there are no rows."]
        if self.rows_without_labels > max_empty * self.rows:
            found.append(f"{self.rows_without_labels} of {self.rows} rows have no supervised token.")
        if self.stopped_turns < self.turns:
            found.append(
                f"{self.turns - self.stopped_turns} of {self.turns} turns end without a supervised "
                "terminator: the model is not taught to stop there."
            )
        if self.censored_rate > max_censored:
            found.append(f"{self.cut_rows} of {self.rows} rows are cut: ends of long answers are never seen.")
        if self.double_stops:
            found.append(f"{self.double_stops} turns end with two supervised terminators.")
        if self.supervised_headers or self.runs_past_stop:
            found.append(
                f"supervised text goes on behind {self.runs_past_stop} terminators and covers "
                f"{self.supervised_headers} header tokens: turns of others are trained on."
            )
        if self.labelled_padding:
            found.append(f"{self.labelled_padding} padding tokens are supervised.")
        if self.foreign_labels:
            found.append(f"{self.foreign_labels} labels are not the token that stands there.")
        if self.out_of_range:
            found.append(f"ids {', '.join(map(str, self.out_of_range))} are beyond the model's rows.")
        if self.unused_stops and not self.supervised_stops:
            found.append(
                f"no row holds a supervised stop id; {', '.join(map(str, self.unused_stops))} never occur."
            )
        return found


def audit(
    rows: Iterable[Row | Mapping[str, Any]] | Batch,
    stop_ids: Collection[int],
    pad_id: int | None = None,
    *,
    vocab_size: int | None = None,
    blank: Callable[[int], bool] | None = None,
    header_ids: Collection[int] = (),
) -> Audit:
    """Count what the labels of `rows` teach about stopping.

    Args:
        rows: `Row`s, a `Batch`, or mappings with `input_ids` and `labels`, and `attention_mask` where padded.
        blank: tells which tokens are white space (`blank_tokens`).
        header_ids: tokens that only ever open a turn, such as `<|im_start|>`.
        vocab_size: rows of the lm_head.
    """
    totals = dict.fromkeys(
        (
            "rows", "cut_rows", "turns", "stopped_turns", "supervised_tokens", "supervised_stops",
            "rows_without_labels", "rows_without_stop", "double_stops", "runs_past_stop",
            "supervised_headers", "labelled_padding", "foreign_labels",
        ),
        0,
    )  # fmt: skip
    seen: set[int] = set()
    strange: set[int] = set()
    stops = frozenset(stop_ids)
    for ids, labels, attention, cut in map(_parts, _each(rows)):
        totals["rows"] += 1
        totals["cut_rows"] += cut
        seen.update(stops.intersection(ids))
        supervised = [label for label in labels if label != IGNORE]
        totals["supervised_tokens"] += len(supervised)
        here = sum(label in stops for label in supervised)
        totals["supervised_stops"] += here
        totals["rows_without_labels"] += not supervised
        totals["rows_without_stop"] += not here
        totals["supervised_headers"] += sum(label in header_ids for label in supervised)
        totals["labelled_padding"] += sum(
            label != IGNORE and not bit for label, bit in zip(labels, attention, strict=True)
        )
        totals["foreign_labels"] += sum(
            label not in (IGNORE, token_id) for token_id, label in zip(ids, labels, strict=True)
        )
        if vocab_size is not None:
            strange.update(i for i in (*ids, *supervised) if not 0 <= i < vocab_size)
        runs = _runs(labels, blank)
        for number, run in enumerate(runs):
            last = number == len(runs) - 1
            stopped = run[-1] in stops
            if not (cut and last and not stopped):
                totals["turns"] += 1
                totals["stopped_turns"] += stopped
            for before, after in pairwise(run):
                if before in stops:
                    totals["double_stops" if after in stops else "runs_past_stop"] += 1
    if vocab_size is not None:
        strange.update(i for i in stops if not 0 <= i < vocab_size)
    return Audit(
        **totals,
        out_of_range=tuple(sorted(strange)),
        unused_stops=tuple(sorted(stops - seen)),
        pad_in_stop_set=pad_id in stops,
    )


def _each(rows: Iterable[Row | Mapping[str, Any]] | Batch) -> Iterable[Row | Mapping[str, Any]]:
    if not isinstance(rows, Batch):
        return rows
    return [
        {"input_ids": ids, "labels": labels, "attention_mask": attention}
        for ids, labels, attention in zip(rows.input_ids, rows.labels, rows.attention_mask, strict=True)
    ]


def _parts(row: Row | Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int], Sequence[int], bool]:
    if isinstance(row, Row):
        return row.ids, row.labels, [1] * len(row.ids), row.cut
    ids, labels = list(row["input_ids"]), list(row["labels"])
    return ids, labels, list(row.get("attention_mask") or [1] * len(ids)), bool(row.get("cut", False))


def _runs(labels: Sequence[int], blank: Callable[[int], bool] | None) -> list[list[int]]:
    """Runs of supervised tokens, without the blank ones unless a run has nothing else."""
    runs: list[list[int]] = []
    before = IGNORE
    for label in labels:
        if label != IGNORE:
            if before == IGNORE:
                runs.append([])
            runs[-1].append(label)
        before = label
    if blank is None:
        return runs
    return [[i for i in run if not blank(i)] or run for run in runs]
