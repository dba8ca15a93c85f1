"""Steps prepared by a thread while the model computes: for GPUs, where the processor has time for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Full, Queue
from typing import Any, Protocol

from endstop.train.batch import TokenBatch


class Loader(Protocol):
    """What `DocumentLoader` and `ChatLoader` have in common."""

    @property
    def own_shards(self) -> list[int]: ...

    def next_step(self) -> list[TokenBatch]: ...

    def state(self, shard: int) -> dict[str, Any]: ...

    def load_state(self, shard: int, state: dict[str, Any]) -> None: ...

    def statistics(self) -> dict[str, Any]: ...


# A step with the states and statistics behind it, or what went wrong in making it.
_Prepared = tuple[list[TokenBatch], dict[int, dict[str, Any]], dict[str, Any]] | BaseException


class AheadLoader:
    """A loader that has the next steps ready; states and statistics are those of the last step handed out.

    Args:
        loader: belongs to this object from now on.
        steps: how many steps to prepare. Rendering and tokenising hold Python's lock for much of the
            time, so that
            this pays where the model computes elsewhere: not on two processor cores.
    """

    def __init__(self, loader: Loader, steps: int = 2) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        self.mixture = getattr(loader, "mixture", None)
        self._loader = loader
        self._size = steps
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._queue: Queue[_Prepared] = Queue(steps)
        self._states = {shard: loader.state(shard) for shard in loader.own_shards}
        self._statistics = loader.statistics()

    @property
    def own_shards(self) -> list[int]:
        return self._loader.own_shards

    def next_step(self) -> list[TokenBatch]:
        """As of the loader; what it raises is raised here when its turn comes."""
        if self._thread is None:
            if self._stop.is_set():
                self._return()
            self._queue = Queue(self._size)
            self._stop = threading.Event()
            work = _worker(self._loader, self._queue, self._stop)
            self._thread = threading.Thread(target=work, name="endstop-data", daemon=True)
            self._thread.start()
        prepared = self._queue.get()
        if isinstance(prepared, BaseException):
            self.close()
            raise prepared
        batches, self._states, self._statistics = prepared
        return batches

    def state(self, shard: int) -> dict[str, Any]:
        return self._states[shard]

    def load_state(self, shard: int, state: dict[str, Any]) -> None:
        """Go on where a state was taken, from the next step on; the other shards stay where they are."""
        self.close()
        self._states = {**self._states, shard: state}
        self._return()

    def statistics(self) -> dict[str, Any]:
        return self._statistics

    def close(self) -> None:
        """End the thread. Steps that were prepared and not handed out are made again when asked for."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _return(self) -> None:
        """Take the loader back to the last step that was handed out."""
        for shard, state in self._states.items():
            self._loader.load_state(shard, state)
        self._statistics = self._loader.statistics()


def _worker(loader: Loader, queue: Queue[_Prepared], stop: threading.Event) -> Callable[[], None]:
    def prepared() -> _Prepared:
        try:
            batches = loader.next_step()
            states = {shard: loader.state(shard) for shard in loader.own_shards}
            return batches, states, loader.statistics()
        except BaseException as error:
            return error

    def work() -> None:
        while not stop.is_set():
            step = prepared()
            while not stop.is_set():
                try:
                    queue.put(step, timeout=0.05)
                    break
                except Full:
                    continue
            if isinstance(step, BaseException):
                return

    return work
