"""What became of documents and conversations on their way into rows: counts, and what follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Reasons for refusals that are kept with their counts.
_REASONS = 20


@dataclass(slots=True)
class PackingCounts:
    """What a packer has done.

    Attributes:
        rows: rows made.
        placed_tokens: document tokens in them. cropped_tokens: document tokens thrown away.
            padded_tokens: filling.
        documents: documents that were finished, whole or cropped.
        supervised_ends: those of them whose end is a target.
        cropped_documents: those that lost tokens. split_documents: those placed in several rows.
        placements: times a document was chosen. steps: words of the length index looked at for that.
    """

    rows: int = 0
    placed_tokens: int = 0
    cropped_tokens: int = 0
    padded_tokens: int = 0
    documents: int = 0
    supervised_ends: int = 0
    cropped_documents: int = 0
    split_documents: int = 0
    placements: int = 0
    steps: int = 0

    def __add__(self, other: PackingCounts) -> PackingCounts:
        return PackingCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def figures(self) -> dict[str, Any]:
        """The counts, and the shares that follow from them (None where there is nothing to divide by)."""
        row_tokens = self.placed_tokens + self.padded_tokens
        tokens = self.placed_tokens + self.cropped_tokens
        return {
            **asdict(self),
            "use": self.placed_tokens / row_tokens if row_tokens else None,
            "cropped_share": self.cropped_tokens / tokens if tokens else None,
            "supervised_ends_share": self.supervised_ends / self.documents if self.documents else None,
        }


@dataclass(slots=True)
class ChatCounts:
    """What became of the conversations.

    Attributes:
        supervised_tokens: targets in the loss. supervised_stops: those of them that end a turn.
        cut: rows that were longer than a row and lost supervised tokens.
        refused: turns or conversations that could not be rendered; `refusals` says how often for which
            reason.
        unsupervised: rows in which there was nothing to learn.
        skipped: conversations that could not be read.
    """

    supervised_tokens: int = 0
    supervised_stops: int = 0
    cut: int = 0
    refused: int = 0
    unsupervised: int = 0
    skipped: int = 0
    refusals: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str, times: int = 1) -> None:
        self.refused += times
        if reason in self.refusals or len(self.refusals) < _REASONS:
            self.refusals[reason] = self.refusals.get(reason, 0) + times

    def include(self, other: ChatCounts) -> None:
        """Add the counts of another shard."""
        for name in ("supervised_tokens", "supervised_stops", "cut", "refused", "unsupervised", "skipped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        total = Counter(self.refusals) + Counter(other.refusals)
        self.refusals = dict(total.most_common(_REASONS))


def combined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The statistics of all processes out of those of each (the `statistics()` of one kind of loader)."""
    if not parts:
        raise ValueError("there are no statistics to be combined")
    total: dict[str, Any] = {
        name: sum(part[name] for part in parts) for name, value in parts[0].items() if type(value) is int
    }
    names = {f.name for f in fields(PackingCounts)}
    shares = PackingCounts(**{name: total[name] for name in names}).figures()
    for name, value in parts[0].items():
        if isinstance(value, dict):
            reasons = sum((Counter(part[name]) for part in parts), Counter())
            total[name] = dict(reasons.most_common(_REASONS))
    return {**total, **shares, "epochs": sum(part["epochs"] for part in parts) / len(parts)}
