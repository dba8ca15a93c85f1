"""Training on several processes: torchrun's environment, sums over processes, DDP and FSDP2.

The objective of a step is a sum over the global batch divided by its global weight, so every process divides
by the global weight itself and gradients are summed, never averaged, over processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError

Strategy = Literal["auto", "ddp", "fsdp"]
Value = TypeVar("Value")
# What gloo and NCCL say where a process at the other end is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
DDP_PARAMETERS = 1_000_000_000
"""Up to this many parameters `auto` keeps a whole copy in each process."""


@dataclass(frozen=True, slots=True)
class Process:
    """One of the `world` processes that train together; rank 0 is the one that logs and writes."""

    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this process logs, writes files and draws progress bars."""
        return self.rank == 0


@contextlib.contextmanager
def joined_processes(device: str = "auto", *, timeout: float = 1800.0) -> Iterator[Process]:
    """Join the other processes of a torchrun for as long as the context lasts; alone without torchrun.

    device: "cpu", "cuda", or "auto" for CUDA where it is there (each process has the GPU of its local rank).
    timeout: seconds that a process waits for the others before it gives up. gloo is used on the CPU, NCCL on
    CUDA. All processes but the main one log errors only. Raises EndstopError for a broken environment, a GPU
    that does not exist, and where another process ended while this one waited for it.
    """
    rank, world, local = (_from_environment(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    world = 1 if world is None else world
    rank, local = rank or 0, local or 0
    if not 0 <= rank < world:
        raise EndstopError(f"RANK={rank} does not fit WORLD_SIZE={world}: start the processes with torchrun")
    chosen = _device(device, local)
    if world == 1:
        yield Process(0, 1, chosen)
        return
    on_gpu = chosen.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=timedelta(seconds=timeout),
            device_id=chosen if on_gpu else None,
        )
    except (ValueError, RuntimeError) as error:
        raise EndstopError(f"process {rank} of {world} cannot reach the others: {error}") from error
    log = logging.getLogger("endstop")
    level = log.level
    if rank:
        log.setLevel(logging.ERROR)
    try:
        yield Process(rank, world, chosen)
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _LOST):
            raise
        raise EndstopError(f"process {rank} of {world} lost the others: one of them ended") from error
    finally:
        log.setLevel(level)
        dist.destroy_process_group()


def barrier(process: Process) -> None:
    """Wait until every process is here."""
    if process.world > 1:
        dist.barrier()


def summed(values: Tensor, process: Process) -> Tensor:
    """The sum over processes of a tensor of any shape; the given one is changed in place."""
    if process.world > 1:
        dist.all_reduce(values)
    return values


def sums(values: list[float], process: Process) -> list[float]:
    """Sums over processes of plain numbers, in double precision."""
    if process.world == 1:
        return values
    total: list[float] = summed(
        torch.tensor(values, dtype=torch.float64, device=process.device), process
    ).tolist()
    return total


def shared(value: Value, process: Process) -> Value:
    """What rank 0 has, in every process (anything that can be pickled, from our own processes only)."""
    if process.world == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=process.device)
    return box[0]


def gathered(value: Value, process: Process) -> list[Value]:
    """What each process has, in the order of their ranks, in every process (anything that can be pickled)."""
    if process.world == 1:
        return [value]
    boxes: list[Any] = [None] * process.world
    dist.all_gather_object(boxes, value)
    return boxes


def done_by_main(work: Callable[[], None], process: Process) -> None:
    """Let rank 0 do something that may be refused; an EndstopError of it is raised in every process."""
    refusal: str | None = None
    if process.main:
        try:
            work()
        except EndstopError as error:
            if process.world == 1:
                raise
            refusal = str(error)
    refusal = shared(refusal, process)
    if refusal is not None:
        raise EndstopError(refusal)


