"""Templates, conversations and small tokenizers that the chat tests share."""

from __future__ import annotations

import importlib.metadata
import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from endstop.protocol.template import SPECIAL_TOKEN_NAMES

NOW = datetime(2026, 11, 30, 12, 0, 0)

FAMILIES = {
    file.stem: file.read_text(encoding="utf-8")
    for file in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}


def installed_trl_templates() -> dict[str, str]:
    """The template files of an installed trl, read as data; empty where trl is not installed."""
    try:
        files = importlib.metadata.files("trl") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {
        f"trl-{file.stem}": Path(str(file.locate())).read_text(encoding="utf-8")
        for file in files
        if file.suffix == ".jinja"
    }


TRL = installed_trl_templates()
TEMPLATES = {**FAMILIES, **TRL}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city, <now> & here.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
        "return": {"type": "string", "description": "The weather"},
    },
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **({} if content is None else {"content": content}), **fields}


def call(name: str, arguments: Any, call_id: str = "abcdefgh1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(content: Any, call_id: str = "abcdefgh1", name: str = "get_weather") -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "single": [user("hi")],
    "answered": [user("hi"), assistant("yo")],
    "turns": [user("hi"), assistant("yo"), user("bye"), assistant("ok then")],
    "system": [system("Be brief."), user("hi"), assistant("yo"), user("bye")],
    "system-late": [user("hi"), system("Be brief."), assistant("yo")],
    "blanks": [
        system("\n system \t"),
        user("  leading\n\n"),
        assistant("\n\n answer  "),
        user("\tx "),
        assistant(" "),
    ],
    "unicode": [
        user("谢谢 👩‍👩‍👧 e\u0301 \u202eabc\u200b"),
        assistant("¿Qué? ﷽ 你好\r\n"),
        user("ok \u00a0"),
    ],
    "markup": [user("a <b>&amp; {{ x }} {% raw %} 'q' \"r\" \\n"), assistant("```py\nprint('<|x|>')\n```")],
    "thinking-field": [
        user("2+2?"),
        assistant("4", reasoning_content="two and two"),
        user("sure?"),
        assistant("yes", reasoning_content="\nI checked\n"),
    ],
    "thinking-inline": [
        user("2+2?"),
        assistant("<think>\nadd\n</think>\n\n4"),
        user("sure?"),
        assistant("<think>hm</think>yes"),
    ],
    "thinking-alias": [user("2+2?"), assistant("4", thinking="two and two")],
    "tools": [
        user("weather in Łódź?"),
        assistant(tool_calls=[call("get_weather", {"city": 'Łódź "<x>"', "days": 2})]),
        tool("rain & 3°"),
        assistant("It rains."),
        user("thanks"),
    ],
    "tools-content": [
        system("Use tools."),
        user("weather?"),
        assistant(
            "Let me see.",
            tool_calls=[call("get_weather", {"city": "A"}), call("get_weather", {"city": "B"}, "abcdefgh2")],
        ),
        tool("sun"),
        tool("fog", "abcdefgh2"),
        assistant("Sun and fog."),
    ],
    "tools-text-arguments": [
        user("weather?"),
        assistant("", tool_calls=[call("get_weather", '{"city": "Rome"}')]),
        tool('{"t": 21}'),
        assistant("21 degrees"),
    ],
    "tool-last": [user("w?"), assistant(None, tool_calls=[call("get_weather", {})]), tool("sun")],
    "null-fields": [user("hi"), {"role": "assistant", "content": "yo", "tool_calls": None, "name": None}],
    "empty-contents": [system(""), user(""), assistant("")],
    "assistant-first": [assistant("Welcome."), user("hi")],
    "two-users": [user("one"), user("two"), assistant("three")],
    "parts": [user([{"type": "text", "text": " hello "}, {"type": "text", "text": "you"}]), assistant("yo")],
    "parts-assistant": [
        user([{"type": "text", "text": "hello"}]),
        assistant([{"type": "text", "text": "yo "}]),
    ],
    "unknown-role": [user("hi"), {"role": "critic", "content": "no"}],
    "no-content": [{"role": "user"}],
    "developer": [{"role": "developer", "content": "Rules."}, user("hi"), assistant("yo")],
}

ADDED_TOKENS = (
    "<s>",
    "</s>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
    "<eos>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|call|>",
    "<|return|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<|END_OF_TURN_TOKEN|>",
    "<|START_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "[gMASK]",
    "<sop>",
    "<|observation|>",
    "<|turn>",
    "<turn|>",
    "<end_of_utterance>",
)
# Added tokens that are not special, as Qwen has them.
PLAIN_ADDED_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

# (bos, eos) of each family; ChatML's where it is not named.
SPECIALS = {
    "llama2": ("<s>", "</s>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "llama3_1": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral_v1": ("<s>", "</s>"),
    "mistral_v3_tools": ("<s>", "</s>"),
    "gemma": ("<bos>", "<eos>"),
    "phi3": ("<s>", "<|endoftext|>"),
    "deepseek": ("<s>", "<｜end▁of▁sentence｜>"),
    "gptoss_style": ("<s>", "<|return|>"),
    "zephyr": ("<s>", "</s>"),
    "alpaca": ("<s>", "</s>"),
    "vicuna": ("<s>", "</s>"),
}

# eos of the families among trl's templates, by the beginning of the file's name.
TRL_EOS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "gemma": "<eos>",
    "glm": "<|user|>",
    "gptoss": "<|return|>",
    "llama": "<|eot_id|>",
    "phi": "<|endoftext|>",
    "idefics": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>",
    "llava": "</s>",
}

_TRAINING_TEXT = [
    "hello you, how are you today?\nuser\nassistant\nsystem\n",
    "The weather in Rome is fine & the answer is 42.\n\n",
    '{"name": "get_weather", "arguments": {"city": "Rome"}}\n',
    "thanks, bye then. ok yes no   <|im_start|> |> <| im_end",
] * 4


@cache
def crate_tokenizer_json() -> str:
    """A byte-level BPE of 400 pieces with the added tokens of many families, as tokenizer.json text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ADDED_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN_ADDED_TOKENS])
    return tokenizer.to_str()


def transformers_tokenizer(template: str, bos: str = "<s>", eos: str = "<|im_end|>", **options: Any) -> Any:
    """The same tokenizer on transformers' side."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(crate_tokenizer_json()), bos_token=bos, eos_token=eos, **options
    )
    tokenizer.chat_template = template
    return tokenizer


def special_token_variables(tokenizer: Any) -> dict[str, str | None]:
    return {name: getattr(tokenizer, name, None) for name in SPECIAL_TOKEN_NAMES}


def endstop_tokenizer(template: str, bos: str = "<s>", eos: str = "<|im_end|>") -> Any:
    """The same tokenizer on our side."""
    from endstop.protocol.tokenizer import Tokenizer

    return Tokenizer(
        json.loads(crate_tokenizer_json()),
        special={"bos_token": bos, "eos_token": eos},
        templates={"default": template},
    )
