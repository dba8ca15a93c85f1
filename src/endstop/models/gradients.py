"""Backward passes written by hand, for training on a CPU.

There an operation on activations costs little beside the memory that its result fills for the first time, and
what autograd derives from a norm, a rotation or a squared ReLU fills up to nine tensors where two would do.
Values of the forward passes are those without gradients, bit for bit in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def by_hand(x: Tensor) -> bool:
    """Whether a gradient of this activation will be asked for on a CPU, outside of `torch.compile`."""
    return (
        x.device.type == "cpu"
        and x.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


class RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) over the last axis, computed in float32, in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = (wide * scale).to(x.dtype)
        ctx.save_for_backward(normed, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        normed, scale = ctx.saved_tensors
        wide = gradient.float()
        along = (wide * normed).mean(-1, keepdim=True)
        return torch.addcmul(wide, normed.float(), along, value=-1).mul_(scale).to(normed.dtype), None


class Rotation(torch.autograd.Function):
    """`ops.apply_rope`; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotated(gradient, cos, -sin), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `ops.apply_rope`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class SquaredReLU(torch.autograd.Function):
    """max(x, 0)^2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = functional.relu(x)
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        product: Tensor = gradient * positive
        return product.mul_(2)
