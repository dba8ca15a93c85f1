"""A model's tokenizer: text to ids and back, with or without control tokens.

A thin layer over the `tokenizers` library, loaded from a Hugging Face directory or a GGUF file.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from endstop.protocol.errors import BrokenModel, RequestRefused
from endstop.protocol.model_files import (
    ChatTemplate,
    chat_templates,
    checked_added_tokens,
    parse_object,
    read_object,
    read_text,
    special_tokens,
    token_text,
    with_tokens_beside,
)
from endstop.protocol.tokenizer_pieces import merges_of, renamed_pieces

# Formats that are recognised for the error message, not read.
FOREIGN_TOKENIZER_FILES = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class AddedTokenInfo:
    """A token that is found in the text before anything else is split.

    Attributes:
        special: a control token, which `skip_special_tokens` hides.
        lstrip, rstrip: blanks on that side belong to the token.
        normalized: looked for in the normalised text instead of the raw one.
        single_word: not found inside a longer word.
    """

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        added_tokens: id -> what the tokenizer says about that added token.
        bos_token, eos_token, pad_token, unk_token: their texts, None where the model names none.
        chat_templates: name -> chat template (`default`, `tool_use`, ...).
        json: the tokenizer.json it stands for, every added token included.
        source: the directory or file it was read from, for messages.
    """

    def __init__(
        self,
        tokenizer_json: Mapping[str, Any],
        *,
        special: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        more_added_tokens: Iterable[Mapping[str, Any]] = (),
        source: str = "tokenizer.json",
    ) -> None:
        import tokenizers

        self.source = source
        self.json: dict[str, Any] = {**tokenizer_json, "truncation": None, "padding": None}
        self.chat_templates = dict(templates or {})
        self._special = dict(special or {})
        # The post-processor is kept apart: it adds BOS and EOS, but it also trims blanks off the
        # offsets, and those must stay exact.
        self._post_processor = None
        if self.json.get("post_processor"):
            bare = {"version": "1.0", "added_tokens": [], "post_processor": self.json["post_processor"]}
            empty = {"type": "BPE", "vocab": {}, "merges": []}
            self._post_processor = self._build({**bare, "model": empty}).post_processor
        self._inner = self._build({**self.json, "post_processor": None})
        known = {token.content for token in self._inner.get_added_tokens_decoder().values()}
        for token in more_added_tokens:
            if token["content"] not in known:
                flags = {k: v for k, v in token.items() if k not in ("id", "content")}
                self._inner.add_tokens([tokenizers.AddedToken(token["content"], **flags)])
        self.added_tokens: dict[int, AddedTokenInfo] = {
            token_id: AddedTokenInfo(
                token.content,
                special=token.special,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                single_word=token.single_word,
            )
            for token_id, token in sorted(self._inner.get_added_tokens_decoder().items())
        }
        self.json["added_tokens"] = [
            {"id": token_id, **asdict(token)} for token_id, token in self.added_tokens.items()
        ]

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, revision: str | None = None, offline: bool | None = None
    ) -> Tokenizer:
        """The tokenizer of a model: a directory, a .gguf file, a Hub id or a registry name.

        Raises BrokenModel where there is none, naming the files that were looked for.
        """
        from endstop.protocol.resolve import resolve_model

        model = resolve_model(path, revision=revision, offline=offline, weights=False)
        return cls._from_gguf(model.path) if model.kind == "gguf" else cls._from_directory(model.path)

    @classmethod
    def _from_directory(cls, directory: Path) -> Tokenizer:
        path = directory / "tokenizer.json"
        if not path.is_file():
            found = [name for name in FOREIGN_TOKENIZER_FILES if (directory / name).is_file()]
            looked_for = f"{directory} has no tokenizer: tokenizer.json was looked for"
            if found:
                raise BrokenModel(
                    f"{looked_for}, only {', '.join(found)} is there; load it with transformers and save "
                    "it with `save_pretrained`, which writes tokenizer.json."
                )
            raise BrokenModel(f"{looked_for}, and {', '.join(FOREIGN_TOKENIZER_FILES)}; add tokenizer.json.")
        tokenizer_json = parse_object(path, read_text(path))
        config = read_object(directory, "tokenizer_config.json")
        templates: dict[str, ChatTemplate] = chat_templates(directory, config)
        listed = checked_added_tokens(path, tokenizer_json.get("added_tokens") or [])
        own = {token["content"] for token in listed}
        added = with_tokens_beside(listed, directory, config)
        return cls(
            {**tokenizer_json, "added_tokens": [token for token in added if token["content"] in own]},
            special={key: token.text for key, token in special_tokens(directory, config).items()},
            templates={name: template.text for name, template in templates.items()},
            more_added_tokens=[token for token in added if token["content"] not in own],
            source=str(path),
        )

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer:
        from endstop.protocol.gguf import (
            read_gguf_metadata,
            tokenizer_config_from_gguf,
            tokenizer_json_from_gguf,
        )
        from endstop.protocol.gguf_tokenizer import chat_templates_of

        meta = read_gguf_metadata(path)
        config = tokenizer_config_from_gguf(meta)
        special = {
            key: text for key in config if key.endswith("_token") and (text := token_text(config[key]))
        }
        return cls(
            tokenizer_json_from_gguf(meta),
            special=special,
            templates=chat_templates_of(meta),
            source=str(path),
        )

    def _build(self, tokenizer_json: Mapping[str, Any]) -> Any:
        import tokenizers

        try:
            return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json))
        except Exception as error:
            # The library raises a bare Exception with the parser's message.
            raise BrokenModel(f"{self.source} cannot be read as a tokenizer: {error}.") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt, with BOS and EOS exactly as the model's own tokenizer adds them.

        Texts of added tokens in it become those tokens. With `add_special_tokens` false nothing is
        added around it: for text that came out of a chat template.
        """
        encoding = _encoded(self._inner, text)
        if add_special_tokens and self._post_processor is not None:
            encoding = self._post_processor.process(encoding, None, True)
        ids: list[int] = encoding.ids
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text` as plain text: nothing is added, and no added token can come out of it.

        For text without any added token's text this is `encode(text, add_special_tokens=False)`,
        SentencePiece's prefix included: a tokenizer that puts a blank before text puts one here as well.
        """
        ids: list[int] = _encoded(self._plain, text).ids
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids (nothing added around them) and for each the characters [start, end) it stands for."""
        encoding = _encoded(self._inner, text)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; incomplete characters become U+FFFD."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary, None for an unknown one."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str | None:
        """The token's text in the vocabulary, which in byte-level models spells bytes in its own alphabet."""
        token: str | None = self._inner.id_to_token(token_id)
        return token

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; a model may have more lm_head rows than that."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def chat_template(self) -> str | None:
        """The chat template named `default`, None for a model without one."""
        return self.chat_templates.get("default")

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ... -> text, as chat templates get them."""
        return dict(self._special)

    @property
    def bos_token(self) -> str | None:
        return self._special.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._special.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self._special.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id_of("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._id_of("unk_token")

    def _id_of(self, name: str) -> int | None:
        text = self._special.get(name)
        return None if text is None else self.token_to_id(text)

    @cached_property
    def _plain(self) -> Any:
        """The same tokenizer without added tokens: their texts are ordinary text to it."""
        model = self.json.get("model") or {}
        bare = {**self.json, "added_tokens": [], "post_processor": None}
        return self._build({**bare, "model": _without_pieces(model, self._unreachable(model))})

    def _unreachable(self, model: Mapping[str, Any]) -> set[str]:
        """The added tokens that plain text must not become.

        That is all of them but ordinary vocabulary that was also added: runs of blanks, and what merges
        make and no one declared special.
        """
        made = {"".join(pair) for pair in merges_of(model)}
        return {
            token.content
            for token in self.added_tokens.values()
            if token.special or not (token.content in made or token.content.strip(" \n\t\r▁") == "")
        }


def _without_pieces(model: Mapping[str, Any], texts: set[str]) -> dict[str, Any]:
    """A tokenizer model in which no text becomes one of `texts`, with every id in its place.

    Control tokens stand in the vocabulary of many models, where whole-word lookups, Unigram pieces or
    a merge could still produce them. Each is renamed to something that no one can guess.
    """
    secret = secrets.token_hex(16)
    return renamed_pieces(model, {text: f"{secret}{index}" for index, text in enumerate(sorted(texts))})


def _encoded(inner: Any, text: str) -> Any:
    """The encoding of `text` with nothing added around it. Raises RequestRefused for what is no Unicode."""
    try:
        return inner.encode(text, add_special_tokens=False)
    except TypeError:
        if isinstance(text, str):
            raise RequestRefused("the text holds half a surrogate pair, which is no valid Unicode") from None
        raise
