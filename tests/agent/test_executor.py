"""Many items at once, with every executor that is there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time

import pytest

from endstop.agent.executor import ExecutorName, run_all
from endstop.protocol.errors import EndstopError


def square(number: int) -> tuple[int, int]:
    time.sleep(0.01 * (5 - number))  # the first items come last
    return number * number, os.getpid()


def broken(number: int) -> int:
    raise EndstopError(f"item {number} cannot be done.")


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_result_with_its_place(jobs: int) -> None:
    found = dict(run_all(square, [0, 1, 2, 3, 4], jobs=jobs))
    assert {place: value for place, (value, _) in found.items()} == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16}
    own = {pid == os.getpid() for _, pid in found.values()}
    assert own == {jobs == 1}
    assert list(run_all(square, [], jobs=jobs)) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_errors_come_through(jobs: int) -> None:
    with pytest.raises(EndstopError, match="item 7 cannot be done"):
        list(run_all(broken, [7], jobs=jobs))


def test_one_job_gives_results_as_they_come() -> None:
    results = run_all(square, [4, 3])
    assert next(results)[0] == 0


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_ray_is_named_where_it_is_missing() -> None:
    with pytest.raises(EndstopError, match="pip install ray"):
        list(run_all(square, [1], executor="ray"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_does_the_same() -> None:
    import ray

    executor: ExecutorName = "ray"
    try:
        found = dict(run_all(square, [0, 1, 2], executor=executor, jobs=2))
    finally:
        ray.shutdown()
    assert {place: value for place, (value, _) in found.items()} == {0: 0, 1: 1, 2: 4}
    assert os.getpid() not in {pid for _, pid in found.values()}


def test_neither_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, endstop.agent.executor, endstop.agent.suite, endstop.agent.bench.scenario\n"
        "print(sorted({'joblib', 'ray', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src"}
    )
    assert done.stdout.strip() == "[]", done.stderr
