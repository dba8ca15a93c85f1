"""The conversation format of the models trained here: special tokens, chat template, generation config.

Nine special tokens are the last ids of the vocabulary. There is no separate EOS: `<|bos|>` is the border
between documents, `<|assistant_end|>` ends a turn, `<|python_end|>` hands over to a tool. The tokens and
what stands between them are nanochat's (Karpathy, 2025), so that such conversations can be exchanged.

An assistant message's content is a text, or a list of parts: `text` and `python` are the model's own words,
`python_output` is what the runtime forced between them and is never trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

BOS = "<|bos|>"
USER_START, USER_END = "<|user_start|>", "<|user_end|>"
ASSISTANT_START, ASSISTANT_END = "<|assistant_start|>", "<|assistant_end|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
OUTPUT_START, OUTPUT_END = "<|output_start|>", "<|output_end|>"
SPECIAL_TOKENS = (
    BOS,
    USER_START,
    USER_END,
    ASSISTANT_START,
    ASSISTANT_END,
    PYTHON_START,
    PYTHON_END,
    OUTPUT_START,
    OUTPUT_END,
)
"""In the order of their ids, which are the vocabulary's last."""

# Roles alternate, a system message goes in front of the first user message, as in nanochat. Only what the
# model says itself stands inside `generation`: not the outputs that the runtime puts between its words.
CHAT_TEMPLATE = """\
{%- macro words(content) -%}
{%- if content is string -%}{{- content -}}{%- else -%}
{%- for part in content -%}
{%- if part.type != 'text' -%}
{{- raise_exception('only text is said to the model, no ' ~ part.type) -}}{%- endif -%}
{{- part.text -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- if not rest or rest[0].role != 'user' -%}
{{- raise_exception('a system message must be followed by a user message') -}}{%- endif -%}
{%- else -%}{%- set system = none -%}{%- set rest = messages -%}{%- endif -%}
{{- '<|bos|>' -}}
{%- for message in rest -%}
{%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
{{- raise_exception('roles must alternate user/assistant, beginning with user') -}}{%- endif -%}
{%- if message.role == 'user' -%}
{{- '<|user_start|>' -}}
{%- if loop.first and system is not none -%}{{- words(system) + '\\n\\n' -}}{%- endif -%}
{{- words(message.content) -}}
{{- '<|user_end|>' -}}
{%- else -%}
{{- '<|assistant_start|>' -}}
{%- if message.content is string -%}
{%- generation -%}{{- message.content -}}{{- '<|assistant_end|>' -}}{%- endgeneration -%}
{%- elif message.content is none or message.content is undefined -%}
{{- raise_exception('an answer has a content; what a tool does in it is a part python') -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'python_output' -%}
{{- '<|output_start|>' -}}{{- part.text -}}{{- '<|output_end|>' -}}
{%- elif part.type == 'python' -%}
{%- generation -%}{{- '<|python_start|>' -}}{{- part.text -}}{{- '<|python_end|>' -}}{%- endgeneration -%}
{%- elif part.type == 'text' -%}
{%- generation -%}{{- part.text -}}{%- endgeneration -%}
{%- else -%}
{{- raise_exception('a part of an answer is text, python or python_output, not ' ~ part.type) -}}
{%- endif -%}
{%- endfor -%}
{%- generation -%}{{- '<|assistant_end|>' -}}{%- endgeneration -%}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant_start|>' -}}{%- endif -%}
"""


def tokenizer_files(tokenizer_json: Mapping[str, Any]) -> dict[str, str]:
    """The files of a tokenizer directory by name, from the content of its tokenizer.json.

    The pad token is `<|output_end|>`: a token that never stands at the end of a row and is in no stop set.
    Raises ValueError where a special token is missing or they are not the last ids.
    """
    ids = {token["content"]: token["id"] for token in tokenizer_json["added_tokens"]}
    if tuple(sorted(ids, key=lambda text: ids[text])) != SPECIAL_TOKENS:
        raise ValueError(f"a tokenizer has exactly the special tokens {', '.join(SPECIAL_TOKENS)}")
    if min(ids.values()) != len(tokenizer_json["model"]["vocab"]):
        raise ValueError("the special tokens must be the last ids of the vocabulary")
    tokenizer_config = {
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": ASSISTANT_END,
        "pad_token": OUTPUT_END,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": json.dumps(tokenizer_json, ensure_ascii=False),
        "tokenizer_config.json": _json(tokenizer_config),
        "chat_template.jinja": CHAT_TEMPLATE,
        "generation_config.json": _json(generation_config(ids)),
    }


def generation_config(ids: Mapping[str, int]) -> dict[str, Any]:
    """What ends a generation: `<|assistant_end|>`, and `<|bos|>`, which begins another document."""
    return {
        "bos_token_id": ids[BOS],
        "eos_token_id": [ids[ASSISTANT_END], ids[BOS]],
        "pad_token_id": ids[OUTPUT_END],
    }


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
