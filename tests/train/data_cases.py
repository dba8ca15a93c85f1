"""What the tests of data share: a tokenizer of bytes, sources in memory, batches as plain lists."""

from __future__ import annotations

import json
from functools import cache

from tokenizers.pre_tokenizers import ByteLevel

from endstop.protocol.render import ChatRenderer
from endstop.protocol.tokenizer import Tokenizer
from endstop.train.chat_format import ASSISTANT_END, BOS, SPECIAL_TOKENS, tokenizer_files

BYTES = 256


@cache
def byte_tokenizer() -> Tokenizer:
    """One token for each byte, then the nine special tokens."""
    vocab = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
    specials = [
        {
            "id": BYTES + number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, text in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "post_processor": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    files = tokenizer_files(content)
    special = {
        name: text for name, text in json.loads(files["tokenizer_config.json"]).items() if "token" in name
    }
    special.pop("tokenizer_class")
    return Tokenizer(content, special=special, templates={"default": files["chat_template.jinja"]})


@cache
def renderer() -> ChatRenderer:
    return ChatRenderer(byte_tokenizer(), stops=[token(ASSISTANT_END), token(BOS)])


def token(text: str) -> int:
    token_id = byte_tokenizer().token_to_id(text)
    assert token_id is not None
    return token_id


def encode(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def chat(*words: str) -> list[dict[str, str]]:
    """A conversation of alternating words, the user's first."""
    return [
        {"role": "user" if number % 2 == 0 else "assistant", "content": text}
        for number, text in enumerate(words)
    ]


def rows_of(batches) -> list[tuple[list[int], list[int], list[int] | None]]:
    """(input ids, targets, document ids) of each row of some micro-batches."""
    return [
        (
            batch.input_ids[row].tolist(),
            batch.targets[row].tolist(),
            None if batch.document_ids is None else batch.document_ids[row].tolist(),
        )
        for batch in batches
        for row in range(len(batch.input_ids))
    ]
