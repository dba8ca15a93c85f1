"""A vocabulary with the calculator's tags brings the calculator, in Python and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from endstop import LLM, SamplingParams
from endstop.testing import cycle_model
from tests.cli.conftest import Run

TAGS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
CALL = {"<|python_start|>": "1", "1": "+", "+": "2", "2": "<|python_end|>", "<|output_end|>": "<|im_end|>"}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'python' %}{{ '<|python_start|>' }}{{ part.text }}{{ '<|python_end|>' }}"
    "{% elif part.type == 'python_output' %}{{ '<|output_start|>' }}{{ part.text }}{{ '<|output_end|>' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SHOWN = "<|python_start|>1+2<|python_end|><|output_start|>3<|output_end|>"


@pytest.fixture
def calculating(tmp_path: Path) -> Path:
    path = cycle_model(tmp_path / "calculating", TAGS, follow=CALL).path
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return path


def test_the_calculator_answers_where_the_vocabulary_has_its_tags(calculating: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, skip_special_tokens=False)
    question = [{"role": "user", "content": "Hi"}]
    with LLM(calculating) as llm:
        output = llm.chat(question, params)[0].outputs[0]
    assert output.text == SHOWN
    assert output.generated_mask == [1, 1, 1, 1, 1, 0, 0, 0, 1]
    with LLM(calculating, make_tool=None) as llm:
        output = llm.chat(question, params)[0].outputs[0]
    assert set(output.generated_mask) == {1}
    assert output.text == SHOWN.replace("3", "")


def test_chat_shows_calls_with_their_tags_and_keeps_them_as_tokens_in_the_history(
    endstop: Run, calculating: Path
) -> None:
    result = endstop("chat", str(calculating), "--temperature", "0", "--stats", stdin="Hi\nHi\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{SHOWN}\n" * 2
    assert "prompt 21 tokens" in result.stderr
    # The second prompt: the first, the answer's 8 tokens, its end and a newline, and a turn like the first.
    assert "prompt 52 tokens" in result.stderr


def test_a_vocabulary_without_the_tags_has_no_tool(tmp_path: Path) -> None:
    with LLM(cycle_model(tmp_path / "plain").path) as llm:
        assert llm.engine.make_tool is None
