"""The loss: weighted cross-entropy over supervised targets, with every kind of ending counted on its own.

The loss of a step is sum(weight * nats) / sum(weight) over all of its micro-batches and ranks. The divisor is
known from the targets before anything is computed, so no micro-batch is a mean of its own: one without labels
adds nothing, and how a step is split into micro-batches changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from endstop.models import ops
from endstop.models.decoder import Decoder
from endstop.protocol.labels import IGNORE
from endstop.train.stop_events import EVENTS, StopEvents

# Logits that exist at a time, in bytes of float32. On a CPU they stay in its cache between the passes over
# them (measured: 2.5 times as fast as all of 4096 x 4096 at once); a GPU wants large products.
_LOGIT_BYTES = {"cpu": 1 << 22, "cuda": 1 << 29}
# exp of it, summed over any vocabulary, is far from float32's end.
_SAFE_CAP = 60.0


@dataclass(frozen=True)
class LossSums:
    """Sums over supervised targets; those of several batches can be added.

    Attributes:
        nats, counts: for each event of EVENTS its nats and its targets.
        byte_nats, bytes: nats of the targets that stand for bytes, and how many bytes these are.
    """

    nats: tuple[float, ...] = (0.0,) * len(EVENTS)
    counts: tuple[int, ...] = (0,) * len(EVENTS)
    byte_nats: float = 0.0
    bytes: int = 0

    @classmethod
    def of(cls, sums: Tensor) -> LossSums:
        """From the sums that `Objective` gives back."""
        size = len(EVENTS)
        values = sums.tolist()
        counts = tuple(round(value) for value in values[size : 2 * size])
        return cls(tuple(values[:size]), counts, values[2 * size], round(values[2 * size + 1]))

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            tuple(a + b for a, b in zip(self.nats, other.nats, strict=True)),
            tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
            self.byte_nats + other.byte_nats,
            self.bytes + other.bytes,
        )

    @property
    def tokens(self) -> int:
        """Supervised targets."""
        return sum(self.counts)

    @property
    def loss(self) -> float:
        """Nats for each supervised target, unweighted; NaN where there is none."""
        return sum(self.nats) / self.tokens if self.tokens else float("nan")

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for each byte of text: special tokens stand for none, so endings do not show in it."""
        return self.byte_nats / math.log(2) / self.bytes if self.bytes else None

    def metrics(self) -> dict[str, float | int]:
        """`loss`, `bits_per_byte`, and `loss_<event>` and `count_<event>` for the events that occur."""
        found: dict[str, float | int] = {"loss": self.loss}
        if self.bits_per_byte is not None:
            found["bits_per_byte"] = self.bits_per_byte
        for event, nats, count in zip(EVENTS, self.nats, self.counts, strict=True):
            if count:
                found[f"loss_{event}"] = nats / count
                found[f"count_{event}"] = count
        return found


