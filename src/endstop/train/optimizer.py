"""The optimiser of all stages: Muon for the matrices inside the layers, AdamW for everything else.

Rates and their rules are nanochat's of October 2025 (Karpathy): embedding 0.2 and output matrix 0.004, both
times (hidden_size / 768)^-0.5, matrices 0.02 with Muon; AdamW has betas 0.8 and 0.95 and eps 1e-10.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError
from endstop.train.muon import Muon

REFERENCE_WIDTH, REFERENCE_BATCH_TOKENS = 768, 2**19


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Peak learning rates and what goes with them; `Optimizers.set_schedule` multiplies the rates.

    Attributes:
        matrix_lr: Muon, for 2-D parameters inside the layers.
        embedding_lr, head_lr: AdamW, for the embedding and the output matrix, times
            (hidden_size / 768)^-0.5. A matrix that is both (tied) has head_lr.
        vector_lr: AdamW, for norm weights and biases, with the same factor.
        matrix_weight_decay, weight_decay: decoupled decay of Muon's matrices, and of embedding and output
            matrix. Vectors have none.
        beta1, beta2, eps: AdamW.
        batch_tokens: tokens in one optimiser step; if given, all rates are multiplied by its
            (batch_tokens / 2^19)^0.5.
        clip_norm: global norm that gradients are scaled down to, None for no limit.
        newton_schulz: dtype of Muon's iteration; see `Muon`.
    """

    matrix_lr: float = 0.02
    embedding_lr: float = 0.2
    head_lr: float = 0.004
    vector_lr: float = 0.004
    matrix_weight_decay: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.8
    beta2: float = 0.95
    eps: float = 1e-10
    batch_tokens: int | None = None
    clip_norm: float | None = 1.0
    newton_schulz: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        rates = (self.matrix_lr, self.embedding_lr, self.head_lr, self.vector_lr)
        for value in (*rates, self.matrix_weight_decay, self.weight_decay):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"learning rates and weight decays must be 0 or more, got {value}")
        if not 0.0 <= self.beta1 < 1.0 or not 0.0 <= self.beta2 < 1.0 or self.eps <= 0:
            raise ValueError("beta1 and beta2 must be in [0, 1), eps above 0")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError("clip_norm must be above 0, or None for no limit")
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ValueError("batch_tokens must be at least 1")


class Optimizers:
    """Muon and AdamW over one model, used as one optimiser.

    The state exists from the beginning, so that `state_dict` always has the same names and shapes.
    """

    def __init__(
        self,
        names: Mapping[str, Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
        clip_norm: float | None,
    ) -> None:
        self._parameters = dict(names)
        self._optimizers = [optimizer for optimizer in optimizers if optimizer.param_groups]
        self._clip_norm = clip_norm
        self._peak_lr = [[float(group["lr"]) for group in one.param_groups] for one in self._optimizers]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name."""
        return dict(self._parameters)

    def learning_rates(self) -> dict[str, float]:
        """The rate of each trained parameter now, by its name."""
        rates = {
            parameter: float(group["lr"])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return {name: rates[parameter] for name, parameter in self._parameters.items()}

    def set_schedule(self, lr_multiplier: float, momentum: float) -> None:
        """Multiply every peak learning rate, and set Muon's momentum, for the steps to come."""
        for optimizer, peaks in zip(self._optimizers, self._peak_lr, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * lr_multiplier
                if isinstance(optimizer, Muon):
                    group["momentum"] = momentum

    def clip_gradients(self) -> float:
        """Scale the gradients down to the clip norm, if they are above it; returns their norm before.

        The norm is that of the whole model, whatever is sharded. Not finite: the gradients are left alone,
        and the caller should not step.
        """
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:
            return 0.0
        total = nn.utils.get_total_norm(gradients)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if self._clip_norm is not None and norm > self._clip_norm and norm != float("inf"):
            local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
            torch._foreach_mul_(local, self._clip_norm / (norm + 1e-6))
        return norm

    def step(self) -> None:
        """Change the parameters by their gradients."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """The state's tensors (not copies) as `<parameter>.<key>`, sharded as the parameters are.

        Names, not indices: the state can be read by another number of processes, or for another order of
        parameters. Learning rates and momentum are no part of it, they follow from the step.
        """
        return {
            f"{name}.{key}": value
            for name, parameter in self._parameters.items()
            for optimizer in self._optimizers
            if parameter in optimizer.state
            for key, value in optimizer.state[parameter].items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state of the same parameters; EndstopError names what is missing, foreign or misshapen."""
        own = self.state_dict()
        if missing := own.keys() - state.keys():
            raise EndstopError(f"the optimizer state lacks {_some(missing)}: it belongs to another model")
        if foreign := state.keys() - own.keys():
            raise EndstopError(f"the optimizer state has {_some(foreign)}, which this model does not train")
        for name, value in own.items():
            if value.shape != state[name].shape:
                raise EndstopError(
                    f"the optimizer state {name} has shape {tuple(state[name].shape)}, "
                    f"this model needs {tuple(value.shape)}"
                )
            value.copy_(state[name])


def build_optimizer(model: Decoder, settings: OptimizerSettings) -> Optimizers:
    """Muon and AdamW over the parameters of a model that require gradients.

    Call it after the model was sharded (`fully_shard`) and moved to its device. Raises ValueError where
    nothing is trainable.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
    scale = 1.0
    if settings.batch_tokens is not None:
        scale = (settings.batch_tokens / REFERENCE_BATCH_TOKENS) ** 0.5
    width_scale = scale * (model.config.hidden_size / REFERENCE_WIDTH) ** -0.5

    matrices: list[Tensor] = []
    embedding: list[Tensor] = []
    head: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, parameter in trained.items():
        if parameter is model.lm_head.weight:
            head.append(parameter)
        elif parameter is model.model.embed_tokens.weight:
            embedding.append(parameter)
        elif parameter.ndim == 2 and name.startswith("model.layers."):
            matrices.append(parameter)
        else:
            vectors.append(parameter)

    optimizers: list[torch.optim.Optimizer] = []
    groups = [
        {"params": params, "lr": rate * width_scale, "weight_decay": decay}
        for params, rate, decay in (
            (head, settings.head_lr, settings.weight_decay),
            (embedding, settings.embedding_lr, settings.weight_decay),
            (vectors, settings.vector_lr, 0.0),
        )
        if params
    ]
    if groups:
        optimizers.append(_adamw(groups, settings))
    if matrices:
        muon = Muon(
            matrices,
            lr=settings.matrix_lr * scale,
            weight_decay=settings.matrix_weight_decay,
            newton_schulz_dtype=getattr(torch, settings.newton_schulz),
        )
        optimizers.append(muon)
    return Optimizers(trained, optimizers, settings.clip_norm)


def _adamw(groups: list[dict[str, object]], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW with its state in place; fused wherever torch has a fused kernel for the device."""
    optimizer = torch.optim.AdamW(
        groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
