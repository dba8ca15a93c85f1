"""A tiny chat model with a tokenizer of bytes, and questions for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from endstop.models.config import DecoderConfig
from endstop.models.decoder import Decoder
from endstop.models.save import save_pretrained
from endstop.protocol.labels import chat_rows
from endstop.protocol.render import ChatRenderer
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenbytes import byte_level_alphabet
from endstop.protocol.tokenizer import Tokenizer
from endstop.train.chat_format import SPECIAL_TOKENS, tokenizer_files
from endstop.train.rollouts import Question

PAD = 256 + SPECIAL_TOKENS.index("<|output_end|>")
END = 256 + SPECIAL_TOKENS.index("<|assistant_end|>")
BOS = 256
PYTHON_START, PYTHON_END = END + 1, END + 2


def byte_tokenizer_json() -> dict[str, Any]:
    """Every byte is a token, the special tokens come behind them."""
    alphabet = {byte: character for character, byte in byte_level_alphabet().items()}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256 + i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, text in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {alphabet[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }


def tiny_decoder(*, hidden: int = 32, layers: int = 2, context: int = 128, seed: int = 0) -> Decoder:
    config = DecoderConfig.from_hf(
        {
            "model_type": "nanochat",
            "vocab_size": 256 + len(SPECIAL_TOKENS),
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": context,
            "bos_token_id": BOS,
            "eos_token_id": [END, BOS],
            "pad_token_id": PAD,
            "initializer_range": 0.1,
        }
    )
    torch.manual_seed(seed)
    return Decoder(config)


def save_chat_model(model: Decoder, directory: Path) -> Path:
    save_pretrained(model, directory, files=tokenizer_files(byte_tokenizer_json()))
    return directory


def chat_renderer(directory: Path) -> ChatRenderer:
    return ChatRenderer(Tokenizer.from_pretrained(directory), stops=StopSet.from_pretrained(directory))


def question(
    renderer: ChatRenderer,
    text: str,
    answer: Any,
    *,
    right: Callable[[str], bool] | None = None,
    gave_up: Callable[[str], bool] = lambda text: text == "?",
) -> Question:
    prompt = [{"role": "user", "content": text}]
    ids = renderer.render(prompt, add_generation_prompt=True).ids
    row = chat_rows(renderer, [*prompt, {"role": "assistant", "content": answer}]).rows[0]
    assert row.ids[: len(ids)] == ids
    gold = row.ids[len(ids) :]
    mask = [int(label >= 0) for label in row.labels[len(ids) :]]
    return Question(ids, gold, mask, right or (lambda output: output == answer), gave_up, "test")
