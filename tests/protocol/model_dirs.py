"""Small model directories and GGUF files for the tests of what models say about themselves."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

STRING, ARRAY = 8, 9
LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Typed = tuple[int, Any]


def gguf_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return gguf_string(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(gguf_value(inner, item) for item in items)
    return struct.pack("<" + LETTERS[kind], value)


def gguf_bytes(
    metadata: Mapping[str, Typed],
    tensors: Sequence[tuple[str, tuple[int, ...], int, bytes]] = (),
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    alignment: int = 32,
) -> bytes:
    """A GGUF file; `tensors` are (name, shape in the file's order, type number, data)."""
    head = magic + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, (kind, value) in metadata.items():
        head += gguf_string(key) + struct.pack("<I", kind) + gguf_value(kind, value)
    data = b""
    for name, shape, kind, content in tensors:
        data += b"\0" * (-len(data) % alignment)
        head += gguf_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", kind, len(data))
        data += content
    return head + b"\0" * (-len(head) % alignment) + data


def gguf_model(
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    merges: Sequence[str] = ("a b",),
    scores: Sequence[float] | None = None,
    kind: str = "gpt2",
    pre: str | None = "gpt-2",
    rows: int | None = None,
    more: Mapping[str, Typed] | None = None,
) -> bytes:
    metadata: dict[str, Typed] = {
        "general.architecture": (STRING, "llama"),
        "tokenizer.ggml.model": (STRING, kind),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, list(tokens))),
        "tokenizer.ggml.token_type": (ARRAY, (5, list(types))),
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = (STRING, pre)
    if scores is None:
        metadata["tokenizer.ggml.merges"] = (ARRAY, (STRING, list(merges)))
    else:
        metadata["tokenizer.ggml.scores"] = (ARRAY, (6, list(scores)))
    rows = len(tokens) if rows is None else rows
    return gguf_bytes({**metadata, **(more or {})}, [("token_embd.weight", (2, rows), 0, b"\0" * (8 * rows))])


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def added(token_id: int, content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
        **flags,
    }


def tokenizer_json(
    tokens: Mapping[str, int] | Sequence[dict[str, Any]] = (), **changes: Any
) -> dict[str, Any]:
    """A byte-level tokenizer.json with 256 byte tokens (ids from 1000) and the given added tokens."""
    if isinstance(tokens, Mapping):
        tokens = [added(token_id, text) for text, token_id in tokens.items()]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(tokens),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {
                **{letter: 1000 + index for index, letter in enumerate(byte_alphabet())},
                **{token["content"]: token["id"] for token in tokens},
            },
            "merges": [],
        },
        **changes,
    }


def byte_alphabet() -> list[str]:
    """The letters that byte-level tokenizers write bytes 0 to 255 with."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def write_model(
    directory: Path,
    tokens: Mapping[str, int] | Sequence[dict[str, Any]] = (),
    *,
    template: str | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """A model directory without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {
        "tokenizer.json": tokenizer or tokenizer_json(tokens),
        "tokenizer_config.json": {"added_tokens_decoder": {}, **(tokenizer_config or {})},
        "config.json": config or {},
        "generation_config.json": generation_config,
    }
    if template is not None:
        files["tokenizer_config.json"]["chat_template"] = template
    for name, content in files.items():
        if content is not None:
            (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return directory


@lru_cache
def trl_template(name: str) -> str:
    """An original chat template out of the installed trl, read without importing it."""
    wanted = f"trl/chat_templates/{name}.jinja"
    for file in distribution("trl").files or ():
        if file.as_posix() == wanted:
            return Path(str(file.locate())).read_text(encoding="utf-8")
    raise FileNotFoundError(f"trl is installed without {wanted}")


@lru_cache
def smollm2() -> Path:
    """The GGUF file of SmolLM2, fetched at its first use."""
    from endstop.protocol.resolve import resolve_model

    return resolve_model("smollm2-135m-instruct").path
