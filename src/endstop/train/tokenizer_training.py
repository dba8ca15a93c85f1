"""Training a byte-level BPE tokenizer.

Ids 0 to 255 are the bytes themselves, then come the merges in the order in which they were learned, then the
nine special tokens of `chat_format`. Both engines learn the same merges: the most frequent pair first, of
pairs equally frequent the one with the lower ids.
"""

from __future__ import annotations

import heapq
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Protocol

from endstop.models.directory import whole_directory
from endstop.protocol.errors import EndstopError
from endstop.protocol.tokenbytes import byte_level_alphabet
from endstop.train.chat_format import BOS, SPECIAL_TOKENS, tokenizer_files
from endstop.train.data.records import BadDocument

Engine = Literal["auto", "tokenizers", "rustbpe"]
Merge = tuple[bytes, bytes]
ENGINES = ("auto", "tokenizers", "rustbpe")
_LARGEST_VOCABULARY = 2**31 - 1
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
DIGITS = (1, 2)
"""How many digits may stand together in a token."""


def split_pattern(digits: int = 2) -> str:
    """The regular expression that cuts text into pieces, within which tokens are merged.

    It is GPT-4's with groups of at most so many digits: two as in nanochat (Karpathy, 2025), or one, for
    which GGUF has a name, so that llama.cpp can read the vocabulary. Raises ValueError for another number.
    """
    if digits not in DIGITS:
        raise ValueError(f"a token holds at most 1 or 2 digits, got {digits!r}")
    number = r"\p{N}" if digits == 1 else r"\p{N}{1,2}"
    return (
        r"'(?i:[sdmt]|ll|ve|re)"
        r"|[^\r\n\p{L}\p{N}]?+\p{L}+"
        rf"|{number}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]"
        r"|\s+(?!\S)"
        r"|\s+"
    )


# Regular expressions that look ahead overflow the stack of rustbpe on a million blanks in a row.
_PIECE_CHARS = 100_000

_log = logging.getLogger(__name__)


class Documents(Protocol):
    """Documents by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> str: ...


@dataclass(slots=True)
class TextsRead:
    """What a training has read so far.

    Attributes:
        documents, characters: used, after cutting.
        skipped: documents that hold half a surrogate pair, which no UTF-8 can express.
    """

    documents: int = 0
    characters: int = 0
    skipped: int = 0


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    engine: Engine = "auto",
    digits: int = 2,
    max_chars: int | None = None,
    document_chars: int | None = 10_000,
    allow_smaller: bool = False,
    progress: Callable[[TextsRead], None] | None = None,
) -> dict[str, Any]:
    """The content of a tokenizer.json, learned from texts.

    Args:
        texts: documents; each is read once, in order.
        vocab_size: all tokens together, the 256 bytes and the nine special tokens included.
        engine: what counts and merges. `auto` is rustbpe where it is installed, which is several times
            faster, and tokenizers otherwise; the merges are the same.
        digits: how many digits may stand together in a token; see `split_pattern`.
        max_chars: stop reading after so many characters.
        document_chars: of each document only so many characters from its start, so that no single one
            outweighs the others. None takes them whole (split at every 100,000 characters).
        allow_smaller: take what the texts give where they do not allow `vocab_size` tokens.
        progress: told after each document what was read so far.

    Raises EndstopError for texts that are all empty, that do not allow `vocab_size` tokens, or for an engine
    that is not installed; ValueError for parameters out of range.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY} (256 bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens), got {vocab_size}"
        )
    if vocab_size > _LARGEST_VOCABULARY:
        raise ValueError(f"vocab_size must be at most {_LARGEST_VOCABULARY:,}, got {vocab_size}")
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    for name, limit in (("max_chars", max_chars), ("document_chars", document_chars)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}")
    pattern = split_pattern(digits)
    read = TextsRead()
    documents = _documents(texts, read, max_chars, document_chars, progress)
    first = next(documents, None)
    if first is None:
        also = f" ({read.skipped} held half a surrogate pair)" if read.skipped else ""
        raise EndstopError(f"There is no text to train a tokenizer on: every document is empty{also}.")
    learn = _with_rustbpe if _chosen(engine) == "rustbpe" else _with_tokenizers
    merges = learn(chain([first], documents), vocab_size - SMALLEST_VOCABULARY, pattern)
    if read.skipped:
        _log.warning("skipped %d documents that hold half a surrogate pair", read.skipped)
    possible = SMALLEST_VOCABULARY + len(merges)
    if possible < vocab_size and not allow_smaller:
        raise EndstopError(
            f"{read.characters:,} characters of text allow at most {possible:,} tokens, not {vocab_size:,}: "
            "no pair is left to merge. Give more text, or ask for a smaller vocabulary."
        )
    return tokenizer_json(merges, digits)


def tokenizer_json(merges: Iterable[Merge], digits: int = 2) -> dict[str, Any]:
    """The content of the tokenizer.json with these merges, in the order in which they apply; `digits` as for
    `split_pattern`."""
    letters = _letters()
    spelled = [tuple("".join(letters[byte] for byte in part) for part in pair) for pair in merges]
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    for pair in spelled:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    specials = {text: len(vocabulary) + index for index, text in enumerate(SPECIAL_TOKENS)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": text, **flags} for text, token_id in specials.items()],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": split_pattern(digits)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        # These models have seen no document without BOS in front. Chat templates write it themselves and are
        # encoded with nothing added; documents of a training get theirs from the loader.
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": BOS, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"SpecialToken": {"id": BOS, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {BOS: {"id": BOS, "ids": [specials[BOS]], "tokens": [BOS]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in spelled],
        },
    }


