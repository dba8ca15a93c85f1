"""Which target tokens end something, and what they end.

Five things can end: a document, a turn, the model's part before a tool runs, its thinking, and the room that
it was given. The last is no event of the model and never a target; each of the others is counted on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from endstop.train.chat_format import ASSISTANT_END, BOS, PYTHON_END, SPECIAL_TOKENS

if TYPE_CHECKING:
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.tokenizer import Tokenizer

EVENTS = ("content", "document_end", "turn_end", "tool_end", "thinking_end")
CONTENT, DOCUMENT_END, TURN_END, TOOL_END, THINKING_END = range(5)
THINKING_CLOSERS = ("</think>", "<|end_think|>", "[/THINK]")


@dataclass(frozen=True, slots=True)
class StopEvents:
    """The event of each token id.

    Attributes:
        table: for each id its index in EVENTS; 0 is content.
        stop_ids: ids at which a runtime ends generation.
    """

    table: tuple[int, ...]
    stop_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, stops: StopSet, vocab_size: int | None = None) -> StopEvents:
        """From a model's own tokenizer and stop set; `vocab_size` are the rows of its lm_head.

        In the conversation format of this package `<|bos|>` ends a document, `<|assistant_end|>` a turn and
        `<|python_end|>` hands over to a tool. Elsewhere the template's terminator and other turn ends end a
        turn, a declared EOS that is not the terminator ends a document, and ids with the role `tool_end` hand
        over. `</think>` and its kin end the thinking where they are one token.
        """
        ids = {token.content: token_id for token_id, token in tokenizer.added_tokens.items()}
        events: dict[int, int] = {}
        if set(SPECIAL_TOKENS) <= set(ids):
            events = {ids[BOS]: DOCUMENT_END, ids[ASSISTANT_END]: TURN_END, ids[PYTHON_END]: TOOL_END}
        else:
            for token_id, role in stops.roles.items():
                turn = token_id == stops.terminator or role == "turn_end"
                events[token_id] = TOOL_END if role == "tool_end" else TURN_END if turn else DOCUMENT_END
            for text in THINKING_CLOSERS:
                if text in ids:
                    events.setdefault(ids[text], THINKING_END)
        size = tokenizer.vocab_size if vocab_size is None else vocab_size
        return cls(tuple(events.get(token_id, CONTENT) for token_id in range(size)), stops.ids)

    def ids_of(self, event: str) -> list[int]:
        """The ids that are this event."""
        wanted = EVENTS.index(event)
        return [token_id for token_id, found in enumerate(self.table) if found == wanted]

    def weights(self, weights: Mapping[str, float] | None = None) -> list[float]:
        """The weight of each id in the loss: 1 where `weights` does not name its event.

        Raises ValueError for an unknown event or a weight that is negative or no number.
        """
        given = dict(weights or {})
        for event, weight in given.items():
            if event not in EVENTS:
                raise ValueError(f"a weighted event is one of {', '.join(EVENTS)}, got {event!r}")
            if not 0.0 <= weight < float("inf"):
                raise ValueError(f"the weight of {event} must be 0 or more, got {weight}")
        factors = [float(given.get(event, 1.0)) for event in EVENTS]
        return [factors[event] for event in self.table]
