"""Data as it is spelled on the command line and in presets: `PLACE[@COUNT][*WEIGHT]`.

PLACE is one of
- a file or folder,
- `tasks` for all synthetic tasks, or one task's name,
- a known data set of conversations (CHAT_SETS): ./data/NAME, else the Hub or its cache; or `NAME:FOLDER`,
- a corpus in shards (`fineweb-edu`) that `endstop train data` has put into ./data, or `NAME:FOLDER` with the
  FOLDER that was its --out,
- `hub:OWNER/NAME` or `hub:OWNER/NAME:CONFIG`, streamed.
Names of data sets come before files that are called so; `./NAME` is the file.

COUNT takes only so many documents of a file or data set, so many shards of a corpus, makes so many of a
task, and is one epoch of a stream. WEIGHT is how often the source is gone through while a source of weight 1
is gone through once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from endstop.protocol.errors import EndstopError
from endstop.train.data.mixture import Mixture, Part
from endstop.train.data.shards import SHARD_SETS, ShardFiles, local_shards, shard_sources

Kind = Literal["texts", "conversations"]
HELD_OUT = 1000
"""At most so many documents, and at most a hundredth, of a file are kept for validation."""

CHAT_SETS = {
    "arc-easy": "arc-easy",
    "arc-challenge": "arc-challenge",
    "gsm8k": "gsm8k",
    "mmlu-aux": "mmlu",
    "smoltalk": "smoltalk",
}
"""Data sets to train on, and their names in `evaluation.datasets`; of MMLU it is the part made for that."""
DATA_FOLDER = Path("data")
"""Where `endstop train data` puts corpora unless told otherwise, and where data sets are looked for first."""

_EXAMPLES, _TEST_EXAMPLES = 50_000, 1000
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_ARGUMENT = re.compile(r"(?P<place>.+?)(?:@(?P<count>\d+))?(?:\*(?P<weight>\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class DataArgument:
    """One source as it was asked for."""

    place: str
    count: int | None = None
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> DataArgument:
        """From `PLACE[@COUNT][*WEIGHT]`; ValueError where it is none."""
        match = _ARGUMENT.fullmatch(text.strip())
        if match is None or match["count"] == "0":
            raise ValueError(f"data is named as PLACE[@COUNT][*WEIGHT], got {text!r}")
        count = None if match["count"] is None else int(match["count"])
        return cls(match["place"], count, 1.0 if match["weight"] is None else float(match["weight"]))


class Slice:
    """Documents `start` to `stop` of a source with random access."""

    def __init__(self, source: Any, start: int, stop: int) -> None:
        self._source, self._start, self._stop = source, start, stop
        self.name = getattr(source, "name", "source")
        self.licence, self.origin = getattr(source, "licence", None), getattr(source, "origin", None)

    @property
    def blocks(self) -> Sequence[int] | None:
        """Where the blocks of the source begin, as far as they lie in the slice; see `mixture.Finite`."""
        blocks = getattr(self._source, "blocks", None)
        if blocks is None:
            return None
        inside = [border for border in blocks if self._start < border < self._stop]
        return [border - self._start for border in (self._start, *inside, self._stop)]

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self._source[self._start + index]


@dataclass(frozen=True)
class Split:
    """What is trained on, and what is held out of the same sources."""

    train: Mixture
    validation: Mixture | None


def open_data(
    arguments: Sequence[str], kind: Kind, *, seed: int = 0, validation: Sequence[str] | None = None
) -> Split:
    """The sources of a stage.

    validation: sources of their own to evaluate on; without them the tasks' test side and the last documents
    of files are. Streams are not held out from. Raises EndstopError for sources that cannot be opened.
    """
    if not arguments:
        raise EndstopError("there is no data to train on: name it with --data.")
    train, held_out = [], []
    for argument in map(DataArgument.parse, arguments):
        own, rest = _opened(argument, kind, seed, hold_out=validation is None)
        train.append(Part(own, argument.weight))
        if rest is not None:
            held_out.append(Part(rest, 1.0))
    if validation is not None:
        for argument in map(DataArgument.parse, validation):
            own, rest = _opened(argument, kind, seed, hold_out=False, test=True)
            held_out.append(Part(own if rest is None else rest, argument.weight))
    return Split(Mixture(train), Mixture(held_out) if held_out else None)


def open_texts(argument: str, *, seed: int = 0, text_key: str = "text") -> Any:
    """One source of texts by number, nothing held out, for whoever reads it through once.

    text_key: the key of JSON lines and the column of Parquet files. Raises EndstopError as `open_data`,
    ValueError for a weight, which says nothing where all is read once.
    """
    wanted = DataArgument.parse(argument)
    if wanted.weight != 1.0:
        raise ValueError(
            f"a vocabulary reads its texts once, so {argument} takes no weight; @COUNT takes fewer"
        )
    source, _ = _opened(wanted, "texts", seed, hold_out=False, text_key=text_key)
    return InOrder(source) if hasattr(source, "read") else source


class InOrder:
    """The documents of a stream by number, to be asked for in their order; 0 begins anew."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._reader, self._next = stream, stream.read(), 0

    def __len__(self) -> int:
        return int(self._stream.documents)

    def __getitem__(self, index: int) -> Any:
        if index < self._next:
            self._reader = self._stream.read()
        self._next = index + 1
        return self._reader.take(index)


