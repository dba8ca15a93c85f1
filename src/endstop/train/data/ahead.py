"""Steps prepared beside the training, so that the model does not wait for its data.

They are prepared in a thread. A forked process would have a core for itself, but a process that has begun to
train cannot be forked safely: CUDA, NCCL and the threads of tokenizers and HTTP clients do not survive it.
While a GPU computes, the training waits without holding Python's lock, nor does tokenising hold it.
"""

from __future__ import annotations

import threading
from queue import Full, Queue
from typing import Any

from endstop.train.batch import TokenBatch
from endstop.train.checkpoint import Loader

_AHEAD = 2

# A step with the states and statistics behind it, or what went wrong in making it.
_Prepared = tuple[list[TokenBatch], dict[int, dict[str, Any]], dict[str, Any]] | Exception


class AheadLoader:
    """A loader that has the next two steps ready.

    States and statistics are those of the last step handed out: a run that is resumed does not see the
    difference. The loader given to it belongs to this object from now on.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._worker: _Worker | None = None
        self._ahead = False
        self._states = {shard: loader.state(shard) for shard in loader.own_shards}
        self._statistics = loader.statistics()

    @property
    def own_shards(self) -> list[int]:
        return list(self._loader.own_shards)

    def next_step(self) -> list[TokenBatch]:
        """As of the loader; what it raises is raised here when its turn comes."""
        if self._worker is None:
            if self._ahead:
                self._return()
            self._worker = _Worker(self._loader)
            self._ahead = True
        prepared = self._worker.get()
        if isinstance(prepared, Exception):
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
        """End the work ahead. Steps that were prepared and not handed out are made again when asked for."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _return(self) -> None:
        """Take the loader back to the last step that was handed out."""
        for shard, state in self._states.items():
            self._loader.load_state(shard, state)
        self._statistics = self._loader.statistics()
        self._ahead = False


def _prepared(loader: Loader) -> _Prepared:
    try:
        batches = loader.next_step()
        return batches, {shard: loader.state(shard) for shard in loader.own_shards}, loader.statistics()
    except Exception as error:
        return error


class _Worker:
    """The thread that prepares steps, until an error or `close`."""

    def __init__(self, loader: Loader) -> None:
        self._queue: Queue[_Prepared] = Queue(_AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(loader,), name="endstop-data", daemon=True)
        self._thread.start()

    def get(self) -> _Prepared:
        return self._queue.get()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self, loader: Loader) -> None:
        while not self._stop.is_set():
            prepared = _prepared(loader)
            while not self._stop.is_set():
                try:
                    self._queue.put(prepared, timeout=0.05)
                    break
                except Full:
                    continue
            if isinstance(prepared, Exception):
                return
