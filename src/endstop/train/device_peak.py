"""How many floating-point operations a device can do, for the share of them that a training uses (MFU)."""

from __future__ import annotations

import time
from functools import lru_cache

import torch

# Dense bfloat16 products in operations per second, from NVIDIA's data sheets.
GPU_PEAK = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


@lru_cache(maxsize=8)
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of products in `dtype`: from the table, else measured within half a second."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for known, peak in GPU_PEAK.items():
            if known in name:
                return peak
    return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    size = 4096 if device.type == "cuda" else 1024
    left = torch.full((size, size), 0.5, dtype=dtype, device=device)
    best = 0.0
    until = time.perf_counter() + 0.3
    with torch.no_grad():
        left @ left
        while time.perf_counter() < until:
            _wait(device)
            started = time.perf_counter()
            left @ left
            _wait(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