class Objective:
    """The loss of a decoder, callable as objective(decoder, input_ids, targets, document_ids, divisor).

    Args:
        events: what each id ends. token_lengths: bytes of each id, 0 for specials; ids beyond it have 0.
        weights: event -> weight in the loss, 1 by default.
    """

    def __init__(
        self,
        events: StopEvents,
        token_lengths: Sequence[int],
        weights: Mapping[str, float] | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        rows = len(events.table)
        if len(token_lengths) > rows:
            raise ValueError(f"there are lengths of {len(token_lengths)} ids, but the model has {rows} rows")
        self.events = events
        self.event_of = torch.tensor(events.table, device=device)
        self._weights = torch.tensor(events.weights(weights), dtype=torch.float32)
        self.weight_of = self._weights.to(device)
        self.bytes_of = torch.tensor([*token_lengths, *[0] * (rows - len(token_lengths))], device=device)

    def weight_sum(self, targets: Iterable[Tensor]) -> float:
        """The divisor of a step, or this process's part: the weights of all supervised targets (CPU)."""
        return sum(float(self._weights[part[part != IGNORE]].double().sum()) for part in targets)

    def __call__(
        self,
        decoder: Decoder,
        input_ids: Tensor,
        targets: Tensor,
        document_ids: Tensor | None,
        divisor: float,
    ) -> tuple[Tensor, Tensor]:
        """Loss and sums of one micro-batch: input_ids and targets int64 [B, T], targets already shifted.

        The loss is a float32 scalar, this micro-batch's part of the step's. The sums carry no gradient;
        `LossSums.of` reads them. Logits are computed only where a target is, some rows at a time.
        """
        hidden, wanted = supervised(decoder, input_ids, targets, document_ids)
        weights = self.weight_of[wanted] / divisor
        softcap = decoder.config.final_logit_softcap
        loss, nats = cross_entropy(hidden, decoder.lm_head.weight, wanted, weights, softcap)
        return loss, self.sums(wanted, nats)

    def sums(self, targets: Tensor, nats: Tensor) -> Tensor:
        """What `LossSums.of` reads, from supervised targets [N] and their nats [N]."""
        exact = torch.float32 if nats.device.type == "mps" else torch.float64
        nats = nats.to(exact)
        events = torch.arange(len(EVENTS), device=nats.device).unsqueeze(1) == self.event_of[targets]
        lengths = self.bytes_of[targets]
        byte_sums = torch.stack([nats[lengths > 0].sum(), lengths.sum().to(exact)])
        return torch.cat([events.to(exact) @ nats, events.sum(1).to(exact), byte_sums])


def supervised(
    decoder: Decoder, input_ids: Tensor, targets: Tensor, document_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Hidden states [N, hidden_size] and targets [N] of the supervised positions, row by row."""
    hidden = decoder.hidden_states(input_ids, document_ids=document_ids).flatten(0, 1)
    wanted = targets.flatten()
    at = (wanted != IGNORE).nonzero().squeeze(1)
    if len(at) == len(wanted):
        return hidden, wanted
    return hidden[at], wanted[at]


def cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor,
    softcap: float | None,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of nats, and the nats of each target, from hidden states and the output matrix.

    hidden: [N, D]; head: [V, D]; targets: int64 [N]; weights: float32 [N]. Gradients are computed on the way
    forward, `rows` rows of logits at a time, so that the memory does not grow with N * V; they equal those
    of the plain way. Under autocast the products have its dtype; softcap and softmax are float32.
    """
    if rows is None:
        budget = _LOGIT_BYTES.get(hidden.device.type, 1 << 28)
        rows = max(32, budget // (4 * head.shape[0]))
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    gradients = torch.is_grad_enabled()
    total, nats = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, weights, softcap, rows, dtype, gradients
    )
    return total, nats


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        weights: Tensor,
        softcap: float | None,
        rows: int,
        dtype: torch.dtype,
        gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        nats = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            states, matrix = hidden.to(dtype), head.to(dtype)
            state_gradient = torch.empty_like(states) if gradients else None
            head_gradient = torch.zeros_like(head, dtype=torch.float32) if gradients else None
            for begin in range(0, len(targets), rows):
                part = slice(begin, begin + rows)
                wanted, weight = targets[part].unsqueeze(1), weights[part].unsqueeze(1)
                logits = ops.softcap((states[part] @ matrix.T).float(), softcap)
                wanted_logits = logits.gather(1, wanted)
                # Capped logits cannot overflow exp. Others are made relative to the largest of their row.
                largest = None if softcap is not None and softcap <= _SAFE_CAP else logits.amax(1, True)
                shares = logits.exp() if largest is None else logits.sub(largest).exp_()
                total = shares.sum(1, keepdim=True)
                norm = total.log() if largest is None else total.log().add_(largest)
                nats[part] = (norm - wanted_logits).squeeze(1)
                if state_gradient is None or head_gradient is None:
                    continue
                # d nats / d logit is softmax - one-hot; through the softcap times 1 - tanh^2.
                gradient = shares.mul_(weight / total).scatter_add_(1, wanted, -weight)
                if softcap is not None:
                    gradient.addcmul_(gradient, logits.square_(), value=-1.0 / softcap**2)
                narrow = gradient.to(dtype)
                torch.mm(narrow, matrix, out=state_gradient[part])
                if dtype == torch.float32:
                    head_gradient.addmm_(narrow.T, states[part])
                else:
                    head_gradient += narrow.T @ states[part]
        if state_gradient is not None and head_gradient is not None:
            ctx.gradients = state_gradient.to(hidden.dtype), head_gradient.to(head.dtype)
        ctx.mark_non_differentiable(nats)
        return (nats * weights).sum(), nats

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        state_gradient, head_gradient = ctx.gradients
        del ctx.gradients
        factor = upstream[0]
        return state_gradient * factor, head_gradient * factor, *[None] * 6
