"""The tokenizer: BOS and EOS of raw prompts, plain text, offsets, and where things are read from."""

from __future__ import annotations

import json

import pytest

from endstop.protocol.errors import BrokenModel, RequestRefused
from endstop.protocol.tokenizer import Tokenizer
from tests.protocol.model_dirs import CHATML, added, smollm2, tokenizer_json, write_model

BOS_PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}


def byte_ids(text: str) -> list[int]:
    return [1000 + byte for byte in text.encode()]


def test_half_a_surrogate_pair_is_refused(tmp_path):
    tokenizer = Tokenizer.from_pretrained(write_model(tmp_path, tokenizer=tokenizer_json({"<s>": 0})))
    for encode in (tokenizer.encode, tokenizer.encode_text, tokenizer.encode_with_offsets):
        with pytest.raises(RequestRefused, match="half a surrogate pair"):
            encode("a\ud800")


def test_B12_one_bos(tmp_path):
    tokens = {"<s>": 0, "<|user|>": 1}
    content = tokenizer_json(tokens, post_processor=BOS_PROCESSOR)
    with_bos = Tokenizer.from_pretrained(write_model(tmp_path / "a", tokenizer=content))
    # The template has written BOS: nothing is added. A raw prompt: one is added.
    assert with_bos.encode("<s><|user|>hi", add_special_tokens=False) == [0, 1, *byte_ids("hi")]
    assert with_bos.encode("hi") == [0, *byte_ids("hi")]
    without = Tokenizer.from_pretrained(write_model(tmp_path / "b", tokens))
    assert without.encode("<s>hi", add_special_tokens=False) == [0, *byte_ids("hi")]
    assert without.encode("hi") == byte_ids("hi")


def test_offsets_are_exact(tmp_path):
    # tokenizer.json files ask for blanks to be trimmed off the offsets; spans must not lose them.
    processor = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    content = tokenizer_json({"<e>": 5}, post_processor=processor)
    content["model"]["vocab"]["Ġa"] = 7
    content["model"]["merges"] = [["Ġ", "a"]]
    tokenizer = Tokenizer.from_pretrained(write_model(tmp_path, tokenizer=content))
    ids, offsets = tokenizer.encode_with_offsets("a a<e>é")
    assert ids == [*byte_ids("a"), 7, 5, *byte_ids("é")]
    assert offsets == [(0, 1), (1, 3), (3, 6), (6, 7), (6, 7)]


def test_plain_text_never_becomes_an_added_token(tmp_path):
    tokens = [
        added(0, "<s>"),
        added(1, "<|im_end|>", rstrip=True),
        added(2, "<tool_call>", special=False),
        added(3, "end", special=False, single_word=True),
    ]
    tokenizer = Tokenizer.from_pretrained(write_model(tmp_path, tokens))
    text = "<s>a<|im_end|>  <tool_call> end <|im_end|"
    assert tokenizer.encode("<|im_end|> <tool_call>end") == [1, 2, 3]
    assert tokenizer.encode_text(text) == byte_ids(text)
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


@pytest.mark.parametrize("kind", ["WordLevel", "Unigram", "BPE"])
def test_plain_text_of_models_that_look_whole_words_up(tmp_path, kind):
    # In these models the control token is in the vocabulary, and plain text would find it there.
    texts = ["<unk>", "</s>", "▁", "a", "<", "/", "s", ">"]
    if kind == "Unigram":
        model = {"type": kind, "unk_id": 0, "vocab": [[text, -1.0] for text in texts]}
    elif kind == "WordLevel":
        model = {"type": kind, "unk_token": "<unk>", "vocab": {text: i for i, text in enumerate(texts)}}
    else:
        vocab = {text: i for i, text in enumerate([*texts, "</", "s>"])}
        merges = [["<", "/"], ["s", ">"], ["</", "s>"]]
        model = {"type": kind, "unk_token": "<unk>", "vocab": vocab, "merges": merges, "ignore_merges": True}
    pre = {"type": "WhitespaceSplit"} if kind == "WordLevel" else None
    content = tokenizer_json(
        [added(0, "<unk>"), added(1, "</s>")], model=model, pre_tokenizer=pre, decoder=None
    )
    tokenizer = Tokenizer.from_pretrained(write_model(tmp_path, tokenizer=content))
    assert tokenizer.encode("a</s>") == [3, 1]
    plain = tokenizer.encode_text("a </s>" if kind == "WordLevel" else "a</s>")
    assert 1 not in plain
    assert plain == {"WordLevel": [3, 0], "Unigram": [3, 4, 5, 6, 7], "BPE": [3, 8, 9]}[kind]


