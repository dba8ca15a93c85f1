"""Checkpoints of a stage: each is a Hugging Face directory with the state of the training beside the weights.

A checkpoint is written beside its place, brought to the disk and renamed, so that whatever has the right name
is whole, and a run that is killed at any moment continues from the last one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from endstop.models.config import DecoderConfig
from endstop.models.decoder import Decoder
from endstop.models.directory import write_json
from endstop.models.save import write_model
from endstop.protocol.errors import EndstopError
from endstop.train.distributed import Process, shared, sums
from endstop.train.optimizer import Optimizers
from endstop.train.run_directory import read_object
from endstop.train.training_state import load_training_state, save_training_state, whole_state_dict

FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")


class Loader(Protocol):
    """Where the batches of a step come from; see `data`."""

    @property
    def own_shards(self) -> Sequence[int]: ...
    def next_step(self) -> list[Any]: ...
    def state(self, shard: int) -> dict[str, Any]: ...
    def load_state(self, shard: int, state: dict[str, Any]) -> None: ...
    def statistics(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        step: finished optimiser steps. steps: those of the whole run, None while they are not known.
        tokens: supervised targets trained on. seconds: time spent in all parts of the run.
        settings: as `StageSettings.to_json` gives them. tokenizer: the fingerprint of tokenizer.json.
        statistics: what the loader has counted.
    """

    step: int = 0
    steps: int | None = None
    tokens: int = 0
    seconds: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str = ""
    statistics: Mapping[str, Any] = field(default_factory=dict)


def save_checkpoint(
    directory: Path,
    position: Position,
    model: Decoder,
    optimizers: Optimizers,
    loader: Loader,
    files: Mapping[str, bytes],
    process: Process,
    *,
    keep: int = 2,
) -> Path:
    """Write `directory`/step-NNNNNN; every process must call it. Older ones beyond `keep` are removed after.

    files: the tokenizer's, by name. One that is there already is left: the same step of the same run. Raises
    EndstopError on a full disk: nothing of the new checkpoint is left then, the older ones are as they were.
    """
    target = directory / f"step-{position.step:06d}"
    partial = directory / f".{target.name}.partial"
    if shared(target in checkpoints(directory) if process.main else None, process):
        return target

    def make_place() -> None:
        if process.main:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "training").mkdir(parents=True)

    def fill() -> None:
        save_training_state(partial / "training", model, optimizers)
        for shard in loader.own_shards:
            write_json(partial / "training" / f"loader-{shard}.json", loader.state(shard))
        weights = whole_state_dict(model)
        if process.main:
            write_model(weights, model.config, partial, files=files)

    def put_in_place() -> None:
        if process.main:
            write_json(partial / "training" / "state.json", {"format": FORMAT, **_values(position)})
            _bring_to_disk(partial)
            # What has its name and is not whole was taken apart by hand, and would be in the way for ever.
            shutil.rmtree(target, ignore_errors=True)
            os.rename(partial, target)
            _sync_directory(directory)

    try:
        for part in (make_place, fill, put_in_place):
            _together(part, process)
    except (OSError, EndstopError) as error:
        last = newest_checkpoint(directory)
        kept = f"; the last good checkpoint is {last}" if last else ""
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).removesuffix(".")
        raise EndstopError(f"the checkpoint {target} cannot be written: {reason}{kept}.") from error
    finally:
        if process.main:
            shutil.rmtree(partial, ignore_errors=True)
    if process.main:
        for old in checkpoints(directory)[:-keep]:
            # Its name goes first: killed in between, what is left of it must not be taken for whole.
            leaving = old.with_name(f".{old.name}.partial")
            with suppress(OSError):
                os.rename(old, leaving)
            shutil.rmtree(leaving, ignore_errors=True)
    return target


