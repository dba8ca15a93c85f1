"""What each token is as bytes.

Stop strings are matched on bytes, so a tokenizer is needed here only as a table: id -> bytes. It is
read off tokenizer.json for the two kinds whose tokens are byte strings that do not depend on their
neighbours, byte-level BPE and SentencePiece with byte fallback. Text at the very start of a
generation keeps its leading blank: a completion continues a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from endstop.protocol.errors import BrokenModel, UnsupportedModel
from endstop.protocol.model_files import checked_added_tokens, read_object, with_tokens_beside

if TYPE_CHECKING:
    from endstop.protocol.textstate import TextStates

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Table of token bytes: `pieces[id]` is bytes, and b"" for ids beyond the table.

    `special` holds the ids of special tokens, which text does not show by default.
    """

    __slots__ = ("_states", "_table", "special")

    def __init__(self, pieces: Iterable[bytes], special: Collection[int] = ()) -> None:
        self._table: tuple[bytes, ...] = tuple(pieces)
        for index, piece in enumerate(self._table):
            if not isinstance(piece, bytes):
                raise ValueError(f"the piece of token {index} must be bytes, got {piece!r}")
        self.special = frozenset(special)
        self._states: dict[tuple[tuple[str, ...], bool], TextStates] = {}

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._table)

    def __getitem__(self, token_id: int) -> bytes:
        if token_id < 0:
            raise IndexError(f"token ids are 0 or more, got {token_id}")
        return self._table[token_id] if token_id < len(self._table) else b""

    def join(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> bytes:
        """The bytes of several tokens, one behind the other."""
        hidden = self.special if skip_special_tokens else frozenset()
        return b"".join(self[token_id] for token_id in token_ids if token_id not in hidden)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, revision: str | None = None, offline: bool | None = None
    ) -> TokenBytes:
        """The table of a model: a directory, a .gguf file, or a name that resolves to one of them."""
        from endstop.protocol.resolve import resolve_model

        model = resolve_model(path, revision=revision, offline=offline, weights=False)
        if model.kind == "gguf":
            from endstop.protocol.gguf import read_gguf_metadata, tokenizer_json_from_gguf

            return cls.from_tokenizer_json(tokenizer_json_from_gguf(read_gguf_metadata(model.path)))
        content = read_object(model.path, "tokenizer.json")
        if content is None:
            raise BrokenModel(f"{model.path} has no tokenizer.json, from which the bytes of tokens are read.")
        # Some models name added tokens only in tokenizer_config.json.
        config = read_object(model.path, "tokenizer_config.json")
        listed = checked_added_tokens(model.path / "tokenizer.json", content.get("added_tokens") or [])
        added = with_tokens_beside(listed, model.path, config)
        try:
            _give_ids(added, _vocabulary(content["model"]["vocab"]))
        except (KeyError, TypeError) as error:
            raise BrokenModel(f"tokenizer.json lacks a part that is needed: {error!r}") from error
        return cls.from_tokenizer_json({**content, "added_tokens": added})

    @classmethod
    def from_tokenizer_json(cls, content: Mapping[str, Any]) -> TokenBytes:
        """The table from the content of a tokenizer.json.

        Raises UnsupportedModel for tokenizers whose tokens have no bytes of their own (WordPiece and
        others that write blanks between tokens), BrokenModel for a file that lacks its parts.
        """
        try:
            vocabulary = _vocabulary(content["model"]["vocab"])
            added = list(content.get("added_tokens") or [])
            steps = _decoder_steps(content.get("decoder"))
            size = max([*vocabulary.values(), *(token["id"] for token in added)], default=-1) + 1
            table = [b""] * size
            for text, token_id in vocabulary.items():
                table[token_id] = _piece(text, steps)
            special = set()
            for token in added:
                # Added tokens stand for their own text. But SentencePiece's user-defined symbols are added
                # tokens too (Gemma's runs of blanks), in the spelling of the vocabulary.
                if token.get("special"):
                    special.add(token["id"])
                plain = token["id"] in special or steps[0]["type"] == "ByteLevel"
                text = token["content"]
                table[token["id"]] = text.encode("utf-8") if plain else _piece(text, steps)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise BrokenModel(f"tokenizer.json lacks a part that is needed: {error!r}") from error
        return cls(table, special)


def _give_ids(added: Iterable[dict[str, Any]], vocabulary: Mapping[str, int]) -> None:
    """Ids for tokens that are only named, as the tokenizers library gives them."""
    new = max([len(vocabulary), *(token["id"] + 1 for token in added if "id" in token)])
    for token in added:
        if "id" not in token:
            token["id"] = vocabulary.get(token["content"], new)
            new = max(new, token["id"] + 1)


def _vocabulary(vocab: Any) -> dict[str, int]:
    if isinstance(vocab, dict):
        return vocab
    # Unigram keeps a list of [piece, score]; the id is the place in it.
    return {piece: index for index, (piece, _) in enumerate(vocab)}


def _decoder_steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The decoder as a list of steps that work on one token alone."""
    if decoder is None:
        raise UnsupportedModel(
            "this tokenizer has no decoder and would join its tokens with blanks; "
            "token bytes need byte-level BPE or SentencePiece with byte fallback"
        )
    steps = list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    kept: list[Mapping[str, Any]] = []
    for step in steps:
        if step["type"] == "Fuse":
            # What comes behind it works on whole text (the blank at its start), not on tokens.
            break
        if step["type"] not in ("ByteLevel", "ByteFallback", "Metaspace", "Replace", "Strip"):
            raise UnsupportedModel(
                f"tokenizers with a {step['type']} decoder are not supported; "
                "token bytes need byte-level BPE or SentencePiece with byte fallback"
            )
        if step["type"] == "Replace" and "String" not in step["pattern"]:
            raise UnsupportedModel("a Replace decoder with a regular expression is not supported")
        kept.append(step)
    if not any(step["type"] in ("ByteLevel", "ByteFallback", "Metaspace") for step in kept):
        raise UnsupportedModel(
            "this tokenizer's decoder is neither byte-level nor SentencePiece; "
            "token bytes need byte-level BPE or SentencePiece with byte fallback"
        )
    return kept


def _piece(text: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            return _byte_level(text)
        if kind == "ByteFallback":
            match = _BYTE_TOKEN.fullmatch(text)
            if match:
                return bytes([int(match[1], 16)])
        elif kind == "Metaspace":
            text = text.replace(step.get("replacement", "▁"), " ")
        elif kind == "Replace":
            text = text.replace(step["pattern"]["String"], step["content"])
        elif kind == "Strip":
            text = _strip(text, step["content"], step["start"], step["stop"])
    return text.encode("utf-8")


def _strip(text: str, content: str, start: int, stop: int) -> str:
    for _ in range(start):
        text = text.removeprefix(content)
    for _ in range(stop):
        text = text.removesuffix(content)
    return text


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (Radford et al., GPT-2, 2019).

    Printable Latin-1 stands for itself, the other 68 bytes follow in order from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _byte_level(text: str) -> bytes:
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[character] for character in text])
    except KeyError:
        # Not written in the alphabet, so it is plain text (an added token kept in the vocabulary).
        return text.encode("utf-8")
