"""Data as the command line spells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from endstop.protocol.errors import EndstopError
from endstop.train.data.mixture import Mixture
from endstop.train.data_arguments import CHAT_SETS, DataArgument, InOrder, Slice, open_data, open_texts
from endstop.train.presets import preset
from endstop.train.tasks import registry
from tests.train.test_data_mixture import Numbers
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


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_known_data_sets_are_conversations_to_train_on(tmp_path: Path) -> None:
    gsm8k = [
        {"question": f"What is {n}+1?", "answer": f"<<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
        for n in range(300)
    ]
    arc = {"text": ["yes", "no"], "label": ["A", "B"]}
    write_rows(tmp_path / "gsm8k" / "train.jsonl", gsm8k)
    write_rows(
        tmp_path / "arc-easy" / "train.jsonl", [{"question": "Is it?", "choices": arc, "answerKey": "B"}]
    )
    write_rows(
        tmp_path / "mmlu" / "auxiliary_train.jsonl",
        [{"train": {"question": "Which?", "subject": "", "choices": ["p", "q", "r", "s"], "answer": 2}}],
    )
    write_rows(tmp_path / "smoltalk" / "train.jsonl", [{"messages": conversations(1)[0]}])
    names = ("gsm8k", "arc-easy", "mmlu-aux", "smoltalk")
    split = open_data([f"{name}:{tmp_path}" for name in names], "conversations")
    assert [len(part.source) for part in split.train.parts] == [297, 1, 1, 1]
    assert len(all_of(split.validation)) == 3
    arc_chat, mmlu_chat, talk = all_of(split.train)[297:]
    assert arc_chat[1] == {"role": "assistant", "content": "B"}
    assert mmlu_chat[1] == {"role": "assistant", "content": "C"}
    assert talk == conversations(1)[0]
    licences = [source["licence"] for source in split.train.sources()]
    assert licences == ["mit", "cc-by-sa-4.0", "mit", "apache-2.0"]
    few = open_data([f"gsm8k:{tmp_path}@20*2"], "conversations").train.parts[0]
    assert (len(few.source), few.weight) == (20, 2.0)
    content = few.source[0][1]["content"]
    assert [part["type"] for part in content[:2]] == ["python", "python_output"]
    with pytest.raises(EndstopError, match="gsm8k holds conversations"):
        open_data([f"gsm8k:{tmp_path}"], "texts")


def test_shards_that_were_fetched_are_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shard(name: str) -> None:
        path = tmp_path / "data" / "fineweb-edu" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": [f"{name} {row}" for row in range(2)]}), path)

    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        EndstopError, match=r"has 0 of 2 shards and none for validation: fetch them with `end"
    ):
        open_data(["fineweb-edu@2"], "texts")
    for number in (0, 1, 3):
        shard(f"training/shard_{number:05d}.parquet")
    shard("validation/shard_01822.parquet")
    for spelled in ("fineweb-edu", "fineweb-edu@2", f"fineweb-edu:{tmp_path / 'data'}@2"):
        split = open_data([spelled], "texts")
        assert all_of(split.train) == [
            f"training/shard_0000{number}.parquet {row}" for number in (0, 1) for row in (0, 1)
        ]
        assert all_of(split.validation) == [f"validation/shard_01822.parquet {row}" for row in range(2)]
    assert len(all_of(open_data(["fineweb-edu@1"], "texts").train)) == 2
    other = open_data(["fineweb-edu"], "texts", validation=["fineweb-edu"])
    assert all_of(other.validation) == all_of(split.validation)
    with pytest.raises(EndstopError, match=r"2 of 3 shards: fetch them with .* --shards 3 --out data`"):
        open_data(["fineweb-edu@3"], "texts")
    with pytest.raises(EndstopError, match="fineweb-edu holds documents"):
        open_data(["fineweb-edu"], "conversations")


def test_large_presets_learn_from_the_data_of_their_sizes() -> None:
    """Names and counts as nanochat had them in October 2025."""
    for name, shards in (("d12", 80), ("d20", 240), ("d32", 800)):
        wanted = preset(name)
        assert wanted.base.data == (f"fineweb-edu@{shards}",)
        # 250 million characters in a shard, 4.8 characters in a token: no document comes twice.
        assert wanted.base.fixed_steps is not None
        assert wanted.base.fixed_steps * wanted.base.batch_tokens < shards * 250e6 / 4.8
        counts = {argument.place: argument.count for argument in map(DataArgument.parse, wanted.mid.data)}
        assert counts == {
            "smoltalk": 460_000,
            "mmlu-aux": 100_000,
            "gsm8k": 8000,
            "spell": 200_000,
            "bee": 80_000,
            "identity": 2000,
        }
        places = {argument.place for argument in map(DataArgument.parse, wanted.sft.data)}
        assert places == {"smoltalk", "arc-easy", "arc-challenge", "gsm8k", "identity", "spell", "bee"}
        assert places | set(counts) <= {*CHAT_SETS, *registry}
        assert wanted.rl.tasks == ("gsm8k",)
        assert wanted.evaluation == ("synthetic", "chatcore")


def test_what_cannot_be_opened_is_named() -> None:
    with pytest.raises(EndstopError, match="no file, no folder, no task and none of the data sets"):
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


def test_texts_are_opened_for_whoever_reads_them_once(tmp_path: Path) -> None:
    path = tmp_path / "songs.jsonl"
    path.write_text("".join(f'{{"line": "song {n}"}}\n' for n in range(200)))
    source = open_texts(str(path), text_key="line")
    assert len(source) == 200
    assert source[199] == "song 199"
    assert len(open_texts(f"{path}@7", text_key="line")) == 7
    made = open_texts("calc@5", seed=3)
    assert [type(made[index]) for index in range(len(made))] == [str] * 5
    with pytest.raises(ValueError, match=r"takes no weight; @COUNT takes fewer"):
        open_texts("calc*2")
    with pytest.raises(EndstopError, match="gsm8k holds conversations"):
        open_texts("gsm8k")


def test_a_stream_is_read_in_its_order_as_often_as_asked() -> None:
    found = InOrder(Numbers(3, 5))
    assert len(found) == 5
    assert [found[index] for index in (0, 2, 3, 0, 1)] == [f"stream {n}" for n in (0, 2, 0, 0, 1)]
