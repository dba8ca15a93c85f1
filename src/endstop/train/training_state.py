"""Model and optimizer state of a run on disk, readable by any number of processes.

The format is that of `torch.distributed.checkpoint`: every process writes what it owns, and a process that
reads takes the pieces it needs, however they were sharded before. Nothing in the files can run code: only
tensors are read, and of the pickled index only the classes that an index is made of.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError
from endstop.train.optimizer import Optimizers

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

_INDEX_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
_MODEL, _OPTIMIZER = "model.", "optimizer."


def save_training_state(directory: str | Path, model: Decoder, optimizers: Optimizers) -> None:
    """Write parameters and optimizer state into a directory; every process must call it.

    The directory is made if need be. It is not atomic: write into a partial directory, wait for all
    processes, and let one of them rename it. Raises OSError where it cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    Path(directory).mkdir(parents=True, exist_ok=True)
    # One file for each process, and no fsync by torch: the caller decides when the files must be there.
    writer = FileSystemWriter(directory, sync_files=False)
    try:
        with _alone_is_meant():
            save(_state(model, optimizers), storage_writer=writer, no_dist=not _distributed())
    except CheckpointException as error:
        raise OSError(f"the training state could not be written to {directory}: {_cause(error)}") from error


def load_training_state(directory: str | Path, model: Decoder, optimizers: Optimizers) -> None:
    """Read into a model and its optimizers what `save_training_state` wrote; every process must call it.

    The number of processes and the way of sharding may differ from those that wrote. Raises EndstopError for
    a directory that is missing or broken, or belongs to a model of another shape; then the model may have
    been changed in part.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    state = _state(model, optimizers)
    reader = _reader(directory)
    try:
        stored = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise EndstopError(f"{directory} holds no whole training state: {error}") from error
    _check_shapes(directory, state, stored)
    try:
        with _alone_is_meant():
            load(state, storage_reader=reader, no_dist=not _distributed())
    except (CheckpointException, OSError, RuntimeError) as error:
        raise EndstopError(f"the training state in {directory} is broken: {_cause(error)}") from error


def whole_state_dict(model: Decoder) -> dict[str, Tensor]:
    """All weights of a model, gathered on the CPU of rank 0; every process must call it, the others get {}.

    Without sharding the tensors are the model's own, not copies. Names are those of `Decoder.state_dict`.
    """
    main = not _distributed() or dist.get_rank() == 0
    whole = {}
    for name, value in model.state_dict().items():
        # Gathered one by one, so that no GPU ever holds the whole model.
        gathered = value.full_tensor() if isinstance(value, DTensor) else value
        if main:
            whole[name] = gathered.detach().cpu()
    return whole


def _reader(directory: str | Path) -> FileSystemReader:
    """torch's reader, but the pickled index may hold nothing except what such an index is made of."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(Path(directory) / ".metadata", "rb") as file:
                metadata = _IndexUnpickler(file).load()
            if getattr(metadata, "storage_meta", None) is None:
                raise pickle.UnpicklingError("its index is of another format")
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(directory)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        plain = module.startswith("torch.distributed.checkpoint.") or (module, name) in _INDEX_NAMES
        found = super().find_class(module, name) if plain or module == "torch" else None
        if plain and (isinstance(found, type) or (module, name) in _INDEX_NAMES):
            return found
        if module == "torch" and isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"its index names {module}.{name}, which no index needs")


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def _alone_is_meant() -> Iterator[None]:
    """Without torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _state(model: Decoder, optimizers: Optimizers) -> dict[str, Any]:
    """The tensors to be written or read into, by names that do not depend on how they are sharded."""
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        state[_MODEL + name] = parameter.detach()
    for name, value in optimizers.state_dict().items():
        state[_OPTIMIZER + name] = value
    return state


def _check_shapes(directory: str | Path, state: dict[str, Tensor], stored: dict[str, Any]) -> None:
    foreign = sorted(stored.keys() ^ state.keys())
    if foreign:
        name = foreign[0]
        there, here = ("lacks", "has") if name in state else ("has", "lacks")
        raise EndstopError(
            f"the training state in {directory} {there} {name}, which this model {here}: "
            "resume with the settings that the run was begun with"
        )
    for name, value in state.items():
        size = getattr(stored[name], "size", None)
        if size is None:
            raise EndstopError(f"{name} in {directory} is no tensor: the training state is broken")
        if torch.Size(size) != value.shape:
            raise EndstopError(
                f"{name} has shape {tuple(size)} in {directory}, but {tuple(value.shape)} in this model: "
                "resume with the settings that the run was begun with"
            )


def _cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if failures:
        first = next(iter(failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    if "inline_container" in str(error):
        # torch's archive notices only that less was written than it gave.
        return "a file is not whole; the disk may be full"
    return str(error) or "a file is not whole"
