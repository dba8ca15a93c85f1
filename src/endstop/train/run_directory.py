"""Where the files of a run lie, and what stands beside the weights of every model in it."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from endstop.models.directory import write_json
from endstop.protocol.errors import EndstopError

# What makes a model directory whole, besides configuration and weights.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# Results of evaluations that the report reads: beside a stage's model, and in the tokenizer's directory.
CHAT_EVALUATION, BASE_EVALUATION = "evaluation-chat.json", "evaluation-base.json"
TOKENIZER_EVALUATION = "evaluation.json"
PREDECESSORS = {"base": (), "mid": ("base",), "sft": ("mid", "base"), "rl": ("sft",)}


@dataclass(frozen=True, slots=True)
class StageDirectory:
    """The files of one stage."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "settings.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint: what has failed before its first one can begin anew."""
        return any(self.checkpoints.glob("step-*"))

    def require_new(self) -> None:
        """EndstopError where there is a stage already."""
        if self.model.exists() or self.begun:
            raise EndstopError(
                f"{self.path} holds a stage already: continue it with --resume, or choose another --run."
            )

    def begin(self, settings: dict[str, Any]) -> None:
        """Make the directory and write the settings; EndstopError where there is a stage already."""
        self.require_new()
        self.write_settings(settings)

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Write the settings, whole or not at all, into a directory that is made if need be."""
        write_object(self.settings, settings)

    def read_settings(self) -> dict[str, Any]:
        """The settings the stage was begun with; EndstopError where it was not begun."""
        if self.begun and not self.settings.exists():
            raise EndstopError(
                f"{self.settings} is missing, and without it nothing goes on from the checkpoints beside it: "
                "it holds what stands under settings in their training/state.json."
            )
        return read_object(self.settings, f"{self.path} holds no stage to resume; begin it without --resume.")

    def remove_partial(self) -> None:
        """Remove what a killed process has left half-written; only the process that has the stage may."""
        for pattern in (".*.partial", ".*.old", "*.part", "checkpoints/.*.partial"):
            for path in self.path.glob(pattern):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of a run."""

    path: Path

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def pipeline(self) -> Path:
        return self.path / "pipeline.json"

    def stage(self, name: str) -> StageDirectory:
        return StageDirectory(self.path / name)

    def predecessor(self, stage: str) -> Path:
        """The finished model that a stage begins with; EndstopError where no earlier stage has finished."""
        for name in PREDECESSORS[stage]:
            if (self.stage(name).model / "config.json").exists():
                return self.stage(name).model
        earlier = " or ".join(PREDECESSORS[stage])
        raise EndstopError(
            f"{self.path} has no finished {earlier} stage for {stage} to begin with: train it first, or name "
            "a model with --init-from."
        )

    def require_tokenizer(self) -> Path:
        """The tokenizer's directory; EndstopError where it was not trained."""
        if not (self.tokenizer / "tokenizer.json").exists():
            raise EndstopError(
                f"{self.tokenizer} has no tokenizer.json: train one with `endstop train tokenizer --out "
                f"{self.tokenizer}`."
            )
        return self.tokenizer


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """The tokenizer's files of a directory, and generation_config.json, by name."""
    files = {name: directory / name for name in TOKENIZER_FILES}
    return {name: path.read_bytes() for name, path in files.items() if path.is_file()}


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object, whole or not at all; EndstopError on a full disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(partial, value)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise EndstopError(f"{path} cannot be written: {error.strerror or error}.") from error


def read_object(path: Path, missing: str) -> dict[str, Any]:
    """A JSON object from a file; EndstopError says `missing` where there is no file, or what is wrong."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EndstopError(missing) from None
    except (OSError, ValueError) as error:
        raise EndstopError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise EndstopError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value
