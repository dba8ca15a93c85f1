"""Tokenizers rebuilt from GGUF metadata encode as the model's own tokenizer does."""

from __future__ import annotations

import inspect
import io
import json
from pathlib import Path
from random import Random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop import StopSet
from endstop.protocol.errors import BrokenModel, EndstopError, UnsupportedModel
from endstop.protocol.gguf import (
    generation_config_from_gguf,
    read_gguf_metadata,
    tokenizer_config_from_gguf,
    tokenizer_json_from_gguf,
)
from endstop.protocol.pretokenizers import PRE_TOKENIZERS
from endstop.protocol.tokenizer import Tokenizer
from tests.protocol.model_dirs import ARRAY, CHATML, STRING, gguf_bytes, gguf_model, smollm2

SENTENCEPIECE = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SENTENCEPIECE_TYPES = [2, 3, 3, *[6] * 256]


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def sentencepiece(tmp_path: Path, pieces: list[str], scores: list[float], **more) -> Path:
    tokens = [*SENTENCEPIECE, *pieces]
    types = more.pop("types", [*SENTENCEPIECE_TYPES, *[1] * len(pieces)])
    return write(
        tmp_path,
        gguf_model(tokens, types, scores=[0.0] * 259 + scores, kind="llama", pre=None, **more),
    )


def test_smollm2_ids():
    tokenizer = Tokenizer.from_pretrained(smollm2())
    prompt = "How do you say thank you in Chinese?"
    assert tokenizer.encode(prompt) == [2020, 536, 346, 1643, 9984, 346, 281, 4097, 47]
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
    assert tokenizer.encode("<|im_start|>user\nHi 12<|im_end|>") == [1, 4093, 198, 26843, 216, 33, 34, 2]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    assert len(tokenizer.added_tokens) == 17
    assert tokenizer.vocab_size == 49152
    assert "<|im_end|>" in (tokenizer.chat_template or "")


def test_smollm2_equals_transformers():
    transformers = pytest.importorskip("transformers")
    path = smollm2()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = Tokenizer.from_pretrained(path)
    for text in ("", " ", "Hello  world\n\n\t x", "don't I'LL 3.14159", "日本語 émigré 🙂🏽", "a" * 500):
        assert ours.encode(text) == theirs.encode(text), text


def test_byte_level_with_bos_and_eos(tmp_path):
    more = {
        "tokenizer.ggml.bos_token_id": (4, 0),
        "tokenizer.ggml.eos_token_id": (4, 1),
        "tokenizer.ggml.add_bos_token": (7, True),
        "tokenizer.ggml.add_eos_token": (7, True),
    }
    path = write(tmp_path, gguf_model(["<b>", "<e>", "a", "b", "ab"], [3, 3, 1, 1, 1], more=more))
    tokenizer = Tokenizer.from_pretrained(path)
    assert tokenizer.encode("abb") == [0, 4, 3, 1]
    assert tokenizer.encode("abb", add_special_tokens=False) == [4, 3]
    assert tokenizer.encode("a<e>b") == [0, 2, 1, 3, 1]


@pytest.mark.parametrize(("pre", "adds"), [("gpt-2", False), ("llama-bpe", True), ("tekken", True)])
def test_bos_where_the_file_does_not_say(tmp_path, pre, adds):
    more = {"tokenizer.ggml.bos_token_id": (4, 0)}
    path = write(tmp_path, gguf_model(["<b>", "a", "b", "ab"], [3, 1, 1, 1], pre=pre, more=more))
    assert Tokenizer.from_pretrained(path).encode("ab") == ([0, 3] if adds else [3])
    assert tokenizer_config_from_gguf(read_gguf_metadata(path))["add_bos_token"] is adds


def test_user_defined_tokens_are_added_and_not_special(tmp_path):
    path = write(tmp_path, gguf_model(["<c>", "<u>", "a", "b", "ab"], [3, 4, 1, 1, 1]))
    added = Tokenizer.from_pretrained(path).added_tokens
    assert {i: (token.content, token.special) for i, token in added.items()} == {
        0: ("<c>", True),
        1: ("<u>", False),
    }