def interleaved(
    sources: Sequence[Documents], unreadable: Callable[[BadDocument], None] | None = None
) -> Iterator[str]:
    """The documents of several sources, each spread evenly over the whole, so that a limit cuts all alike.

    A document that cannot be read is left out and told to `unreadable`.
    """

    def places(number: int) -> Iterator[tuple[float, int, int]]:
        size = len(sources[number])
        return (((index + 0.5) / size, number, index) for index in range(size))

    for _, number, index in heapq.merge(*map(places, range(len(sources)))):
        try:
            text = sources[number][index]
        except BadDocument as error:
            if unreadable is not None:
                unreadable(error)
            continue
        yield text


def save_tokenizer(content: Mapping[str, Any], directory: str | Path, *, replace: bool = False) -> None:
    """Write a tokenizer directory, whole or not at all: tokenizer, configs and chat template.

    Raises FileExistsError for a directory that exists, unless it is to be replaced.
    """
    files = tokenizer_files(content)
    with whole_directory(directory, replace=replace) as place:
        for name, text in files.items():
            (place / name).write_text(text, encoding="utf-8")


def _documents(
    texts: Iterable[str],
    read: TextsRead,
    max_chars: int | None,
    document_chars: int | None,
    progress: Callable[[TextsRead], None] | None,
) -> Iterator[str]:
    """The documents that are trained on, cut to their limits; `read` counts them."""
    if isinstance(texts, str):
        raise ValueError("texts must be many documents, got one str")
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"documents must be str, got {type(text).__name__}")
        left = None if max_chars is None else max_chars - read.characters
        limits = [limit for limit in (document_chars, left) if limit is not None]
        text = text[: min(limits)] if limits else text
        if not text:
            continue
        if not is_unicode(text):
            read.skipped += 1
            continue
        read.documents += 1
        read.characters += len(text)
        if progress is not None:
            progress(read)
        for start in range(0, len(text), _PIECE_CHARS):
            yield text[start : start + _PIECE_CHARS]
        if max_chars is not None and read.characters >= max_chars:
            return


def is_unicode(text: str) -> bool:
    """False for text that holds half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _chosen(engine: Engine) -> Engine:
    if engine == "tokenizers":
        return engine
    if find_spec("rustbpe") is not None:
        return "rustbpe"
    if engine == "rustbpe":
        raise EndstopError("The engine rustbpe is not installed: pip install rustbpe, or choose tokenizers.")
    return "tokenizers"


def _with_rustbpe(documents: Iterator[str], count: int, pattern: str) -> list[Merge]:
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(documents, 256 + count, pattern=pattern)
    return merges_of_ranks({bytes(token): rank for token, rank in trainer.get_mergeable_ranks()})


def _with_tokenizers(documents: Iterator[str], count: int, pattern: str) -> list[Merge]:
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    letters = _letters()
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # "Special" tokens get the first ids, in their order: so ids are bytes, by which equal counts are decided.
    # As an alphabet the bytes would be numbered by the character that spells them.
    trainer = trainers.BpeTrainer(vocab_size=256 + count, special_tokens=letters, show_progress=False)
    learner.train_from_iterator(documents, trainer)
    alphabet = byte_level_alphabet()
    model = json.loads(learner.to_str())["model"]
    return [
        (bytes(alphabet[letter] for letter in left), bytes(alphabet[letter] for letter in right))
        for left, right in model["merges"]
    ]


def merges_of_ranks(ranks: Mapping[bytes, int]) -> list[Merge]:
    """The merges behind tokens numbered in the order in which they were learned, as tiktoken stores them.

    A token was made of the two parts into which all earlier merges turn its bytes. Raises ValueError where
    there are no such parts.
    """
    merges: dict[Merge, int] = {}
    parts: dict[bytes, Merge] = {}
    earlier = {token for token in ranks if len(token) == 1}
    for token, rank in sorted(ranks.items(), key=itemgetter(1)):
        if token in earlier:
            continue
        # There is one such pair at most; the second of it is short more often than not.
        for at in range(len(token) - 1, 0, -1):
            left, right = token[:at], token[at:]
            if left in earlier and right in earlier and _left_apart(left, right, ranks, merges, parts):
                break
        else:
            raise ValueError(f"token {rank} ({token!r}) is not made of two earlier tokens")
        earlier.add(token)
        parts[token] = left, right
        merges[left, right] = rank
    return list(merges)


def _left_apart(
    left: bytes,
    right: bytes,
    ranks: Mapping[bytes, int],
    merges: Mapping[Merge, int],
    parts: Mapping[bytes, Merge],
) -> bool:
    """Whether the merges so far make exactly these two tokens of their bytes put together.

    Going back merge by merge, latest first: no two parts that ever met at the border may have a merge that
    came before the one that took them apart. Of the same merge at two places the left one came first.
    """
    while True:
        if ranks[left] > ranks[right]:
            if len(left) == 1:
                return True
            undone, left = ranks[left], parts[left][1]
        else:
            if len(right) == 1:
                return True
            undone, right = ranks[right] + 1, parts[right][0]
        if merges.get((left, right), undone) < undone:
            return False


def _letters() -> list[str]:
    """The character that spells each byte, by byte."""
    alphabet = byte_level_alphabet()
    return sorted(alphabet, key=alphabet.__getitem__)
