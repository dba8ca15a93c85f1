"""The small files of a model directory: JSON with a place in its errors, special tokens, chat templates.

Where the same thing can stand in several files, the order is that of transformers 5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from endstop.protocol.errors import BrokenModel

SPECIAL_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template and where it stands."""

    text: str
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """The text of a special token such as `eos_token`, and the file that names it."""

    text: str
    file: str


def read_text(path: Path) -> str:
    """The text of a file. Raises BrokenModel where it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise BrokenModel(f"{path} is not UTF-8 text (byte {error.start}); fetch the model again.") from error


def parse_object(path: Path, text: str) -> dict[str, Any]:
    """`text`, the content of `path`, as a JSON object. Raises BrokenModel with the file and the place."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BrokenModel(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    except RecursionError:
        raise BrokenModel(f"{path} is nested too deeply to be read.") from None
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def read_object(directory: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in `directory`/`name`, None where there is no such file."""
    path = directory / name
    return parse_object(path, read_text(path)) if path.is_file() else None


def token_text(value: Any) -> str | None:
    """The text of a token that a config gives as a string or as {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def added_tokens(directory: Path) -> list[dict[str, Any]]:
    """The added tokens of a directory, each with at least `id` and `content`, in the order of their ids.

    tokenizer.json comes first; what only other files know is added to it. Of tokenizer.json only that list
    is parsed, since the vocabulary beside it has megabytes; the vocabulary is read where a special token
    is named that no list gives an id.
    """
    path = directory / "tokenizer.json"
    own = _added_tokens_of_tokenizer_json(path) if path.is_file() else []
    config = read_object(directory, "tokenizer_config.json")
    found = with_tokens_beside(own, directory, config)
    if path.is_file() and any("id" not in token for token in found):
        ids = _vocabulary_ids(parse_object(path, read_text(path)))
        found = [{"id": ids.get(token["content"]), **token} for token in found]
    found = [token for token in found if token.get("id") is not None]
    return sorted(found, key=lambda token: int(token["id"]))


def with_tokens_beside(
    own: Iterable[Mapping[str, Any]], directory: Path, config: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """The added tokens `own` of a tokenizer.json and those that other files add, as transformers 5 does it.

    `added_tokens_decoder` also decides about the flags of a token that is there; a token that is named
    (`eos_token`, ...) is special. Tokens that are only named, in `additional_special_tokens` for one, come
    last and have no `id`: it is the vocabulary's, or a new one.
    """
    found = {token["content"]: dict(token) for token in own}
    for token in config_added_tokens(directory, config):
        known = found.get(token["content"])
        if known is None:
            found[token["content"]] = token
        elif token.get("replaces"):
            known.update({name: value for name, value in token.items() if name not in ("id", "content")})
    for token in found.values():
        token.pop("replaces", None)
    for token in _named_tokens(directory, config):
        known = found.setdefault(token["content"], token)
        if token.pop("named"):
            known["special"] = True
        known.pop("named", None)
    return list(found.values())


def config_added_tokens(directory: Path, config: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Added tokens that stand beside tokenizer.json: `added_tokens_decoder`, else added_tokens.json."""
    decoder = (config or {}).get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for token_id, token in sorted(decoder.items(), key=lambda item: (len(item[0]), item[0])):
            text = token_text(token)
            if text is None or not str(token_id).isdecimal():
                path = directory / "tokenizer_config.json"
                raise BrokenModel(f"{path}: added_tokens_decoder has no usable token under {token_id!r}.")
            yield {**_flags(token), "id": int(token_id), "content": text, "replaces": isinstance(token, dict)}
        return
    legacy = read_object(directory, "added_tokens.json")
    specials = {token.text for token in special_tokens(directory, config).values()}
    for text, token_id in (legacy or {}).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise BrokenModel(f"{directory / 'added_tokens.json'}: the id of {text!r} is {token_id!r}.")
        special = text in specials
        yield {"id": token_id, "content": text, "special": special, "normalized": not special}


def _flags(token: Any, special: bool = False) -> dict[str, bool]:
    """The flags of a token in a config, with the defaults of the tokenizers library."""
    given = token if isinstance(token, dict) else {}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    special = special or given.get("special") is True
    flags.update({"special": special, "normalized": not special})
    flags.update({name: value for name, value in given.items() if name in flags and isinstance(value, bool)})
    return {**flags, "special": special}


def _named_tokens(directory: Path, config: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Special tokens by the keys that name them; `named` is true for `eos_token` and the like."""
    places = [config or {}]
    if config is None or "added_tokens_decoder" not in config:
        # As in `special_tokens`: the map of older files wins.
        places.insert(0, read_object(directory, "special_tokens_map.json") or {})
    more: list[Any] = []
    for place in places:
        extra = place.get("extra_special_tokens") or place.get("additional_special_tokens") or ()
        more += extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
        more += [
            value for key, value in place.items() if key.endswith("_token") and key not in SPECIAL_TOKEN_KEYS
        ]
    named = [
        next(place[key] for place in places if token_text(place.get(key)))
        for key in special_tokens(directory, config)
    ]
    for values, is_named in ((named, True), (more, False)):
        for value in values:
            text = token_text(value)
            if text is not None:
                yield {**_flags(value, special=True), "content": text, "named": is_named}


def _vocabulary_ids(tokenizer_json: Mapping[str, Any]) -> dict[str, int]:
    model = tokenizer_json.get("model")
    pieces = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(pieces, list):
        return {piece[0]: token_id for token_id, piece in enumerate(pieces)}
    return pieces if isinstance(pieces, dict) else {}


def special_tokens(directory: Path, config: dict[str, Any] | None) -> dict[str, SpecialToken]:
    """`eos_token`, `bos_token`, ... of a directory.

    special_tokens_map.json is read only where tokenizer_config.json has no `added_tokens_decoder`,
    and then it wins: files of older transformers versions.
    """
    found: dict[str, SpecialToken] = {}
    for key in SPECIAL_TOKEN_KEYS:
        text = token_text((config or {}).get(key))
        if text is not None:
            found[key] = SpecialToken(text, "tokenizer_config.json")
    if config is None or "added_tokens_decoder" not in config:
        for key, value in (read_object(directory, "special_tokens_map.json") or {}).items():
            text = token_text(value)
            if key in SPECIAL_TOKEN_KEYS and text is not None:
                found[key] = SpecialToken(text, "special_tokens_map.json")
    return found


def chat_templates(directory: Path, config: dict[str, Any] | None) -> dict[str, ChatTemplate]:
    """Name -> chat template of a directory; the unnamed one is `default`.

    chat_template.jinja and additional_chat_templates/*.jinja win over tokenizer_config.json, which
    wins over the chat_template.json of processors.
    """
    found: dict[str, ChatTemplate] = {}
    single = directory / "chat_template.jinja"
    if single.is_file():
        found["default"] = ChatTemplate(read_text(single), single.name, "template")
    more = directory / "additional_chat_templates"
    if more.is_dir():
        for path in sorted(more.glob("*.jinja")):
            found[path.stem] = ChatTemplate(read_text(path), f"{more.name}/{path.name}", "template")
    if found:
        return found
    value = (config or {}).get("chat_template")
    file = "tokenizer_config.json"
    if value is None:
        value = (read_object(directory, "chat_template.json") or {}).get("chat_template")
        file = "chat_template.json"
    if isinstance(value, str):
        return {"default": ChatTemplate(value, file, "chat_template")}
    if isinstance(value, dict):
        value = [{"name": name, "template": text} for name, text in value.items()]
    for entry in value if isinstance(value, list) else ():
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(k), str) for k in ("name", "template")
        ):
            raise BrokenModel(f"{directory / file}: an entry of chat_template has no name and template.")
        found[entry["name"]] = ChatTemplate(entry["template"], file, f"chat_template ({entry['name']})")
    return found


def _added_tokens_of_tokenizer_json(path: Path) -> list[dict[str, Any]]:
    text = read_text(path)
    match = _ADDED_TOKENS.search(text)
    tokens: Any = None
    # A file that does not end where an object ends is cut off: parsing it whole gives the place.
    if match is not None and text[-64:].rstrip().endswith("}"):
        try:
            tokens, _ = json.JSONDecoder().raw_decode(text, match.end())
        except json.JSONDecodeError:
            tokens = None
    if tokens is None:
        tokens = parse_object(path, text).get("added_tokens") or []
    return checked_added_tokens(path, tokens)


def checked_added_tokens(path: Path, tokens: Any) -> list[dict[str, Any]]:
    """The `added_tokens` of a tokenizer.json. Raises BrokenModel unless each has an id and a content."""
    if not isinstance(tokens, list) or not all(map(_is_added_token, tokens)):
        raise BrokenModel(f"{path}: every entry of added_tokens needs an id and a content.")
    return list(tokens)


def _is_added_token(token: Any) -> bool:
    """Whether an entry of added_tokens has an id of 0 or more and a content."""
    token_id = token.get("id") if isinstance(token, dict) else None
    whole = isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0
    return whole and isinstance(token.get("content"), str)