def _together(work: Callable[[], None], process: Process) -> None:
    """Do a part of the work in every process; where it fails in one, all of them say so."""
    error: OSError | EndstopError | None = None
    try:
        work()
    except (OSError, EndstopError) as failed:
        error = failed
    (failures,) = sums([float(error is not None)], process)
    if error is not None:
        raise error
    if failures:
        raise EndstopError("another process could not write its part")


def load_checkpoint(
    checkpoint: Path, model: Decoder, optimizers: Optimizers, loader: Loader, tokenizer: str
) -> Position:
    """Put a model, its optimizers and its loader where a checkpoint was taken; every process must call it.

    Raises EndstopError for a checkpoint that is damaged, or of another shape, vocabulary, tokenizer or number
    of data shards; it names the one before it, if there is one.
    """
    try:
        return _loaded(checkpoint, model, optimizers, loader, tokenizer)
    except EndstopError as error:
        before = [path for path in checkpoints(checkpoint.parent) if path.name < checkpoint.name]
        if not before:
            raise
        said = str(error).removesuffix(".")
        raise EndstopError(
            f"{said}. If it is damaged, remove it: the one before it is {before[-1]}."
        ) from error


def _loaded(
    checkpoint: Path, model: Decoder, optimizers: Optimizers, loader: Loader, tokenizer: str
) -> Position:
    position = read_position(checkpoint)
    _check_shape(checkpoint, model.config)
    if position.tokenizer != tokenizer:
        raise EndstopError(f"{checkpoint} was trained with another tokenizer.json than this run has.")
    load_training_state(checkpoint / "training", model, optimizers)
    for shard in loader.own_shards:
        path = checkpoint / "training" / f"loader-{shard}.json"
        state = read_object(path, f"{checkpoint} has no data shard {shard}: it was made with fewer shards.")
        try:
            loader.load_state(shard, state)
        except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
            raise EndstopError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    return position


def read_position(checkpoint: Path) -> Position:
    """How far the run was at a checkpoint."""
    value = read_object(
        checkpoint / "training" / "state.json", f"{checkpoint} is no checkpoint that training can go on from."
    )
    if value.pop("format", None) != FORMAT:
        raise EndstopError(f"{checkpoint} was written by another version of endstop.")
    try:
        found = Position(**value)
    except TypeError as error:
        raise EndstopError(f"{checkpoint}: training/state.json is damaged: {error}.") from error
    for name, kind in (("step", int), ("tokens", int), ("seconds", int | float)):
        if not isinstance(getattr(found, name), kind):
            wrong = getattr(found, name)
            raise EndstopError(f"{checkpoint}: training/state.json is damaged: its {name} is {wrong!r}.")
    return found


def checkpoints(directory: Path) -> list[Path]:
    """The whole checkpoints of a stage, oldest first."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / "training" / "state.json").is_file()]


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint to resume from, if there is one."""
    found = checkpoints(directory)
    return found[-1] if found else None


def newest_shared(directory: Path, process: Process) -> Path | None:
    """As `newest_checkpoint`, the same one in every process."""
    return shared(newest_checkpoint(directory) if process.main else None, process)


def fingerprint(files: Mapping[str, bytes]) -> str:
    """What tells one tokenizer from another."""
    return hashlib.sha256(files.get("tokenizer.json", b"")).hexdigest()


def _check_shape(checkpoint: Path, config: DecoderConfig) -> None:
    found = DecoderConfig.from_hf(
        read_object(checkpoint / "config.json", f"{checkpoint} has no config.json.")
    )
    for name in (
        *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "intermediate_size", "tie_word_embeddings", "rope"),
    ):
        theirs, ours = getattr(found, name), getattr(config, name)
        if theirs != ours:
            raise EndstopError(
                f"{checkpoint} is of another model: its {name} is {theirs}, here it is {ours}."
            )


def _values(position: Position) -> dict[str, Any]:
    return {name: getattr(position, name) for name in Position.__dataclass_fields__}


def _bring_to_disk(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_directory(path)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
