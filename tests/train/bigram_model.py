"""A model whose next token depends on the last one only, in the conversation format, with known logits."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch

from endstop.models.config import DecoderConfig
from endstop.models.decoder import Decoder
from endstop.models.save import save_pretrained
from endstop.train.chat_format import SPECIAL_TOKENS, tokenizer_files
from tests.train.tiny_policy import byte_tokenizer_json

SPECIAL = {text: 256 + i for i, text in enumerate(SPECIAL_TOKENS)}
BOS, START, END = SPECIAL["<|bos|>"], SPECIAL["<|assistant_start|>"], SPECIAL["<|assistant_end|>"]
VOCABULARY = 266


def bigram(logits: Mapping[int, Mapping[int, float]], *, context: int = 512) -> Decoder:
    """A llama without attention: behind token t the logits are `logits[t]`, 0 for what is not named there."""
    config = DecoderConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": VOCABULARY,
            "intermediate_size": 2,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 2,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "bos_token_id": BOS,
            "eos_token_id": [END, BOS],
        }
    )
    model = Decoder(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(VOCABULARY))
        for before, row in logits.items():
            for after, value in row.items():
                model.lm_head.weight[after, before] = value / VOCABULARY**0.5
    return model.eval()


def chain(
    text: str, then: int | None = END, *, first: int = START, margin: float = 12.0
) -> dict[int, dict[int, float]]:
    """Logits that make the model say `text` behind `first` and then `then`; no byte may occur twice."""
    ids = [first, *text.encode(), *([] if then is None else [then])]
    return {before: {after: margin} for before, after in pairwise(ids)}


def save(model: Decoder, directory: Path) -> Path:
    """As a chat model's directory."""
    save_pretrained(model, directory, files=tokenizer_files(byte_tokenizer_json()))
    return directory
