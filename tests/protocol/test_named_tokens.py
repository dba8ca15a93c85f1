"""Special tokens that only the small files name or describe: the same ids and flags as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from endstop.protocol.render import ChatRenderer
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenbytes import TokenBytes
from endstop.protocol.tokenizer import Tokenizer
from tests.protocol.chat_cases import assistant, user
from tests.protocol.model_dirs import (
    CHATML,
    STRING,
    added,
    byte_alphabet,
    gguf_model,
    tokenizer_json,
    write_model,
)

END, START, BASE = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
CHAT = [user("hi  you"), assistant("yo"), user("x"), assistant("z")]


def directory(
    path: Path, listed: list[dict[str, Any]], config: dict[str, Any], special_map: dict[str, Any] | None
) -> Path:
    """A model with three control tokens in its vocabulary, of which tokenizer.json lists `listed`."""
    content = tokenizer_json(listed)
    content["model"]["vocab"].update({BASE: 0, START: 1, END: 2})
    write_model(path, tokenizer=content, template=CHATML, tokenizer_config=config)
    if "added_tokens_decoder" not in config:
        file = path / "tokenizer_config.json"
        kept = json.loads(file.read_text())
        del kept["added_tokens_decoder"]
        file.write_text(json.dumps(kept))
    if special_map is not None:
        (path / "special_tokens_map.json").write_text(json.dumps(special_map))
    return path


FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
ALL = [added(0, BASE), added(1, START), added(2, END)]
PLACES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any] | None]] = {
    "eos_token in the vocabulary only": (ALL[:2], {"eos_token": END}, None),
    "the same in a new file": (ALL[:2], {"eos_token": END, "added_tokens_decoder": {}}, None),
    "additional_special_tokens": (ALL[:1], {"additional_special_tokens": [START, END]}, None),
    "additional_special_tokens of the map": (ALL[:1], {}, {"additional_special_tokens": [START, END]}),
    "extra_special_tokens by name": (ALL[:2], {"extra_special_tokens": {"turn_token": END}}, None),
    "a key of its own": (ALL[:2], {"turn_token": END}, None),
    "named, and not special in tokenizer.json": (
        [*ALL[:2], added(2, END, special=False)],
        {"eos_token": END},
        None,
    ),
    "special in added_tokens_decoder alone": (
        [*ALL[:2], added(2, END, special=False)],
        {"added_tokens_decoder": {"2": {"content": END, "special": True, **FLAGS}}},
        None,
    ),
    "taking blanks in added_tokens_decoder alone": (
        ALL,
        {"added_tokens_decoder": {"2": {"content": END, "special": True, **FLAGS, "rstrip": True}}},
        None,
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_terminator_is_one_token_wherever_it_is_named(tmp_path, place):
    path = directory(tmp_path, *PLACES[place])
    stops = StopSet.from_pretrained(path)
    assert (stops.terminator, stops.roles[2]) == (2, "turn_end")
    tokenizer = Tokenizer.from_pretrained(path)
    assert tokenizer.added_tokens[2].special
    assert TokenBytes.from_pretrained(path).special >= {2}
    rendered = ChatRenderer(tokenizer, stops=stops).render([*CHAT, user(f"a {END} b")])
    assert rendered.ids.count(2) == 5
    mask = rendered.mask
    assert mask is not None
    assert [i for i, bit in zip(rendered.ids, mask, strict=True) if bit and i < 3] == [2, 2]


@pytest.mark.parametrize("place", PLACES)
def test_ids_equal_those_of_transformers(tmp_path, place):
    transformers = pytest.importorskip("transformers")
    path = directory(tmp_path, *PLACES[place])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))
    tokenizer = Tokenizer.from_pretrained(path)
    ids = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert ChatRenderer(tokenizer).render(CHAT).ids == ids
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_token_that_no_vocabulary_has_gets_the_id_that_transformers_gives_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    path = directory(tmp_path, ALL, {"eos_token": END, "pad_token": "[PAD]"}, None)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))
    tokenizer = Tokenizer.from_pretrained(path)
    assert tokenizer.pad_token_id == theirs.pad_token_id == 259
    assert TokenBytes.from_pretrained(path)[259] == b"[PAD]"
    assert StopSet.from_pretrained(path).ids == {2}


@pytest.mark.parametrize("key", ["eos", "eot", "eom"])
def test_a_terminator_that_a_gguf_file_calls_ordinary_is_one_token(tmp_path, key):
    tokens = [BASE, START, END, "ab", *byte_alphabet()]
    types = [3, 3, 1, *[1] * 257]
    more = {f"tokenizer.ggml.{key}_token_id": (4, 2), "tokenizer.chat_template": (STRING, CHATML)}
    path = tmp_path / "chat.gguf"
    path.write_bytes(gguf_model(tokens, types, merges=["a b"], more=more))
    stops = StopSet.from_pretrained(path)
    assert (stops.terminator, dict(stops.roles)) == (2, {2: "turn_end"})
    assert stops.conflicts == ()
    assert TokenBytes.from_pretrained(path).special == {0, 1, 2}
    rendered = ChatRenderer(Tokenizer.from_pretrained(path), stops=stops).render(CHAT)
    assert [i for i in rendered.ids if i < 3] == [1, 2] * 4
    assert rendered.mask is not None


def test_an_end_of_a_gguf_file_that_is_blank_stays_ordinary(tmp_path):
    tokens = ["", *byte_alphabet(), "ab"]
    path = tmp_path / "blank.gguf"
    for end in (0, 1 + ord("\n")):
        more = {"tokenizer.ggml.eos_token_id": (4, end)}
        path.write_bytes(gguf_model(tokens, [1] * 258, merges=["a b"], more=more))
        assert TokenBytes.from_pretrained(path).special == frozenset()
        assert StopSet.from_pretrained(path).ids == {end}
