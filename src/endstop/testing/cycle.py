"""The cycle model: a real Hugging Face checkpoint whose greedy output is known in advance.

A llama with one-hot embeddings and all attention and MLP weights zero: the residual stream holds nothing but
the last token, and row `next[t]` of the lm_head is the largest for token t. Any runtime that loads a llama
directory (endstop, transformers, a GGUF converter) can be put through the same stopping cases with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from endstop.protocol.tokenbytes import byte_level_alphabet

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_FIRST_BYTE = len(SPECIAL_TOKENS)
_FIRST_WORD = _FIRST_BYTE + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class CycleModel:
    """Where the checkpoint lies and what it will say.

    `pieces`: the text of every token id. `next`: the id that follows each id.
    """

    path: Path
    pieces: list[str]
    next: list[int]

    def id_of(self, text: str) -> int:
        return _id_of(self.pieces, text)

    def continuation(self, token_id: int, count: int) -> list[int]:
        """The `count` ids that follow `token_id` greedily."""
        ids = []
        for _ in range(count):
            token_id = self.next[token_id]
            ids.append(token_id)
        return ids


def cycle_model(
    directory: str | Path,
    words: Sequence[str] = (" one", " two", " three", " four", " five"),
    *,
    follow: Mapping[str, str] | None = None,
    eos: Sequence[str] = ("<|im_end|>",),
    context_len: int = 512,
    margin: float = 12.0,
) -> CycleModel:
    """Write a checkpoint that says `words` in a circle.

    The vocabulary is three special tokens, the 256 single bytes and the words. Every token that is no word
    is followed by the first word. `follow` changes who follows whom, by text: `{" two": "<|im_end|>"}` ends
    behind the second word. `eos` is declared in generation_config.json. `margin`: by how much the next
    token's logit exceeds all the others. Needs torch and safetensors.
    """
    import torch
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    byte_of = byte_level_alphabet()
    letters = sorted(byte_of, key=lambda letter: byte_of[letter])
    encoded = ["".join(letters[byte] for byte in word.encode("utf-8")) for word in words]
    vocabulary = [*SPECIAL_TOKENS, *letters, *encoded]
    if len(set(vocabulary)) < len(vocabulary):
        raise ValueError("the words of a cycle must differ and be longer than one byte")
    if len(vocabulary) % 2:  # the width must be even for RoPE
        vocabulary.append("<|unused|>")
    pieces = [*SPECIAL_TOKENS, *(bytes([i]).decode("latin-1") for i in range(256)), *words]
    pieces += vocabulary[len(pieces) :]
    size = len(vocabulary)
    following = [_FIRST_WORD] * size
    for place in range(len(words)):
        following[_FIRST_WORD + place] = _FIRST_WORD + (place + 1) % len(words)
    for before, after in (follow or {}).items():
        following[_id_of(pieces, before)] = _id_of(pieces, after)

    identity = torch.eye(size)
    head = torch.zeros(size, size)
    # The last norm turns a one-hot vector of width `size` into sqrt(size) times it.
    head[following, range(size)] = margin / size**0.5
    zero = torch.zeros(size, size)
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": identity,
        "model.norm.weight": torch.ones(size),
        "lm_head.weight": head,
        layer + "input_layernorm.weight": torch.ones(size),
        layer + "post_attention_layernorm.weight": torch.ones(size),
        layer + "mlp.gate_proj.weight": zero[:2].clone(),
        layer + "mlp.up_proj.weight": zero[:2].clone(),
        layer + "mlp.down_proj.weight": zero[:, :2].clone(),
    }
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weights[f"{layer}self_attn.{name}.weight"] = zero.clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    eos_ids = [pieces.index(text) for text in eos]
    _write(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": size,
            "hidden_size": size,
            "intermediate_size": 2,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": size,
            "hidden_act": "silu",
            "max_position_embeddings": context_len,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": eos_ids[0] if eos_ids else None,
            "dtype": "float32",
        },
    )
    _write(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": eos_ids or None})
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, text in enumerate(vocabulary)
        if text.startswith("<|")
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    _write(
        directory / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": True,
                "vocab": {text: i for i, text in enumerate(vocabulary)},
                "merges": [],
            },
        },
    )
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": eos[0] if eos else None,
            "pad_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context_len,
        },
    )
    return CycleModel(directory, pieces, following)


def _id_of(pieces: Sequence[str], text: str) -> int:
    """The id of a text; a word before the byte that is shown as the same letter (é)."""
    if text not in pieces:
        raise ValueError(f"the cycle model has no token {text!r}")
    return len(pieces) - 1 - pieces[::-1].index(text)


def _write(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
