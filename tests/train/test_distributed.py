"""Several processes train as one: the same losses, whatever is replicated or sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError
from endstop.train.distributed import (
    Process,
    barrier,
    check_layout,
    joined_processes,
    parallelized,
    shared,
    sums,
)
from endstop.train.optimizer import OptimizerSettings, build_optimizer
from endstop.train.training_state import load_training_state, save_training_state, whole_state_dict
from tests.train.processes import alone, run_processes
from tests.train.small_models import small_model

ROWS, LENGTH, STEPS = 8, 12, 6
SETTINGS = OptimizerSettings(newton_schulz="float32", matrix_weight_decay=0.1, clip_norm=0.5)


def objective(model: Decoder, ids: Tensor, targets: Tensor, global_weight: float) -> Tensor:
    """Sum of the losses over the weight of the whole step, by the two methods that the loop calls."""
    logits = model.logits(model.hidden_states(ids))
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / global_weight


def global_batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, 61, (ROWS, LENGTH + 1), generator=generator)


def train(process: Process, task: dict[str, Any]) -> None:
    """Steps [first, last) of a run; its losses, gradient norms and weights are written by rank 0."""
    model = small_model(task["shape"])
    parallel = parallelized(model, objective, process, strategy=task["strategy"])
    optimizers = build_optimizer(parallel.model, SETTINGS)
    if task["load"] is not None:
        load_training_state(task["load"], model, optimizers)
    record = []
    for step in range(task["first"], task["last"]):
        optimizers.set_schedule(1.0 - 0.1 * step, 0.85 + 0.01 * step)
        # Rows are dealt out one by one, and come in two micro-batches.
        own = global_batch(step)[process.rank :: process.world]
        halves = own.chunk(2)
        loss = 0.0
        for index, rows in enumerate(halves):
            with parallel.micro_batch(last=index == len(halves) - 1):
                part = parallel.loss(rows[:, :-1], rows[:, 1:], float(ROWS * LENGTH))
                part.backward()
            loss += part.item()
        norm = optimizers.clip_gradients()
        optimizers.step()
        optimizers.zero_grad()
        record.append((sums([loss], process)[0], norm))
    if task["save"] is not None:
        save_training_state(task["save"], model, optimizers)
    weights = whole_state_dict(model)
    if process.main:
        torch.save(weights, task["result"] + ".pt")
        Path(task["result"]).write_text(json.dumps(record))


def run(tmp_path: Path, world: int, strategy: str, **task: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and norms [steps, 2], and the weights at the end."""
    result = str(tmp_path / f"{world}-{strategy}-{task.get('first', 0)}.json")
    whole = {"shape": "nanochat", "first": 0, "last": STEPS, "load": None, "save": None, **task}
    whole |= {"strategy": strategy, "result": result}
    if world == 1:
        alone(train, whole)
    else:
        run_processes(world, train, whole)
    return torch.tensor(json.loads(Path(result).read_text())), torch.load(result + ".pt", weights_only=True)


def assert_same(left: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(left[0], right[0], rtol=1e-6, atol=1e-6)
    assert left[1].keys() == right[1].keys()
    for name, value in left[1].items():
        torch.testing.assert_close(value, right[1][name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("shape", ["nanochat", "llama", "tied"])
def test_two_processes_train_as_one(tmp_path: Path, strategy: str, shape: str) -> None:
    assert_same(run(tmp_path, 1, "auto", shape=shape), run(tmp_path, 2, strategy, shape=shape))


@pytest.mark.slow
def test_four_processes_with_uneven_shards_train_as_one(tmp_path: Path) -> None:
    # 24 and 40 rows over 4 processes are even, 61 of the embedding and 3 matrices of a shape are not.
    assert_same(run(tmp_path, 1, "auto"), run(tmp_path, 4, "fsdp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [((2, "fsdp"), (1, "auto")), ((1, "auto"), (2, "fsdp")), ((2, "fsdp"), (2, "ddp"))]
)
def test_a_run_goes_on_in_another_number_of_processes(
    tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    whole = run(tmp_path, 1, "auto")
    state = str(tmp_path / "state")
    begun = run(tmp_path, *before, last=3, save=state)
    rest = run(tmp_path, *after, first=3, load=state)
    assert_same((torch.cat((begun[0], rest[0])), rest[1]), whole)


def share_and_wait(process: Process, directory: str) -> None:
    name = shared(f"from {process.rank}", process)
    total = sums([1.0, float(process.rank)], process)
    barrier(process)
    (Path(directory) / str(process.rank)).write_text(json.dumps([name, total]))


def test_values_are_summed_and_shared(tmp_path: Path) -> None:
    run_processes(2, share_and_wait, str(tmp_path))
    for rank in ("0", "1"):
        assert json.loads((tmp_path / rank).read_text()) == ["from 0", [2.0, 1.0]]


def test_alone_nothing_is_exchanged() -> None:
    with joined_processes("cpu") as process:
        assert (process.rank, process.world, process.main) == (0, 1, True)
        assert sums([1.5], process) == [1.5]
        assert shared("x", process) == "x"
        barrier(process)


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        (
            {"rows": 16, "shards": 8, "world": 3},
            "8 data shards cannot be dealt out to 3 processes: the number of processes can be 1, 2, 4 or 8, "
            "or begin a run with 6 or 9 data shards",
        ),
        (
            {"rows": 10, "shards": 8, "world": 2},
            "10 rows of a step cannot be dealt out to 8 data shards: "
            "take 8 or 16 rows, or 1, 2, 5 or 10 shards",
        ),
        ({"rows": 0, "shards": 8, "world": 2}, "at least 1 each"),
    ],
)
def test_a_wrong_layout_is_refused_with_numbers_that_would_do(numbers: dict[str, int], sentence: str) -> None:
    with pytest.raises(EndstopError, match=sentence):
        check_layout(**numbers)
    check_layout(rows=16, shards=8, world=4)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "process 0 of 2 cannot reach the others"),
    ],
)
def test_a_broken_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], sentence: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EndstopError, match=sentence), joined_processes("cpu"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(EndstopError, match="no CUDA device"), joined_processes("cuda"):
        pass
