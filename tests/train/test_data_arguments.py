"""Data as the command line spells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from endstop.protocol.errors import EndstopError
from endstop.train.data.mixture import Mixture
from endstop.train.data_arguments import DataArgument, Slice, open_data
from tests.train.tiny_runs import conversations, documents


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("corpus.jsonl", DataArgument("corpus.jsonl")),
        ("corpus.jsonl@100", DataArgument("corpus.jsonl", 100)),
        ("corpus.jsonl*0.5", DataArgument("corpus.jsonl", None, 0.5)),
        ("tasks@2000*3", DataArgument("tasks", 2000, 3.0)),
        ("hub:owner/name:config@10", DataArgument("hub:owner/name:config", 10)),
        ("some@where/file*", DataArgument("some@where/file*")),
    ],
)
def test_arguments_are_read(text: str, expected: DataArgument) -> None:
    assert DataArgument.parse(text) == expected


@pytest.mark.parametrize("text", ["", "tasks@0"])
def test_what_is_no_argument_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PLACE"):
        DataArgument.parse(text)


def all_of(mixture: Mixture | None) -> list[Any]:
    assert mixture is not None
    return [part.source[index] for part in mixture.parts for index in range(len(part.source))]


def texts(place: Path, count: int) -> str:
    path = place / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(count)))
    return str(path)


def test_the_end_of_a_file_is_held_out(tmp_path: Path) -> None:
    split = open_data([texts(tmp_path, 250)], "texts")
    assert all_of(split.train) == documents(250)[:248]
    assert all_of(split.validation) == documents(250)[248:]
    few = open_data([texts(tmp_path, 250) + "@50*2"], "texts")
    assert all_of(few.train) == documents(250)[:50]
    assert few.validation is None
    assert few.train.parts[0].weight == 2.0
    own = open_data([texts(tmp_path, 250)], "texts", validation=[texts(tmp_path, 250) + "@7"])
    assert all_of(own.train) == documents(250)
    assert all_of(own.validation) == documents(250)[:7]


def test_tasks_are_held_out_by_their_test_side() -> None:
    split = open_data(["echo@300", "tasks@100"], "conversations", seed=1)
    assert [len(part.source) for part in split.train.parts] == [300, 100]

    def prompts(mixture: Mixture | None) -> set[str]:
        return {messages[0]["content"] for messages in all_of(mixture)}

    assert not prompts(split.train) & prompts(split.validation)
    assert isinstance(all_of(open_data(["echo@3"], "texts").train)[0], str)


def test_conversations_come_from_files_too(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in conversations(5)))
    assert all_of(open_data([str(path)], "conversations").train) == conversations(5)


def test_what_cannot_be_opened_is_named() -> None:
    with pytest.raises(EndstopError, match="no file, no folder and no task"):
        open_data(["nowhere.jsonl"], "texts")
    with pytest.raises(EndstopError, match="name it with --data"):
        open_data([], "texts")
    with pytest.raises(EndstopError, match="needs the number of its documents"):
        open_data(["hub:owner/name"], "texts")


def test_a_slice_keeps_the_blocks_inside_it() -> None:
    class Blocks(list[str]):
        blocks = (0, 3, 6, 9)

    part = Slice(Blocks("abcdefghi"), 2, 8)
    assert [part[index] for index in range(len(part))] == list("cdefgh")
    assert part.blocks == [0, 1, 4, 6]
    assert Slice(list("abc"), 0, 2).blocks is None
    with pytest.raises(IndexError):
        part[6]
