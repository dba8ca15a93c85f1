"""How byte-level BPE tokenizers split text before merging, by the name that GGUF files give it.

A GGUF file keeps the vocabulary and the merges, but of the splitting only a name
(`tokenizer.ggml.pre`). The patterns are those of the models' own tokenizer.json files, as pieces of
a `tokenizers` pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


def _cased(suffix: str) -> str:
    """A word that is cut where a capital follows a small letter, with an optional contraction behind it."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"


_GPT4O = _cased(_CONTRACTION + "?") + r"|\p{N}{1,3}" + _CASED_REST
_TEKKEN = _cased("") + r"|\p{N}" + _CASED_REST
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
# The cased letters, written as escapes: some of them would not survive Unicode normalisation of this file.
_DEEPSEEK_LLM_LETTERS = (
    r"\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370"
    "-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-"
    "\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-"
    "\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a"
    "-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-"
    "\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-"
    "\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-"
    "\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The pieces of a tokenizer.json that a pre-tokenizer name stands for.

    Attributes:
        splits: patterns, each of which splits what the ones before left over.
        nfc: text is put into Unicode's NFC form first.
        ignore_merges: a whole word that is in the vocabulary is taken without merging.
        add_bos: BOS is added where the file does not say.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> dict[str, Any] | None:
        return {"type": "NFC"} if self.nfc else None

    def pre_tokenizer(self) -> dict[str, Any]:
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.splits
        ]
        steps.append(
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        )
        return {"type": "Sequence", "pretokenizers": steps}


_DIGIT_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_LLAMA = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer((_QWEN2,), nfc=True)
_O200K = PreTokenizer((_GPT4O,))
_DEEPSEEK = PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3))
_FALCON_LIKE = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(_FALCON_LIKE),
    "gpt-2": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "mpt": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "jais": _PLAIN_GPT2,
    "trillion": _PLAIN_GPT2,
    "granite-docling": _PLAIN_GPT2,
    "gigachat": _PLAIN_GPT2,
    "exaone4": _PLAIN_GPT2,
    "mellum": _PLAIN_GPT2,
    "a.x-4.0": _PLAIN_GPT2,
    "smollm": _DIGIT_GPT2,
    "starcoder": _DIGIT_GPT2,
    "refact": _DIGIT_GPT2,
    "command-r": PreTokenizer((r"\p{N}", _GPT2), nfc=True),
    "codeshell": _DIGIT_GPT2,
    "exaone": _DIGIT_GPT2,
    "minerva-7b": _DIGIT_GPT2,
    "mellum2": _DIGIT_GPT2,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "llama-bpe": _LLAMA,
    "falcon3": _LLAMA,
    "falcon-h1": _LLAMA,
    "pixtral": _LLAMA,
    "midm-2.0": _LLAMA,
    "lfm2": _LLAMA,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "kormo": _QWEN,
    "megrez": _QWEN,
    "stablelm2": PreTokenizer((_QWEN2,)),
    "hunyuan": PreTokenizer((_QWEN2,)),
    "solar-open": PreTokenizer((_QWEN2,)),
    "grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "kanana2": _O200K,
    "minimax-m2": _O200K,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            _DEEPSEEK_LLM_LETTERS,
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": _DEEPSEEK,
    "hunyuan-dense": _DEEPSEEK,
    "joyai-llm": _DEEPSEEK,
    "bloom": PreTokenizer((_BLOOM,)),
    "poro-chat": PreTokenizer((_BLOOM,)),
    "gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "seed-coder": PreTokenizer(
        (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,)
    ),
    "bailingmoe": PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
}
