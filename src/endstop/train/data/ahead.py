"""Steps prepared beside the training, so that the model does not wait for its data."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import Full, Queue
from typing import Any, Protocol

import torch

from endstop.protocol.errors import EndstopError
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
_Prepared = tuple[list[TokenBatch], dict[int, dict[str, Any]], dict[str, Any]] | Exception


class AheadLoader:
    """A loader that has the next steps ready; states and statistics are those of the last step handed out.

    Args:
        loader: belongs to this object from now on.
        process: prepare them in a forked process, which has a core for itself. None: where that is possible.
            A thread does where little of the work holds Python's lock: tokenising, but not rendering.
    """

    def __init__(self, loader: Loader, *, process: bool | None = None) -> None:
        can_fork = "fork" in multiprocessing.get_all_start_methods()
        if process and not can_fork:
            raise ValueError("this system cannot fork processes; prepare the steps in a thread")
        self._make: Callable[[Loader], _Thread | _Process] = (
            _Process if (can_fork if process is None else process) else _Thread
        )
        self.mixture = getattr(loader, "mixture", None)
        self._loader = loader
        self._worker: _Thread | _Process | None = None
        self._ahead = False
        self._states = {shard: loader.state(shard) for shard in loader.own_shards}
        self._statistics = loader.statistics()

    @property
    def own_shards(self) -> list[int]:
        return self._loader.own_shards

    def next_step(self) -> list[TokenBatch]:
        """As of the loader; what it raises is raised here when its turn comes."""
        if self._worker is None:
            if self._ahead:
                self._return()
            self._worker = self._make(self._loader)
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


class _Thread:
    """Prepares two steps in a thread."""

    def __init__(self, loader: Loader) -> None:
        self._queue: Queue[_Prepared] = Queue(2)
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


class _Process:
    """Prepares a step, and what fits into a pipe, in a forked process, which ends when its parent does."""

    def __init__(self, loader: Loader) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_work_in_process, args=(loader, theirs, self._connection), name="endstop-data", daemon=True
        )
        self._process.start()
        theirs.close()

    def get(self) -> _Prepared:
        try:
            content = self._connection.recv_bytes()
        except (EOFError, OSError):
            self._process.join()
            return EndstopError(
                f"the process that prepares the data has ended (exit code {self._process.exitcode}): "
                "the memory may not have been enough."
            )
        step = pickle.loads(content)  # from our own child
        if isinstance(step, Exception):
            return step
        arrays, states, statistics = step
        tensors = [
            TokenBatch(*(None if array is None else torch.from_numpy(array) for array in batch))  # type: ignore[arg-type]
            for batch in arrays
        ]
        return tensors, states, statistics

    def close(self) -> None:
        self._process.terminate()
        self._process.join()
        self._connection.close()


def _work_in_process(loader: Loader, connection: Connection, parents: Connection) -> None:
    # Ctrl-C is the parent's business; without its end of the pipe here, its death breaks the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parents.close()
    # The threads of the parent's pools do not exist here.
    torch.set_num_threads(1)
    while True:
        prepared = _prepared(loader)
        try:
            connection.send_bytes(_pickled(prepared))
        except BrokenPipeError:
            return
        if isinstance(prepared, Exception):
            return


def _pickled(prepared: _Prepared) -> bytes:
    if isinstance(prepared, Exception):
        try:
            pickle.loads(pickle.dumps(prepared))
        except Exception:  # not every exception can be taken apart and put together
            prepared = EndstopError(f"{type(prepared).__name__}: {prepared}")
        return pickle.dumps(prepared)
    batches, states, statistics = prepared
    arrays = [
        tuple(
            None if tensor is None else tensor.numpy()
            for tensor in (batch.input_ids, batch.targets, batch.document_ids)
        )
        for batch in batches
    ]
    return pickle.dumps((arrays, states, statistics), protocol=pickle.HIGHEST_PROTOCOL)
