"""Models of the Hugging Face Hub: looked up in the Hub's own cache, fetched with huggingface_hub.

Files lie where every other tool of the Hub finds them (HF_HOME, HF_HUB_CACHE); endstop adds a record
of commit, licence and checksums in its own cache. huggingface_hub is imported only to fetch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from endstop.protocol.cache import (
    RECORD,
    Progress,
    Record,
    cache_root,
    disk_error,
    disk_errors,
    locked,
    sha256_of,
)
from endstop.protocol.errors import BrokenModel, EndstopError, ModelNotFound, UnsupportedModel

# Seconds to wait for the Hub before another source is tried.
PATIENCE = 4.0
_SMALL_FILES = re.compile(
    r"[^/]+\.(json|jinja|txt|md)|LICEN[CS]E[^/]*|tokenizer\.model|additional_chat_templates/[^/]+\.jinja"
)
_PICKLED = re.compile(r"[^/]+\.(bin|pt|pth|ckpt|pkl)")


class HubUnreachable(ModelNotFound):
    """The Hub does not answer: no network, a proxy in between, or a fault on its side."""


def hub_cache() -> Path:
    """The Hub's own cache directory, by its own environment variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.path.expandvars(os.environ[name])).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.path.expandvars(os.environ["HF_HOME"])).expanduser() / "hub"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "huggingface" / "hub"


def cached_snapshot(
    repository: str, revision: str | None, *, file: str | None = None, weights: bool = True
) -> Record | None:
    """The record of a whole snapshot on this machine, None otherwise. Does not use the network.

    Snapshots that other tools fetched count as well: their record has no checksums.
    """
    asked = revision or "main"
    for record in _records(repository):
        whole = record.missing() is None and _is_whole(record.directory, file, weights)
        if whole and asked in (record.asked, record.revision):
            return record
    home = hub_cache() / ("models--" + repository.replace("/", "--"))
    commit = asked
    reference = home / "refs" / asked
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8").strip()
    directory = home / "snapshots" / commit
    if not _is_whole(directory, file, weights):
        return None
    return Record(repository, _address(repository), commit, licence_of(directory), directory, asked=asked)


def fetch_snapshot(
    repository: str,
    revision: str | None,
    *,
    file: str | None = None,
    weights: bool = True,
    progress: Progress | None = None,
) -> Record:
    """Fetch a snapshot: its small files and, with `weights`, its safetensors (or one GGUF `file`).

    Files that are there already are not fetched again; each is checked against the Hub's checksum and
    appears whole or not at all. Raises HubUnreachable, ModelNotFound (no such model, revision or file,
    or no right to it), UnsupportedModel (only pickled weights), BrokenModel (a wrong checksum),
    EndstopError (a full disk).
    """
    info = _info(repository, revision)
    commit = str(info.sha)
    sizes = {entry.rfilename: int(entry.size or 0) for entry in info.siblings or ()}
    expected = {entry.rfilename: entry.lfs.sha256 for entry in info.siblings or () if entry.lfs}
    wanted = _chosen(repository, sizes, file, weights)
    place = cache_root() / "hub" / repository.replace("/", "--") / commit
    with locked(place):
        directory, checksums = _download(repository, commit, wanted, sizes, expected, progress)
        record = Record(
            model=repository,
            source=_address(repository),
            revision=commit,
            licence=_licence(info),
            directory=directory,
            sizes={name: (directory / name).stat().st_size for name in wanted},
            checksums=checksums,
            asked=revision or "main",
        )
        before = Record.read(place / RECORD)
        if before is not None and before.missing() is None:
            # A pull without weights must not make the record forget them.
            record = replace(
                record,
                sizes={**before.sizes, **record.sizes},
                checksums={**before.checksums, **record.checksums},
            )
        with disk_errors(place):
            place.mkdir(parents=True, exist_ok=True)
            record.write(place / RECORD)
    return record


