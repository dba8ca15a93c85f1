"""From the metadata of a GGUF file to the three files that a Hugging Face directory has instead.

`tokenizer.ggml.model` names the kind: `gpt2` is byte-level BPE with merges, `llama` a SentencePiece
BPE model with scores and byte fallback. Other kinds are refused.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

from endstop.protocol.errors import BrokenModel, UnsupportedModel
from endstop.protocol.pretokenizers import PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    from endstop.protocol.gguf import GGUFMetadata

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "▁"
# Keys that end a turn, with the role that the format gives them.
STOP_KEYS = {
    "tokenizer.ggml.eos_token_id": "eos",
    "tokenizer.ggml.eot_token_id": "turn_end",
    "tokenizer.ggml.eom_token_id": "tool_end",
}


def tokenizer_json_from_gguf(meta: GGUFMetadata) -> dict[str, Any]:
    """A tokenizer.json (of the `tokenizers` library) that encodes as the model's own tokenizer does.

    Raises UnsupportedModel for a kind or a pre-tokenizer that is not known (a guess would encode
    wrongly and silently), BrokenModel for a vocabulary that contradicts itself.
    """
    kind = meta.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(meta)
    if kind == "llama":
        return _sentencepiece(meta)
    if kind is None:
        raise BrokenModel(f"{meta.path} has no tokenizer: the key tokenizer.ggml.model is missing.")
    raise UnsupportedModel(
        f"{meta.path} has a tokenizer of the kind {kind!r}; endstop reads `gpt2` and `llama` from GGUF, "
        "so use the model's Hugging Face directory."
    )


def tokenizer_config_from_gguf(meta: GGUFMetadata) -> dict[str, Any]:
    """A tokenizer_config.json: special tokens, whether BOS and EOS are added, the chat templates."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(meta, "bos"),
        "add_eos_token": _adds(meta, "eos"),
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = _tokens(meta)
    for key, name in names.items():
        token_id = token_id_of(meta, f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[name] = tokens[token_id]
    length = meta.metadata.get(f"{meta.architecture}.context_length")
    if isinstance(length, int):
        config["model_max_length"] = length
    templates = chat_templates_of(meta)
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def generation_config_from_gguf(meta: GGUFMetadata) -> dict[str, Any]:
    """A generation_config.json: eos_token_id is the union of the eos, eot and eom keys, in that order."""
    ids: list[int] = []
    for key in STOP_KEYS:
        token_id = token_id_of(meta, key)
        if token_id is not None and token_id not in ids:
            ids.append(token_id)
    config: dict[str, Any] = {}
    for key, name in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        token_id = token_id_of(meta, f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[name] = token_id
    if ids:
        config["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return config


def chat_templates_of(meta: GGUFMetadata) -> dict[str, str]:
    """Name -> chat template; the unnamed one is `default`. Empty for a model without a template."""
    prefix = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    for key, value in meta.metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(prefix + ".")):
            templates[key[len(prefix) + 1 :] or "default"] = value
    return templates


def token_id_of(meta: GGUFMetadata, key: str) -> int | None:
    """The id under `key`; None where it is missing or the format's "no such token" (-1)."""
    value = meta.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BrokenModel(f"{meta.path}: {key} must be a token id, got {value!r}.")
    return None if value < 0 or value >= 0xFFFFFFFF else value


def added_tokens_of(meta: GGUFMetadata) -> list[dict[str, Any]]:
    """The added tokens as in a tokenizer.json: control tokens are special, user-defined ones are not."""
    tokens, types = _tokens(meta), _types(meta)
    sentencepiece = meta.metadata.get("tokenizer.ggml.model") == "llama"
    added = []
    for token_id, kind in enumerate(types):
        if kind == NORMAL:
            continue
        special = kind == CONTROL or (kind == UNKNOWN and sentencepiece)
        if special or (kind == USER_DEFINED and not _is_blank(tokens[token_id])):
            added.append(
                {
                    "id": token_id,
                    "content": tokens[token_id],
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": special,
                }
            )
    return added


def _byte_level(meta: GGUFMetadata) -> dict[str, Any]:
    pre = _pre_tokenizer(meta)
    tokens = _tokens(meta)
    vocabulary = _vocabulary(meta)
    merges: list[list[str]] = []
    for index, merge in enumerate(_strings(meta, "tokenizer.ggml.merges")):
        # A piece may begin with a space in vocabularies that are not byte-level, so the first is skipped.
        left, _, right = merge[1:].partition(" ")
        pair = [merge[:1] + left, right]
        if not right or any(part not in vocabulary for part in (*pair, "".join(pair))):
            raise BrokenModel(
                f"{meta.path}: merge {index} in tokenizer.ggml.merges, {merge!r}, is not made of tokens."
            )
        merges.append(pair)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre.ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return _assemble(meta, tokens, pre.normalizer(), pre.pre_tokenizer(), model, decoder)


def _sentencepiece(meta: GGUFMetadata) -> dict[str, Any]:
    tokens, types = _tokens(meta), _types(meta)
    vocabulary = _vocabulary(meta)
    scores = meta.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise BrokenModel(
            f"{meta.path}: a `llama` tokenizer needs a score for each of its {len(tokens)} tokens in "
            "tokenizer.ggml.scores."
        )
    # Blank user-defined pieces (runs of spaces and newlines) are ordinary vocabulary with the best score.
    pieces = {
        token.replace(" ", SPACE): (0.0 if kind == USER_DEFINED else float(score))
        for token, kind, score in zip(tokens, types, scores, strict=False)
        if kind == NORMAL or (kind == USER_DEFINED and _is_blank(token))
    }
    for piece in pieces.keys() - vocabulary.keys():
        vocabulary[piece] = vocabulary.pop(piece.replace(SPACE, " "))
    unknown = token_id_of(meta, "tokenizer.ggml.unknown_token_id")
    if unknown is None and UNKNOWN in types:
        unknown = types.index(UNKNOWN)
    prefix = bool(meta.metadata.get("tokenizer.ggml.add_space_prefix", True))
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": types.count(BYTE) >= 256,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": _merges_of_scores(pieces, vocabulary),
    }
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _assemble(
        meta,
        tokens,
        {"type": "Sequence", "normalizers": normalizers},
        None,
        model,
        {"type": "Sequence", "decoders": decoders},
    )


def _merges_of_scores(pieces: dict[str, float], vocabulary: dict[str, int]) -> list[list[str]]:
    """Merges whose order does what SentencePiece does with scores: the best-scored result first.

    Every split of a piece into two pieces is a merge. Of the splits of equally scored pieces the
    longer parts come first, as in the merges that transformers derives.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score in pieces.items():
        splits = [
            (vocabulary[piece[:cut]], vocabulary[piece[cut:]], cut)
            for cut in range(1, len(piece))
            if piece[:cut] in pieces and piece[cut:] in pieces
        ]
        for _, _, cut in sorted(splits):
            ranked.append((score, cut, len(piece) - cut, piece[:cut], piece[cut:]))
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in ranked]


def _assemble(
    meta: GGUFMetadata,
    tokens: list[str],
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    model: dict[str, Any],
    decoder: dict[str, Any],
) -> dict[str, Any]:
    sequence = {"id": "A", "type_id": 0}
    single: list[dict[str, Any]] = [{"Sequence": sequence}]
    specials: dict[str, dict[str, Any]] = {}
    for name, place in (("bos", 0), ("eos", len(single))):
        token_id = token_id_of(meta, f"tokenizer.ggml.{name}_token_id")
        if _adds(meta, name) and token_id is not None and token_id < len(tokens):
            text = tokens[token_id]
            single.insert(0 if place == 0 else len(single), {"SpecialToken": {"id": text, "type_id": 0}})
            specials[text] = {"id": text, "ids": [token_id], "tokens": [text]}
    post_processor = None
    if specials:
        second = [{"Sequence": {"id": "B", "type_id": 1}} if "Sequence" in part else part for part in single]
        post_processor = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single + second,
            "special_tokens": specials,
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens_of(meta),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": model,
    }


def _pre_tokenizer(meta: GGUFMetadata) -> PreTokenizer:
    name = meta.metadata.get("tokenizer.ggml.pre", "default")
    try:
        return PRE_TOKENIZERS[name]
    except (KeyError, TypeError):
        raise UnsupportedModel(
            f"{meta.path} splits text with the pre-tokenizer {name!r}, which endstop does not know; "
            "use the model's Hugging Face directory."
        ) from None


def _adds(meta: GGUFMetadata, name: str) -> bool:
    """Whether the tokenizer adds `name` (bos, eos) to a raw prompt; the defaults are the format's."""
    said = meta.metadata.get(f"tokenizer.ggml.add_{name}_token")
    if said is not None:
        return bool(said)
    if name == "eos":
        return False
    if meta.metadata.get("tokenizer.ggml.model") == "llama":
        return True
    pre = PRE_TOKENIZERS.get(str(meta.metadata.get("tokenizer.ggml.pre", "default")))
    return pre is not None and pre.add_bos


def _strings(meta: GGUFMetadata, key: str) -> list[str]:
    value = meta.metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise BrokenModel(f"{meta.path} has no usable tokenizer: {key} must be an array of strings.")
    return value


def _tokens(meta: GGUFMetadata) -> list[str]:
    return _strings(meta, "tokenizer.ggml.tokens")


def _types(meta: GGUFMetadata) -> list[int]:
    """The type of each token; one that the metadata names as an end or a beginning is a control token.

    Some conversions call it an ordinary one. Templates write it all the same, and it must not fall apart.
    """
    tokens = _tokens(meta)
    types = meta.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = [NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise BrokenModel(
            f"{meta.path}: tokenizer.ggml.token_type must have a type for each of {len(tokens)} tokens."
        )
    types = list(types)
    for key in (*STOP_KEYS, "tokenizer.ggml.bos_token_id"):
        token_id = token_id_of(meta, key)
        if token_id is not None and token_id < len(types):
            text = tokens[token_id]
            # Blanks, also in the byte-level alphabet (from U+0100), stay the text that they are.
            if text and not _is_blank(text) and not any("\u0100" <= letter <= "\u0143" for letter in text):
                types[token_id] = CONTROL
    return types


def _vocabulary(meta: GGUFMetadata) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(_tokens(meta)):
        first = vocabulary.setdefault(token or f"[EMPTY_{token_id}]", token_id)
        if first != token_id:
            raise BrokenModel(
                f"{meta.path}: tokenizer.ggml.tokens has {token!r} twice, as {first} and {token_id}."
            )
    return vocabulary


def _is_blank(token: str) -> bool:
    """Whether a token is only spaces, newlines and tabs, in SentencePiece's spelling or plain."""
    return bool(token) and all(
        letter in (SPACE, " ", "\n", "\t", "\r") or unicodedata.category(letter) == "Zs" for letter in token
    )
