"""Real processes with a gloo group on the loopback interface, each running one function of a test."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from endstop.train.distributed import Process, joined_processes

Work = Callable[..., None]


def run_processes(world: int, work: Work, *arguments: Any) -> None:
    """work(process, *arguments) in `world` new processes; raises what the first failing one raised."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_enter, (world, port, work, arguments), nprocs=world)


def _enter(rank: int, world: int, port: int, work: Work, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with joined_processes("cpu", timeout=60.0) as process:
        work(process, *arguments)


def alone(work: Work, *arguments: Any) -> None:
    """work(process, *arguments) here, as the only process."""
    work(Process(0, 1, torch.device("cpu")), *arguments)
