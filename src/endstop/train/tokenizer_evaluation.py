"""How well a tokenizer compresses, beside the vocabularies of GPT-2 and GPT-4; and bits per byte."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from endstop.protocol.model_files import parse_object, read_text
from endstop.protocol.resolve import is_offline
from endstop.protocol.tokenbytes import TokenBytes
from endstop.train.compression_samples import SAMPLES
from endstop.train.document_encoding import Encode, encode_documents

# Name -> tiktoken's encoding.
OTHERS = {"gpt-2": "gpt2", "gpt-4": "cl100k_base"}
OURS = "ours"

# tiktoken fetches its files without a time limit of its own.
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """A sample and how many tokens each tokenizer makes of it.

    Attributes:
        name: of the sample.
        size: its UTF-8 bytes.
        tokens: tokenizer -> number of tokens, nothing added.
    """

    name: str
    size: int
    tokens: Mapping[str, int]

    def bytes_per_token(self, tokenizer: str = OURS) -> float:
        """Mean bytes of a token; higher is shorter. 0.0 for an empty sample."""
        count = self.tokens[tokenizer]
        return self.size / count if count else 0.0

    def ratio(self, other: str) -> float:
        """Our tokens for each of the other's; below 1 ours is shorter. 0.0 for an empty sample."""
        count = self.tokens[other]
        return self.tokens[OURS] / count if count else 0.0


@dataclass(frozen=True, slots=True)
class TokenizerEvaluation:
    """The compression of a tokenizer.

    Attributes:
        vocab_sizes: tokenizer -> number of tokens, special ones included; ours is named `ours`.
        samples: one for each sample, in the order given.
        unavailable: the vocabularies that could not be had, and why.
        lossless: every sample is again what it was when the bytes of its tokens are joined.
    """

    vocab_sizes: Mapping[str, int]
    samples: Sequence[SampleTokens]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    lossless: bool = True

    def to_json(self) -> dict[str, Any]:
        """As a JSON object: what `endstop eval tokenizer --json` prints."""
        return {
            "vocab_sizes": dict(self.vocab_sizes),
            "samples": [
                {
                    "name": sample.name,
                    "bytes": sample.size,
                    "tokens": dict(sample.tokens),
                    "bytes_per_token": {name: sample.bytes_per_token(name) for name in sample.tokens},
                    "ratio": {name: sample.ratio(name) for name in sample.tokens if name != OURS},
                }
                for sample in self.samples
            ],
            "unavailable": dict(self.unavailable),
            "lossless": self.lossless,
        }


def evaluate_tokenizer(
    tokenizer: str | Path | Mapping[str, Any],
    more_samples: Mapping[str, Sequence[str]] | None = None,
    *,
    others: Mapping[str, str] = OTHERS,
) -> TokenizerEvaluation:
    """Count tokens on the built-in samples and on further ones.

    Args:
        tokenizer: a directory, or the content of a tokenizer.json.
        more_samples: name -> its documents, such as parts of the training and validation text.
        others: name -> tiktoken's encoding to compare with. One whose file is neither cached
            (TIKTOKEN_CACHE_DIR) nor to be fetched is named in `unavailable`.
    """
    if not isinstance(tokenizer, Mapping):
        path = Path(tokenizer) / "tokenizer.json"
        tokenizer = parse_object(path, read_text(path))
    pieces = TokenBytes.from_tokenizer_json(tokenizer)
    encoders = {OURS: encode_documents(tokenizer)}
    vocab_sizes = {OURS: len(pieces)}
    unavailable = {}
    for name, encoding in others.items():
        found = _tiktoken(encoding)
        if isinstance(found, str):
            unavailable[name] = found
        else:
            encoders[name], vocab_sizes[name] = found
    rows, lossless = [], True
    documents = {name: [text] for name, text in SAMPLES.items()} | dict(more_samples or {})
    for name, texts in documents.items():
        encoded = {other: encode(list(texts)) for other, encode in encoders.items()}
        raw = [text.encode("utf-8") for text in texts]
        lossless &= [pieces.join(ids) for ids in encoded[OURS]] == raw
        tokens = {other: sum(map(len, ids)) for other, ids in encoded.items()}
        rows.append(SampleTokens(name, sum(map(len, raw)), tokens))
    return TokenizerEvaluation(vocab_sizes, rows, unavailable, lossless)


def bits_per_byte(total_nats: float, total_bytes: int) -> float:
    """Loss that can be compared over tokenizers: nats summed over targets that stand for bytes, as bits for
    each byte of text. Special tokens stand for none and must be in neither sum. Infinite for no bytes."""
    return total_nats / (math.log(2) * total_bytes) if total_bytes else math.inf


def first_characters(documents: Iterable[str], characters: int) -> list[str]:
    """The first documents, as many characters of them as asked for."""
    kept: list[str] = []
    for text in documents:
        if characters <= 0:
            break
        kept.append(text[:characters])
        characters -= len(text)
    return kept


def _tiktoken(name: str) -> tuple[Encode, int] | str:
    """How to encode with a vocabulary of tiktoken, and its size; or why it cannot be had."""
    try:
        import tiktoken
    except ModuleNotFoundError:
        return "tiktoken is not installed"
    if is_offline() and not os.environ.get("TIKTOKEN_CACHE_DIR"):
        return "offline, and TIKTOKEN_CACHE_DIR names no folder that has its file"
    found: list[tuple[Encode, int] | str] = []

    def load() -> None:
        try:
            encoding = tiktoken.get_encoding(name)
        except Exception as error:
            # requests raises errors of many kinds; their chain of causes is no reading for people.
            found.append(f"its file is not cached and cannot be fetched ({type(error).__name__})")
        else:
            found.append((encoding.encode_ordinary_batch, encoding.n_vocab))

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return found[0] if found else f"its file did not come within {_PATIENCE:.0f} seconds"
