"""Training rows over plain lists: what is supervised, what is cut, what is padding.

The rules: every complete assistant turn has exactly one supervised terminator; a row that is cut gets none
for the turn that was cut, and is counted; padding is masked by its position, never by its token id.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from endstop.protocol.chat_encoding import ChatEncoder, cores_of
from endstop.protocol.errors import RenderRefused
from endstop.protocol.message_words import role_of
from endstop.protocol.supervision import token_mask
from endstop.protocol.tracked_text import tracked

if TYPE_CHECKING:
    from endstop.protocol.render import ChatRenderer, Rendered
    from endstop.protocol.tokenizer import Tokenizer

# The label of a token that does not count in the loss.
IGNORE = -100


@dataclass(frozen=True, slots=True)
class Row:
    """One training row before batching.

    Attributes:
        ids, labels: of the same length; a label is the token's own id or IGNORE. They are not shifted.
        cut: a limit has taken tokens away that would have been supervised.
    """

    ids: list[int]
    labels: list[int]
    cut: bool = False

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.labels):
            raise ValueError(f"a row has as many labels as ids, got {len(self.labels)} and {len(self.ids)}")


def labels_from_mask(ids: Sequence[int], mask: Sequence[int]) -> list[int]:
    """The ids where the mask is 1, IGNORE elsewhere."""
    if len(ids) != len(mask):
        raise ValueError(f"a mask is as long as its ids, got {len(mask)} and {len(ids)}")
    return [token_id if bit else IGNORE for token_id, bit in zip(ids, mask, strict=True)]


def row_from_mask(ids: Sequence[int], mask: Sequence[int], max_length: int | None = None) -> Row:
    """A row from ids and the mask of supervised tokens, cut to `max_length` if it is longer."""
    row = Row(list(ids), labels_from_mask(ids, mask))
    return row if max_length is None else truncated(row, max_length)


def truncated(row: Row, max_length: int) -> Row:
    """The row's first `max_length` tokens.

    What is kept keeps its labels, nothing is put in the place of what is lost: a turn that was cut has no
    supervised terminator. A row of exactly `max_length` tokens, or one that loses only tokens that were not
    supervised, is not cut.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if len(row.ids) <= max_length:
        return row
    lost = any(label != IGNORE for label in row.labels[max_length:])
    return Row(row.ids[:max_length], row.labels[:max_length], row.cut or lost)


def with_terminator(
    row: Row, terminator: int, stop_ids: Collection[int] = (), blank: Callable[[int], bool] | None = None
) -> Row:
    """A complete row with one supervised terminator at its end.

    Added where the last token that is not blank is no stop id. `blank` tells which tokens are white space:
    templates write a newline behind the terminator, and that newline is no reason for a second one. A
    terminator that is there becomes supervised; a row that was cut stays as it is.
    """
    if row.cut:
        return row
    stops = {terminator, *stop_ids}
    at = len(row.ids)
    while at > 0 and row.ids[at - 1] not in stops and blank is not None and blank(row.ids[at - 1]):
        at -= 1
    if at > 0 and row.ids[at - 1] in stops:
        labels = list(row.labels)
        labels[at - 1] = row.ids[at - 1]
        return Row(row.ids, labels)
    return Row([*row.ids, terminator], [*row.labels, terminator])


def blank_tokens(tokenizer: Tokenizer) -> Callable[[int], bool]:
    """Tells whether a token is white space only."""
    known: dict[int, bool] = {}

    def blank(token_id: int) -> bool:
        if token_id not in known:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            known[token_id] = token_id not in tokenizer.added_tokens and bool(text) and not text.strip()
        return known[token_id]

    return blank


def completion_row(
    tokenizer: Tokenizer,
    prompt: str,
    completion: str,
    terminator: int,
    *,
    stop_ids: Collection[int] = (),
    complete: bool = True,
) -> Row:
    """A row from plain texts: the prompt is not supervised, the completion and one terminator are.

    Text is tokenised as a whole and told apart by its characters, with the BOS that the tokenizer adds. No
    text becomes a control token, but for one: a terminator spelled out at the end of the completion is
    taken as the terminator. `complete=False` is for completions known to be cut off: they get none.
    """
    stops = {terminator, *stop_ids}
    for token_id in sorted(stops):
        spelled = tokenizer.added_tokens.get(token_id)
        if spelled is not None and completion.rstrip().endswith(spelled.content):
            completion = completion.rstrip().removesuffix(spelled.content)
            return _completion(tokenizer, prompt, completion, token_id if complete else None, stops)
    return _completion(tokenizer, prompt, completion, terminator if complete else None, stops)


