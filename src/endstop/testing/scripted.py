"""ScriptedModel: a TokenModel whose answers are written down. Most stopping tests use it.

It keeps a row as its plain list of tokens, checks every call against the rules of the protocol, and records
what was computed, so that a test can say what an engine did and not only what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from endstop.runtime.token_model import Capabilities, ForwardResult, RowChunk

# All tokens of a row -> the next id (it bypasses the sampler) or the logits of the next token.
Script = Callable[[tuple[int, ...]], int | Sequence[float]]


@dataclass(frozen=True, slots=True)
class Call:
    """One chunk of a forward call."""

    row: int
    tokens: tuple[int, ...]
    start: int
    logits: str


class ScriptedModel:
    """A model that follows a script.

    Args:
        script: for each prompt the ids that follow it, or a function from the tokens of a row to the next id
            or to its logits (a list of `vocab_size` numbers).
        vocab_size, context_len, capabilities: see TokenModel.
        memory: tokens that the cache holds, over all rows; None for no limit. max_rows: rows it holds.

    Attributes:
        calls: every forward call, as a list of its chunks.
        rows: the open rows and their computed tokens.
    """

    def __init__(
        self,
        script: Mapping[Sequence[int], Sequence[int]] | Script,
        *,
        vocab_size: int = 256,
        context_len: int | None = None,
        capabilities: Capabilities | None = None,
        memory: int | None = None,
        max_rows: int | None = None,
    ) -> None:
        self.script = script if callable(script) else follow(script)
        self.vocab_size = vocab_size
        self.context_len = context_len
        self.capabilities = capabilities if capabilities is not None else Capabilities()
        self.memory = memory
        self.max_rows = max_rows
        self.calls: list[list[Call]] = []
        self.rows: dict[int, list[int]] = {}
        self.loaded: list[Mapping[str, Any]] = []
        self._next_row = 0

    def without(self, **capabilities: bool) -> ScriptedModel:
        """The same script with some capabilities changed: `model.without(fork=False)`."""
        return ScriptedModel(
            self.script,
            vocab_size=self.vocab_size,
            context_len=self.context_len,
            capabilities=replace(self.capabilities, **capabilities),
            memory=self.memory,
            max_rows=self.max_rows,
        )

    @property
    def tokens_computed(self) -> int:
        return sum(len(call.tokens) for calls in self.calls for call in calls)

    def open_row(self) -> int:
        row = self._next_row
        self._next_row += 1
        self.rows[row] = []
        return row

    def close_row(self, row: int) -> None:
        del self.rows[row]

    def fork_row(self, row: int, length: int) -> int:
        if not self.capabilities.fork:
            raise RuntimeError("fork_row was called on a model without the capability")
        if not 0 <= length <= len(self.rows[row]):
            raise RuntimeError(f"row {row} has {len(self.rows[row])} tokens, it cannot be forked at {length}")
        other = self.open_row()
        self.rows[other] = self.rows[row][:length]
        return other

    def truncate_row(self, row: int, length: int) -> None:
        if not self.capabilities.truncate:
            raise RuntimeError("truncate_row was called on a model without the capability")
        if not 0 <= length <= len(self.rows[row]):
            raise RuntimeError(f"row {row} has {len(self.rows[row])} tokens, it cannot be cut at {length}")
        del self.rows[row][length:]

    def fits(self, lengths: Sequence[int]) -> bool:
        enough_rows = self.max_rows is None or len(lengths) <= self.max_rows
        return enough_rows and (self.memory is None or sum(lengths) <= self.memory)

    def forward(self, chunks: Sequence[RowChunk]) -> ForwardResult:
        self._check(chunks)
        self.calls.append([Call(c.row, tuple(c.tokens), c.start, c.logits) for c in chunks])
        ids: list[int | None] = []
        logits: list[Sequence[float]] = []
        has_logits = any(chunk.logits == "all" for chunk in chunks)
        for chunk in chunks:
            tokens = self.rows[chunk.row]
            tokens.extend(chunk.tokens)
            if chunk.logits == "none":
                continue
            first = len(tokens) if chunk.logits == "last" else chunk.start + 1
            answers = [self.script(tuple(tokens[:end])) for end in range(first, len(tokens) + 1)]
            ids.append(answers[-1] if isinstance(answers[-1], int) else None)
            for answer in answers:
                has_logits = has_logits or not isinstance(answer, int)
                logits.append(self._certain(answer) if isinstance(answer, int) else answer)
        if not self.fits([len(tokens) for tokens in self.rows.values()]):
            raise RuntimeError("the engine computed more than the memory budget holds")
        if not has_logits:
            return ForwardResult(None, ids)
        import torch

        return ForwardResult(torch.tensor(logits, dtype=torch.float32), ids)

    def load_weights(self, state_dict: Mapping[str, Any]) -> None:
        if self.rows:
            raise RuntimeError("load_weights was called with open rows")
        self.loaded.append(state_dict)

    def _certain(self, token_id: int) -> list[float]:
        """All mass on one id."""
        return [0.0 if i == token_id else float("-inf") for i in range(self.vocab_size)]

    def _check(self, chunks: Sequence[RowChunk]) -> None:
        if not chunks:
            raise RuntimeError("forward was called without chunks")
        if len({chunk.row for chunk in chunks}) < len(chunks):
            raise RuntimeError("forward was given two chunks of one row")
        if len(chunks) > 1 and not self.capabilities.batched:
            raise RuntimeError("forward was given several rows, but the model is not batched")
        for chunk in chunks:
            computed = len(self.rows[chunk.row])
            if not chunk.tokens or chunk.start != computed:
                raise RuntimeError(
                    f"row {chunk.row} has {computed} computed tokens, "
                    f"but {len(chunk.tokens)} tokens at {chunk.start} were to be computed"
                )
            if self.context_len is not None and computed + len(chunk.tokens) > self.context_len:
                raise RuntimeError(f"row {chunk.row} grew beyond the window of {self.context_len} tokens")
            if not all(0 <= token_id < self.vocab_size for token_id in chunk.tokens):
                raise RuntimeError(f"row {chunk.row} was given ids outside the vocabulary: {chunk.tokens}")


def follow(answers: Mapping[Sequence[int], Sequence[int]]) -> Script:
    """A script that answers each prompt with its ids, one after the other.

    A row is matched to the longest prompt that it begins with. Behind the last id the script raises
    IndexError: an engine that asks for it did not stop where it should have.
    """
    prompts = {tuple(prompt): list(ids) for prompt, ids in answers.items()}

    def next_id(tokens: tuple[int, ...]) -> int:
        found = [prompt for prompt in prompts if tokens[: len(prompt)] == prompt]
        if not found:
            raise KeyError(f"no prompt of the script begins the row {tokens}")
        prompt = max(found, key=len)
        position = len(tokens) - len(prompt)
        if position >= len(prompts[prompt]):
            raise IndexError(f"the script of prompt {prompt} has ended after {position} tokens")
        return prompts[prompt][position]

    return next_id
