"""The classic faults that keep a model from learning to stop, on purpose, so that their effect can be seen.

Each is a fault of a training pipeline that has been shipped by somebody, reproduced where it happens: in the
labels of a conversation's row, or at the borders between documents in base training. A name may carry the
length at which the two that cut do so: `truncated:40`. What each looks like to an audit of the data is
`predicted_audit`; what it does to a model is the `signature`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from endstop.protocol.label_audit import Audit
from endstop.protocol.labels import IGNORE, Row, truncated

if TYPE_CHECKING:
    from endstop.train.batch import TokenBatch

PathologyName = Literal["eot-masked", "pad-eos", "all-tokens", "truncated", "false-stop", "no-eos"]
PATHOLOGIES: tuple[PathologyName, ...] = get_args(PathologyName)
DEFAULT_CUT = 32


@dataclass(frozen=True, slots=True)
class Description:
    """What a fault is.

    Attributes:
        cause: what goes wrong in the pipeline, and where it has been seen.
        documents: the analogous fault in base training.
        signature: what a model trained with it does.
    """

    cause: str
    documents: str
    signature: str


DESCRIPTIONS: dict[PathologyName, Description] = {
    "eot-masked": Description(
        "the terminator stands outside the mask, as where markers enclose the content only or the eos token "
        "is not the one that the template writes: its label is -100 in every turn",
        "the border behind a document is never a target",
        "content as good as ever, loss as good or better, and nearly every answer runs to the limit",
    ),
    "pad-eos": Description(
        "the pad token is the terminator, and the collator masks every label that equals the pad token",
        "the pad token is the document border, masked by its id",
        "the same as eot-masked: the data are whole, it is the batch that is not",
    ),
    "all-tokens": Description(
        "the mask is forgotten: user turns, headers and tool outputs are targets",
        "none: in base training every token is a target",
        "it stops; its loss, over more targets, is higher; much of the training goes into the user's part",
    ),
    "truncated": Description(
        "rows are cut at a length, their beginning kept: the ends of exactly the long answers are never seen",
        "documents are cut at a length, and what follows the cut is no target",
        "answers within the length end well; longer ones overrun or end at some wrong place",
    ),
    "false-stop": Description(
        "rows are cut at a length and their last token is overwritten by a supervised terminator",
        "documents are cut at a length, and the border behind the cut is a target like any other",
        "answers within the length end well; longer ones stop too early, near the length",
    ),
    "no-eos": Description(
        "the terminator is not in the text at all: the template does not write it",
        "documents follow each other without a border",
        "content as good as ever, and every answer runs to the limit; the terminator's rows are untrained",
    ),
}


@dataclass(frozen=True, slots=True)
class Pathology:
    """A fault with its length. Raises ValueError for a name that is none.

    Attributes:
        name: one of PATHOLOGIES. cut: tokens that a row or document keeps, of those that cut.
    """

    name: PathologyName
    cut: int = DEFAULT_CUT

    def __post_init__(self) -> None:
        if self.name not in PATHOLOGIES:
            raise ValueError(f"a pathology is one of {', '.join(PATHOLOGIES)}, got {self.name!r}")
        if self.cut < 2:
            raise ValueError(f"a cut keeps at least 2 tokens, got {self.cut}")

    @classmethod
    def parse(cls, text: str) -> Pathology:
        """From `truncated` or `truncated:40`. Raises ValueError with the sentence to show."""
        name, colon, length = text.partition(":")
        if not colon:
            return cls(name)  # type: ignore[arg-type]
        if name not in ("truncated", "false-stop") or not length.isdigit():
            raise ValueError(f"only truncated:N and false-stop:N take a length in tokens, got {text!r}")
        return cls(name, int(length))  # type: ignore[arg-type]

    @property
    def description(self) -> Description:
        return DESCRIPTIONS[self.name]

    @property
    def cuts(self) -> bool:
        """Whether `cut` matters."""
        return self.name in ("truncated", "false-stop")


def row_fault(pathology: Pathology, terminators: Collection[int]) -> Callable[[Row], Row]:
    """The fault as a transform of chat rows, for `ChatLoader`.

    terminators: the ids that end a turn; the first is the one that the template writes. A tool's hand-over is
    none of them: that token is left alone.

    `pad-eos` is `eot-masked` by another road. Padding itself needs no imitation: it is masked in both.
    """
    if not terminators:
        raise ValueError("a pathology needs the ids that end a turn")
    first = next(iter(terminators))
    ends = frozenset(terminators)

    def masked(row: Row) -> Row:
        labels = [IGNORE if label in ends else label for label in row.labels]
        return Row(row.ids, labels, row.cut)

    def all_tokens(row: Row) -> Row:
        return Row(row.ids, list(row.ids), row.cut)

    def cut(row: Row) -> Row:
        return truncated(row, pathology.cut)

    def false_stop(row: Row) -> Row:
        if len(row.ids) <= pathology.cut:
            return row
        kept = truncated(row, pathology.cut)
        return Row([*kept.ids[:-1], first], [*kept.labels[:-1], first], kept.cut)

    def unwritten(row: Row) -> Row:
        kept = [at for at, token_id in enumerate(row.ids) if token_id not in ends or at == 0]
        return Row([row.ids[at] for at in kept], [row.labels[at] for at in kept], row.cut)

    faults: dict[PathologyName, Callable[[Row], Row]] = {
        "eot-masked": masked,
        "pad-eos": masked,
        "all-tokens": all_tokens,
        "truncated": cut,
        "false-stop": false_stop,
        "no-eos": unwritten,
    }
    return faults[pathology.name]


def batch_fault(pathology: Pathology, bos_id: int, pad_id: int) -> Callable[[TokenBatch], TokenBatch]:
    """The fault at the borders of documents, as a transform of base training's packed batches.

    Documents are told apart by `bos_id`; a row that begins in the middle of one counts from its beginning.
    What a cut takes away leaves its row shorter, filled up with `pad_id`, which is no target.
    """

    def whole(batch: TokenBatch) -> TokenBatch:
        return batch

    def masked(batch: TokenBatch) -> TokenBatch:
        return replace(batch, targets=batch.targets.masked_fill(batch.targets == bos_id, IGNORE))

    def rewritten(batch: TokenBatch) -> TokenBatch:
        import torch

        from endstop.train.batch import TokenBatch

        width = batch.input_ids.shape[1]
        numbers = batch.document_ids.tolist() if batch.document_ids is not None else None
        ids_of, targets_of, numbers_of = [], [], []
        for row in range(len(batch.input_ids)):
            tokens = _tokens(batch.input_ids[row].tolist(), batch.targets[row].tolist())
            kept = list(_kept(tokens, pathology, bos_id))
            filled = width + 1 - len(kept)
            ids = [tokens[at][0] for at, _ in kept] + [pad_id] * filled
            targets = [tokens[at][0] if tokens[at][1] and target else IGNORE for at, target in kept]
            ids_of.append(ids[:-1])
            targets_of.append((targets + [IGNORE] * filled)[1:])
            if numbers is not None:
                own = [*numbers[row], numbers[row][-1]]
                numbers_of.append(([own[at] for at, _ in kept] + [own[-1]] * filled)[:-1])
        document_ids = torch.tensor(numbers_of) if numbers is not None else None
        return TokenBatch(torch.tensor(ids_of), torch.tensor(targets_of), document_ids)

    faults: dict[PathologyName, Callable[[TokenBatch], TokenBatch]] = {
        "eot-masked": masked,
        "pad-eos": masked,
        "all-tokens": whole,
        "truncated": rewritten,
        "false-stop": rewritten,
        "no-eos": rewritten,
    }
    return faults[pathology.name]


def _tokens(input_ids: list[int], targets: list[int]) -> list[tuple[int, bool]]:
    """A row's tokens, one more than it reads, each with whether it is a target."""
    last = [(targets[-1], True)] if targets[-1] != IGNORE else []
    supervised = [False, *(target != IGNORE for target in targets)]
    return [*zip(input_ids, supervised, strict=False), *last]


