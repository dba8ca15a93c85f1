"""Tiny model directories of every family, with a byte-level tokenizer in the format of our models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from endstop.train.chat_format import SPECIAL_TOKENS, tokenizer_files
from tests.models.tiny_models import tiny_transformers_model

_TEXT = "the cat sat on 12 mats and 345 dogs. what is 12+30? it's the dog's 2024\n"


def pattern(digits: int) -> str:
    """The split pattern of the models trained here, with groups of at most `digits` digits."""
    return (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,"
        + str(digits)
        + r"}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )


def tokenizer_json(digits: int = 1, size: int = 300) -> dict[str, Any]:
    """A tokenizer.json trained on one line: 256 bytes, some merges, the nine special tokens last."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern(digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_TEXT] * 20, trainer)
    count = tokenizer.get_vocab_size()
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": count + index, "content": text, **flags, "special": True}
        for index, text in enumerate(SPECIAL_TOKENS)
    ]
    return content


def write_model(
    directory: Path,
    family: str = "llama",
    *,
    digits: int = 1,
    content: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Write a tiny model that stops at `<|assistant_end|>` and `<|bos|>`; returns transformers' model."""
    content = tokenizer_json(digits) if content is None else content
    size = len(content["model"]["vocab"]) + len(SPECIAL_TOKENS)
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    sizes: dict[str, Any] = {
        "vocab_size": size + -size % 32,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": ids["<|bos|>"],
        "eos_token_id": ids["<|assistant_end|>"],
        "pad_token_id": ids["<|output_end|>"],
    }
    model = tiny_transformers_model(family, **{**sizes, **options})
    model.save_pretrained(directory)
    for name, text in tokenizer_files(content).items():
        (directory / name).write_text(text, encoding="utf-8")
    return model
