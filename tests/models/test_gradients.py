"""Backward passes written by hand against autograd's, and their forward passes against those without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from endstop.models import ops
from endstop.models.config import RopeConfig


def turns(length: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return ops.rope_cos_sin(RopeConfig(), size, torch.arange(length), dtype)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: ops.rms_norm(x, None, 1e-5),
    "weighted rms_norm": lambda x: ops.rms_norm(x, torch.linspace(0.5, 2, 8, dtype=x.dtype), 1e-5),
    "rotation": lambda x: ops.apply_rope(x, *turns(x.shape[-2], x.shape[-1], x.dtype)),
    "squared relu": lambda x: ops.activate(x, "relu2"),
}


def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("endstop.models.gradients.by_hand", lambda x: False)


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 0.03)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, tolerance: float, transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 5, 3, 8) if transposed else (2, 3, 5, 8)
    values = torch.randn(shape, generator=generator).to(dtype)
    weights = torch.randn((2, 3, 5, 8), generator=generator).to(dtype)

    def run() -> tuple[Tensor, Tensor]:
        x = values.clone().requires_grad_()
        result = CASES[name](x.transpose(1, 2) if transposed else x)
        (gradient,) = torch.autograd.grad((result * weights).sum(), x)
        return result.detach(), gradient

    result, gradient = run()
    with torch.no_grad():
        unwatched = CASES[name](values.transpose(1, 2) if transposed else values)
    plainly(monkeypatch)
    expected, expected_gradient = run()
    assert result.dtype == expected.dtype
    assert gradient.dtype == expected_gradient.dtype
    torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=tolerance)
    if dtype == torch.float32:
        assert torch.equal(result, expected)
        assert torch.equal(result, unwatched)
    else:
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
