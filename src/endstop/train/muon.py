"""Muon on stacks of matrices, and on matrices that are sharded over processes.

The rule is that of `torch.optim.Muon` (Keller Jordan, https://kellerjordan.github.io/posts/muon/): momentum,
five Newton-Schulz iterations that make the update nearly orthogonal, a step of a size that fits the shape.
torch takes one matrix at a time, which for small matrices is mostly overhead, and knows no sharding. Here
matrices of one shape are orthogonalised as one stack. Of matrices sharded by FSDP2 every process gets whole
ones, an equal share of them, so that the work is done once and the result is that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Above these sizes a stack is no faster than its matrices one by one (measured on a CPU with AVX-512), and
# on an accelerator it should not hold a large model twice.
_CPU_SIDE, _STACK_ELEMENTS = 256, 2**26


def orthogonalized(
    stack: Tensor, *, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Each matrix of a stack [N, rows, columns], or one [rows, columns], brought near to U V^T of its SVD.

    A quintic Newton-Schulz iteration in `dtype`; singular values end between about 0.5 and 1.5. The result
    has `dtype`. Equal to what `torch.optim.Muon` computes for each matrix in bfloat16.
    """
    a, b, c = _COEFFICIENTS
    tall = stack.shape[-2] > stack.shape[-1]
    x = (stack.mT if tall else stack).to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with the update of this module; parameters may be DTensors of `fully_shard`.

    newton_schulz_dtype: bfloat16 as in torch. float32 gives results that do not hang on the order of sums
    (bfloat16 rounds a gradient that differs in the last bit to another number), and is faster on processors
    without bfloat16 instructions.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        newton_schulz_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self.newton_schulz_dtype = newton_schulz_dtype
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step for all parameters that have a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            updates = self._momentum(parameters, group["momentum"])
            for indices in _stacks(parameters):
                chosen = [updates[index] for index in indices]
                shape = parameters[indices[0]].shape
                steps = self._orthogonal(chosen)
                rate = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                for index, step in zip(indices, steps, strict=True):
                    local = _local(parameters[index])
                    if group["weight_decay"]:
                        local.mul_(1.0 - group["lr"] * group["weight_decay"])
                    local.add_(step, alpha=-rate)
        return None

    def _momentum(self, parameters: list[Tensor], momentum: float) -> list[Tensor]:
        """Put the gradients into the buffers; returns Nesterov's look-ahead, sharded as they are."""
        if not parameters:
            return []
        gradients = [_local(p.grad) for p in parameters if p.grad is not None]
        buffers = [_local(self.state[p]["momentum_buffer"]) for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1.0 - momentum)
        ahead = torch._foreach_lerp(gradients, buffers, momentum)
        return [_sharded_like(update, p) for update, p in zip(ahead, parameters, strict=True)]

    def _orthogonal(self, updates: list[Tensor]) -> list[Tensor]:
        """This process's part of each orthogonalised matrix; all have one shape."""
        dtype = self.newton_schulz_dtype
        if not isinstance(updates[0], DTensor):
            if len(updates) == 1:
                return [orthogonalized(updates[0], dtype=dtype)]
            return list(orthogonalized(torch.stack(updates), dtype=dtype).unbind())
        sharded: list[Any] = updates
        mesh, placements = sharded[0].device_mesh, sharded[0].placements
        if mesh.ndim == 1 and placements == (Shard(0),):
            return _orthogonal_by_owners(sharded, dtype)
        whole = orthogonalized(torch.stack([update.full_tensor() for update in sharded]), dtype=dtype)
        return [_own_part(matrix, like) for matrix, like in zip(whole, sharded, strict=True)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_like(local: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _own_part(matrix: Tensor, like: DTensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(matrix, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _stacks(parameters: list[Tensor]) -> list[list[int]]:
    """Indices of parameters to be taken together: of one shape, dtype, device and kind, within the limits."""
    stacks: dict[tuple[Any, ...], list[list[int]]] = {}
    for index, parameter in enumerate(parameters):
        sharded = isinstance(parameter, DTensor)
        small = parameter.device.type != "cpu" or min(parameter.shape) < _CPU_SIDE
        largest = max(1, _STACK_ELEMENTS // parameter.numel()) if small else 1
        if isinstance(parameter, DTensor):
            largest = max(largest, parameter.device_mesh.size())
        key = (parameter.shape, parameter.dtype, parameter.device, sharded)
        lists = stacks.setdefault(key, [[]])
        if len(lists[-1]) == largest:
            lists.append([])
        lists[-1].append(index)
    return [indices for lists in stacks.values() for indices in lists]


def _orthogonal_by_owners(updates: list[DTensor], dtype: torch.dtype) -> list[Tensor]:
    """Matrices sharded by rows over W processes: whole ones to their owners, there orthogonalised, and back.

    Matrix i belongs to process i % W. Two all-to-all exchanges move every element at most twice.
    """
    mesh = updates[0].device_mesh
    group, world, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    rows, columns = updates[0].shape
    # torch shards by rows in chunks of ceil(rows / W); the last processes may have fewer, or none.
    chunk = -(-rows // world)
    heights = [max(0, min(chunk, rows - process * chunk)) for process in range(world)]
    counts = [len(range(owner, len(updates), world)) for owner in range(world)]
    shards = [update.to_local() for update in updates]
    order = [index for owner in range(world) for index in range(owner, len(updates), world)]

    sizes_out = [count * heights[rank] * columns for count in counts]
    sizes_in = [counts[rank] * height * columns for height in heights]
    outgoing = torch.cat([shards[index].reshape(-1) for index in order])
    incoming = outgoing.new_empty(sum(sizes_in))
    dist.all_to_all_single(incoming, outgoing, sizes_in, sizes_out, group=group)
    parts = [
        part.view(counts[rank], height, columns)
        for part, height in zip(torch.split(incoming, sizes_in), heights, strict=True)
    ]
    if counts[rank]:
        whole = orthogonalized(torch.cat(parts, dim=1), dtype=dtype).contiguous()
        answer = torch.cat([part.reshape(-1) for part in torch.split(whole, heights, dim=1)])
    else:
        answer = outgoing.new_empty(0, dtype=dtype)
    returned = answer.new_empty(sum(sizes_out))
    dist.all_to_all_single(returned, answer, sizes_out, sizes_in, group=group)
    steps: list[Tensor] = [returned] * len(updates)
    for index, step in zip(order, returned.view(len(updates), heights[rank], columns).unbind(), strict=True):
        steps[index] = step
    return steps