# What the patterns of the models' own tokenizer.json files do with one text (from those files).
TEXT = "It's 12345 HTTPServer's\n\n x"
SPLITS = {
    "gpt-2": ["It", "'s", " 12345", " HTTPServer", "'s", "\n\n", " x"],
    "smollm": ["It", "'s", " ", *"12345", " HTTPServer", "'s", "\n\n", " x"],
    "llama-bpe": ["It", "'s", " ", "123", "45", " HTTPServer", "'s", "\n\n", " x"],
    "qwen2": ["It", "'s", " ", *"12345", " HTTPServer", "'s", "\n\n", " x"],
    "gpt-4o": ["It's", " ", "123", "45", " HTTPServer's", "\n\n", " x"],
    "tekken": ["It", "'s", " ", *"12345", " HTTPServer", "'s", "\n\n", " x"],
    "deepseek-llm": ["It", "'", "s", " ", "12345", " HTTPServer", "'", "s", "\n", "\n", " x"],
    "deepseek-coder": ["It", "'", "s", " ", *"12345", " HTTPServer", "'", "s", "\n", "\n", " x"],
    "deepseek-v3": ["It", "'s", " ", "123", "45", " HTTPServer", "'s", "\n\n", " x"],
    "falcon": ["It", "'", "s", " ", "123", "45", " HTTPServer", "'", "s", "\n\n", " x"],
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits(name):
    assert split(name, TEXT) == SPLITS[name]


def test_patterns_are_those_of_transformers():
    qwen2 = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    assert PRE_TOKENIZERS["qwen2"].splits == (qwen2.PRETOKENIZE_REGEX,)
    llama3 = inspect.signature(convert.TikTokenConverter.__init__).parameters["pattern"].default
    assert PRE_TOKENIZERS["llama-bpe"].splits == (llama3,)


def test_every_pre_tokenizer_can_be_built_and_loses_nothing():
    for name in PRE_TOKENIZERS:
        text = "Ab  c1234 - don't\r\n\té日本語 🙂 x.  "
        assert "".join(split(name, text)) == text, name


def split(name: str, text: str) -> list[str]:
    pre = PRE_TOKENIZERS[name]
    content = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": pre.normalizer(),
        "pre_tokenizer": pre.pre_tokenizer(),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path):
    meta = read_gguf_metadata(write(tmp_path, gguf_model(["a", "b", "ab"], [1, 1, 1], pre="from-2031")))
    with pytest.raises(UnsupportedModel, match="pre-tokenizer 'from-2031'"):
        tokenizer_json_from_gguf(meta)


def test_other_kinds_are_refused(tmp_path):
    meta = read_gguf_metadata(write(tmp_path, gguf_model(["a"], [1], kind="bert")))
    with pytest.raises(UnsupportedModel, match="of the kind 'bert'"):
        tokenizer_json_from_gguf(meta)
    with pytest.raises(BrokenModel, match=r"tokenizer\.ggml\.model is missing"):
        tokenizer_json_from_gguf(read_gguf_metadata(write(tmp_path, gguf_bytes({"a": (4, 1)}))))


def test_broken_vocabularies(tmp_path):
    def fails(data: bytes, message: str) -> None:
        with pytest.raises(BrokenModel, match=message):
            tokenizer_json_from_gguf(read_gguf_metadata(write(tmp_path, data)))

    fails(gguf_model(["a", "b", "a"], [1, 1, 1], merges=["a b"]), "has 'a' twice, as 0 and 2")
    fails(gguf_model(["a", "b"], [1, 1], merges=["a b"]), "merge 0 .* is not made of tokens")
    fails(gguf_model(["b", "ab"], [1], kind="llama", scores=[0.0, 0.0]), "a type for each of 2 tokens")
    fails(gguf_model(["a", "b"], [1, 1], scores=[0.0], kind="llama"), "a score for each of its 2 tokens")
    more = {"tokenizer.ggml.bos_token_id": (STRING, "x")}
    fails(gguf_model(["a", "b", "ab"], [1, 1, 1], more=more), "must be a token id, got 'x'")


