"""What a training step is given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from endstop.protocol.labels import IGNORE


@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch of B rows of T tokens.

    Attributes:
        input_ids: int64 [B, T].
        targets: int64 [B, T]: the token that follows each input, IGNORE (-100) where it is not in the loss.
        document_ids: int64 [B, T], which document of its row each input belongs to, counted from 0; attention
            stays within a document. None: attention goes across documents.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    document_ids: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("input_ids", "targets", "document_ids"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.shape != self.input_ids.shape or tensor.dtype != torch.int64):
                raise ValueError(
                    f"{name} must be int64 of shape {list(self.input_ids.shape)}, got {tensor.dtype} of "
                    f"shape {list(tensor.shape)}"
                )

    @cached_property
    def supervised(self) -> int:
        """Targets that are in the loss."""
        return int((self.targets != IGNORE).sum())

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on a device."""
        document_ids = None if self.document_ids is None else self.document_ids.to(device)
        return TokenBatch(self.input_ids.to(device), self.targets.to(device), document_ids)
