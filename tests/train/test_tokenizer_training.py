"""Tokenizers trained here: the same merges from both engines, no text that becomes special, right files."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import endstop.protocol
import endstop.train.tokenizer_training as training
from endstop.cli.app import app
from endstop.protocol.errors import EndstopError
from endstop.protocol.render import ChatRenderer
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenbytes import TokenBytes
from endstop.protocol.tokenizer import Tokenizer
from endstop.train.chat_format import ASSISTANT_END, BOS, OUTPUT_END, SPECIAL_TOKENS
from endstop.train.document_encoding import Encode, _by_tokenizers, _pieces, encode_documents
from endstop.train.tokenizer_training import (
    TextsRead,
    merges_of_ranks,
    save_tokenizer,
    train_tokenizer,
)

KOREAN = "안녕하세요. 오늘 날씨가 참 좋습니다. 내일은 비가 온다고 합니다. 우산을 꼭 챙기세요!\n"
DIGITS = "\n".join(f"{n} + {n * 7} = {n * 8}; {n:05d}.{n % 97:02d}" for n in range(900))


def real_texts() -> list[str]:
    """Code, English, Korean, digits, runs of blanks and of one letter."""
    folder = Path(endstop.protocol.__file__).parent
    code = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))]
    return [
        *code,
        KOREAN * 40,
        DIGITS,
        "aaaaaaaa aaa aaaa\n\n\n     x " * 30,
        "naïve café — “quoted” ½ ㎏ ſ'S",
    ]


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return train_tokenizer(real_texts(), 800)


@pytest.fixture(scope="module")
def directory(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "tokenizer"
    save_tokenizer(content, place)
    return place


def test_ids_are_bytes_then_merges_then_the_special_tokens(content: dict[str, Any]) -> None:
    table = list(TokenBytes.from_tokenizer_json(content))
    assert len(table) == 800
    assert table[:256] == [bytes([byte]) for byte in range(256)]
    assert table[-9:] == [text.encode() for text in SPECIAL_TOKENS]
    merged = [bytes(map(ord, a + b)) for a, b in content["model"]["merges"] if (a + b).isascii()]
    assert merged
    assert set(merged) <= set(table[256:-9])
    assert len(content["model"]["merges"]) == 800 - 9 - 256
    assert [(t["special"], t["normalized"]) for t in content["added_tokens"]] == [(True, False)] * 9


@pytest.mark.parametrize("vocab_size", [270, 1000, 4096])
def test_both_engines_learn_the_same_merges_from_real_text(vocab_size: int) -> None:
    texts = real_texts()
    first = train_tokenizer(texts, vocab_size, engine="rustbpe")
    second = train_tokenizer(texts, vocab_size, engine="tokenizers")
    assert first["model"]["merges"] == second["model"]["merges"]
    assert first == second


@settings(deadline=None)
@given(
    st.lists(st.text(st.sampled_from("ab ca1\n한é'st"), min_size=1, max_size=60), min_size=1, max_size=8),
    st.integers(0, 60),
)
def test_both_engines_decide_equal_counts_alike(texts: list[str], merges: int) -> None:
    results = [
        train_tokenizer(texts, 265 + merges, engine=engine, allow_smaller=True)
        for engine in ("rustbpe", "tokenizers")
    ]
    assert results[0] == results[1]


def test_a_token_is_the_two_parts_that_earlier_merges_leave() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {b"ab": 256, b"bc": 257, b"abc": 258, b"abcabc": 259}
    assert merges_of_ranks(ranks) == [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"abc", b"abc")]
    with pytest.raises(ValueError, match=r"token 256 \(b'abc'\) is not made of two earlier tokens"):
        merges_of_ranks({bytes([byte]): byte for byte in range(256)} | {b"abc": 256})


def test_digits_merge_in_groups_of_at_most_two(content: dict[str, Any]) -> None:
    for piece in list(TokenBytes.from_tokenizer_json(content))[:-9]:
        assert sum(letter.isdigit() for letter in piece.decode("utf-8", "replace")) <= 2
    learned = train_tokenizer(["x12345"] * 9, 400, allow_smaller=True)
    assert learned["model"]["merges"] == [["1", "2"], ["3", "4"]]
    assert encode_documents(learned)(["12345"]) == [[256, 257, ord("5")]]


@pytest.mark.parametrize("engine", ["rustbpe", "tokenizers"])
def test_digits_stand_alone_where_that_is_asked_for(engine: Any) -> None:
    learned = train_tokenizer([*real_texts(), "x12345 " * 99], 600, engine=engine, digits=1)
    for piece in list(TokenBytes.from_tokenizer_json(learned))[:-9]:
        assert sum(letter.isdigit() for letter in piece.decode("utf-8", "replace")) <= 1
    fast, plain = (encode_documents(learned, engine=name) for name in ("tiktoken", "tokenizers"))
    texts = [*real_texts(), "12345 a1b22"]
    assert fast(texts) == plain(texts)
    assert plain(["12345"]) == [[ord(letter) for letter in "12345"]]
    with pytest.raises(ValueError, match="at most 1 or 2 digits, got 3"):
        train_tokenizer(["abc"], 300, digits=3)


def test_the_command_takes_the_number_of_digits(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x12345 " * 200, encoding="utf-8")
    arguments = ["train", "tokenizer", "--data", str(text), "--vocab-size", "270", "--smaller"]
    for digits, expected in ((1, []), (2, [["1", "2"], ["3", "4"]])):
        out = tmp_path / str(digits)
        found = CliRunner().invoke(app, [*arguments, "--digits", str(digits), "--out", str(out)])
        assert found.exit_code == 0, found.output
        merges = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
        assert [pair for pair in merges if "".join(pair).isdigit()] == expected


def test_the_command_reads_what_a_stage_reads(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["train", "tokenizer", "--data", "calc@50", "--data", "echo@50", "--vocab-size", "280"]
    found = CliRunner().invoke(app, [*arguments, "--out", str(out), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["documents"] == 100
    # What was measured of it is no reason to keep it.
    (out / "evaluation.json").write_text("{}")
    found = CliRunner().invoke(app, [*arguments, "--out", str(out), "--replace"])
    assert found.exit_code == 0, found.output
    assert not (out / "evaluation.json").exists()


def test_limits_cut_documents_and_end_the_reading() -> None:
    seen: list[tuple[int, int]] = []

    def told(read: TextsRead) -> None:
        seen.append((read.documents, read.characters))

    def endless() -> Any:
        while True:
            yield "abcd" * 5

    train_tokenizer(endless(), 266, max_chars=25, document_chars=10, progress=told)
    assert seen == [(1, 10), (2, 20), (3, 25)]
    # What is cut off is not learned from.
    learned = train_tokenizer(["xxab" + "xy" * 50], 267, document_chars=4, allow_smaller=True)
    assert ["x", "y"] not in learned["model"]["merges"]


def test_one_giant_line_without_a_blank_is_learned_from() -> None:
    learned = train_tokenizer(["ab" * 200_000], 270, document_chars=None)
    assert learned["model"]["merges"][:2] == [["a", "b"], ["ab", "ab"]]


@pytest.mark.parametrize("engine", ["rustbpe", "tokenizers"])
def test_more_tokens_than_the_text_allows(engine: Any) -> None:
    with pytest.raises(EndstopError, match=r"5 characters of text allow at most 267 tokens, not 300"):
        train_tokenizer(["ab ab"], 300, engine=engine)
    smaller = train_tokenizer(["ab ab"], 300, engine=engine, allow_smaller=True)
    assert smaller["model"]["merges"] == [["a", "b"], ["Ġ", "ab"]]
    assert [token["id"] for token in smaller["added_tokens"]] == list(range(258, 267))


def test_bad_input_is_refused_or_skipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EndstopError, match="every document is empty"):
        train_tokenizer([], 300)
    with pytest.raises(EndstopError, match="every document is empty"):
        train_tokenizer(["", ""], 300)
    with pytest.raises(EndstopError, match=r"empty \(1 held half a surrogate pair\)"):
        train_tokenizer(["a\ud800"], 300)
    with pytest.raises(ValueError, match="at least 265"):
        train_tokenizer(["ab"], 264)
    with pytest.raises(ValueError, match="many documents, got one str"):
        train_tokenizer("abc", 300)
    with pytest.raises(ValueError, match="documents must be str, got bytes"):
        train_tokenizer([b"abc"], 300)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="document_chars must be at least 1"):
        train_tokenizer(["abc"], 300, document_chars=0)
    with pytest.raises(ValueError, match="engine must be one of auto, tokenizers, rustbpe"):
        train_tokenizer(["abc"], 300, engine="bpe")  # type: ignore[arg-type]
    learned = train_tokenizer(["abab", "\udc00cdcd", "abab"], 266)
    assert learned["model"]["merges"] == [["a", "b"]]
    assert "skipped 1 documents" in caplog.text


def test_without_rustbpe_the_other_engine_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    assert train_tokenizer(["abab"], 266)["model"]["merges"] == [["a", "b"]]
    with pytest.raises(EndstopError, match="pip install rustbpe"):
        train_tokenizer(["abab"], 266, engine="rustbpe")


# Encoding for training


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", KOREAN, "  12345\n\n"]), st.text())).map(
        "".join
    )
)
def test_text_never_becomes_a_special_token(text: str) -> None:
    fast, plain, tokenizer = _encoders()
    [ids] = fast([text])
    assert plain([text]) == [ids]
    assert all(token_id < 800 - 9 for token_id in ids)
    assert tokenizer.encode_text(text) == ids
    assert TokenBytes.from_tokenizer_json(tokenizer.json).join(ids) == text.encode()


@cache
def _encoders() -> tuple[Encode, Encode, Tokenizer]:
    content = train_tokenizer(real_texts(), 800)
    fast, plain = (encode_documents(content, engine=engine) for engine in ("tiktoken", "tokenizers"))
    return fast, plain, Tokenizer(content)


@pytest.mark.parametrize("engine", ["tiktoken", "tokenizers"])
def test_documents_are_encoded_from_a_directory_with_nothing_added(directory: Path, engine: str) -> None:
    encode = encode_documents(directory, engine=engine)
    assert encode([]) == []
    assert encode(["", "a", "<|bos|>"])[:2] == [[], [97]]
    with pytest.raises(ValueError, match="document 1 holds half a surrogate pair"):
        encode(["fine", "bad \ud83d"])
    pieces = TokenBytes.from_pretrained(directory)
    assert [pieces.join(ids) for ids in encode(["x", " " * 500_000])] == [b"x", b" " * 500_000]


def test_both_engines_encode_real_text_alike(content: dict[str, Any]) -> None:
    fast = encode_documents(content, engine="tiktoken", threads=2)
    assert fast(real_texts()) == encode_documents(content, engine="tokenizers")(real_texts())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("aab 1\n한é't"), max_size=60), min_size=1, max_size=8),
    st.text(st.sampled_from("aab 1\n한é'tc"), max_size=60),
    st.integers(0, 80),
)
def test_what_tiktoken_joins_is_what_the_merges_join(texts: list[str], text: str, merges: int) -> None:
    learned = train_tokenizer([*texts, "a"], 265 + merges, allow_smaller=True)
    [fast, plain] = [encode_documents(learned, engine=engine) for engine in ("tiktoken", "tokenizers")]
    assert fast([text, *texts]) == plain([text, *texts])


def test_tokenizers_of_others_are_encoded_with_their_own_rules(content: dict[str, Any]) -> None:
    other = {**content, "normalizer": {"type": "Lowercase"}}
    assert encode_documents(other)(["AB"]) == encode_documents(content)(["ab"])
    with pytest.raises(EndstopError, match="only encodes as tokenizers trained here do"):
        encode_documents(other, engine="tiktoken")
    with pytest.raises(ValueError, match="auto, tokenizers or tiktoken"):
        encode_documents(other, engine="fast")


# Files


def test_the_directory_is_written_whole_and_not_over_another(directory: Path, content: Any) -> None:
    assert sorted(file.name for file in directory.iterdir()) == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((directory / "tokenizer.json").read_text(encoding="utf-8")) == content
    with pytest.raises(FileExistsError, match="exists already"):
        save_tokenizer(content, directory)
    save_tokenizer(content, directory, replace=True)
    assert [file.name for file in directory.parent.iterdir()] == ["tokenizer"]


def test_the_stop_set_is_the_turn_end_and_the_document_border(directory: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(directory)
    end, bos, pad = (tokenizer.token_to_id(text) for text in (ASSISTANT_END, BOS, OUTPUT_END))
    stops = StopSet.from_pretrained(directory)
    assert stops.roles == {end: "turn_end", bos: "eos"}
    assert stops.terminator == end
    assert tokenizer.pad_token_id == pad
    assert pad not in stops.ids
    assert [conflict.code for conflict in stops.conflicts if conflict.severity == "error"] == []


def test_raw_prompts_begin_with_bos_everywhere(directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.from_pretrained(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for text in ("Once upon a time", "", KOREAN, "a <|user_start|> b"):
        ids = ours.encode(text)
        assert ids[0] == ours.bos_token_id
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == BOS + text
        assert ours.encode(text, add_special_tokens=False) == ids[1:]
    assert len(theirs) == ours.vocab_size == 800


def part(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, "text": text}


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CALCULATED = [
    part("text", "That is "),
    part("python", "12*12"),
    part("python_output", "144"),
    part("text", "144."),
]
CHATS = {
    "one turn": [message("user", "Hi"), message("assistant", "Hello there.")],
    "several turns": [
        message("system", "Be brief."),
        message("user", "하나 더?"),
        message("assistant", "네. 12345"),
        message("user", "  blanks  \n"),
        message("assistant", "\n  kept\n"),
    ],
    "tool parts": [message("user", "12*12?"), message("assistant", CALCULATED)],
    "tool first": [message("user", "?"), message("assistant", CALCULATED[1:])],
    "tool in the middle": [
        message("user", "12*12?"),
        message("assistant", CALCULATED),
        message("user", "Sure?"),
        message("assistant", "Yes."),
    ],
    "empty answers": [
        message("user", ""),
        message("assistant", ""),
        message("user", "x"),
        message("assistant", []),
    ],
}


def renderer_of(directory: Path) -> ChatRenderer:
    return ChatRenderer(Tokenizer.from_pretrained(directory), stops=StopSet.from_pretrained(directory))


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_the_same_ids_and_masks_in_transformers(directory: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    renderer = renderer_of(directory)
    rendered = renderer.render(CHATS[name])
    expected = theirs.apply_chat_template(
        CHATS[name], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    assert rendered.ids == expected["input_ids"]
    assert rendered.refusal is None
    assert rendered.mask == expected["assistant_masks"]
    end = theirs.convert_tokens_to_ids(ASSISTANT_END)
    turns = sum(message["role"] == "assistant" for message in CHATS[name])
    assert [bit for token, bit in zip(rendered.ids, rendered.mask, strict=True) if token == end] == [
        1
    ] * turns
    assert rendered.ids.count(theirs.bos_token_id) == 1


def test_forced_output_is_not_supervised_and_the_hand_over_is(directory: Path) -> None:
    renderer = renderer_of(directory)
    tokenizer = Tokenizer.from_pretrained(directory)
    rendered = renderer.render(CHATS["tool parts"])
    assert rendered.mask is not None
    said = [token for token, bit in zip(rendered.ids, rendered.mask, strict=True) if bit]
    text = tokenizer.decode(said, skip_special_tokens=False)
    assert text == "That is <|python_start|>12*12<|python_end|>144.<|assistant_end|>"


def test_long_documents_are_encoded_in_pieces_with_the_same_ids() -> None:
    source = random.Random(0)
    words = ["the", " ", "\n", "  ", "cat", "'s", "é", "12", ".", " a", "x y", "\u3000"]
    text = "".join(source.choice(words) for _ in range(150_000))
    content = train_tokenizer([text[:20_000]], 320, engine="tokenizers")
    whole = _by_tokenizers(content)
    for engine in ("auto", "tokenizers"):
        encode = encode_documents(content, engine=engine)
        for long in (text, "a b" * 80_000, " " * 150_000 + "a", "a" * 150_000):
            assert encode([long, "the cat"]) == whole([long, "the cat"])
    assert len(list(_pieces(text))) > 3
    assert "".join(_pieces(text)) == text
    # What has no border is cut all the same, so that it does not need all the memory.
    assert [len(piece) for piece in _pieces("a" * 2_050_000)] == [1_000_000, 1_000_000, 50_000]
