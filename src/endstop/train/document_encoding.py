"""Documents to ids for training: many at once, and never a special token."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from endstop.protocol.errors import EndstopError
from endstop.protocol.model_files import parse_object, read_text
from endstop.protocol.tokenbytes import byte_level_alphabet
from endstop.protocol.tokenizer_pieces import merges_of
from endstop.train.tokenizer_training import DIGITS, is_unicode, split_pattern, tokenizer_json

Encode = Callable[[list[str]], list[list[int]]]

# tiktoken's regular expressions overflow their stack on about a million blanks in a row.
_LONG_DOCUMENT = 100_000
# A tokenizer takes some 100 bytes for each character that it is given at once.
_LONGEST_PIECE = 1_000_000
# Between a letter and a blank with a letter behind it the split pattern always splits.
_BORDER = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")


def encode_documents(
    tokenizer: str | Path | Mapping[str, Any], *, threads: int | None = None, engine: str = "auto"
) -> Encode:
    """A function that encodes many documents at once.

    Nothing is added around a document, and no text in it becomes a special token.

    Args:
        tokenizer: a directory, or the content of a tokenizer.json.
        threads: how many documents to encode side by side with tiktoken, one for each processor by default.
            tokenizers has its own rule, RAYON_NUM_THREADS.
        engine: `auto` is tiktoken for tokenizers that were trained here, where it is installed: it is faster
            and gives the same ids. `tokenizers` is used for all others.

    Tokenizers that were trained here encode documents of more than 100,000 characters in pieces, with the
    same ids: nothing else bounds the memory. The function raises ValueError, naming the document, for half a
    surrogate pair.
    """
    if engine not in ("auto", "tokenizers", "tiktoken"):
        raise ValueError(f"engine must be auto, tokenizers or tiktoken, got {engine!r}")
    if not isinstance(tokenizer, Mapping):
        path = Path(tokenizer) / "tokenizer.json"
        tokenizer = parse_object(path, read_text(path))
    plain = _by_tokenizers(tokenizer)
    known = _ranks(tokenizer)
    own = known is not None
    fast = None
    if known is not None and engine != "tokenizers":
        fast = _by_tiktoken(*known, threads or os.cpu_count() or 1)
    if engine == "tiktoken" and fast is None:
        why = "is not installed" if own else "only encodes as tokenizers trained here do"
        raise EndstopError(f"tiktoken {why}; choose tokenizers instead.")

    def encode(documents: list[str]) -> list[list[int]]:
        for index, text in enumerate(documents):
            if not is_unicode(text):
                raise ValueError(f"document {index} holds half a surrogate pair")
        if not own:
            return plain(documents)
        if all(len(text) <= _LONG_DOCUMENT for text in documents):
            return (fast or plain)(documents)
        return [[token_id for piece in _pieces(text) for token_id in short(piece)] for text in documents]

    def short(piece: str) -> list[int]:
        return (fast if fast is not None and len(piece) <= _LONG_DOCUMENT else plain)([piece])[0]

    return encode


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces that give the ids of the whole, each long enough to lose no time.

    Where there is no border in a million characters (not a text), it is cut all the same.
    """
    start = 0
    while len(text) - start > _LONG_DOCUMENT:
        half = start + _LONG_DOCUMENT // 2
        found = _BORDER.search(text, half, start + _LONG_DOCUMENT) or _BORDER.search(
            text, half, start + _LONGEST_PIECE
        )
        end = start + _LONGEST_PIECE if found is None else found.start()
        yield text[start:end]
        start = end
    yield text[start:]


def trained_here(tokenizer: Mapping[str, Any]) -> bool:
    """Whether the content of a tokenizer.json splits and merges as those do that `train_tokenizer` makes."""
    return _ranks(tokenizer) is not None


def _by_tokenizers(content: Mapping[str, Any]) -> Encode:
    import tokenizers

    bare = {**content, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    inner = tokenizers.Tokenizer.from_str(json.dumps(bare))

    def encode(documents: list[str]) -> list[list[int]]:
        # `encode_batch_fast` makes no offsets, but with byte-level models takes a third longer (0.23).
        return [found.ids for found in inner.encode_batch(documents, add_special_tokens=False)]

    return encode


def _ranks(content: Mapping[str, Any]) -> tuple[dict[bytes, int], str] | None:
    """Ids by token bytes, and the pattern that splits text, for a tokenizer as `train_tokenizer` makes it.

    None for all others.
    """
    alphabet = byte_level_alphabet()
    model = content.get("model") or {}
    try:
        merges = [
            (bytes(alphabet[letter] for letter in left), bytes(alphabet[letter] for letter in right))
            for left, right in merges_of(model)
        ]
    except (KeyError, ValueError):
        return None
    parts = ("normalizer", "pre_tokenizer", "model")
    for digits in DIGITS:
        own = tokenizer_json(merges, digits)
        if all(content.get(part) == own[part] for part in parts):
            spelled = own["model"]["vocab"].items()
            ranks = {bytes(alphabet[letter] for letter in piece): token_id for piece, token_id in spelled}
            return ranks, split_pattern(digits)
    return None


def _by_tiktoken(ranks: dict[bytes, int], pattern: str, threads: int) -> Encode | None:
    """None where tiktoken is not installed.

    tiktoken joins any two neighbours that make a token, tokenizers only those of which it was made. That is
    the same here: neighbours with untouched borders were merged as their bytes are on their own, by the
    merges in order, and so are the two parts that the token was made of.
    """
    try:
        import tiktoken
    except ModuleNotFoundError:
        return None
    inner = tiktoken.Encoding("trained-here", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(documents: list[str]) -> list[list[int]]:
        ids: list[list[int]]
        if threads == 1 or len(documents) == 1:
            ids = [inner.encode_ordinary(text) for text in documents]
        else:
            ids = inner.encode_ordinary_batch(documents, num_threads=threads)
        return ids

    return encode
