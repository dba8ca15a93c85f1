"""Sources: local files good and bad, conversations in TRL's formats, streams through `datasets`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop.protocol.errors import EndstopError
from endstop.train.data.document_loader import DocumentLoader
from endstop.train.data.mixture import Mixture, ShardReader
from endstop.train.data.records import Joined, JsonLines
from endstop.train.data.sources import (
    BadDocument,
    hub_chats,
    hub_texts,
    open_chat_source,
    open_text_source,
)
from tests.train.data_cases import encode


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(path: Path, columns: dict, group: int = 3) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=group)
    return path


def test_a_text_file_is_one_document_or_several(tmp_path):
    text = "First line.\nSecond.\n\n\nThird, alone.\n%\n50 %\n  \nlast"
    path = write(tmp_path / "notes.txt", text)
    assert list(open_text_source(path)) == [text]
    assert list(open_text_source(path, split="blank")) == [
        "First line.\nSecond.",
        "Third, alone.\n%\n50 %",
        "last",
    ]
    assert list(open_text_source(path, split="%")) == [
        "First line.\nSecond.\n\n\nThird, alone.",
        "50 %\n  \nlast",
    ]
    source = open_text_source(path)
    assert (source.name, source.licence, source.origin, len(source)) == ("notes", None, None, 1)
    with pytest.raises(IndexError):
        open_text_source(path, split="%")[2]


@given(st.text(alphabet="ab \n%\u00e9", max_size=60))
def test_entries_are_what_splitting_the_text_gives(tmp_path_factory, text):
    path = write(tmp_path_factory.mktemp("entries") / "a.txt", text)
    entries, current = [], []
    for line in text.split("\n"):
        if line.strip(" ") == "":
            entries.append("\n".join(current))
            current = []
        else:
            current.append(line)
    entries.append("\n".join(current))
    assert list(open_text_source(path, split="blank")) == [entry for entry in entries if entry.strip()]


def test_jsonl_texts(tmp_path):
    lines = [{"text": "one", "n": 1}, {"text": "zwei é\u2028"}, {"text": ""}, {"text": None}]
    content = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    source = open_text_source(write(tmp_path / "a.jsonl", "\ufeff" + content.replace("\n\n", "\r\n \n", 1)))
    assert list(source) == ["one", "zwei é\u2028", "", ""]
    other = write(tmp_path / "b.jsonl", '{"body": "hello"}\n"a bare text"\n')
    assert list(open_text_source(other, text_key="body")) == ["hello", "a bare text"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', "line 3: this is not JSON"),
        ("[" * 100_000, "line 3: this is not JSON"),
        ('{"txt": "x"}', "line 3: there is no 'text' in this record, it has txt"),
        ("[1]", "line 3: there is no 'text' in this record, it is no object"),
        ('{"text": 5}', "line 3: 'text' is not a text but int"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n\n{line}\n{{"text": "fine too"}}\n')
    source = open_text_source(path)
    assert len(source) == 3
    assert (source[0], source[2]) == ("fine", "fine too")
    with pytest.raises(BadDocument, match=message) as caught:
        source[1]
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "index", "byte"),
    [
        ("a.txt", b"caf\xe9", 0, 3),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "caf\xe9"}\n', 1, 30),
    ],
)
def test_what_is_no_utf_8_is_named_with_its_byte(tmp_path, name, content, index, byte):
    path = write(tmp_path / name, content)
    assert content[byte] == 0xE9
    with pytest.raises(BadDocument, match=f"{name}, byte {byte}: 0xe9 is not UTF-8"):
        open_text_source(path)[index]


def test_empty_files_have_no_documents(tmp_path):
    for name, split in (("a.jsonl", "file"), ("b.txt", "blank"), ("c.txt", "%")):
        source = open_text_source(write(tmp_path / name, ""), split=split)
        assert len(source) == 0
        with pytest.raises(EndstopError, match=f"{name[0]} has no documents"):
            Mixture([(source, 1.0)])
    assert len(open_text_source(parquet(tmp_path / "d.parquet", {"text": []}))) == 0


def test_one_giant_line(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "word " * 40_000}) + "\n")
    source = open_text_source(path)
    assert len(source) == 1
    loader = DocumentLoader(
        source, encode, 0, row_length=1024, rows_per_step=8, micro_rows=8, buffer=1000, mode="keep-ends"
    )
    for _ in range(3):
        assert loader.next_step()[0].supervised == 8 * 1024
    # The buffer of a thousand documents is full with fewer of this length.
    assert loader.statistics()["epochs"] < 11
    crop = DocumentLoader(source, encode, 0, row_length=1024, rows_per_step=1, micro_rows=1, buffer=1)
    crop.next_step()
    assert crop.statistics()["cropped_tokens"] == 200_001 - 1025


def test_parquet_is_read_by_row_groups(tmp_path):
    texts = [f"row {number}" for number in range(10)]
    source = open_text_source(parquet(tmp_path / "a.parquet", {"text": texts, "n": list(range(10))}))
    assert list(source.blocks) == [0, 3, 6, 9, 10]
    assert [source[at] for at in (9, 0, 5)] == ["row 9", "row 0", "row 5"]
    # Rows of a group come one after the other, each once.
    order = Mixture([(source, 1.0)]).order(0)
    indices = [order[at].index for at in range(10)]
    assert sorted(indices) == list(range(10))
    groups = [min(index // 3, 3) for index in indices]
    assert len([g for at, g in enumerate(groups) if at == 0 or groups[at - 1] != g]) == 4
    with pytest.raises(EndstopError, match=r"a.parquet has no column 'body'; it has text, n"):
        open_text_source(tmp_path / "a.parquet", text_key="body")
    with pytest.raises(BadDocument, match="row 4: 'n' is not a text but int"):
        open_text_source(tmp_path / "a.parquet", text_key="n")[4]
    broken = write(tmp_path / "b.parquet", b"PAR1 is not all of it")
    with pytest.raises(EndstopError, match=r"b.parquet cannot be read as Parquet"):
        open_text_source(broken)


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deeper").mkdir(parents=True)
    write(folder / "b.txt", "b")
    write(folder / "a.txt", "a")
    write(folder / "deeper" / "c.txt", "c")
    write(folder / ".hidden.txt", "no")
    write(folder / "read.me", "no")
    assert list(open_text_source(folder)) == ["a", "b", "c"]
    parquet(folder / "d.parquet", {"text": ["d", "e", "f", "g"]})
    write(folder / "x.jsonl", '{"text": "x"}\n')
    source = open_text_source(folder)
    assert sorted(source) == ["a", "b", "c", "d", "e", "f", "g", "x"]
    assert source.blocks == [0, 1, 4, 7, 8]
    assert [source[at] for at in range(len(source))] == list(source)


def test_licence_and_origin_come_from_the_manifest(tmp_path):
    write(tmp_path / "songs.jsonl", '{"text": "la"}\n')
    write(tmp_path / "songs.manifest.json", '{"name": "Songs", "licence": "CC0", "origin": "here"}')
    source = open_text_source(tmp_path / "songs.jsonl")
    assert (source.name, source.licence, source.origin) == ("Songs", "CC0", "here")
    write(tmp_path / "songs.manifest.json", "[]")
    assert open_text_source(tmp_path / "songs.jsonl").name == "songs"


def test_what_is_no_source(tmp_path):
    with pytest.raises(EndstopError, match=r"nowhere.jsonl does not exist"):
        open_text_source(tmp_path / "nowhere.jsonl")
    with pytest.raises(
        EndstopError, match=r"a.csv is not read here: it must be one of .txt, .jsonl, .parquet"
    ):
        open_text_source(write(tmp_path / "a.csv", "x"))
    with pytest.raises(EndstopError, match=r"must be one of .jsonl, .parquet"):
        open_chat_source(write(tmp_path / "a.txt", "x"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(EndstopError, match=r"holds no files named \*.txt, \*.jsonl"):
        open_text_source(tmp_path / "empty")
    wide = tmp_path / "wide.jsonl"
    wide.write_bytes('{"text": "x"}\n'.encode("utf-16"))
    with pytest.raises(EndstopError, match=r"wide.jsonl is UTF-16, not UTF-8; convert it"):
        open_text_source(wide)


def test_pipes_are_refused_and_folders_are_gone_through_whatever_they_are_called(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(EndstopError, match=r"pipe.jsonl is no ordinary file"):
        open_text_source(tmp_path / "pipe.jsonl")
    with pytest.raises(EndstopError, match=r"pipe.jsonl is no ordinary file"):
        open_text_source(tmp_path)
    # As Spark writes them.
    parts = tmp_path / "corpus" / "all.parquet"
    parts.mkdir(parents=True)
    parquet(parts / "part-0.parquet", {"text": ["one", "two"]})
    assert list(open_text_source(tmp_path / "corpus")) == ["one", "two"]
    (tmp_path / "corpus" / "gone.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(EndstopError, match=r"gone.jsonl cannot be read: No such file"):
        open_text_source(tmp_path / "corpus")


def nested(levels):
    """A list in a list in a list ..."""
    found = []
    for _ in range(levels):
        found = [found]
    return found


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
    {
        "role": "assistant",
        "content": [{"type": "python", "text": "2+2"}, {"type": "python_output", "text": "4"}],
    },
]


def test_conversations_in_trls_formats(tmp_path):
    lines = [
        {"messages": MESSAGES},
        {"prompt": "hi", "completion": "yo"},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
        {"messages": PARTS, "other": 1},
    ]
    path = write(tmp_path / "chats.jsonl", "\n".join(map(json.dumps, lines)))
    assert list(open_chat_source(path)) == [MESSAGES, MESSAGES, MESSAGES, PARTS]


def test_conversations_of_parquet_lose_the_keys_of_others(tmp_path):
    rows = [MESSAGES, [{"role": "user", "content": "more", "name": "Ann"}]]
    path = parquet(tmp_path / "chats.parquet", {"messages": rows, "id": [1, 2]})
    source = open_chat_source(path)
    assert list(source) == rows
    completions = parquet(tmp_path / "b.parquet", {"prompt": ["hi"], "completion": ["yo"]})
    assert list(open_chat_source(completions)) == [MESSAGES]
    assert open_chat_source(completions)[0].first_message == 1
    beside = {
        "tools": [[{"name": "clock", "hint": None}], None],
        "chat_template_kwargs": [{"thinking": True, "tone": None}, {"thinking": None, "tone": "dry"}],
        "complete": [None, False],
    }
    taking = open_chat_source(parquet(tmp_path / "d.parquet", {"messages": rows, **beside}))
    assert [taking[index].tools for index in range(2)] == [[{"name": "clock"}], None]
    assert [taking[index].template_options for index in range(2)] == [{"thinking": True}, {"tone": "dry"}]
    assert [taking[index].complete for index in range(2)] == [True, False]
    with pytest.raises(
        EndstopError, match="has no column 'messages' or 'prompt' or 'completion'; it has text"
    ):
        open_chat_source(parquet(tmp_path / "c.parquet", {"text": ["x"]}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "x"}, "no messages, and no prompt with a completion, among text"),
        ({"prompt": "x"}, "no messages, and no prompt with a completion, among prompt"),
        ({"prompt": 5, "completion": "x"}, "prompt and completion are texts or lists of messages"),
        ({"messages": "x"}, "messages is a list of objects"),
        ({"messages": [{"content": "x"}]}, "every message has a role"),
        ([], "a conversation is a JSON object"),
        ({"messages": [{"role": "user", "content": "x", "more": nested(150)}]}, "more than 100 levels deep"),
        ({"messages": MESSAGES, "tools": [{"name": nested(600)}]}, "more than 100 levels deep"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"a": nested(600)}}, "more than 100 levels deep"),
        ({"messages": MESSAGES, "chat_template_kwargs": 5}, "chat_template_kwargs is an object, got 5"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": "{"},
            "is no object and no JSON of one",
        ),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"add_generation_prompt": True}},
            "chat_template_kwargs cannot set add_generation_prompt",
        ),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"eos_token": "<|bos|>"}},
            "chat_template_kwargs cannot set eos_token",
        ),
        ({"messages": MESSAGES, "complete": "no"}, "complete is true or false, got 'no'"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path, line, message):
    path = write(tmp_path / "chats.jsonl", json.dumps(line))
    with pytest.raises(BadDocument, match=f"line 1: .*{message}"):
        open_chat_source(path)[0]


def test_joined_records_are_one_behind_the_other(tmp_path):
    paths = [write(tmp_path / f"{n}.jsonl", "\n".join(str(10 * n + k) for k in range(n))) for n in range(4)]
    joined = Joined([JsonLines(path) for path in paths])
    assert [joined[at] for at in range(len(joined))] == [10, 20, 21, 30, 31, 32]
    assert joined.blocks is None
    assert joined.where(5) == f"{paths[3]}, line 3"
    with pytest.raises(IndexError):
        joined[6]


@pytest.fixture
def streamed(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "home"))
    lines = [json.dumps({"text": f"text {n}", "messages": MESSAGES}) for n in range(10)]
    return {"data_files": str(write(tmp_path / "a.jsonl", "\n".join(lines)))}


def test_a_data_set_of_the_hub_is_streamed_and_goes_on_where_it_was(streamed):
    stream = hub_texts("json", documents=10, **streamed)
    mixture = Mixture([(stream, 0.5)])
    assert len(mixture) == 5
    reader = ShardReader(mixture.order(0), 1, 2)
    found = [reader.item(reader.next_place()) for _ in range(8)]
    # Every second document, and from the beginning when it ends.
    assert found == [f"text {n % 10}" for n in range(1, 17, 2)]
    again = ShardReader(mixture.order(0), 1, 2)
    again.load_state(json.loads(json.dumps(reader.state())))
    assert again.item(again.next_place()) == "text 7"
    assert again.item(again.next_place()) == "text 9"


def test_a_stream_that_breaks_off_says_so(streamed, tmp_path):
    lines = [json.dumps({"text": f"text {n}"}) for n in range(3)]
    path = write(tmp_path / "broken.jsonl", "\n".join([*lines, '{"text": "bro']))
    reader = hub_texts("json", documents=10, data_files=str(path)).read()
    with pytest.raises(EndstopError, match=r"^json broke off behind document \d: .*--resume"):
        list(map(reader.take, range(10)))


def test_conversations_and_wrong_rows_of_a_stream(streamed):
    chats = hub_chats("json", documents=10, **streamed).read()
    assert chats.take(0) == MESSAGES
    with pytest.raises(BadDocument, match="json, document 2: there is no text 'body'"):
        hub_texts("json", documents=10, text_key="body", **streamed).read().take(2)


def test_a_stream_that_cannot_be_had(tmp_path, streamed):
    with pytest.raises(EndstopError, match="json cannot be streamed from the Hub"):
        hub_texts("json", documents=1, data_files=str(tmp_path / "nothing.jsonl")).read()
    with pytest.raises(ValueError, match="documents must be at least 1"):
        hub_texts("json", documents=0)
    empty = write(tmp_path / "empty.jsonl", "")
    with pytest.raises(EndstopError):
        hub_texts("json", documents=1, data_files=str(empty)).read().take(0)
