"""What a record says beside its messages: prompt, tools, options of its template, an answer that was cut."""

from __future__ import annotations

import json

import pytest

from endstop.protocol.labels import IGNORE
from endstop.protocol.render import ChatRenderer
from endstop.train.chat_format import ASSISTANT_END, BOS
from endstop.train.data.chat_loader import ChatLoader
from endstop.train.data.messages import Messages, training_rows
from endstop.train.data.sources import open_chat_source
from tests.train.data_cases import byte_tokenizer, chat, renderer, token
from tests.train.test_data_loaders import chat_loader


def supervised_text(loader):
    """What is supervised in the first step, as text."""
    targets = [label for batch in loader.next_step() for label in batch.targets.flatten().tolist()]
    kept = [label for label in targets if label != IGNORE]
    return byte_tokenizer().decode(kept, skip_special_tokens=False)


def test_turns_inside_a_prompt_are_read_and_not_trained_on(tmp_path):
    turns = chat("one", "first", "two", "second")
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"prompt": turns[:3], "completion": turns[3:]}) + "\n")
    one_row = {"rows_per_step": 1, "shards": 1, "buffer": 1}
    found = supervised_text(chat_loader(open_chat_source(path), row_length=60, **one_row))
    assert set(found.split("<|assistant_end|>")) == {"second", ""}
    whole = supervised_text(chat_loader([turns], row_length=60, **one_row))
    assert set(whole.split("<|assistant_end|>")) == {"first", "second", ""}


WITH_TOOLS = (
    "{{- '<|bos|>' -}}{%- if tools -%}[{{- tools[0].name -}}]{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}<{{- m.content -}}>"
    "{%- else -%}{%- generation -%}{{- m.content + '<|assistant_end|>' -}}{%- endgeneration -%}{%- endif -%}"
    "{%- endfor -%}"
)


@pytest.mark.parametrize("tools", [[{"name": "clock", "hint": None}], '[{"name": "clock"}]', None, "", []])
def test_tools_reach_a_template_that_takes_them(tools, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": chat("when", "now"), "tools": tools}) + "\n")
    source = open_chat_source(path)
    assert source[0].tools == ([{"name": "clock"}] if tools else None)
    taking = ChatRenderer(byte_tokenizer(), WITH_TOOLS, stops=[token(ASSISTANT_END), token(BOS)])
    loader = ChatLoader(
        source,
        taking,
        stop_ids=[token(ASSISTANT_END)],
        row_length=40,
        rows_per_step=1,
        micro_rows=1,
        buffer=1,
    )
    ids = loader.next_step()[0].input_ids[0].tolist()
    text = byte_tokenizer().decode(ids, skip_special_tokens=False)
    assert text.startswith("<|bos|>[clock]<when>now" if tools else "<|bos|><when>now")
    # Templates of models trained here take none, and nothing changes.
    own = supervised_text(chat_loader(source, rows_per_step=1, shards=1, buffer=1, row_length=30))
    assert set(own.split("<|assistant_end|>")) == {"now", ""}


WITH_TONE = (
    "{{- '<|bos|>' + ('!' if tone == 'dry' else '?') -}}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}<{{- m.content -}}>{%- else -%}{%- generation -%}"
    "{{- m.content + '<|assistant_end|>' -}}{%- endgeneration -%}{%- endif -%}{%- endfor -%}"
)


def test_what_a_record_gives_its_template_reaches_it(tmp_path):
    path = tmp_path / "chats.jsonl"
    records = [{"messages": chat("when", "now"), "chat_template_kwargs": {"tone": "dry"}}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    taking = ChatRenderer(byte_tokenizer(), WITH_TONE, stops=[token(ASSISTANT_END), token(BOS)])
    options = {"row_length": 40, "rows_per_step": 1, "micro_rows": 1, "buffer": 1, "options": {"tone": "wet"}}
    for source, said in ((open_chat_source(path), "!"), ([chat("when", "now")], "?")):
        loader = ChatLoader(source, taking, stop_ids=[token(ASSISTANT_END)], **options)
        ids = loader.next_step()[0].input_ids[0].tolist()
        text = byte_tokenizer().decode(ids, skip_special_tokens=False)
        assert text.startswith(f"<|bos|>{said}<when>now<|assistant_end|>")


def test_an_answer_that_was_cut_off_before_has_no_supervised_end(tmp_path):
    path = tmp_path / "chats.jsonl"
    turns = chat("one", "first", "two", "second")
    records = [{"messages": turns, "complete": False}, {"prompt": "a", "completion": "b", "complete": False}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    loader = chat_loader(open_chat_source(path), rows_per_step=2, shards=1, buffer=2, row_length=60, seed=1)
    found = supervised_text(loader)
    end = ASSISTANT_END
    assert f"first{end}second" in found
    assert f"second{end}" not in found
    assert f"b{end}" not in found
    figures = loader.statistics()
    assert figures["cut"] >= figures["documents"]
    assert figures["supervised_stops"] == found.count(f"first{end}")
    assert figures["supervised_ends"] == 0
    # A user's turn at the end says nothing of the answer before it.
    open_end = Messages([*chat("one", "first"), {"role": "user", "content": "more"}], complete=False)
    made = training_rows(renderer(), open_end).rows[0]
    assert not made.cut
    assert token(ASSISTANT_END) in made.labels


def test_messages_are_a_list_with_more_beside_it():
    turns = chat("one", "first")
    assert Messages(turns) == turns
    assert (Messages(turns).first_message, Messages(turns).tools) == (0, None)
