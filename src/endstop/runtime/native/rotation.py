"""Rotary embedding as one complex product.

Rows of the q and k matrices are reordered when weights are loaded so that the two elements of a pair,
(i, i + d/2) in Hugging Face's layout, become neighbours. A pair is then one complex number and rotating it
is a product with cos + i sin. Scores q.k do not change, since q and k are reordered alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from endstop.models import ops
from endstop.models.config import RopeConfig


def interleave_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Bring the pairs (i, i + d/2) of each head together: [heads * d, ...] -> the same shape."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


class RotationTable:
    """cos + i sin for each position, computed as far as it was needed.

    With dynamic NTK scaling, position p beyond the original window has the frequencies of a sequence of
    p + 1 tokens: those it has when the text is computed token by token. It depends on nothing else, so
    results are the same however a text is cut into chunks. (transformers gives all tokens of one call the
    frequencies of the call's last position, so a prompt longer than the original window differs.)
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, device: torch.device, *, magnitude: bool = True
    ) -> None:
        """`magnitude=False` leaves the attention factor out."""
        self._rope, self._head_dim, self._device, self._magnitude = rope, head_dim, device, magnitude
        self._table = torch.empty(0, head_dim // 2, dtype=torch.complex64, device=device)

    def at(self, positions: Tensor, end: int) -> Tensor:
        """complex64 [N, head_dim / 2] for positions int64 [N], all below `end`."""
        if end > len(self._table):
            self._grow(max(end, 2 * len(self._table), 256))
        return self._table[positions]

    def _grow(self, length: int) -> None:
        positions = torch.arange(len(self._table), length).unsqueeze(-1)
        cos, sin = ops.rope_cos_sin(self._rope, self._head_dim, positions, torch.float32)
        added = torch.complex(cos, sin).squeeze(1)
        if not self._magnitude:
            added = added / self._rope.attention_factor
        self._table = torch.cat((self._table, added.to(self._device)))
