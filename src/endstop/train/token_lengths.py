"""How many bytes of text each token stands for: what bits per byte are counted with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from endstop.protocol.tokenbytes import TokenBytes
from endstop.protocol.tokenizer import Tokenizer


def token_lengths(tokenizer: Tokenizer | str | Path | Mapping[str, Any]) -> list[int]:
    """The bytes of each token by id, 0 for special tokens, which are no text.

    `tokenizer` may be a directory or the content of a tokenizer.json as well. Raises UnsupportedModel for
    tokenizers whose tokens have no bytes of their own.
    """
    if isinstance(tokenizer, Tokenizer):
        table = TokenBytes.from_tokenizer_json(tokenizer.json)
    elif isinstance(tokenizer, Mapping):
        table = TokenBytes.from_tokenizer_json(tokenizer)
    else:
        table = TokenBytes.from_pretrained(tokenizer)
    return [0 if token_id in table.special else len(piece) for token_id, piece in enumerate(table)]
