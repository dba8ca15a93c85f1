"""Many independent runs at once: here with joblib, on other machines with Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from endstop.protocol.errors import EndstopError

ExecutorName = Literal["joblib", "ray"]
Item = TypeVar("Item")
Result = TypeVar("Result")


def run_all(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    executor: ExecutorName = "joblib",
    jobs: int = 1,
) -> Iterator[tuple[int, Result]]:
    """The results as they come, each with its item's place. What a function raises is raised here.

    `jobs`: processes at once; with Ray 0 leaves it to the cluster. One job of joblib runs in this process.
    """
    if executor == "ray":
        yield from _with_ray(function, items, jobs)
    elif jobs == 1:
        for place, item in enumerate(items):
            yield place, function(item)
    else:
        yield from _with_joblib(function, items, jobs)


def _with_joblib(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Iterator[tuple[int, Result]]:
    try:
        from joblib import Parallel, delayed
        from joblib.externals.loky.process_executor import TerminatedWorkerError
    except ModuleNotFoundError as error:
        raise EndstopError("Several jobs need joblib: pip install 'endstop[agent]'.") from error
    parallel = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1, pre_dispatch="all")
    try:
        yield from parallel(delayed(_numbered)(function, place, item) for place, item in enumerate(items))
    except TerminatedWorkerError as error:
        raise EndstopError(
            "a process of the suite was killed, perhaps because the memory was full; the same command "
            "goes on with what is missing, --jobs 1 needs least."
        ) from error


def _with_ray(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Iterator[tuple[int, Result]]:
    """Joins the cluster that RAY_ADDRESS names, or starts one of this machine. Every machine needs the
    workspaces at the same paths."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise EndstopError(
            "The executor ray needs a package: pip install ray. On one machine joblib does the same."
        ) from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False, **({"num_cpus": jobs} if jobs else {}))
    remote: Any = ray.remote(_numbered)
    waiting = [remote.remote(function, place, item) for place, item in enumerate(items)]
    while waiting:
        ready, waiting = ray.wait(waiting)
        for one in ready:
            yield ray.get(one)


def _numbered(function: Callable[[Item], Result], place: int, item: Item) -> tuple[int, Result]:
    return place, function(item)
