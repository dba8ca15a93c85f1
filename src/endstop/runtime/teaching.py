"""The teaching model: a transformer small enough to be worked out on paper, and a TokenModel like any other.

Vocabulary of 7, width 4, one layer, one head: embedding + position -> causal attention, added to its input ->
tanh feed-forward, added to its input -> head. All weights but the head's are fixed small numbers; the head is
fitted (minimum-norm least squares, three equations) so that behind the prompt [1, 2] come 3, 5 and 6, and 6
is the end. The cache then holds 2, 3 and 4 tokens when these three are drawn: the last token of a finished
sequence is never computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from endstop.runtime.token_model import Capabilities, ForwardResult, RowChunk

PROMPT = [1, 2]
ANSWER = [3, 5, 6]
EOS = 6
VOCABULARY = 7
WIDTH = 4
LONGEST = 16
_SCALE = 8.0  # how far the fitted logit stands above the others


class TeachingModel:
    """See the module. Everything is float64, so that a cached step equals the full recomputation.

    `weights`: name -> tensor. `keys`, `values`: row -> [computed tokens, WIDTH].
    """

    def __init__(self) -> None:
        self.vocab_size = VOCABULARY
        self.context_len: int | None = LONGEST
        self.capabilities = Capabilities()
        self.weights = {
            "embedding": _numbers(VOCABULARY, WIDTH, 1),
            "position": 0.5 * _numbers(LONGEST, WIDTH, 2),
            "query": _numbers(WIDTH, WIDTH, 3),
            "key": _numbers(WIDTH, WIDTH, 4),
            "value": _numbers(WIDTH, WIDTH, 5),
            "output": _numbers(WIDTH, WIDTH, 6),
            "up": _numbers(WIDTH, WIDTH, 7),
            "down": _numbers(WIDTH, WIDTH, 8),
        }
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._next_row = 0
        prefixes = [PROMPT + ANSWER[:i] for i in range(len(ANSWER))]
        hidden = torch.stack([self.hidden(prefix)[-1] for prefix in prefixes])
        wanted = torch.zeros(len(ANSWER), VOCABULARY, dtype=torch.float64)
        wanted[range(len(ANSWER)), ANSWER] = _SCALE
        self.weights["head"] = (torch.linalg.pinv(hidden) @ wanted).T

    def hidden(self, tokens: Sequence[int], row: int | None = None) -> torch.Tensor:
        """Final hidden states [T, WIDTH] of `tokens`: a whole sequence, or what continues a cached row."""
        w = self.weights
        start = 0 if row is None else len(self.keys[row])
        x = w["embedding"][list(tokens)] + w["position"][start : start + len(tokens)]
        query, key, value = x @ w["query"], x @ w["key"], x @ w["value"]
        if row is not None:
            key = self.keys[row] = torch.cat([self.keys[row], key])
            value = self.values[row] = torch.cat([self.values[row], value])
        # Position p sees the positions up to p.
        visible = torch.ones(len(tokens), len(key), dtype=torch.bool).tril(start)
        scores = (query @ key.T / math.sqrt(WIDTH)).masked_fill(~visible, -torch.inf)
        x = x + torch.softmax(scores, dim=-1) @ value @ w["output"]
        return x + torch.tanh(x @ w["up"]) @ w["down"]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weights["head"].T

    def open_row(self) -> int:
        row = self._next_row
        self._next_row += 1
        self.keys[row] = torch.zeros(0, WIDTH, dtype=torch.float64)
        self.values[row] = torch.zeros(0, WIDTH, dtype=torch.float64)
        return row

    def close_row(self, row: int) -> None:
        del self.keys[row], self.values[row]

    def fork_row(self, row: int, length: int) -> int:
        other = self.open_row()
        self.keys[other], self.values[other] = self.keys[row][:length], self.values[row][:length]
        return other

    def truncate_row(self, row: int, length: int) -> None:
        self.keys[row], self.values[row] = self.keys[row][:length], self.values[row][:length]

    def fits(self, lengths: Sequence[int]) -> bool:
        return True

    def forward(self, chunks: Sequence[RowChunk]) -> ForwardResult:
        rows = []
        for chunk in chunks:
            logits = self.logits(self.hidden(chunk.tokens, chunk.row))
            rows.append(
                logits if chunk.logits == "all" else logits[-1:] if chunk.logits == "last" else logits[:0]
            )
        return ForwardResult(torch.cat(rows).float())

    def load_weights(self, state_dict: Mapping[str, Any]) -> None:
        for name, tensor in self.weights.items():
            tensor.copy_(state_dict[name])


def _numbers(rows: int, columns: int, salt: int) -> torch.Tensor:
    """Fixed numbers in (-1, 1) without pattern: the fractions of multiples of the golden ratio, squared."""
    values = [
        2 * math.modf((i + 1) * (i + 1 + salt * 17) * (math.sqrt(5) - 1) / 2)[0] - 1
        for i in range(rows * columns)
    ]
    return torch.tensor(values, dtype=torch.float64).reshape(rows, columns)