def gguf_in(directory: Path, file: str | None = None) -> Path | None:
    """The GGUF file that a snapshot is used as: `file`, or the only one where config.json is missing."""
    if file is not None:
        return directory / file
    if (directory / "config.json").is_file():
        return None
    found = sorted(directory.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def has_safetensors(directory: Path) -> bool:
    """Whether the safetensors of a directory are all there, shards of an index included."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return False
        return all((directory / str(shard)).is_file() for shard in shards)
    return any(directory.glob("*.safetensors"))


def refuse_pickled(place: str, names: Iterable[str]) -> None:
    """Raises UnsupportedModel where all weights among `names` are pickled: loading one runs its code."""
    names = list(names)
    pickled = [name for name in names if _PICKLED.fullmatch(name) and name != "training_args.bin"]
    if pickled and not any(name.endswith((".safetensors", ".gguf")) for name in names):
        raise UnsupportedModel(
            f"{place} has only pickled weights ({pickled[0]}), which can run code when they are read; "
            "convert them to safetensors, or use a model that has them."
        )


def _is_whole(directory: Path, file: str | None, weights: bool) -> bool:
    if file is not None:
        return (directory / file).is_file()
    if gguf_in(directory) is not None:
        return True
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    small = (directory / "config.json").is_file() and any((directory / name).is_file() for name in names)
    return small and (not weights or has_safetensors(directory))


def _records(repository: str) -> list[Record]:
    """The records of a repository, the newest first."""
    home = cache_root() / "hub" / repository.replace("/", "--")
    paths = sorted(home.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [record for path in paths if (record := Record.read(path)) is not None]


def _chosen(repository: str, sizes: dict[str, int], file: str | None, weights: bool) -> list[str]:
    """The files to fetch."""
    if file is not None:
        if file not in sizes:
            raise ModelNotFound(f"{repository} has no file {file!r} on the Hub.")
        return [file]
    top = [name for name in sizes if "/" not in name]
    refuse_pickled(repository, top)
    small = [name for name in sizes if _SMALL_FILES.fullmatch(name)]
    ggufs = [name for name in top if name.endswith(".gguf")]
    tensors = [name for name in top if name.endswith(".safetensors")]
    if not tensors and ggufs:
        if len(ggufs) > 1:
            raise ModelNotFound(
                f"{repository} holds several GGUF files; name one of them, as in {repository}/{ggufs[0]} "
                f"(others: {', '.join(ggufs[1:6])})."
            )
        return [*small, *ggufs]
    if "config.json" not in sizes:
        raise ModelNotFound(f"{repository} is no model that can be loaded: it has no config.json.")
    if not weights:
        return small
    if not tensors:
        raise ModelNotFound(f"{repository} has no weights: neither safetensors nor GGUF.")
    if "model.safetensors" in tensors:
        return [*small, "model.safetensors"]
    shards = [name for name in tensors if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)]
    return [*small, *(shards or tensors)]


def _info(repository: str, revision: str | None) -> Any:
    from huggingface_hub import HfApi

    with _hub_errors(repository, revision), _hub_cache_errors():
        return HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=PATIENCE)


def _download(
    repository: str,
    commit: str,
    names: list[str],
    sizes: dict[str, int],
    expected: dict[str, str],
    progress: Progress | None,
) -> tuple[Path, dict[str, str]]:
    """(the snapshot's directory, sha256 of every file)."""
    from huggingface_hub import hf_hub_download

    total = sum(sizes[name] for name in names)
    done = 0
    checksums = {}
    directory = Path()
    for name in names:
        bar = _bar(progress, done, total, name)
        with _hub_errors(repository, commit), _hub_cache_errors():
            path = Path(hf_hub_download(repository, name, revision=commit, tqdm_class=bar))
        directory = path.parents[name.count("/")]
        checksums[name] = sha256_of(path)
        if name in expected and checksums[name] != expected[name]:
            # The blob behind the link goes too, or the next pull would take it for good.
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise BrokenModel(
                f"{name} of {repository} came with sha256 {checksums[name]}, the Hub says {expected[name]}; "
                "it was removed, pull again."
            )
        done += sizes[name]
        if progress is not None:
            progress(done, total, name)
    return directory, checksums


def _bar(progress: Progress | None, before: int, total: int, name: str) -> Any:
    """A stand-in for huggingface_hub's progress bar that reports to `progress` and draws nothing."""

    class Bar:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            self.n = initial
            self.total: int | None = None

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: Any) -> None:
            self.close()

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            if progress is not None:
                progress(before + self.n, total, name)

        def close(self) -> None:
            pass

        def refresh(self, *_: Any, **__: Any) -> None:
            pass

        def set_description(self, *_: Any, **__: Any) -> None:
            pass

        set_postfix_str = set_description

    return Bar


class _hub_cache_errors:
    """Turns what the file system refuses below the Hub's cache into one sentence; network errors pass."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError):
            return
        # HTTP errors are OSErrors too, without a number.
        if error.errno is not None:
            place = Path(error.filename) if isinstance(error.filename, str) else hub_cache()
            raise disk_error(place, error) from error


class _hub_errors:
    """Turns what huggingface_hub raises into one sentence."""

    def __init__(self, repository: str, revision: str | None) -> None:
        self.repository = repository
        self.revision = revision

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None or isinstance(error, EndstopError) or not isinstance(error, Exception):
            return
        sentence = self._sentence(error)
        if sentence is not None:
            raise sentence from error

    def _sentence(self, error: Exception) -> EndstopError | None:
        from huggingface_hub import errors

        repository, page = self.repository, _address(self.repository)
        if isinstance(error, errors.GatedRepoError):
            return ModelNotFound(
                f"{repository} is gated: accept its terms at {page}, then set HF_TOKEN or run `hf auth "
                "login`."
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return ModelNotFound(f"{repository} has no revision {self.revision!r} on the Hub.")
        if isinstance(error, errors.RepositoryNotFoundError):
            return ModelNotFound(
                f"the Hub has no model {repository}, or it is private; check the name, or set HF_TOKEN."
            )
        if isinstance(error, errors.EntryNotFoundError):
            return ModelNotFound(f"{repository} lacks a file on the Hub: {_first_line(error)}.")
        if isinstance(error, errors.HFValidationError):
            return ModelNotFound(f"{repository!r} is no name of a model on the Hub: {_first_line(error)}.")
        if isinstance(error, errors.HfHubHTTPError):
            status = getattr(error.response, "status_code", None)
            if status in (401, 403):
                return ModelNotFound(
                    f"the Hub refuses {repository} (HTTP {status}); set HF_TOKEN to a good token."
                )
            return HubUnreachable(f"the Hub answered HTTP {status} for {repository}.")
        # huggingface_hub's HTTP error derives from the error of the HTTP client it uses, httpx or httpx2.
        network = errors.HfHubHTTPError.__bases__[0]
        if isinstance(error, network | ConnectionError | TimeoutError):
            return HubUnreachable(f"the Hub at {_endpoint()} cannot be reached ({_first_line(error)}).")
        return None


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _address(repository: str) -> str:
    return f"{_endpoint()}/{repository}"


def _licence(info: Any) -> str | None:
    card = getattr(info, "card_data", None)
    licence = getattr(card, "license", None)
    if isinstance(licence, str):
        return licence
    tags = [tag for tag in info.tags or () if tag.startswith("license:")]
    return tags[0].partition(":")[2] if tags else None


def licence_of(directory: Path) -> str | None:
    """The licence that the front matter of a README.md names."""
    try:
        text = (directory / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    head = re.match(r"---\s*\n(.*?)\n---\s*\n", text, re.DOTALL)
    match = re.search(r"^licen[cs]e:\s*([\w.-]+)\s*$", head[1], re.MULTILINE) if head else None
    return match[1] if match else None
