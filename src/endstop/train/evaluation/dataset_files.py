"""Where the rows of a data set lie: in a local file or folder, else in the Hub's cache or on the Hub."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from endstop.protocol.errors import EndstopError
from endstop.protocol.hub import PATIENCE
from endstop.train.data.records import Joined, JsonLines, ParquetRows, Records

_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A data set as it lies on the Hub.

    Attributes:
        name: what it is called here. repository: on the Hub. licence: as its card names it.
        config: the folder of its Parquet files, "" where there is none.
        columns: what is read of each row.
    """

    name: str
    repository: str
    config: str
    columns: tuple[str, ...]
    licence: str


def dataset_rows(
    dataset: HubDataset, split: str, place: str | Path | None = None, *, offline: bool | None = None
) -> Records:
    """The rows of one split, by number: from `place` (see `local_rows`), else from the Hub.

    offline: True asks only the Hub's cache; None follows ENDSTOP_OFFLINE and HF_HUB_OFFLINE. Raises
    EndstopError where there is neither, or what is there cannot be read.
    """
    rows = None if place is None else local_rows(dataset, split, Path(place))
    if rows is not None:
        return rows
    return _read(_from_hub(dataset, split, None if place is None else Path(place), offline), dataset)


def local_rows(dataset: HubDataset, split: str, place: Path) -> Records | None:
    """The rows of a split on this machine, None where the place has none.

    place: a .parquet, .jsonl or .jsonl.gz file, or a folder with data sets: in a folder named like this one
    (`gsm8k`, `openai/gsm8k`) or like its config (`ARC-Easy`), files whose names begin with the split
    (`test.jsonl`, `test-00000-of-00001.parquet`). Raises EndstopError where the place does not exist, or what
    is there cannot be read.
    """
    if place.is_file():
        return _read([place], dataset)
    if not place.is_dir():
        raise EndstopError(f"{place}, given for {dataset.name}, does not exist.")
    short = dataset.repository.split("/")[1]
    for folder in (place / dataset.name, place / dataset.repository, place / short, place):
        found = _files(folder, split, dataset.config)
        if found and (folder != place or place.name in (dataset.name, short) or _below(found, dataset)):
            return _read(found, dataset)
    return None


def _files(folder: Path, split: str, config: str) -> list[Path]:
    """The files of a split below a folder; where some lie in a folder named like the config, only those."""
    if not folder.is_dir():
        return []
    found = sorted(path for path in folder.rglob("*") if path.is_file() and _is_of(path, split))
    below = [path for path in found if config and config in path.relative_to(folder).parts[:-1]]
    return below or found


def _below(found: Sequence[Path], dataset: HubDataset) -> bool:
    """Whether files found in a folder of many data sets are this one's."""
    return bool(dataset.config) and all(dataset.config in path.parts for path in found)


def _is_of(path: Path, split: str) -> bool:
    if not path.name.endswith(_SUFFIXES) or not path.name.startswith(split):
        return False
    # `test.jsonl`, `test-00000-of-00001.parquet`, and not `test_more.jsonl`.
    return not path.name[len(split)].isalnum() and path.name[len(split)] != "_"


def _read(paths: Sequence[Path], dataset: HubDataset) -> Records:
    members: list[Records] = []
    parquets = [path for path in paths if path.suffix == ".parquet"]
    if parquets:
        members.append(ParquetRows(parquets, dataset.columns))
    for path in paths:
        if path.name.endswith(".jsonl.gz"):
            members.append(_Unpacked(path))
        elif path.suffix == ".jsonl":
            members.append(JsonLines(path))
        elif path.suffix != ".parquet":
            raise EndstopError(f"{path} is not read here: it must be one of {', '.join(_SUFFIXES)}.")
    rows = members[0] if len(members) == 1 else Joined(members)
    if not len(rows):
        raise EndstopError(f"{paths[0]} has no rows.")
    return rows


class _Unpacked:
    """The lines of a gzipped JSON Lines file, held in memory."""

    blocks = None

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                self._rows: list[Any] = [json.loads(line) for line in file if line.strip()]
        except (OSError, EOFError, ValueError, RecursionError) as error:
            raise EndstopError(f"{path} cannot be read as gzipped JSON lines: {error}.") from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self._path}, row {index + 1}"


def _from_hub(dataset: HubDataset, split: str, place: Path | None, offline: bool | None) -> list[Path]:
    """The split's files in the Hub's cache, fetched where the Hub can be reached."""
    from endstop.protocol.resolve import is_offline

    here = "the Hub's cache" if place is None else str(place)
    way_out = (
        f"put {split}.parquet or {split}.jsonl into a folder {dataset.name}/ and name the folder above it "
        "with --data (in training behind the name and a colon, NAME:FOLDER)."
    )
    try:
        snapshot = _snapshot(dataset, split, is_offline(offline))
    except Exception as error:
        # Of many kinds: the HTTP client's, the Hub's, the file system's.
        if isinstance(error, OSError) and error.errno is not None and error.filename:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise EndstopError(
            f"there is no {dataset.name} in {here}, and the Hub does not give {dataset.repository} "
            f"({reason}); {way_out}"
        ) from error
    found = _files(snapshot, split, dataset.config)
    if not found:
        raise EndstopError(
            f"there is no {dataset.name} in {here}, and {dataset.repository} of the Hub has no files of the "
            f"split {split!r}; {way_out}"
        )
    return found


def _snapshot(dataset: HubDataset, split: str, offline: bool) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    if offline:
        return Path(snapshot_download(dataset.repository, repo_type="dataset", local_files_only=True))
    info = HfApi().dataset_info(dataset.repository, timeout=PATIENCE)
    names = [entry.rfilename for entry in info.siblings or () if _is_of(Path(entry.rfilename), split)]
    config = [name for name in names if dataset.config in Path(name).parts[:-1]]
    root = Path()
    for name in config or names:
        path = Path(hf_hub_download(dataset.repository, name, repo_type="dataset"))
        root = path.parents[name.count("/")]
    return root
