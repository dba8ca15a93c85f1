"""Stop sets of models: the union of files and template, roles, sources, and conflicts as data."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from endstop import StopSet
from endstop.protocol.errors import BrokenModel
from endstop.protocol.stopset import CONFLICTS
from tests.protocol.model_dirs import CHATML, STRING, added, gguf_model, smollm2, trl_template, write_model

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA3_TOKENS = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008,
    "<|eot_id|>": 128009,
    "<|python_tag|>": 128010,
}
CHATML_TOKENS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def codes(stops: StopSet) -> list[str]:
    return [conflict.code for conflict in stops.conflicts]


def sources(stops: StopSet, token_id: int) -> list[str]:
    return [str(source) for source in stops.sources[token_id]]


def test_B01_terminator_that_no_file_declares(tmp_path):
    directory = write_model(
        tmp_path,
        LLAMA3_TOKENS,
        template=LLAMA3,
        tokenizer_config={"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"},
        generation_config={"eos_token_id": 128001},
        config={"eos_token_id": 128001, "vocab_size": 128256},
    )
    stops = StopSet.from_pretrained(directory)
    assert stops.roles == {128001: "eos", 128009: "turn_end"}
    assert stops.terminator == 128009
    assert stops.texts[128009] == "<|eot_id|>"
    assert sources(stops, 128001) == [
        "generation_config.json: eos_token_id",
        "config.json: eos_token_id",
        "tokenizer_config.json: eos_token",
    ]
    assert sources(stops, 128009) == ["tokenizer_config.json: chat_template, end of an assistant turn"]
    conflict = next(c for c in stops.conflicts if c.code == "undeclared_terminator")
    assert (conflict.token_id, conflict.severity) == (128009, "error")
    assert "128009 (<|eot_id|>)" in conflict.message


def test_B02_base_eos_and_a_limit_left_over(tmp_path):
    directory = write_model(
        tmp_path,
        {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645},
        template=CHATML,
        tokenizer_config={"eos_token": "<|endoftext|>"},
        generation_config={"eos_token_id": 151643, "pad_token_id": 151643, "max_new_tokens": 64},
    )
    stops = StopSet.from_pretrained(directory)
    assert stops.ids == {151643, 151645}
    assert codes(stops) == [
        "undeclared_terminator",
        "declared_never_written",
        "pad_in_stop_set",
        "max_new_tokens_left_over",
    ]
    assert [c.severity for c in stops.conflicts] == ["error", "warning", "warning", "warning"]


def test_B06_gguf_misses_the_terminator(tmp_path):
    tokens = ["a", "b", "ab", "</s>", "<|im_start|>", "<|im_end|>"]
    keys = {"tokenizer.ggml.eos_token_id": (4, 3), "tokenizer.chat_template": (STRING, CHATML)}
    path = tmp_path / "chat.gguf"
    path.write_bytes(gguf_model(tokens, [1, 1, 1, 3, 3, 3], more=keys))
    stops = StopSet.from_pretrained(path)
    assert stops.roles == {3: "eos", 5: "turn_end"}
    conflict = next(c for c in stops.conflicts if c.code == "gguf_misses_terminator")
    assert (conflict.token_id, conflict.severity) == (5, "error")
    assert sources(stops, 5) == ["chat.gguf: tokenizer.chat_template, end of an assistant turn"]
    # Repaired, the conflict is gone.
    path.write_bytes(
        gguf_model(tokens, [1, 1, 1, 3, 3, 3], more={**keys, "tokenizer.ggml.eot_token_id": (4, 5)})
    )
    repaired = StopSet.from_pretrained(path)
    assert repaired.roles == {3: "eos", 5: "turn_end"}
    assert "gguf_misses_terminator" not in codes(repaired)
    assert sources(repaired, 5)[0] == "chat.gguf: tokenizer.ggml.eot_token_id"


def test_B07_keys_of_a_gguf_file_have_roles(tmp_path):
    keys = {"tokenizer.ggml.eos_token_id": (4, 3), "tokenizer.ggml.eot_token_id": (4, 4)}
    more = {**keys, "tokenizer.ggml.eom_token_id": (4, 5)}
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_model(["a", "b", "ab", "<e>", "<t>", "<m>"], [1, 1, 1, 3, 3, 3], more=more))
    stops = StopSet.from_pretrained(path)
    assert stops.roles == {3: "eos", 4: "turn_end", 5: "tool_end"}
    assert sources(stops, 5) == ["x.gguf: tokenizer.ggml.eom_token_id"]


@pytest.mark.parametrize("declared", [[128001, 128008, 128009], [128001, 128009]])
def test_B07_the_token_behind_a_tool_call(tmp_path, declared):
    directory = write_model(
        tmp_path,
        LLAMA3_TOKENS,
        template=trl_template("llama3_1"),
        tokenizer_config={"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"},
        generation_config={"eos_token_id": declared},
    )
    stops = StopSet.from_pretrained(directory)
    assert stops.roles == {128001: "eos", 128008: "tool_end", 128009: "turn_end"}
    assert "tokenizer_config.json: chat_template, end of a tool call" in sources(stops, 128008)
    assert ("undeclared_tool_end" in codes(stops)) is (128008 not in declared)


B09 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def test_B09_template_without_a_terminator(tmp_path):
    directory = write_model(
        tmp_path,
        {"<s>": 1, "</s>": 2, "<|start|>": 3},
        template=B09,
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"},
    )
    stops = StopSet.from_pretrained(directory)
    assert stops.roles == {2: "eos"}
    assert stops.terminator is None
    assert [(c.code, c.severity) for c in stops.conflicts] == [("no_terminator", "error")]


def test_B11_template_that_ignores_the_generation_prompt(tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    config = {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    directory = write_model(tmp_path / "a", CHATML_TOKENS, template=template, tokenizer_config=config)
    assert codes(StopSet.from_pretrained(directory)) == ["no_generation_prompt"]
    # Here the user's turn itself opens the answer, so equal renders are fine.
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    config = {"eos_token": "</s>", "bos_token": "<s>"}
    directory = write_model(tmp_path / "b", {"<s>": 1, "</s>": 2}, template=template, tokenizer_config=config)
    stops = StopSet.from_pretrained(directory)
    assert stops.roles == {2: "turn_end"}
    assert stops.conflicts == ()


# Original templates of trl: (the file, its tokens, what the files declare) -> roles.
FAMILIES = {
    "qwen2_5": (CHATML_TOKENS, ["<|im_end|>", "<|endoftext|>"], {2: "turn_end", 0: "eos"}),
    "qwen3": (CHATML_TOKENS, ["<|im_end|>", "<|endoftext|>"], {2: "turn_end", 0: "eos"}),
    "lfm2": ({"<|im_start|>": 6, "<|im_end|>": 7, "<|startoftext|>": 1}, ["<|im_end|>"], {7: "turn_end"}),
    "llama3": (LLAMA3_TOKENS, ["<|eot_id|>"], {128009: "turn_end"}),
    "llama3_2": (LLAMA3_TOKENS, ["<|eot_id|>"], {128009: "turn_end"}),
    "gemma": (
        {"<bos>": 2, "<eos>": 1, "<start_of_turn>": 105, "<end_of_turn>": 106},
        ["<eos>"],
        {1: "eos", 106: "turn_end"},
    ),
    "gemma3": (
        {"<bos>": 2, "<eos>": 1, "<start_of_turn>": 105, "<end_of_turn>": 106},
        ["<eos>", "<end_of_turn>"],
        {1: "eos", 106: "turn_end"},
    ),
    "phi3": (
        {"<s>": 1, "<|endoftext|>": 32000, "<|assistant|>": 32001, "<|end|>": 32007, "<|user|>": 32010},
        ["<|endoftext|>", "<|assistant|>", "<|end|>"],
        {32000: "eos", 32001: "eos", 32007: "turn_end"},
    ),
    "cohere2": (
        {
            "<BOS_TOKEN>": 5,
            "<|START_OF_TURN_TOKEN|>": 6,
            "<|END_OF_TURN_TOKEN|>": 7,
            "<|USER_TOKEN|>": 8,
            "<|CHATBOT_TOKEN|>": 9,
            "<|SYSTEM_TOKEN|>": 10,
            "<|START_RESPONSE|>": 11,
            "<|END_RESPONSE|>": 12,
        },
        ["<|END_OF_TURN_TOKEN|>"],
        {7: "turn_end"},
    ),
    "deepseekv3": (
        {
            "<｜begin▁of▁sentence｜>": 0,
            "<｜end▁of▁sentence｜>": 1,
            "<｜User｜>": 2,
            "<｜Assistant｜>": 3,
            "<｜tool▁call▁end｜>": 4,
            "<｜tool▁calls▁end｜>": 5,
        },
        ["<｜end▁of▁sentence｜>"],
        {1: "turn_end"},
    ),
    "gptoss": (
        {
            "<|start|>": 200006,
            "<|end|>": 200007,
            "<|message|>": 200008,
            "<|channel|>": 200005,
            "<|return|>": 200002,
            "<|call|>": 200012,
            "<|endoftext|>": 199999,
        },
        ["<|return|>", "<|endoftext|>", "<|call|>"],
        {200002: "turn_end", 199999: "eos", 200012: "tool_end"},
    ),
    "glm4moe": (
        {
            "[gMASK]": 1,
            "<sop>": 2,
            "<|endoftext|>": 151329,
            "<|user|>": 151336,
            "<|assistant|>": 151337,
            "<|observation|>": 151338,
        },
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
        {151329: "eos", 151336: "eos", 151338: "tool_end"},
    ),
    "gemma4": (
        {
            "<bos>": 2,
            "<eos>": 1,
            "<|turn>": 105,
            "<turn|>": 106,
            "<|tool_call>": 48,
            "<tool_call|>": 49,
            "<|tool_response>": 50,
        },
        ["<eos>", "<turn|>"],
        {1: "eos", 106: "turn_end", 50: "tool_end"},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path, name):
    tokens, declared, roles = FAMILIES[name]
    bos = next((text for text in tokens if "bos" in text.lower() or "begin" in text), None)
    directory = write_model(
        tmp_path,
        tokens,
        template=trl_template(name),
        tokenizer_config={"eos_token": declared[0], "bos_token": bos},
        generation_config={"eos_token_id": [tokens[text] for text in declared]},
    )
    stops = StopSet.from_pretrained(directory)
    assert stops.roles == roles
    if name == "gptoss":
        conflict = next(c for c in stops.conflicts if c.code == "history_closer")
        assert (conflict.token_id, conflict.severity) == (200007, "info")
        assert 200007 not in stops
    if name == "glm4moe":
        assert codes(stops)[0] == "terminator_is_next_header"


def test_first_declared_token_of_the_run_is_the_terminator(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<a><b><c>\n{% endfor %}"
    tokens = {"<a>": 1, "<b>": 2, "<c>": 3}
    for declared, expected in ({"eos_token": "<b>"}, 2), ({"eos_token": "<c>"}, 3), ({}, 1):
        directory = write_model(
            tmp_path / str(expected), tokens, template=template, tokenizer_config=declared
        )
        stops = StopSet.from_pretrained(directory)
        assert stops.terminator == expected
        assert stops.roles == {expected: "turn_end"}


def test_longest_token_at_a_position(tmp_path):
    template = "{% for m in messages %}{{ m.content }}<|end|>of<|x|>{% endfor %}"
    directory = write_model(tmp_path, {"<|end|>": 1, "<|end|>of": 2, "<|x|>": 3}, template=template)
    stops = StopSet.from_pretrained(directory)
    assert stops.terminator == 2


def test_eos_token_written_as_text(tmp_path):
    template = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    config = {"eos_token": "</s>"}
    directory = write_model(tmp_path, {"</s>": 2}, template=template, tokenizer_config=config)
    assert StopSet.from_pretrained(directory).roles == {2: "turn_end"}


@pytest.mark.parametrize("end", ["\n### End", "<|im_end|>"])
def test_terminator_of_many_tokens_is_no_stop_id(tmp_path, end):
    # An Alpaca-like marker, and ChatML on a tokenizer that never got its tokens.
    template = f"{{% for m in messages %}}### {{{{ m.role }}}}:\n{{{{ m.content }}}}{end}\n{{% endfor %}}"
    config = {"eos_token": "</s>"}
    directory = write_model(tmp_path, {"</s>": 2}, template=template, tokenizer_config=config)
    stops = StopSet.from_pretrained(directory)
    assert stops.roles == {2: "eos"}
    conflict = next(c for c in stops.conflicts if c.code == "terminator_is_text")
    assert repr(end.strip()) in conflict.message


def test_sentinel_dropped(tmp_path):
    template = "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% endif %}{% endfor %}"
    directory = write_model(tmp_path, {"<u>": 1, "</s>": 2}, template=template, config={"eos_token_id": 2})
    stops = StopSet.from_pretrained(directory)
    assert stops.roles == {2: "eos"}
    assert codes(stops) == ["sentinel_dropped"]


def test_template_that_always_raises(tmp_path):
    template = "{{ raise_exception('no such thing') }}"
    directory = write_model(tmp_path, {"</s>": 2}, template=template, config={"eos_token_id": 2})
    stops = StopSet.from_pretrained(directory)
    assert stops.roles == {2: "eos"}
    assert codes(stops) == ["template_refuses"]
    assert "no such thing" in stops.conflicts[0].message


def test_variants_that_raise_are_skipped(tmp_path):
    template = (
        "{% if tools or builtin_tools is defined %}{{ raise_exception('no tools') }}{% endif %}" + CHATML
    )
    directory = write_model(tmp_path, CHATML_TOKENS, template=template, config={"eos_token_id": 2})
    assert StopSet.from_pretrained(directory).roles == {2: "turn_end"}


def test_content_in_parts_only(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    directory = write_model(tmp_path, CHATML_TOKENS, template=template, config={"eos_token_id": 2})
    stops = StopSet.from_pretrained(directory)
    assert stops.roles == {2: "turn_end"}
    assert stops.conflicts == ()


def test_close_tag_of_parallel_calls_is_no_stop(tmp_path):
    # <end_call> stands behind every call and nothing ends the turn: only the last token hands over.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}<end_call>{% endfor %}"
        "{% if m.tool_calls %}<wait>{% else %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokens = {**CHATML_TOKENS, "<call>": 10, "<end_call>": 11, "<wait>": 12}
    directory = write_model(tmp_path, tokens, template=template, config={"eos_token_id": 2})
    assert StopSet.from_pretrained(directory).roles == {2: "turn_end", 12: "tool_end"}
    without_wait = template.replace("<wait>", "")
    directory = write_model(tmp_path / "b", tokens, template=without_wait, config={"eos_token_id": 2})
    assert StopSet.from_pretrained(directory).roles == {2: "turn_end"}


def test_tool_use_template_is_rendered_with_tools(tmp_path):
    tool_use = CHATML.replace("{{ m.content }}", "{{ m.content or (m.tool_calls | tojson) }}")
    tool_use = tool_use.replace("<|im_end|>", "{{ '<|eom|>' if m.tool_calls else '<|im_end|>' }}")
    templates = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": tool_use}]
    directory = write_model(
        tmp_path,
        {**CHATML_TOKENS, "<|eom|>": 3},
        tokenizer_config={"chat_template": templates, "eos_token": "<|im_end|>"},
    )
    stops = StopSet.from_pretrained(directory)
    assert stops.roles == {2: "turn_end", 3: "tool_end"}
    assert sources(stops, 3) == ["tokenizer_config.json: chat_template (tool_use), end of a tool call"]


def test_token_that_is_not_special(tmp_path):
    tokens = [added(1, "<|im_start|>", special=False), added(2, "<|im_end|>", special=False)]
    directory = write_model(tmp_path, tokens, template=CHATML)
    assert StopSet.from_pretrained(directory).roles == {2: "turn_end"}


def test_outside_the_lm_head(tmp_path):
    directory = write_model(
        tmp_path,
        {"<|endoftext|>": 0, "<|im_start|>": 32000, "<|im_end|>": 32001},
        template=CHATML,
        config={"vocab_size": 32000, "eos_token_id": [0, 32001]},
    )
    stops = StopSet.from_pretrained(directory)
    assert stops.ids == {0}
    assert stops.terminator == 32001
    assert stops.vocab_size == 32000
    conflict = next(c for c in stops.conflicts if c.code == "outside_vocab")
    assert (conflict.token_id, conflict.severity) == (32001, "error")


def test_text_config(tmp_path):
    config = {"text_config": {"eos_token_id": 2, "vocab_size": 10}, "eos_token_id": None, "vocab_size": 99}
    stops = StopSet.from_pretrained(write_model(tmp_path, CHATML_TOKENS, config=config))
    assert stops.roles == {2: "eos"}
    assert sources(stops, 2) == ["config.json: text_config.eos_token_id"]
    assert stops.vocab_size == 10


def test_base_model_without_template(tmp_path):
    stops = StopSet.from_pretrained(
        write_model(tmp_path, {"<|endoftext|>": 0}, tokenizer_config={"eos_token": "<|endoftext|>"})
    )
    assert stops.roles == {0: "eos"}
    assert stops.terminator is None
    assert stops.conflicts == ()


def test_nothing_declared_at_all(tmp_path):
    stops = StopSet.from_pretrained(write_model(tmp_path, {"<|x|>": 0}))
    assert stops.ids == frozenset()
    assert codes(stops) == ["empty_stop_set"]


def test_eos_token_outside_the_added_tokens(tmp_path):
    # "A" is in the vocabulary only; "nowhere" is in neither.
    directory = write_model(tmp_path / "a", {"<x>": 0}, tokenizer_config={"eos_token": "A"})
    assert StopSet.from_pretrained(directory).roles == {1000 + ord("A"): "eos"}
    directory = write_model(tmp_path / "b", {"<x>": 0}, tokenizer_config={"eos_token": "nowhere"})
    assert codes(StopSet.from_pretrained(directory)) == ["unknown_eos_token", "empty_stop_set"]


def test_template_given_from_outside(tmp_path):
    directory = write_model(tmp_path, CHATML_TOKENS, config={"eos_token_id": 0})
    stops = StopSet.from_pretrained(directory, chat_template=CHATML)
    assert stops.terminator == 2
    assert sources(stops, 2) == ["argument: chat_template, end of an assistant turn"]


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "3"], {"a": 1}])
def test_eos_of_a_wrong_type(tmp_path, value):
    directory = write_model(tmp_path, CHATML_TOKENS, generation_config={"eos_token_id": value})
    with pytest.raises(
        BrokenModel, match=r"generation_config\.json: eos_token_id must be an integer or a list"
    ):
        StopSet.from_pretrained(directory)


def test_minus_one_is_none(tmp_path):
    directory = write_model(tmp_path, CHATML_TOKENS, generation_config={"eos_token_id": [-1, 2]})
    assert StopSet.from_pretrained(directory).roles == {2: "eos"}


def test_broken_files(tmp_path):
    directory = write_model(tmp_path, CHATML_TOKENS)
    (directory / "config.json").write_text('{"eos_token_id": 2')
    with pytest.raises(BrokenModel, match=r"config\.json is not valid JSON: .* at line 1, column"):
        StopSet.from_pretrained(directory)
    (directory / "config.json").unlink()
    text = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(BrokenModel, match=r"tokenizer\.json is not valid JSON"):
        StopSet.from_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"added_tokens": [{"id": -1, "content": "x"}]}')
    with pytest.raises(BrokenModel, match="every entry of added_tokens needs an id and a content"):
        StopSet.from_pretrained(directory)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BrokenModel, match="is no model directory"):
        StopSet.from_pretrained(tmp_path / "empty")


def test_smollm2():
    stops = StopSet.from_pretrained(smollm2())
    assert stops.roles == {2: "turn_end"}
    assert (stops.terminator, stops.vocab_size, stops.texts) == (2, 49152, {2: "<|im_end|>"})
    assert codes(stops) == ["pad_in_stop_set"]
    assert [source.key for source in stops.sources[2]] == [
        "tokenizer.ggml.eos_token_id",
        "tokenizer.chat_template, end of an assistant turn",
    ]


def test_directory_that_holds_one_gguf_file(tmp_path):
    more = {"tokenizer.ggml.eos_token_id": (4, 2)}
    (tmp_path / "x.gguf").write_bytes(gguf_model(["a", "b", "ab"], [1, 1, 3], more=more))
    assert StopSet.from_pretrained(tmp_path).roles == {2: "eos"}


def test_a_stop_set_needs_no_heavy_imports(tmp_path):
    """Of a directory and of a GGUF file; benchmarks/imports.py says what it takes."""
    from endstop.protocol.gguf import (
        read_gguf_metadata,
        tokenizer_config_from_gguf,
        tokenizer_json_from_gguf,
    )

    meta = read_gguf_metadata(smollm2())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json_from_gguf(meta)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config_from_gguf(meta)))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 49152}))
    code = (
        "import sys; from endstop import StopSet; stops = StopSet.from_pretrained(sys.argv[1]); "
        "assert stops.ids == {2}; assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules)"
    )
    for place in (tmp_path, smollm2()):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", code, str(place)], check=True, env=environment)


def test_every_code_has_a_severity():
    assert set(CONFLICTS.values()) == {"info", "warning", "error"}
