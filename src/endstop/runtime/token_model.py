"""TokenModel: rows of token ids in, logits out. What every model behind the engine implements.

A model owns its KV cache. A *row* is one sequence in that cache, named by a handle; its length is the
number of computed tokens. The engine decides what is computed and when, the model only computes it:
it never samples, never stops, never keeps a queue. This module imports no torch, so that the engine's
core can be used (and tested) with scripted models alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

LogitsWanted = Literal["none", "last", "all"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model can do; the engine does without what is missing.

    Attributes:
        batched: `forward` may be given chunks of several rows at once. Otherwise the engine calls it
            once for each row.
        fork: `fork_row` works (shared prompts of n > 1, beam search, prefix reuse by copy).
        truncate: `truncate_row` works (prefix reuse of a finished row, speculation).
    """

    batched: bool = True
    fork: bool = True
    truncate: bool = True


@dataclass(slots=True)
class RowChunk:
    """Tokens to compute next in one row.

    `start` is the number of tokens that are computed in that row already, so the first token of the
    chunk stands at position `start`. A forward call holds at most one chunk of a row.
    `logits`: "none", "last" (of the chunk's last token: 1 row) or "all" (len(tokens) rows).
    """

    row: int
    tokens: list[int]
    start: int
    logits: LogitsWanted = "last"


@dataclass(slots=True)
class ForwardResult:
    """What a forward call gives back.

    `logits`: torch float32 [R, V], contiguous in chunk order ("all" contributes len(tokens) rows, "last"
    one, "none" none), or None where R = 0 or the model is scripted with ids.
    `token_ids`: only scripted models: ids that bypass the sampler, one for each chunk with logits in
    chunk order; an entry of None means "sample this one", which needs `logits` for all chunks.
    """

    logits: Any | None = None
    token_ids: list[int | None] | None = None


@runtime_checkable
class TokenModel(Protocol):
    """A causal language model with a cache of rows.

    Attributes:
        vocab_size: rows of the lm_head, the length V of a logits row; ids >= V cannot be computed.
        context_len: longest row in tokens, None for no limit.
        capabilities: see `Capabilities`.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_len(self) -> int | None: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def open_row(self) -> int:
        """A new, empty row; returns its handle (a handle may be used again after `close_row`)."""
        ...

    def close_row(self, row: int) -> None:
        """Free a row and its cache memory."""
        ...

    def fork_row(self, row: int, length: int) -> int:
        """A new row with the same first `length` computed tokens. `row` stays as it is."""
        ...

    def truncate_row(self, row: int, length: int) -> None:
        """Cut a row's cache back to its first `length` computed tokens."""
        ...

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether rows with these computed lengths fit into the cache's memory budget at once.

        The engine asks before each step, with the lengths that *all* open rows (kept prefixes too)
        would have after it. Must be monotone: fewer or shorter rows never fit worse.
        """
        ...

    def forward(self, chunks: Sequence[RowChunk]) -> ForwardResult:
        """Compute the chunks, append their keys and values to the rows, return the logits asked for.

        After an exception the rows of this call are in an undefined state: the engine closes them.
        """
        ...

    def load_weights(self, state_dict: Mapping[str, Any]) -> None:
        """Swap the weights (Hugging Face names). The engine has closed all rows before."""
        ...
