"""Devices that trainings are planned for: what they can do, what they hold, and what an hour of them costs.

Prices move: each has its date and its source, and every price and every MFU can be given anew.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from endstop.train.flops import known_hardware

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device, or one core of a processor.

    Attributes:
        peak: operations per second of dense products in `dtype`, from the maker's data sheet (of a core:
            measured with a product of 1024 x 1024 in float32 on an AMD EPYC with AVX-512).
        memory: bytes. bandwidth: bytes per second.
        mfu: the share of `peak` that training is assumed to reach, and mfu_source why.
        price: US dollars for an hour, None where it costs nothing by the hour. price_source: where and when.
    """

    name: str
    peak: float
    memory: float
    bandwidth: float
    dtype: str = "bfloat16"
    mfu: float = 0.45
    mfu_source: str = "assumed"
    price: float | None = None
    price_source: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """`count` equal devices that train together."""

    device: Device
    count: int = 1

    @property
    def name(self) -> str:
        return self.device.name if self.count == 1 else f"{self.count}x{self.device.name}"

    @property
    def processes(self) -> int:
        """Processes that train together: one for each device, one for all cores of a processor."""
        return 1 if self.device.name == "cpu" else self.count

    @property
    def memory(self) -> float:
        """Bytes for each process."""
        return self.device.memory * self.count / self.processes

    @property
    def price(self) -> float | None:
        """US dollars for an hour of all devices."""
        return None if self.device.price is None else self.device.price * self.count


_HOPPER = "nanochat reached 46 % (d18) and 50.9 % (d32) on 8 H100"
_NANOCHAT_PRICE = "nanochat's report, October 2025"
_LIST_PRICE = "RunPod's list as deploybase.ai shows it, March 2026"


def _gpu(name: str, bandwidth: float, **more: Any) -> Device:
    """Peak and memory are those that the measured MFU of a training refers to."""
    entry = known_hardware(name)
    assert entry is not None
    return Device(name, entry.flops, float(entry.memory), bandwidth, **more)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("H100", 3.35e12, mfu=0.48, mfu_source=_HOPPER, price=3.0, price_source=_NANOCHAT_PRICE),
        _gpu("H200", 4.8e12, mfu=0.48, mfu_source=_HOPPER, price=3.59, price_source=_LIST_PRICE),
        _gpu(
            "A100",
            2.0e12,
            mfu=0.48,
            mfu_source="assumed as on H100",
            price=1.79,
            price_source=_NANOCHAT_PRICE,
        ),
        _gpu("L40S", 0.864e12, mfu=0.35, price=0.79, price_source=_LIST_PRICE),
        _gpu("RTX 4090", 1.008e12, mfu=0.40, price=0.34, price_source=_LIST_PRICE),
        Device(
            "cpu",
            108e9,
            4 * GIB,
            2e10,
            "float32",
            mfu=0.50,
            mfu_source="what a model of 0.8 million parameters reached on two idle cores",
        ),
    )
}
COMMON = ("8xH100", "8xH200", "8xA100", "H100", "H200", "A100", "L40S", "RTX 4090", "2xcpu")
"""Shown side by side where no machine is named."""


def machine(name: str, *, mfu: float | None = None, price: float | None = None) -> Machine:
    """A machine by its name: `H200`, `8xH100`, `2xcpu`.

    mfu and price (dollars for an hour of the whole machine) stand in for the table's. Raises ValueError for
    a name that is not known, or an MFU outside (0, 1].
    """
    match = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+)", name.strip(), re.IGNORECASE)
    wanted = (match[2] if match else name).strip().lower()
    found = next(
        (
            device
            for name, device in DEVICES.items()
            if wanted in (name.lower(), name.lower().removeprefix("rtx "))
        ),
        None,
    )
    count = int(match[1]) if match and match[1] else 1
    if found is None or count < 1:
        raise ValueError(
            f"hardware is one of {', '.join(DEVICES)}, with the number of devices before it as in 8xH100, "
            f"got {name!r}"
        )
    if mfu is not None:
        if not 0.0 < mfu <= 1.0:
            raise ValueError(f"mfu must be a share above 0 and at most 1, got {mfu}")
        found = replace(found, mfu=mfu, mfu_source="given")
    if price is not None:
        if not 0 <= price < math.inf:
            raise ValueError(f"a price must be 0 or more, got {price}")
        found = replace(found, price=price / count, price_source="given")
    return Machine(found, count)


def this_machine(device: str, processes: int = 1) -> Machine:
    """What this process runs on: "cuda" is the GPU it uses, anything else the processor."""
    if device == "cuda":
        import torch

        name = torch.cuda.get_device_name()
        entry = known_hardware(name)
        memory = float(torch.cuda.get_device_properties().total_memory)
        return Machine(Device(name, entry.flops if entry else 0.0, memory, 0.0), processes)
    memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # One core of it stands for all of them: only the memory is asked for.
    return Machine(replace(DEVICES["cpu"], memory=memory / processes))