def check_layout(*, rows: int, shards: int, world: int) -> None:
    """Data is dealt out in whole: shards to processes, rows of a step to shards. Raises EndstopError if not.

    The sentence says which numbers would do.
    """
    if min(rows, shards, world) < 1:
        raise EndstopError(f"rows ({rows}), data shards ({shards}), processes ({world}): at least 1 each")
    if shards % world:
        raise EndstopError(
            f"{shards} data shards cannot be dealt out to {world} processes: the number of processes can be "
            f"{_listed(_divisors(shards))}, or begin a run with {_multiples(shards, world)} data shards"
        )
    if rows % shards:
        raise EndstopError(
            f"{rows} rows of a step cannot be dealt out to {shards} data shards: "
            f"take {_multiples(rows, shards)} rows, or {_listed(_divisors(rows))} shards"
        )


class Parallel:
    """A model as the processes train it together.

    Attributes:
        model: the decoder itself; its parameters are DTensors under FSDP2.
    """

    def __init__(self, model: Decoder, objective: nn.Module, ddp: Any | None, sharded: bool) -> None:
        self.model = model
        self._objective, self._ddp, self._sharded = objective, ddp, sharded

    def loss(self, *arguments: Any) -> Any:
        """What the objective function returns for the model and these arguments, ready for `backward`."""
        called = self._objective if self._ddp is None else self._ddp
        return called(*arguments)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch; gradients cross processes in the last one only."""
        if self._sharded:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        with contextlib.nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            yield


class _Objective(nn.Module):
    """A function of the model as the forward pass of a module, for what hooks forward passes."""

    def __init__(self, model: Decoder, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *arguments: Any) -> Any:
        return self.function(self.model, *arguments)


def parallelized(
    model: Decoder,
    objective: Callable[..., Any],
    process: Process,
    *,
    strategy: Strategy = "auto",
    compute_dtype: torch.dtype = torch.float32,
) -> Parallel:
    """Set a model up for training by all processes; alone it stays as it is.

    objective: called as objective(model, *arguments) by `Parallel.loss`; it may call `forward`,
    `hidden_states` and `logits`. Build the optimizer afterwards, from `Parallel.model`.
    ddp keeps a whole copy in each process. fsdp shards parameters, gradients and optimizer state by layers
    (FSDP2), computes in `compute_dtype` and sums gradients in float32. The model must have the same weights
    in every process and be on the process's device.
    """
    module = _Objective(model, objective)
    if process.world == 1:
        return Parallel(model, module, None, False)
    if strategy == "auto":
        small = sum(p.numel() for p in model.parameters()) <= DDP_PARAMETERS
        strategy = "ddp" if small else "fsdp"
    if strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
        ddp.register_comm_hook(None, lambda state, bucket: _sum_of_bucket(bucket))
        return Parallel(model, module, ddp, False)
    _shard(model, process, compute_dtype)
    return Parallel(model, module, None, True)


def _sum_of_bucket(bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's exchange of gradients without its division by the number of processes."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    exchanged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return exchanged


def _shard(model: Decoder, process: Process, compute_dtype: torch.dtype) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(process.device.type, (process.world,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for method in ("hidden_states", "logits"):
        register_fsdp_forward_method(model, method)
    for module in (model, *model.model.layers):
        # A plain sum, which gloo knows too.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _from_environment(name: str) -> int | None:
    value = os.environ.get(name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise EndstopError(f"{name}={value!r} is no number: start the processes with torchrun") from None


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise EndstopError(f"training runs on the device auto, cpu or cuda, not {name!r}")
    if not torch.cuda.is_available():
        raise EndstopError("there is no CUDA device here: train with device 'cpu'")
    count = torch.cuda.device_count()
    device = torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)
    if device.index >= count:
        raise EndstopError(
            f"there are {count} GPUs on this machine, none for local rank {device.index}: "
            f"start {count} processes on it (torchrun --nproc-per-node {count})"
        )
    torch.cuda.set_device(device)
    return device


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _multiples(number: int, of: int) -> str:
    below = number // of * of
    return f"{below + of}" if below == 0 else f"{below} or {below + of}"


def _listed(numbers: list[int]) -> str:
    if len(numbers) > 8:
        numbers = numbers[:4] + numbers[-4:]
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