def _opened(
    argument: DataArgument,
    kind: Kind,
    seed: int,
    *,
    hold_out: bool,
    test: bool = False,
    text_key: str = "text",
) -> tuple[Any, Any | None]:
    """A source, and what is held out of it."""
    place, count = argument.place, argument.count
    if place.startswith("hub:"):
        return _hub(place.removeprefix("hub:"), kind, count), None
    name, _, folder = place.partition(":")
    if name in CHAT_SETS:
        return _cut(_chat_set(name, Path(folder) if folder else local_folder(), kind), count, hold_out)
    if name in SHARD_SETS:
        training, validation = _shards(name, Path(folder) if folder else DATA_FOLDER, kind, count)
        return (validation, None) if test else (training, validation if hold_out else None)
    path = Path(place)
    if not path.exists():
        made = _tasks(place, kind)
        if made is None:
            raise EndstopError(
                f"{place} is no file, no folder, no task and none of the data sets "
                f"{', '.join([*CHAT_SETS, *SHARD_SETS])}; hub:OWNER/NAME streams from the Hub."
            )
        tests = made(seed, "test", count if test and count else _TEST_EXAMPLES)
        return (tests, None) if test else (made(seed, "train", count or _EXAMPLES), tests)
    from endstop.train.data.sources import open_chat_source, open_text_source

    source: Any = open_text_source(path, text_key=text_key) if kind == "texts" else open_chat_source(path)
    return _cut(source, count, hold_out)


def _cut(source: Any, count: int | None, hold_out: bool) -> tuple[Any, Any | None]:
    """`count` documents of a source, and of them the last ones apart where they are to be held out."""
    size = len(source) if count is None else min(count, len(source))
    kept = min(HELD_OUT, size // 100) if hold_out else 0
    if not kept:
        return (source if size == len(source) else Slice(source, 0, size)), None
    return Slice(source, 0, size - kept), Slice(source, size - kept, size)


def local_folder() -> Path | None:
    """The folder in which data sets are looked for before the Hub is asked, where there is one."""
    return DATA_FOLDER if DATA_FOLDER.is_dir() else None


def _chat_set(name: str, folder: Path | None, kind: Kind) -> Any:
    from endstop.train.evaluation.datasets import dataset_chats

    if kind == "texts":
        raise EndstopError(f"{name} holds conversations, and documents are trained on here.")
    return dataset_chats(CHAT_SETS[name], place=folder)


def _shards(name: str, folder: Path, kind: Kind, count: int | None) -> tuple[Any, Any]:
    """Training and validation documents of a corpus in shards, of the first `count` or all that are there."""
    if kind != "texts":
        raise EndstopError(f"{name} holds documents, and conversations are trained on here.")
    files = local_shards(SHARD_SETS[name], folder / name)
    wanted = count or max(1, len(files.training))
    if len(files.training) < wanted or not files.validation.is_file():
        raise EndstopError(
            f"{folder / name} has {len(files.training)} of {wanted} shards"
            f"{'' if files.validation.is_file() else ' and none for validation'}: fetch them with `endstop "
            f"train data {name} --shards {wanted} --out {folder}`."
        )
    return shard_sources(ShardFiles(files.training[:wanted], files.validation))


def _hub(name: str, kind: Kind, count: int | None) -> Any:
    from endstop.train.data.sources import hub_chats, hub_texts

    repository, _, config = name.partition(":")
    # Anything else `datasets` would take for a folder of this machine.
    if not _REPOSITORY.fullmatch(repository):
        raise EndstopError(f"a data set of the Hub is named as hub:OWNER/NAME@COUNT, got hub:{name}.")
    if count is None:
        raise EndstopError(f"hub:{name} needs the number of its documents: hub:{name}@1000000.")
    opened = hub_texts if kind == "texts" else hub_chats
    return opened(repository, documents=count, config=config or None)


def _tasks(name: str, kind: Kind) -> Callable[[int, Any, int], Any] | None:
    """Makes a source of synthetic tasks from (seed, split, size); None where no task has the name."""
    from endstop.train.tasks.registry import SYNTHETIC, registry
    from endstop.train.tasks.sources import GeneratedCorpus, TaskSource

    names = [task.name for task in SYNTHETIC] if name == "tasks" else [name]
    if not set(names) <= set(registry):
        return None
    weights = dict.fromkeys(names, 1.0)
    made = GeneratedCorpus if kind == "texts" else TaskSource
    return lambda seed, split, size: made(weights, seed=seed, split=split, size=size, name=name)
