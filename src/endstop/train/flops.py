"""What hardware can do, and the share of it that a training uses (MFU).

How many operations a model needs is in `model_shapes.flops_per_token`: forward and backward of one token, of
which the forward pass is a third. torch is imported only to look at the machine itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Hardware:
    """An accelerator: dense bfloat16 products in operations per second, and memory in bytes."""

    name: str
    flops: float
    memory: int


_GB = 10**9
# From NVIDIA's data sheets, without sparsity. Consumer cards: with float32 accumulation, as in training.
# A longer name stands before the shorter one that it contains.
HARDWARE: tuple[Hardware, ...] = (
    Hardware("GB200", 2500e12, 186 * _GB),
    Hardware("B200", 2250e12, 180 * _GB),
    Hardware("GH200", 989e12, 96 * _GB),
    Hardware("H200", 989e12, 141 * _GB),
    Hardware("H100 PCIe", 756e12, 80 * _GB),
    Hardware("H100 NVL", 835e12, 94 * _GB),
    Hardware("H100", 989e12, 80 * _GB),
    Hardware("H800", 989e12, 80 * _GB),
    Hardware("A100-SXM4-40GB", 312e12, 40 * _GB),
    Hardware("A100-PCIE-40GB", 312e12, 40 * _GB),
    Hardware("A100", 312e12, 80 * _GB),
    Hardware("A10G", 70e12, 24 * _GB),
    Hardware("L40S", 362e12, 48 * _GB),
    Hardware("L40", 181e12, 48 * _GB),
    Hardware("L4", 121e12, 24 * _GB),
    Hardware("RTX 6000 Ada", 364e12, 48 * _GB),
    Hardware("RTX 5090", 209.5e12, 32 * _GB),
    Hardware("RTX 4090", 165.2e12, 24 * _GB),
    Hardware("RTX 3090", 71e12, 24 * _GB),
)


def known_hardware(name: str) -> Hardware | None:
    """The entry for a device name as a driver or a person spells it ("NVIDIA H100 80GB HBM3", "h100")."""
    wanted = _letters(name)
    return next((entry for entry in HARDWARE if _letters(entry.name) in wanted), None)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


@lru_cache(maxsize=8)
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a device for products in `dtype`.

    From the data sheet for bfloat16 and float16 on known GPUs; otherwise the best of square products within
    half a second, with the threads that torch has now. A measured peak is a lower bound.
    """
    import torch

    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        entry = known_hardware(torch.cuda.get_device_name(device))
        if entry is not None:
            return entry.flops
    return measured_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.4) -> float:
    """Operations per second of the fastest of many square products within so many seconds."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    size = 4096 if device.type == "cuda" else 1024
    matrix = torch.full((size, size), 1.0 / size, dtype=dtype, device=device)
    result = torch.empty_like(matrix)
    best = 0.0
    with torch.no_grad():
        torch.mm(matrix, matrix, out=result)
        wait()
        until = time.perf_counter() + seconds
        while True:
            begun = time.perf_counter()
            torch.mm(matrix, matrix, out=result)
            wait()
            ended = time.perf_counter()
            best = max(best, 2 * size**3 / (ended - begun))
            if ended >= until:
                return best


def utilisation(tokens_per_second: float, flops_per_token: float, peak: float) -> float:
    """Model FLOPs utilisation: the share of the peak of all devices that a training's own products use."""
    return tokens_per_second * flops_per_token / peak