def test_sentencepiece_prefix_and_bytes(tmp_path):
    more = {"tokenizer.ggml.bos_token_id": (4, 1), "tokenizer.ggml.eos_token_id": (4, 2)}
    path = sentencepiece(tmp_path, ["▁", "a", "b", "ab", "▁ab"], [-5, -3, -4, -1, -2], more=more)
    tokenizer = Tokenizer.from_pretrained(path)
    # A blank is put before the text, BOS before that (the kind's default), bytes spell what is unknown.
    assert tokenizer.encode("ab") == [1, 263]
    assert tokenizer.encode("ab ab", add_special_tokens=False) == [263, 263]
    assert tokenizer.encode("é", add_special_tokens=False) == [259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode([1, 263, 263, 3 + 0xC3, 3 + 0xA9]) == "ab abé"
    # Text behind a control token gets its blank as well.
    assert tokenizer.encode("</s>ab", add_special_tokens=False) == [2, 263]


def test_sentencepiece_without_prefix(tmp_path):
    more = {"tokenizer.ggml.add_space_prefix": (7, False), "tokenizer.ggml.add_bos_token": (7, False)}
    path = sentencepiece(tmp_path, ["▁", "a", "b", "ab"], [-5, -3, -4, -1], more=more)
    tokenizer = Tokenizer.from_pretrained(path)
    assert tokenizer.encode("ab a") == [262, 259, 260]
    assert tokenizer.decode([259, 260]) == " a"


def test_blank_user_defined_pieces_are_vocabulary(tmp_path):
    # Gemma's files keep runs of blanks as user-defined tokens, spelled with spaces.
    pieces = ["▁", "a", "  ", "\n", "\n\n", "<table>"]
    types = [*SENTENCEPIECE_TYPES, 1, 1, 4, 1, 4, 4]
    more = {"tokenizer.ggml.add_space_prefix": (7, False), "tokenizer.ggml.add_bos_token": (7, False)}
    path = sentencepiece(tmp_path, pieces, [-5, -3, 0, -4, 0, 0], types=types, more=more)
    tokenizer = Tokenizer.from_pretrained(path)
    assert tokenizer.encode("a  a\n\n<table>") == [260, 261, 260, 263, 264]
    assert [token.content for token in tokenizer.added_tokens.values()] == ["<unk>", "<s>", "</s>", "<table>"]
    assert tokenizer.encode_text("a  a\n\n") == [260, 261, 260, 263]


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE, naively: the neighbours whose union scores best, leftmost first, until none."""
    parts = list(text)
    while True:
        best = max(
            (
                (scores[parts[i] + parts[i + 1]], -i)
                for i in range(len(parts) - 1)
                if parts[i] + parts[i + 1] in scores
            ),
            default=None,
        )
        if best is None:
            return parts
        i = -best[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text("ab▁", min_size=2, max_size=4), min_size=1, max_size=8, unique=True),
    st.text("ab ", max_size=12),
    st.randoms(use_true_random=False),
)
def test_merges_of_scores_equal_merging_by_score(tmp_path_factory, longer, text, random):
    pieces = ["▁", "a", "b", *longer]
    values = [-float(rank) for rank in range(1, len(pieces) + 1)]
    random.shuffle(values)
    path = sentencepiece(
        tmp_path_factory.mktemp("spm"),
        pieces,
        values,
        more={"tokenizer.ggml.add_space_prefix": (7, False)},
    )
    tokenizer = Tokenizer.from_pretrained(path)
    expected = merge_by_score(text.replace(" ", "▁"), dict(zip(pieces, values, strict=True)))
    got = [tokenizer.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    # Where a piece can be made in two overlapping ways (a|aa and aa|a), merges have an order, scores none.
    assert got == expected or (overlaps(pieces) and "".join(got) == "".join(expected))


def overlaps(pieces: list[str]) -> bool:
    """Whether a piece can be made of two others in two ways that may compete for one letter."""
    ways = {p: sum(p[:i] in pieces and p[i:] in pieces for i in range(1, len(p))) for p in pieces}
    return any(count > 1 for count in ways.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"user_defined_symbols": ["▁▁", "▁▁▁▁", "\n", "<tag>"], "add_dummy_prefix": False},
    ],
    ids=["prefix", "no prefix", "user-defined"],
)
def test_equals_sentencepiece(tmp_path, options):
    """The rebuilt tokenizer against the library that such models are made with."""
    library = pytest.importorskip("sentencepiece")
    lines = [line for line in Path(json.__file__).read_text().splitlines() if line.strip()]
    lines += ["日本語のテキスト é à ü", "naïve café — déjà vu", "Привет, мир"] * 10
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **options,
    )
    theirs = library.SentencePieceProcessor(model_proto=model.getvalue())
    tokens, types = [], []
    for i in range(theirs.get_piece_size()):
        piece = theirs.id_to_piece(i)
        defined = piece in options.get("user_defined_symbols", ())
        kinds = {2: theirs.is_unknown(i), 3: theirs.is_control(i), 6: theirs.is_byte(i), 4: defined}
        types.append(next((kind for kind, holds in kinds.items() if holds), 1))
        tokens.append(piece.replace("▁", " ") if defined else piece)
    more = {
        "tokenizer.ggml.add_space_prefix": (7, options.get("add_dummy_prefix", True)),
        "tokenizer.ggml.add_bos_token": (7, False),
    }
    scores = [theirs.get_score(i) for i in range(len(tokens))]
    data = gguf_model(tokens, types, scores=scores, kind="llama", pre=None, more=more)
    ours = Tokenizer.from_pretrained(write(tmp_path, data))
    random = Random(1)
    for round in range(400):
        text = (
            random.choice(lines)[random.randrange(20) :] + "  " * random.randrange(4) + random.choice(lines)
        )
        if round % 2:
            text = "".join(random.choice("ab  <>tag\n日🙂é12 xyzthe") for _ in range(random.randrange(30)))
        assert ours.encode(text) == theirs.encode(text), text
        if "<tag>" not in text:
            assert ours.encode_text(text) == theirs.encode(text), text


def test_generation_config_is_the_union_of_the_stop_keys(tmp_path):
    more = {
        "tokenizer.ggml.eos_token_id": (4, 1),
        "tokenizer.ggml.eot_token_id": (4, 2),
        "tokenizer.ggml.eom_token_id": (4, 1),
        "tokenizer.ggml.padding_token_id": (4, 0xFFFFFFFF),
        "tokenizer.ggml.bos_token_id": (4, 0),
    }
    meta = read_gguf_metadata(write(tmp_path, gguf_model(["a", "b", "ab"], [1, 3, 3], more=more)))
    assert generation_config_from_gguf(meta) == {"bos_token_id": 0, "eos_token_id": [1, 2]}


def test_tokenizer_config_with_named_templates(tmp_path):
    more = {
        "tokenizer.chat_template": (STRING, "plain"),
        "tokenizer.chat_template.tool_use": (STRING, "tools"),
        "tokenizer.chat_templates": (ARRAY, (STRING, ["tool_use"])),
        "llama.context_length": (4, 77),
    }
    meta = read_gguf_metadata(write(tmp_path, gguf_model(["a", "b", "ab"], [1, 1, 1], more=more)))
    config = tokenizer_config_from_gguf(meta)
    assert config["model_max_length"] == 77
    assert config["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    assert Tokenizer.from_pretrained(meta.path).chat_templates == {"default": "plain", "tool_use": "tools"}


def test_damaged_files_are_one_sentence_or_a_model(tmp_path):
    keys = {
        "tokenizer.ggml.eos_token_id": (4, 3),
        "tokenizer.ggml.bos_token_id": (4, 3),
        "tokenizer.ggml.add_bos_token": (7, True),
        "tokenizer.chat_template": (STRING, CHATML),
    }
    chat = ["a", "b", "ab", "</s>", "<|im_start|>", "<|im_end|>"]
    whole = [
        gguf_model(chat, [1, 1, 1, 3, 3, 3], more=keys),
        gguf_model(
            ["<unk>", "<s>", "</s>", "▁", "a", "▁a"],
            [2, 3, 3, 1, 1, 1],
            scores=[0, 0, 0, -1, -2, -3],
            kind="llama",
            pre=None,
            more=keys,
        ),
    ]
    random = Random(7)
    outcomes = set()
    for _ in range(300):
        data = bytearray(random.choice(whole))
        for _ in range(random.choice([1, 1, 2, 4])):
            data[random.randrange(len(data))] = random.choice([0, 1, 255, random.randrange(256)])
        path = write(tmp_path, bytes(data))
        for reader in (StopSet.from_pretrained, Tokenizer.from_pretrained):
            try:
                reader(path)
                outcomes.add("model")
            except EndstopError as error:
                outcomes.add(type(error).__name__ + " in lines" * str(error).count("\n"))
    assert outcomes == {"model", "BrokenModel", "UnsupportedModel"}
