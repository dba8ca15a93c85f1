"""Compression beside other vocabularies, bytes of tokens, bits per byte, and the two verbs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from endstop.protocol.tokenizer import Tokenizer
from endstop.train.compression_samples import SAMPLES
from endstop.train.token_lengths import token_lengths
from endstop.train.tokenizer_evaluation import (
    bits_per_byte,
    evaluate_tokenizer,
    first_characters,
)
from endstop.train.tokenizer_training import save_tokenizer, tokenizer_json, train_tokenizer
from tests.cli.conftest import Run, endstop, home  # noqa: F401


def test_lengths_are_raw_bytes_and_special_tokens_have_none(tmp_path: Path) -> None:
    letters = "한".encode()
    content = tokenizer_json([(letters[:1], letters[1:2]), (letters[:2], letters[2:]), (b" ", b"a")])
    lengths = token_lengths(content)
    assert lengths == [1] * 256 + [2, 3, 2] + [0] * 9
    assert token_lengths(Tokenizer(content)) == lengths
    save_tokenizer(content, tmp_path / "tokenizer")
    assert token_lengths(tmp_path / "tokenizer") == lengths


def test_bits_per_byte() -> None:
    assert bits_per_byte(8 * math.log(2), 4) == 2.0
    assert bits_per_byte(0.0, 10) == 0.0
    assert bits_per_byte(1.0, 0) == math.inf


def test_samples_are_of_five_kinds_and_of_like_size() -> None:
    assert list(SAMPLES) == ["news", "korean", "code", "maths", "science"]
    for text in SAMPLES.values():
        assert 1000 <= len(text.encode()) <= 2000


def test_compression_is_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDSTOP_OFFLINE", "1")
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    nothing_merged = evaluate_tokenizer(tokenizer_json([]), {"mine": ["한", "<|bos|>"], "empty": []})
    assert nothing_merged.vocab_sizes == {"ours": 265}
    assert [sample.name for sample in nothing_merged.samples] == [*SAMPLES, "mine", "empty"]
    for sample in nothing_merged.samples[:-1]:
        assert sample.tokens == {"ours": sample.size}
        assert sample.bytes_per_token() == 1.0
    assert nothing_merged.samples[-2].size == 3 + 7
    assert nothing_merged.samples[-1].bytes_per_token() == 0.0
    assert nothing_merged.lossless
    assert set(nothing_merged.unavailable) == {"gpt-2", "gpt-4"}
    assert "TIKTOKEN_CACHE_DIR" in nothing_merged.unavailable["gpt-2"]
    trained = evaluate_tokenizer(train_tokenizer([SAMPLES["news"]] * 3, 500))
    by_name = {sample.name: sample.bytes_per_token() for sample in trained.samples}
    assert by_name["news"] > by_name["science"] > by_name["korean"] >= 1.0


def test_a_vocabulary_of_tiktoken_is_compared_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    bytes_only = tiktoken.Encoding(
        "bytes-only",
        pat_str=r"[\s\S]",
        mergeable_ranks={bytes([b]): b for b in range(256)},
        special_tokens={},
    )
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "bytes-only", bytes_only)
    content = train_tokenizer([SAMPLES["code"]] * 2, 400)
    found = evaluate_tokenizer(content, others={"bytes": "bytes-only", "none": "no-such-encoding"})
    assert found.vocab_sizes == {"ours": 400, "bytes": 256}
    assert list(found.unavailable) == ["none"]
    code = next(sample for sample in found.samples if sample.name == "code")
    assert code.tokens["bytes"] == code.size
    assert code.ratio("bytes") == code.tokens["ours"] / code.size < 0.7
    record = found.to_json()["samples"][2]
    assert record["name"] == "code"
    assert record["ratio"] == {"bytes": code.ratio("bytes")}


def test_the_first_characters_of_documents() -> None:
    assert first_characters(["abc", "def", "ghi"], 5) == ["abc", "de"]
    assert first_characters(["abc"], 3) == ["abc"]
    assert first_characters([], 3) == []


# The verbs


@pytest.fixture
def corpus(home: Path) -> Path:  # noqa: F811
    (home / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*SAMPLES.values()] * 3), encoding="utf-8"
    )
    (home / "more.txt").write_text(SAMPLES["news"] * 4, encoding="utf-8")
    return home / "corpus.jsonl"


def test_train_and_eval_tokenizer(endstop: Run, corpus: Path, home: Path) -> None:  # noqa: F811
    trained = endstop(
        *("train", "tokenizer", "--out", "run/tokenizer", "--vocab-size", "400"),
        *("--data", "corpus.jsonl", "--data", "more.txt"),
    )
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.startswith("run/tokenizer: 400 tokens, ")
    assert "characters of 16 documents in " in trained.stderr
    assert Tokenizer.from_pretrained(home / "run/tokenizer").vocab_size == 400
    again = endstop("train", "tokenizer", "--out", "run/tokenizer", "--data", "more.txt")
    assert (again.returncode, "exists already" in again.stderr) == (1, True)
    offline = {"ENDSTOP_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": ""}
    shown = endstop("eval", "tokenizer", "run/tokenizer", "--train", "corpus.jsonl", env=offline)
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines() if line.strip()] == [
        *("sample", "─" * len(shown.stdout.splitlines()[2].split()[0])),
        *("news", "korean", "code", "maths", "science", "train", "vocabulary:"),
    ]
    assert "no comparison with gpt-2: offline" in shown.stderr
    printed = endstop("eval", "tokenizer", "run/tokenizer", "--json", env=offline)
    assert json.loads(printed.stdout)["vocab_sizes"] == {"ours": 400}


def test_train_tokenizer_refuses_what_cannot_be(endstop: Run, corpus: Path, home: Path) -> None:  # noqa: F811
    too_many = endstop("train", "tokenizer", "--out", "t", "--data", "more.txt", "--vocab-size", "90000")
    assert too_many.returncode == 1
    assert "of text allow at most" in too_many.stderr
    assert not (home / "t").exists()
    (home / "half.jsonl").write_text('{"text": "\\ud800 x"}\n"\\udc00"\n', encoding="utf-8")
    half = endstop("train", "tokenizer", "--out", "t", "--data", "half.jsonl", "--vocab-size", "270")
    assert "2 documents cannot be read, the first because: half.jsonl" in half.stderr
    assert "half a surrogate pair" in half.stderr
    (home / "latin.txt").write_bytes(b"caf\xe9 " * 40)
    broken = endstop("train", "tokenizer", "--out", "t", "--data", "latin.txt", "--vocab-size", "270")
    assert broken.returncode == 1
    assert "every document is empty. 1 document cannot be read, the first because: latin.txt" in broken.stderr
    skipped = endstop(
        *("train", "tokenizer", "--out", "t", "--data", "latin.txt", "--data", "more.txt", "--json"),
        *("--vocab-size", "9000", "--smaller"),
    )
    assert skipped.returncode == 0, skipped.stderr
    result = json.loads(skipped.stdout)
    assert (result["documents"], result["skipped"]) == (1, 1)
    assert "left out 1 document:" in skipped.stderr
    assert result["vocab_size"] < 9000