def test_plain_text_equals_normal_encoding_where_no_added_token_is():
    tokenizer = Tokenizer.from_pretrained(smollm2())
    for text in ("", " hi", "a\n\n  b", "日本語 🙂", "<|im_sta rt|>", "1234 don't"):
        assert tokenizer.encode_text(text) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode_text("<|im_end|>") == [44, 108, 306, 79, 486, 108, 46]


def test_tokens_of_the_config_are_added(tmp_path):
    config = {
        "added_tokens_decoder": {
            "1300": {"content": "<new>", "special": True, "lstrip": False, "rstrip": True},
            "0": {"content": "<s>", "special": True},
        },
        "eos_token": {"content": "<new>"},
        "bos_token": "<s>",
    }
    tokenizer = Tokenizer.from_pretrained(write_model(tmp_path, {"<s>": 0}, tokenizer_config=config))
    new = next(i for i, token in tokenizer.added_tokens.items() if token.content == "<new>")
    assert tokenizer.added_tokens[new].rstrip
    assert tokenizer.encode("a<new>  b") == [*byte_ids("a"), new, *byte_ids("b")]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (new, 0)
    assert {token["content"] for token in tokenizer.json["added_tokens"]} == {"<s>", "<new>"}
    assert tokenizer.vocab_size == 1256


def test_special_tokens_map_counts_only_for_old_files(tmp_path):
    (tmp_path / "old").mkdir()
    for name in ("old", "new"):
        directory = write_model(tmp_path / name, {"<a>": 0, "<b>": 1}, tokenizer_config={"eos_token": "<a>"})
        (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<b>"}}))
    config = tmp_path / "old" / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "<a>"}))
    assert Tokenizer.from_pretrained(tmp_path / "old").eos_token == "<b>"
    assert Tokenizer.from_pretrained(tmp_path / "new").eos_token == "<a>"


def test_template_files_in_the_order_of_transformers(tmp_path):
    directory = write_model(tmp_path, {"<s>": 0}, template="config")
    assert Tokenizer.from_pretrained(directory).chat_template == "config"
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert Tokenizer.from_pretrained(directory).chat_template == "config"
    (directory / "chat_template.jinja").write_text("file")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.from_pretrained(directory)
    assert tokenizer.chat_templates == {"default": "file", "tool_use": "tools"}
    assert tokenizer.chat_template == "file"


def test_templates_as_a_list(tmp_path):
    templates = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    directory = write_model(tmp_path, {"<s>": 0}, tokenizer_config={"chat_template": templates})
    assert Tokenizer.from_pretrained(directory).chat_templates == {"default": "a", "rag": "b"}
    bad = write_model(tmp_path / "bad", {"<s>": 0}, tokenizer_config={"chat_template": [{"name": "x"}]})
    with pytest.raises(BrokenModel, match="an entry of chat_template has no name and template"):
        Tokenizer.from_pretrained(bad)


def test_equals_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    content = tokenizer_json({"<s>": 0, "<|im_end|>": 1}, post_processor=BOS_PROCESSOR)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            str(token["id"]): {k: v for k, v in token.items() if k != "id"}
            for token in content["added_tokens"]
        },
    }
    directory = write_model(tmp_path, tokenizer=content, tokenizer_config=config, template=CHATML)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.from_pretrained(directory)
    for text in ("hi<|im_end|> x", "", "é  日本"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.chat_template == theirs.chat_template
    assert ours.eos_token_id == theirs.eos_token_id


def test_missing_tokenizer_names_what_was_looked_for(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        BrokenModel, match=r"has no tokenizer: tokenizer\.json was looked for, and tokenizer\.model"
    ):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(BrokenModel, match=r"only tokenizer\.model is there"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", '{"a": 1,\n "b" 2}', r"tokenizer\.json is not valid JSON: .* at line 2, column 6"),
        ("tokenizer.json", "[]", r"tokenizer\.json must hold a JSON object, got list"),
        (
            "tokenizer.json",
            '{"model": {"type": "Strange"}}',
            r"tokenizer\.json cannot be read as a tokenizer",
        ),
        ("tokenizer.json", "[" * 100_000, r"tokenizer\.json is nested too deeply"),
        ("tokenizer_config.json", '{"a": ', r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "no usable token under 'x'"),
    ],
)
def test_broken_files_are_one_sentence(tmp_path, file, content, message):
    directory = write_model(tmp_path, {"<s>": 0})
    (directory / file).write_text(content)
    with pytest.raises(BrokenModel, match=message) as caught:
        Tokenizer.from_pretrained(directory)
    assert "\n" not in str(caught.value)


def test_not_utf8(tmp_path):
    directory = write_model(tmp_path, {"<s>": 0})
    (directory / "tokenizer.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(BrokenModel, match=r"is not UTF-8 text \(byte 7\)"):
        Tokenizer.from_pretrained(directory)
