"""A Hugging Face tokenizer as the keys of a GGUF file: tokens, types, merges, ends, chat template.

A GGUF file keeps only the name of a pre-tokenizer, and readers have the patterns built in. So a name is
written only if with it the model's own merges give the model's own ids, on texts that are made to tell the
patterns apart. No torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from endstop.protocol.errors import UnsupportedModel
from endstop.protocol.gguf_tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED
from endstop.protocol.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenbytes import byte_level_alphabet
from endstop.protocol.tokenizer import Tokenizer
from endstop.protocol.tokenizer_pieces import merges_of

_ROLE_KEYS = {"eos": "eos", "turn_end": "eot", "tool_end": "eom"}
_TEXTS = (
    "It's the dog's, they'LL say; WE'VE 'sour' can'T I'm I'd you're rock'n'roll o'clock 'S 'll",
    "camelCaseWord HTTPServer iPhone x1y22z333 v1.2.3 3.14159 1,234,567 12:45 2024-05-06 ½ ² ٣٤٥ Ⅷ",
    "a  b   c    d\te\t\tf\n\ng\n \n  \nh\r\n\r\ni \n\n\n j   \n",
    "  leading, trailing  ",
    "wait... what?! (yes) [no] {x: 1} <a/b> $5.00 50% #tag @name a_b a-b a/b \\n ``` == != && || --> ~^|",
    "naïve café élève e\u0301 Ångström straße Привет, мир! Γειά σου שלום مرحبا नमस्ते สวัสดี",
    "日本語のテキスト。漢字かなカナ 한국어 문장입니다. 中文，标点！ 😀👍🏽 👩‍👩‍👧 …—–“quotes”‘x’",
    "def f(x):\n    if x > 10:\n        return x ** 2  # ok\n\n\n",
    "\u00a0non-breaking\u2003em space\u200bzero width\ufeff",
    "",
    " ",
    "\n",
)
_LETTERS = " \n\t\r aaBbz'sStdl0123456789.,!?-_/()éß日の한😀\u00a0\u0301²"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer's keys of a GGUF file.

    Attributes:
        keys: name behind `tokenizer.` -> value.
        left_out: stop ids for which the format has no further key; other programs will not stop there.
    """

    keys: Mapping[str, Any]
    left_out: tuple[int, ...]


def vocabulary_of(directory: str | Path, size: int, *, pre: str | None = None) -> Vocabulary:
    """The tokenizer of a model directory, with `size` tokens (rows of the embedding).

    `pre` names the pre-tokenizer instead of having it found; then nothing is checked about it.
    Raises UnsupportedModel for a tokenizer that is not byte-level BPE or splits text like none of the known
    pre-tokenizers.
    """
    tokenizer = Tokenizer.from_pretrained(directory)
    content = tokenizer.json
    _refuse_other_kinds(content, directory)
    name = pre if pre is not None else matching_pre_tokenizer(content, str(directory))
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [UNUSED] * size
    for text, token_id in content["model"]["vocab"].items():
        tokens[_inside(token_id, size, directory)], types[token_id] = text, NORMAL
    for token_id, info in tokenizer.added_tokens.items():
        tokens[_inside(token_id, size, directory)] = info.content
        types[token_id] = CONTROL if info.special else USER_DEFINED
    stops = StopSet.from_pretrained(directory)
    ends, left_out = _ends(stops)
    probe = tokenizer.encode("a")
    keys: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": name,
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": [f"{left} {right}" for left, right in merges_of(content["model"])],
        **ends,
    }
    ids = {info.content: token_id for token_id, info in tokenizer.added_tokens.items()}
    for key, text in (("bos", tokenizer.bos_token), ("padding", tokenizer.pad_token)):
        if text in ids:
            keys[f"ggml.{key}_token_id"] = ids[text]
    keys["ggml.add_bos_token"] = tokenizer.bos_token in ids and probe[:1] == [ids[tokenizer.bos_token]]
    if "default" in tokenizer.chat_templates:
        keys["chat_template"] = tokenizer.chat_templates["default"]
    return Vocabulary(keys, left_out)