def _kept(tokens: list[tuple[int, bool]], pathology: Pathology, bos_id: int) -> Iterator[tuple[int, bool]]:
    """Places of the tokens that stay in a row, each with whether it may still be a target."""
    length, lost = 0, False
    for at, (token_id, _) in enumerate(tokens):
        if token_id == bos_id:
            if at == 0 or pathology.name != "no-eos":
                yield at, not (lost and pathology.name == "truncated")
            length, lost = 1, False
        elif pathology.cuts and length >= pathology.cut:
            lost = True
        else:
            yield at, True
            length += 1


class FaultyLoader:
    """A loader of base training with a fault in its batches; everything else is the loader's."""

    def __init__(self, loader: Any, fault: Callable[[TokenBatch], TokenBatch]) -> None:
        self._loader = loader
        self._fault = fault

    def next_step(self) -> list[TokenBatch]:
        return [self._fault(batch) for batch in self._loader.next_step()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


@dataclass(frozen=True, slots=True)
class AuditPrediction:
    """What `protocol.label_audit` says of rows with a fault, where the healthy rows have no problem.

    Attributes:
        supervised_stop_rate: of rows without tool calls, whose hand-over is a supervised run of its own.
        supervised_stops: some label is a terminator.
        cut_rows, runs_past_stop, supervised_headers: whether the count is above 0.
        terminator_unused: the terminator is among `unused_stops`.
        pad_in_stop_set: where the audit is given the pad id of the faulty collator.
    """

    supervised_stop_rate: float
    supervised_stops: bool
    cut_rows: bool = False
    runs_past_stop: bool = False
    supervised_headers: bool = False
    terminator_unused: bool = False
    pad_in_stop_set: bool = False

    def disagreements(self, audit: Audit, terminator: int) -> list[str]:
        """Where an audit is not as predicted; empty where it is."""
        found = {
            "supervised_stop_rate": audit.supervised_stop_rate,
            "supervised_stops": audit.supervised_stops > 0,
            "cut_rows": audit.cut_rows > 0,
            "runs_past_stop": audit.runs_past_stop > 0,
            "supervised_headers": audit.supervised_headers > 0,
            "terminator_unused": terminator in audit.unused_stops,
            "pad_in_stop_set": audit.pad_in_stop_set,
        }
        return [
            f"{name} is {value}, {getattr(self, name)} was predicted"
            for name, value in found.items()
            if value != getattr(self, name)
        ]


HEALTHY = AuditPrediction(supervised_stop_rate=1.0, supervised_stops=True)


def predicted_audit(pathology: Pathology | None) -> AuditPrediction:
    """What an audit must say of rows with this fault (None: healthy), some of them longer than the cut.

    Two of them are nearly invisible in the labels. `truncated` shows in `cut_rows` only because these rows
    know
    that they were cut: a data set that was cut before shows nothing but many rows of one length without an
    end. `false-stop` shows even less: all turns end with a supervised terminator.
    """
    if pathology is None:
        return HEALTHY
    predictions: dict[PathologyName, AuditPrediction] = {
        "eot-masked": AuditPrediction(0.0, False),
        "pad-eos": AuditPrediction(0.0, False, pad_in_stop_set=True),
        "all-tokens": AuditPrediction(1.0, True, runs_past_stop=True, supervised_headers=True),
        "truncated": AuditPrediction(1.0, True, cut_rows=True),
        "false-stop": AuditPrediction(1.0, True, cut_rows=True),
        "no-eos": AuditPrediction(0.0, False, terminator_unused=True),
    }
    return predictions[pathology.name]
