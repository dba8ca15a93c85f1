"""Sources of texts and conversations: local files, and data sets of the Hub as streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from endstop.protocol.errors import EndstopError
from endstop.train.data.messages import BESIDE, COLUMNS, Messages, messages_of
from endstop.train.data.records import (
    BadDocument,
    Joined,
    JsonLines,
    ParquetRows,
    Records,
    Split,
    TextEntries,
    TextFiles,
)

__all__ = [
    "BadDocument",
    "ChatSource",
    "HubStream",
    "TextSource",
    "hub_chats",
    "hub_texts",
    "open_chat_source",
    "open_text_source",
    "text_source",
]

Item = TypeVar("Item")
_SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class _Source(Generic[Item]):
    """Records, each made into an item when it is asked for.

    Attributes:
        name: for messages and statistics.
        licence, origin: from the manifest that lies beside the files, None where there is none.
    """

    records: Records
    make: Callable[[Any], Item]
    name: str
    licence: str | None = None
    origin: str | None = None

    @property
    def blocks(self) -> Sequence[int] | None:
        """Where blocks begin that are read at once, for shuffling; see `mixture.Finite`."""
        return self.records.blocks

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Item:
        record = self.records[index]
        try:
            return self.make(record)
        except BadDocument as error:
            raise BadDocument(f"{self.records.where(index)}: {error}") from error

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))


class TextSource(_Source[str]):
    """Documents by number."""


class ChatSource(_Source[Messages]):
    """Conversations by number, each a list of messages with `role` and `content`."""


def open_text_source(path: str | Path, *, text_key: str = "text", split: Split = "file") -> TextSource:
    """A file of texts (.txt, .jsonl, .parquet), or a folder of them in the order of their names.

    `text_key` is the key of JSON lines and the column of Parquet. `split` is for .txt: one document for each
    file, or one for each part of it between blank lines ("blank") or lines of a percent sign alone ("%").
    Raises EndstopError where there is no such file, or one that cannot be read as what it is called.
    """
    path = Path(path)
    return text_source(_records(path, [text_key], split), path, text_key)


def text_source(records: Records, path: Path, text_key: str = "text") -> TextSource:
    """Documents out of records that are texts or have one; licence and origin from the manifest beside
    `path`."""

    def text(record: Any) -> str:
        if isinstance(record, str):
            return _unicode(record)
        if not isinstance(record, dict) or text_key not in record:
            keys = f"it has {', '.join(map(str, record))}" if isinstance(record, dict) else "it is no object"
            raise BadDocument(f"there is no {text_key!r} in this record, {keys}.")
        value = record[text_key]
        if value is None:
            return ""
        if not isinstance(value, str):
            raise BadDocument(f"{text_key!r} is not a text but {type(value).__name__}.")
        return _unicode(value)

    return TextSource(records, text, *_facts(path))


def _unicode(text: str) -> str:
    """The text; BadDocument for half a surrogate pair, which JSON can spell and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadDocument("the text holds half a surrogate pair, which is no valid Unicode.") from None
    return text


def open_chat_source(path: str | Path) -> ChatSource:
    """Conversations in TRL's formats: `messages`, or `prompt` and `completion` (texts or lists of messages).

    A .jsonl or .parquet file, or a folder of them. A prompt that is a text becomes a user message, such a
    completion an assistant message; of these the completion is trained on. `tools` (a list, or one as JSON)
    are definitions of tools for the template, `chat_template_kwargs` what it is given besides, and `complete`
    false says that the last answer was cut off. Raises EndstopError like `open_text_source`.
    """
    path = Path(path)
    return ChatSource(_records(path, COLUMNS, None), messages_of, *_facts(path))


class HubStream(Generic[Item]):
    """A data set of the Hub, read through `datasets` as a stream; its end leads to its beginning.

    Every logical shard reads the stream for itself and passes over what belongs to others.

    Args:
        repository, config, split, revision, data_files: as in `datasets.load_dataset`.
        documents: how many documents count as one epoch in a mixture.
        make: an item out of a row.
    """

    def __init__(
        self,
        repository: str,
        make: Callable[[Any], Item],
        *,
        documents: int,
        config: str | None = None,
        split: str = "train",
        revision: str | None = None,
        data_files: Any = None,
    ) -> None:
        if documents < 1:
            raise ValueError(f"documents must be at least 1, got {documents}")
        self.name = repository
        self.licence: str | None = None
        self.origin = f"{repository} ({split}) of the Hugging Face Hub"
        self.documents = documents
        self.make = make
        self._arguments: dict[str, Any] = {
            "path": repository,
            "name": config,
            "split": split,
            "revision": revision,
            "data_files": data_files,
            "streaming": True,
        }

    def open(self) -> Any:
        """The data set. Raises EndstopError where it cannot be had."""
        try:
            import datasets
        except ImportError as error:
            raise EndstopError(
                "streaming from the Hub needs the package datasets: pip install 'endstop[train-extra]'."
            ) from error
        try:
            return datasets.load_dataset(**self._arguments)
        except Exception as error:  # the network, the Hub, the data set's own files: anything may fail
            what = str(error) or type(error).__name__
            raise EndstopError(f"{self.name} cannot be streamed from the Hub: {what}") from error

    def read(self, state: dict[str, Any] | None = None) -> HubReader[Item]:
        return HubReader(self, state)