def matching_pre_tokenizer(tokenizer_json: Mapping[str, Any], source: str = "the tokenizer") -> str:
    """The name of a pre-tokenizer with which the same merges give the same ids.

    Of several the one that splits most probe texts alike: where the vocabulary has no token that would show
    a difference, patterns may differ and give the same ids.
    Raises UnsupportedModel, with the text on which the closest one differs, if there is none.
    """
    own = _built(tokenizer_json, tokenizer_json.get("normalizer"), tokenizer_json.get("pre_tokenizer"))
    texts = list(probe_texts(own.get_vocab(with_added_tokens=False)))
    splits = [_split(own, text) for text in texts]
    expected = _ids(own, texts)
    same_ids: dict[str, int] = {}
    closest: tuple[int, str, str] = (-1, "", "")
    seen: set[PreTokenizer] = set()
    for name, pre in PRE_TOKENIZERS.items():
        if pre in seen or name == "default":
            continue
        seen.add(pre)
        other = _built(tokenizer_json, pre.normalizer(), pre.pre_tokenizer(), pre.ignore_merges)
        # Most names fail one of the written texts already.
        for part in (slice(0, len(_TEXTS)), slice(len(_TEXTS), None)):
            found = _ids(other, texts[part])
            differs = next((i for i, ids in enumerate(found) if ids != expected[part][i]), None)
            if differs is not None:
                index = differs + part.start
                closest = max(closest, (index, name, _difference(own, other, texts[index])))
                break
        else:
            same_ids[name] = sum(
                _split(other, text) == split for text, split in zip(texts, splits, strict=True)
            )
            if same_ids[name] == len(texts):
                return name
    if same_ids:
        return max(same_ids, key=lambda name: same_ids[name])
    _, name, words = closest
    raise UnsupportedModel(
        f"{source} splits text like none of the pre-tokenizers that GGUF has names for; the closest, "
        f"{name!r}, makes other tokens of {words}. Train the tokenizer with single digits where numbers are "
        "the difference, or name a pre-tokenizer (--pre NAME) and accept that some texts are split otherwise."
    )


def _built(
    content: Mapping[str, Any], normalizer: Any, pre_tokenizer: Any, ignore_merges: bool | None = None
) -> Any:
    import json

    import tokenizers

    model = dict(content["model"])
    if ignore_merges is not None:
        model["ignore_merges"] = ignore_merges
    changed = {
        "post_processor": None,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "model": model,
    }
    return tokenizers.Tokenizer.from_str(json.dumps({**content, **changed}))


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _split(tokenizer: Any, text: str) -> list[str]:
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def probe_texts(vocabulary: Iterable[str], count: int = 400, seed: int = 0) -> Iterable[str]:
    """Texts that tell pre-tokenizers apart: written ones, all numbers of up to four digits, random ones.

    The random ones are made of characters of every class and of pieces of the vocabulary.
    """
    yield from _TEXTS
    yield " ".join(str(number) for number in range(10_000))
    yield "".join(f"{number:03d}a" for number in range(1000))
    chance = random.Random(seed)
    alphabet = byte_level_alphabet()
    pieces = [
        bytes(alphabet[letter] for letter in text).decode("utf-8", "ignore")
        for text in sorted(vocabulary)
        if all(letter in alphabet for letter in text)
    ]
    pieces = [piece for piece in pieces if piece] or ["a"]
    for _ in range(count):
        letters = "".join(chance.choices(_LETTERS, k=chance.randint(1, 24)))
        yield letters + "".join(chance.choices(pieces, k=12)) + letters[::-1]


def _difference(own: Any, other: Any, text: str) -> str:
    """The first place where two tokenizers differ, with a few characters around it."""
    left, right = (tokenizer.encode(text, add_special_tokens=False).offsets for tokenizer in (own, other))
    place = next(
        (mine[0] for mine, theirs in zip(left, right, strict=False) if mine != theirs),
        0,
    )
    return repr(text[max(0, place - 4) : place + 8])


def _ends(stops: StopSet) -> tuple[dict[str, int], tuple[int, ...]]:
    """One id for each key; the terminator has the first right to its own."""
    keys: dict[str, int] = {}
    left_out: list[int] = []
    for token_id in sorted(stops.ids, key=lambda stop: (stop != stops.terminator, stop)):
        wanted = [_ROLE_KEYS[stops.roles[token_id]], "eos", "eot", "eom"]
        free = next((key for key in wanted if f"ggml.{key}_token_id" not in keys), None)
        if free is None:
            left_out.append(token_id)
        else:
            keys[f"ggml.{free}_token_id"] = token_id
    if "ggml.eos_token_id" not in keys and stops.terminator is not None:
        keys["ggml.eos_token_id"] = stops.terminator
    return keys, tuple(left_out)


def _refuse_other_kinds(content: Mapping[str, Any], directory: str | Path) -> None:
    model = content.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("continuing_subword_prefix"):
        raise UnsupportedModel(
            f"{directory} has a tokenizer that is not byte-level BPE, the only kind that endstop writes into "
            "GGUF; use llama.cpp's own converter for this model."
        )
    if "ByteLevel" not in str(content.get("pre_tokenizer")):
        raise UnsupportedModel(
            f"{directory} has a BPE tokenizer that does not work on bytes, and GGUF's `gpt2` kind does; use "
            "llama.cpp's own converter for this model."
        )


def _inside(token_id: int, size: int, directory: str | Path) -> int:
    if token_id >= size:
        raise UnsupportedModel(
            f"{directory} has the token {token_id}, but its embedding has only {size} rows; GGUF cannot hold "
            "tokens without a row."
        )
    return token_id
