"""What the files of a model say about its ends: declared stop ids, special tokens, templates.

The stop set is put together from this and from what the chat template really writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from endstop.outcomes import StopRole
from endstop.protocol.errors import BrokenModel
from endstop.protocol.model_files import (
    ChatTemplate,
    added_tokens,
    chat_templates,
    parse_object,
    read_object,
    read_text,
    special_tokens,
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One stop id in one place; the role is what the place itself says, `eos` for most."""

    token_id: int
    file: str
    key: str
    role: StopRole = "eos"


@dataclass
class ModelFacts:
    """What the small files of a model say.

    Attributes:
        place: the directory or file, for messages.
        gguf: whether it is a GGUF file.
        declared: stop ids in the order of the files.
        unknown_eos: the tokenizer's eos_token where it is not in the vocabulary.
        tokens: text of every added token -> (id, special).
        special_tokens: `bos_token`, `eos_token`, ... -> text.
        templates: name -> chat template.
        vocab_size: rows of the lm_head.
        pad_id: the padding token.
        max_new_tokens: a limit that generation_config.json carries, None for none.
        text_of: id -> text of the token in the vocabulary, None where it is unknown.
    """

    place: str
    gguf: bool = False
    declared: list[Declaration] = field(default_factory=list)
    unknown_eos: str | None = None
    tokens: dict[str, tuple[int, bool]] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)
    templates: dict[str, ChatTemplate] = field(default_factory=dict)
    vocab_size: int | None = None
    pad_id: int | None = None
    max_new_tokens: int | None = None
    text_of: Callable[[int], str | None] = lambda _: None


def facts_of_directory(directory: Path) -> ModelFacts:
    """The facts of a Hugging Face directory. Raises BrokenModel with the file and the place."""
    generation = read_object(directory, "generation_config.json")
    config = read_object(directory, "config.json")
    tokenizer_config = read_object(directory, "tokenizer_config.json")
    if config is None and tokenizer_config is None and not (directory / "tokenizer.json").is_file():
        raise BrokenModel(
            f"{directory} is no model directory: config.json, tokenizer_config.json and tokenizer.json "
            "were looked for."
        )
    facts = ModelFacts(str(directory))
    facts.tokens = {
        token["content"]: (int(token["id"]), bool(token.get("special", False)))
        for token in added_tokens(directory)
    }
    specials = special_tokens(directory, tokenizer_config)
    facts.special_tokens = {key: token.text for key, token in specials.items()}
    facts.templates = chat_templates(directory, tokenizer_config)
    vocabulary = _Vocabulary(directory, facts.tokens)
    facts.text_of = vocabulary.text_of
    path = directory / "generation_config.json"
    _declare(facts, path, "eos_token_id", (generation or {}).get("eos_token_id"))
    path = directory / "config.json"
    text_config = (config or {}).get("text_config")
    _declare(facts, path, "eos_token_id", (config or {}).get("eos_token_id"))
    if isinstance(text_config, dict):
        _declare(facts, path, "text_config.eos_token_id", text_config.get("eos_token_id"))
    eos = specials.get("eos_token")
    if eos is not None:
        token_id = vocabulary.id_of(eos.text)
        if token_id is None:
            facts.unknown_eos = eos.text
        else:
            facts.declared.append(Declaration(token_id, eos.file, "eos_token"))
    for source in (text_config, config):
        size = source.get("vocab_size") if isinstance(source, dict) else None
        if facts.vocab_size is None and isinstance(size, int) and not isinstance(size, bool):
            facts.vocab_size = size
    facts.pad_id = _pad_id(generation, config, specials, vocabulary)
    limit = (generation or {}).get("max_new_tokens")
    facts.max_new_tokens = limit if isinstance(limit, int) and not isinstance(limit, bool) else None
    return facts


def facts_of_gguf(path: Path) -> ModelFacts:
    """The facts of a GGUF file, from its metadata and the shape of its lm_head."""
    from endstop.protocol.gguf import read_gguf_metadata
    from endstop.protocol.gguf_tokenizer import (
        STOP_KEYS,
        added_tokens_of,
        chat_templates_of,
        token_id_of,
        tokenizer_config_from_gguf,
    )

    meta = read_gguf_metadata(path)
    facts = ModelFacts(str(path), gguf=True, vocab_size=meta.vocab_size)
    roles: dict[str, StopRole] = {"eos": "eos", "turn_end": "turn_end", "tool_end": "tool_end"}
    for key, role in STOP_KEYS.items():
        token_id = token_id_of(meta, key)
        if token_id is not None:
            facts.declared.append(Declaration(token_id, path.name, key, roles[role]))
    facts.pad_id = token_id_of(meta, "tokenizer.ggml.padding_token_id")
    texts = meta.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(texts, list):
        return facts
    facts.tokens = {token["content"]: (token["id"], token["special"]) for token in added_tokens_of(meta)}
    facts.text_of = lambda token_id: texts[token_id] if token_id < len(texts) else None
    config = tokenizer_config_from_gguf(meta)
    facts.special_tokens = {
        key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)
    }
    facts.templates = {
        name: ChatTemplate(
            text, path.name, "tokenizer.chat_template" + ("" if name == "default" else f".{name}")
        )
        for name, text in chat_templates_of(meta).items()
    }
    return facts


class _Vocabulary:
    """Ids and texts of tokens: added tokens first, the rest of tokenizer.json only when it is needed."""

    def __init__(self, directory: Path, tokens: dict[str, tuple[int, bool]]) -> None:
        self.directory = directory
        self.ids = {text: token_id for text, (token_id, _) in tokens.items()}
        self.texts = {token_id: text for text, token_id in self.ids.items()}
        self.whole = False

    def id_of(self, text: str) -> int | None:
        if text not in self.ids:
            self._read_all()
        return self.ids.get(text)

    def text_of(self, token_id: int) -> str | None:
        if token_id not in self.texts:
            self._read_all()
        return self.texts.get(token_id)

    def _read_all(self) -> None:
        path = self.directory / "tokenizer.json"
        if self.whole or not path.is_file():
            return
        self.whole = True
        model = parse_object(path, read_text(path)).get("model")
        pieces = model.get("vocab") if isinstance(model, dict) else None
        for text, token_id in _pieces(pieces):
            self.ids.setdefault(text, token_id)
            self.texts.setdefault(token_id, text)


def _pieces(vocabulary: Any) -> Iterator[tuple[str, int]]:
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    elif isinstance(vocabulary, list):
        yield from ((entry[0], index) for index, entry in enumerate(vocabulary))


def _declare(facts: ModelFacts, path: Path, key: str, value: Any) -> None:
    for token_id in _ids(path, key, value):
        facts.declared.append(Declaration(token_id, path.name, key))


def _ids(path: Path, key: str, value: Any) -> list[int]:
    """The ids of an `eos_token_id`: nothing, an integer or a list; -1 is the old way to say none."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int):
            raise BrokenModel(f"{path}: {key} must be an integer or a list of integers, got {value!r}.")
    return [item for item in values if item >= 0]


def _pad_id(
    generation: dict[str, Any] | None, config: dict[str, Any] | None, specials: Any, vocabulary: _Vocabulary
) -> int | None:
    for source in (generation, config):
        value = (source or {}).get("pad_token_id")
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    pad = specials.get("pad_token")
    return vocabulary.id_of(pad.text) if pad is not None else None