class HubReader(Generic[Item]):
    """Goes through a stream; see `mixture.StreamReader`."""

    def __init__(self, stream: HubStream[Item], state: dict[str, Any] | None) -> None:
        self._stream = stream
        self._next = 0 if state is None else int(state["next"])
        self._data = stream.open()
        if state is not None:
            self._data.load_state_dict(state["stream"])
        self._rows = iter(self._data)

    def take(self, position: int) -> Item:
        while True:
            row = self._row()
            self._next += 1
            if self._next > position:
                try:
                    return self._stream.make(row)
                except BadDocument as error:
                    raise BadDocument(f"{self._stream.name}, document {position}: {error}") from error

    def state(self) -> dict[str, Any]:
        return {"next": self._next, "stream": self._data.state_dict()}

    def _row(self) -> Any:
        for _ in range(2):
            try:
                for row in self._rows:
                    return row
            except Exception as error:  # as in `HubStream.open`
                what = (str(error) or type(error).__name__).removesuffix(".")
                raise EndstopError(
                    f"{self._stream.name} broke off behind document {self._next}: {what}. Go on later with "
                    "--resume from the last checkpoint."
                ) from error
            self._data = self._stream.open()
            self._rows = iter(self._data)
        raise EndstopError(f"{self._stream.name} has no documents.")


def hub_texts(repository: str, *, documents: int, text_key: str = "text", **options: Any) -> HubStream[str]:
    """The texts of a data set of the Hub; `options` are those of `HubStream`."""

    def text(row: Any) -> str:
        value = row.get(text_key)
        if not isinstance(value, str):
            raise BadDocument(f"there is no text {text_key!r} in this row, it has {', '.join(row)}.")
        return value

    return HubStream(repository, text, documents=documents, **options)


def hub_chats(repository: str, *, documents: int, **options: Any) -> HubStream[Messages]:
    """The conversations of a data set of the Hub, in the formats of `open_chat_source`."""
    return HubStream(repository, messages_of, documents=documents, **options)


def _records(path: Path, columns: Sequence[str], split: Split | None) -> Records:
    """`split` None: texts are no answer."""
    if not path.exists():
        raise EndstopError(f"{path} does not exist.")
    allowed = [suffix for suffix in _SUFFIXES if split is not None or suffix != ".txt"]
    paths = [path]
    if path.is_dir():
        paths = sorted(
            p
            for p in path.rglob("*")
            if p.suffix in allowed and not p.name.startswith(".") and not p.is_dir()
        )
        if not paths:
            raise EndstopError(f"{path} holds no files named {', '.join('*' + s for s in allowed)}.")
    members: list[Records] = []
    texts = [p for p in paths if p.suffix == ".txt"]
    parquets = [p for p in paths if p.suffix == ".parquet"]
    for file in paths:
        if file.suffix not in allowed:
            raise EndstopError(f"{file} is not read here: it must be one of {', '.join(allowed)}.")
        # A pipe would be waited for without end.
        if file.exists() and not file.is_file():
            raise EndstopError(f"{file} is no ordinary file: give one whose bytes can be read again.")
        if file.suffix == ".jsonl":
            members.append(JsonLines(file))
    if texts and split is not None:
        members += [TextFiles(texts)] if split == "file" else [TextEntries(p, split) for p in texts]
    if parquets:
        members.append(ParquetRows(parquets, columns, () if split is not None else BESIDE))
    return members[0] if len(members) == 1 else Joined(members)


def _facts(path: Path) -> tuple[str, str | None, str | None]:
    """(name, licence, origin), from NAME.manifest.json beside NAME.jsonl or the like."""
    manifest = path.with_name(f"{path.stem}.manifest.json")
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
        return found.get("name", path.stem), found.get("licence"), found.get("origin")
    except (OSError, ValueError, AttributeError):
        return path.stem, None, None