def _completion(
    tokenizer: Tokenizer, prompt: str, completion: str, end: int | None, stops: Collection[int]
) -> Row:
    text = prompt + completion
    encoded = _encoder(tokenizer).encode(tracked(text, ("text",)))
    mask = token_mask(encoded, [(len(prompt), len(text))])
    before, behind = _added_around(tokenizer, text)
    ids = [*before, *encoded.ids]
    labels = labels_from_mask(ids, [0] * len(before) + mask)
    if end is None:
        return Row(ids, labels, cut=True)
    # The tokenizer's own EOS, if it adds one, is the terminator where it is a stop id.
    end = next((token_id for token_id in behind if token_id in stops), end)
    return Row([*ids, end], [*labels, end])


@lru_cache(maxsize=1)
def _encoder(tokenizer: Tokenizer) -> ChatEncoder:
    """The same for all rows: what it finds out about a vocabulary takes longer than a row."""
    return ChatEncoder(tokenizer)


def _added_around(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and behind a text by itself."""
    whole = tokenizer.encode(text)
    bare = tokenizer.encode(text, add_special_tokens=False)
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []


def marker_row(
    tokenizer: Tokenizer,
    text: str,
    response_marker: str,
    *,
    instruction_marker: str | None = None,
    terminator: int | None = None,
) -> Row:
    """A row from one text in which a marker ("Answer:") stands before what is to be learned.

    Markers are looked for in the characters of the text, not in its ids: in context the same text has other
    ids than alone. Each response reaches to the next instruction marker, the last one to the end, where the
    terminator is added if one is given. Without a marker nothing is supervised, which the audit counts.
    """
    if not response_marker or instruction_marker == "":
        raise ValueError("a marker is a text of at least one character")
    ids, offsets = tokenizer.encode_with_offsets(text)
    cores = cores_of(tokenizer, text, ids, offsets)
    ranges = []
    at = text.find(response_marker)
    while at >= 0:
        start = at + len(response_marker)
        end = text.find(instruction_marker, start) if instruction_marker is not None else -1
        ranges.append((start, len(text) if end < 0 else end))
        at = -1 if end < 0 else text.find(response_marker, end)
    bits = [int(any(a < r[1] and r[0] < b for r in ranges)) for a, b in cores]
    row = Row(ids, labels_from_mask(ids, bits))
    if terminator is None or not ranges or ranges[-1][1] < len(text):
        return row
    return with_terminator(row, terminator, (), blank_tokens(tokenizer))


@dataclass(frozen=True, slots=True)
class ChatRows:
    """Rows of one conversation: one for all turns, or one for each.

    Attributes:
        rows: what to train on.
        refusals: why a row could not be made, in words.
        whole: all turns are supervised in one row.
    """

    rows: list[Row]
    refusals: list[str] = field(default_factory=list)
    whole: bool = True


def chat_rows(
    renderer: ChatRenderer,
    messages: Sequence[Any],
    max_length: int | None = None,
    *,
    first_message: int = 0,
    **options: Any,
) -> ChatRows:
    """Rows of a conversation. `options` are those of `ChatRenderer.render`.

    All turns in one row where the template allows it; where it rewrites earlier turns, one row for each turn.
    A turn for which it cannot be told what the model would have produced gives a refusal, not a guess.
    Turns in front of message `first_message` are read, not trained on.
    """
    try:
        rendered = renderer.render(messages, **options)
        if rendered.mask is not None:
            return ChatRows([_row(rendered, max_length, first_message)])
        samples = renderer.render_turns(messages, **options)
    except RenderRefused as error:
        return ChatRows([], [str(error)])
    samples = samples[sum(role_of(message) == "assistant" for message in messages[:first_message]) :]
    rows = [_row(sample, max_length) for sample in samples if sample.mask is not None]
    refusals = [str(sample.refusal) for sample in samples if sample.mask is None]
    return ChatRows(rows, refusals, whole=False)


def _row(rendered: Rendered, max_length: int | None, first_message: int = 0) -> Row:
    mask = rendered.mask
    assert mask is not None
    if first_message:
        turns = [turn for turn in rendered.supervision.turns if turn.message >= first_message]
        border = min((span[0] for turn in turns for span in turn.ranges), default=len(rendered.text))
        mask = [int(bit and end > border) for bit, (_, end) in zip(mask, rendered.offsets, strict=True)]
    return row_from_mask(rendered.ids, mask, max_length)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of equal length.

    Attributes:
        input_ids, labels: [rows][length]; labels are not shifted.
        attention_mask: 1 for tokens, 0 for padding.
        position_ids: counted from 0 in every packed row, and in every row behind left padding.
    """

    input_ids: list[list[int]]
    labels: list[list[int]]
    attention_mask: list[list[int]]
    position_ids: list[list[int]]


def padded(
    rows: Sequence[Row], pad_id: int, *, length: int | None = None, side: Literal["right", "left"] = "right"
) -> Batch:
    """Rows filled up with `pad_id`, which may be any token: the filling is masked by where it is.

    Raises ValueError where a row is longer than `length`: cut it first, so that it is known to be cut.
    """
    if side not in ("right", "left"):
        raise ValueError(f"side must be 'right' or 'left', got {side!r}")
    width = max((len(row.ids) for row in rows), default=0) if length is None else length
    batch = Batch([], [], [], [])
    for row in rows:
        gap = width - len(row.ids)
        if gap < 0:
            raise ValueError(f"a row of {len(row.ids)} tokens does not fit into {width}; cut it first")
        whole = len(row.ids)
        for target, tokens, filling in (
            (batch.input_ids, row.ids, pad_id),
            (batch.labels, row.labels, IGNORE),
            (batch.attention_mask, [1] * whole, 0),
            (batch.position_ids, list(range(whole)), 0),
        ):
            fill = [filling] * gap
            target.append([*tokens, *fill] if side == "right" else [*fill, *tokens])
    return batch


def labels_of_padded(
    input_ids: Sequence[int], attention_mask: Sequence[int], mask: Sequence[int] | None = None
) -> list[int]:
    """Labels of a row that is padded already: IGNORE where the attention mask is 0, and where `mask` is 0."""
    bits = attention_mask if mask is None else [a and m for a, m in zip(attention_mask, mask, strict=True)]
    return labels_from_mask(input_ids, bits)


# Blocks that still have room are searched for every row; the oldest are given up beyond this number.
_OPEN_BLOCKS = 256


def packed(rows: Sequence[Row], block: int, pad_id: int, *, supervise_borders: bool = False) -> Batch:
    """Rows one behind the other in blocks of `block` tokens, each row whole and with its own terminator.

    A row goes into the first block with room for it; what is left of a block is padding. The first token of
    a row is not supervised, since what it would be predicted from belongs to another row; base training, in
    which a document's BOS is what ends the one before it, asks for `supervise_borders`. Raises ValueError for
    a row that is longer than a block.
    """
    blocks: list[list[Row]] = []
    room: list[int] = []
    for row in rows:
        if len(row.ids) > block:
            raise ValueError(
                f"a row of {len(row.ids)} tokens does not fit into a block of {block}; cut it first"
            )
        if not row.ids:
            continue
        first = max(0, len(blocks) - _OPEN_BLOCKS)
        at = next((i for i in range(first, len(blocks)) if room[i] >= len(row.ids)), len(blocks))
        if at == len(blocks):
            blocks.append([])
            room.append(block)
        blocks[at].append(row)
        room[at] -= len(row.ids)
    batch = Batch([], [], [], [])
    for members, left in zip(blocks, room, strict=True):
        used = block - left
        batch.input_ids.append([i for row in members for i in row.ids] + [pad_id] * left)
        labels = [
            label if at or supervise_borders else IGNORE
            for row in members
            for at, label in enumerate(row.labels)
        ]
        batch.labels.append(labels + [IGNORE] * left)
        batch.attention_mask.append([1] * used + [0] * left)
        batch.position_ids.append([p for row in members for p in range(len(row.ids))] + [0] * left)
    return batch


def untrainable_terminators(
    stop_ids: Iterable[int],
    *,
    vocab_size: int,
    untrained_ids: Collection[int] = (),
    lora: Mapping[str, Any] | None = None,
    tied: bool = False,
) -> dict[int, str]:
    """Stop ids that this training cannot teach, and why.

    Args:
        vocab_size: rows of the embedding and the lm_head.
        untrained_ids: tokens that the base model has never been trained on, newly added ones above all.
        lora: the adapter's configuration as peft writes it: `target_modules`, `modules_to_save`,
            `trainable_token_indices`. None is full training.
        tied: embedding and lm_head are the same matrix.
    """
    reasons = {}
    for token_id in stop_ids:
        if not 0 <= token_id < vocab_size:
            reasons[token_id] = f"id {token_id} is out of range: the model has {vocab_size} rows"
        elif token_id in untrained_ids and lora is not None and not _reaches(lora, token_id, tied):
            reasons[token_id] = (
                f"token {token_id} was never trained, and the adapter leaves embed_tokens and lm_head as "
                "they are; name them in modules_to_save or choose a terminator that the base model knows"
            )
    return reasons


def _reaches(lora: Mapping[str, Any], token_id: int, tied: bool) -> bool:
    indices = lora.get("trainable_token_indices") or ()
    if isinstance(indices, Mapping):
        indices = [i for group in indices.values() for i in group]
    if token_id in indices and tied:
        return True
    named: list[str] = []
    for key in ("modules_to_save", "target_modules"):
        value = lora.get(key) or ()
        # A text is a pattern; peft's "all-linear" leaves the output layer out.
        named += [value] if isinstance(value, str) else list(value)
    modules = {name.rsplit(".", 1)[-1] for name in named}
    embedding = bool(modules & {"embed_tokens", "wte", "embedding"}) or token_id in indices
    head = bool(modules & {"lm_head", "output", "embed_out"})
    return (embedding or head) if tied else (embedding and head)
