"""Matrix products for inference: weights stored in the blocked layout of oneDNN where that is possible.

With row-major weights every call of `torch.nn.functional.linear` on a CPU first rearranges the matrix or
falls back to slower kernels. Rearranging once, when weights are loaded, makes products of few rows (decoding)
two to three times as fast in bfloat16 and float32 alike. These operators are the ones that
torch.compile's freezing emits; where a build of torch lacks them, the plain product is used.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """x [N, inputs] -> x W^T + b [N, outputs], in the weight's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product added to `residual` [N, outputs], which stays as it is."""
        ...


class PlainLinear:
    """Row-major weights; every device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias).add_(residual)


class PackedLinear:
    """Weights in oneDNN's layout; CPU. `plus` adds inside the product, before rounding to the dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = bias
        # Overloads are looked up once: choosing one takes longer than dispatching it.
        self.product = torch.ops.mkldnn._linear_pointwise.default
        self.product_plus = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self.product(x, self.packed, self.bias, "none", [], "")
        return result

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        result: Tensor = self.product_plus(x, residual, self.packed, self.bias, "add")
        return result


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product for a weight [outputs, inputs] and a bias [outputs], both of the same dtype."""
    if weight.device.type == "cpu" and packing_works(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this build of torch can pack CPU weights of a dtype and then computes the same product."""
    if not torch.backends.mkldnn.enabled:
        return False
    weight = torch.linspace(-1, 1, 48 * 40).view(48, 40).to(dtype)
    x = torch.linspace(1, -1, 3 * 40).view(3, 40).to(dtype)
    residual, bias = torch.ones(3, 48, dtype=dtype), torch.full((48,), 0.5, dtype=dtype)
    try:
        with torch.inference_mode():
            result = PackedLinear(weight, bias).plus(x, residual)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    expected = functional.linear(x.double(), weight.double()) + 1.5
    return bool(torch.allclose(result.double(), expected, rtol=2e-2, atol=2e-2))
