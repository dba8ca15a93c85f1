"""Batches with right labels for other people's trainers: transformers' Trainer, TRL, one's own loop.

Labels come from `endstop.protocol.labels`: the model's own words and one terminator for each complete turn
are supervised, a row cut by a limit gets none, and padding is masked by where it is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from endstop.protocol.errors import EndstopError
from endstop.protocol.labels import (
    IGNORE,
    ChatRows,
    Row,
    blank_tokens,
    completion_row,
    labels_from_mask,
    marker_row,
    packed,
    padded,
    truncated,
    untrainable_terminators,
    with_terminator,
)
from endstop.protocol.render import ChatRenderer
from endstop.protocol.stopset import StopSet
from endstop.protocol.template import SPECIAL_TOKEN_NAMES
from endstop.protocol.tokenizer import Tokenizer
from endstop.train.data.messages import messages_of, training_rows

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CollatedSoFar:
    """What a collator has seen; in worker processes of a DataLoader each counts for itself.

    Attributes:
        examples, rows: given, and made of them: some templates need a row for each turn.
        cut_rows: rows of which a limit took supervised tokens.
        rows_without_labels: left out, since nothing in them is supervised.
        refused: examples, or turns of them, that no right labels could be made for.
        last_refusal: why, for the last of them.
    """

    examples: int = 0
    rows: int = 0
    cut_rows: int = 0
    rows_without_labels: int = 0
    refused: int = 0
    last_refusal: str | None = None


class ChatCollator:
    """Makes batches of examples in TRL's formats; give it to a trainer as `data_collator`.

    An example has one of

    - `messages`, with `tools` and `chat_template_kwargs` where there are any: assistant turns are supervised;
    - `prompt` and `completion`, two texts or two lists of messages: the completion is supervised;
    - `text`: all of it is supervised, or what follows `response_marker`;
    - `input_ids`, with `labels`, `assistant_masks`, `completion_mask`, `attention_mask` where there are any:
      taken as they are; with `complete` true one terminator is added where none stands at the end.

    `complete` false says that a text, or the last answer, was cut off where it ends: it gets no terminator.

    Trainers drop columns that the model does not know unless told not to (`remove_unused_columns=False`), and
    TRL prepares the examples itself unless told not to (`dataset_kwargs={"skip_prepare_dataset": True}`).

    Args:
        model: a model directory or name, a tokenizer of endstop or transformers, or a ChatRenderer.
        max_length: rows are cut to it.
        pack_length: put several rows one behind the other in blocks of this length. Such a batch has
            `position_ids` and no `attention_mask`, by which transformers keeps the rows apart, provided that
            the model is called with `use_cache=False`, as its Trainer does.
        pad_id: the token to fill up with, any token; by default the tokenizer's pad token.
        stops: the stop set, or its ids; by default what the model's files declare.
        terminator: what ends a `text` or a completion that is a text; by default the tokenizer's eos token,
            or the stop set's terminator where that is no stop id.
        response_marker, instruction_marker: for `text` examples, see `endstop.protocol.labels.marker_row`.

    Attributes:
        so_far: what was counted.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int | None = None,
        pack_length: int | None = None,
        pad_id: int | None = None,
        padding_side: Literal["right", "left"] = "right",
        stops: StopSet | Iterable[int] | None = None,
        terminator: int | None = None,
        response_marker: str | None = None,
        instruction_marker: str | None = None,
    ) -> None:
        if padding_side not in ("right", "left"):
            raise ValueError(f"padding_side must be 'right' or 'left', got {padding_side!r}")
        limits = [limit for limit in (max_length, pack_length) if limit is not None]
        if any(limit < 2 for limit in limits):
            raise ValueError(f"max_length and pack_length must be at least 2, got {min(limits)}")
        if stops is None and isinstance(model, str | Path):
            stops = StopSet.from_pretrained(model)
        # Not named `tokenizer`: transformers' Trainer would call that one's `save_pretrained`.
        self._tokenizer = _tokenizer_of(model)
        self._given = model if isinstance(model, ChatRenderer) else None
        self._stops = stops if stops is None or isinstance(stops, StopSet) else frozenset(stops)
        self._terminator = terminator
        self._limit = min(limits, default=None)
        self._pack_length = pack_length
        self._side = padding_side
        self._markers = (response_marker, instruction_marker)
        fill = (pad_id, self._tokenizer.pad_token_id, *sorted(self.stop_ids), 0)
        self._pad_id = next(token_id for token_id in fill if token_id is not None)
        self.so_far = CollatedSoFar()

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch: `input_ids`, `labels` (not shifted, -100 where not supervised) and `attention_mask`, or
        `position_ids` where rows are packed; int64 [rows, length].

        Raises EndstopError where no example of the batch has a supervised token: its loss would be NaN.
        """
        import torch

        rows = [row for example in examples for row in self._usable(example)]
        if not rows:
            last = self.so_far.last_refusal
            raise EndstopError(
                f"None of the {len(examples)} examples of this batch has a supervised token: "
                f"{last or 'their assistant turns are missing, empty or cut off'}."
            )
        if self._pack_length is not None:
            batch = packed(rows, self._pack_length, self._pad_id)
            kept = {"position_ids": batch.position_ids}
        else:
            if self._side == "left":
                # Its first token would be predicted from padding.
                rows = [replace(row, labels=[IGNORE, *row.labels[1:]]) for row in rows]
            batch = padded(rows, self._pad_id, side=self._side)
            kept = {"attention_mask": batch.attention_mask}
        found = {"input_ids": batch.input_ids, "labels": batch.labels, **kept}
        return {name: torch.tensor(values, dtype=torch.long) for name, values in found.items()}

    def rows(self, example: Mapping[str, Any]) -> ChatRows:
        """The rows of one example, and why some could not be made. Nothing is left out or counted."""
        try:
            made = self._made(example)
        except EndstopError as error:
            return ChatRows([], [str(error)])
        return replace(made, rows=[self._cut(row) for row in made.rows])

    def untrainable(self, model: Any, untrained_ids: Collection[int] = ()) -> dict[int, str]:
        """Stop ids that training this model cannot teach, and why: beyond its rows, or new and out of an
        adapter's reach. `model` is one of transformers, with or without adapters of peft; `untrained_ids` are
        tokens that were added to it."""
        config = getattr(model, "config", None)
        adapters = getattr(model, "peft_config", None) or {}
        lora = next(iter(adapters.values()), None)
        if lora is not None and not isinstance(lora, Mapping):
            lora = lora.to_dict()
        return untrainable_terminators(
            sorted(self.stop_ids),
            vocab_size=model.get_input_embeddings().weight.shape[0],
            untrained_ids=untrained_ids,
            lora=lora,
            tied=bool(getattr(config, "tie_word_embeddings", False)),
        )

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a turn: those given or declared, else eos and what the template writes."""
        if isinstance(self._stops, StopSet):
            return frozenset(self._stops.ids)
        if self._stops is not None:
            return self._stops
        found = {i for i in (self._terminator, self._tokenizer.eos_token_id) if i is not None}
        asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        # A model without a template, or with one that wants other messages, has only its eos token.
        with suppress(EndstopError):
            found |= self.renderer.render([asked, answered]).stop_ids
        return frozenset(found)

    @cached_property
    def renderer(self) -> ChatRenderer:
        """Renders conversations. Raises MissingTemplate for a model without a chat template."""
        return self._given or ChatRenderer(self._tokenizer, stops=self._stops)

    @cached_property
    def terminator(self) -> int:
        """What ends a text. Raises EndstopError where nothing says so."""
        declared = self._stops.terminator if isinstance(self._stops, StopSet) else None
        eos = self._tokenizer.eos_token_id
        if self._stops is not None and eos not in self.stop_ids:
            eos = None
        for token_id in (self._terminator, eos, declared):
            if token_id is not None:
                return token_id
        raise EndstopError(f"{self._tokenizer.source} names no eos token; say which terminator ends a text.")

    def _usable(self, example: Mapping[str, Any]) -> list[Row]:
        """The example's rows without those that teach nothing; all are counted."""
        made, so_far = self.rows(example), self.so_far
        so_far.examples += 1
        so_far.refused += len(made.refusals)
        for refusal in made.refusals:
            so_far.last_refusal = refusal.rstrip(".")
            _log.debug("refused: %s", refusal)
        # The first token of a row is predicted from nothing.
        usable = [row for row in made.rows if any(label != IGNORE for label in row.labels[1:])]
        so_far.rows += len(usable)
        so_far.rows_without_labels += len(made.rows) - len(usable)
        so_far.cut_rows += sum(row.cut for row in made.rows)
        return usable

    def _cut(self, row: Row) -> Row:
        return row if self._limit is None else truncated(row, self._limit)

    def _made(self, example: Mapping[str, Any]) -> ChatRows:
        if example.get("input_ids") is not None:
            return ChatRows([self._of_ids(example)])
        if example.get("messages") is not None:
            return training_rows(self.renderer, messages_of(example))
        if example.get("text") is not None:
            return ChatRows([self._of_text(example)])
        prompt, completion = example.get("prompt"), example.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return ChatRows([self._of_completion(prompt, completion, example)])
        if isinstance(prompt, list) and isinstance(completion, list):
            return training_rows(self.renderer, messages_of(example))
        raise EndstopError(
            "an example needs messages, prompt and completion (two texts or two lists of messages), text, "
            f"or input_ids; this one has {', '.join(example) or 'nothing'}"
        )

    def _of_completion(self, prompt: str, completion: str, example: Mapping[str, Any]) -> Row:
        return completion_row(
            self._tokenizer,
            prompt,
            completion,
            self.terminator,
            stop_ids=self.stop_ids,
            complete=example.get("complete") is not False,
        )

    def _of_text(self, example: Mapping[str, Any]) -> Row:
        response, instruction = self._markers
        if response is None:
            return self._of_completion("", example["text"], example)
        end = None if example.get("complete") is False else self.terminator
        return marker_row(
            self._tokenizer, example["text"], response, instruction_marker=instruction, terminator=end
        )

    def _of_ids(self, example: Mapping[str, Any]) -> Row:
        ids = _ints(example["input_ids"])
        labels = _ints(example["labels"]) if example.get("labels") is not None else list(ids)
        if len(labels) != len(ids):
            raise EndstopError(f"labels have {len(labels)} entries for {len(ids)} input_ids")
        kept = [True] * len(ids)
        for name in ("attention_mask", "assistant_masks", "completion_mask"):
            if example.get(name) is None:
                continue
            mask = _ints(example[name])
            if len(mask) != len(ids):
                raise EndstopError(f"{name} has {len(mask)} entries for {len(ids)} input_ids")
            if name == "attention_mask":
                kept = [bool(bit) for bit in mask]
            else:
                masked = labels_from_mask(ids, mask)
                labels = [IGNORE if bit == IGNORE else old for bit, old in zip(masked, labels, strict=True)]
        row = Row(
            [token_id for token_id, keep in zip(ids, kept, strict=True) if keep],
            [label for label, keep in zip(labels, kept, strict=True) if keep],
            cut=example.get("complete") is False,
        )
        if not example.get("complete"):
            return row
        return with_terminator(row, self.terminator, self.stop_ids, blank_tokens(self._tokenizer))


def _tokenizer_of(model: Any) -> Tokenizer:
    if isinstance(model, Tokenizer):
        return model
    if isinstance(model, ChatRenderer):
        return model.tokenizer
    if isinstance(model, str | Path):
        return Tokenizer.from_pretrained(model)
    backend = getattr(model, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            "model must be a model directory or name, a ChatRenderer, or a (fast) tokenizer of endstop or "
            f"transformers, got {type(model).__name__}"
        )
    special = {name: getattr(model, name, None) for name in SPECIAL_TOKEN_NAMES}
    templates = getattr(model, "chat_template", None)
    return Tokenizer(
        json.loads(backend.to_str()),
        special={name: str(text) for name, text in special.items() if text is not None},
        templates={"default": templates} if isinstance(templates, str) else templates,
        source=getattr(model, "name_or_path", None) or "the tokenizer",
    )


def _ints(values: Iterable[Any]) -> list[int]:
    """Plain ints out of a list or a tensor."""
    return [int(value) for value in values]
