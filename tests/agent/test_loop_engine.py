"""The loop over our own engine, with tokens that are written down: templates that know tools, and one that
does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from endstop.agent.models import engine_model
from endstop.agent.settings import ModelSettings
from endstop.models.gguf import ensure_directory
from endstop.protocol.resolve import resolve_model
from endstop.protocol.tokenizer import Tokenizer
from endstop.runtime.llm import engine_over
from endstop.testing import ScriptedModel

from .test_loop import Run

TEMPLATES = Path(__file__).parents[1] / "protocol" / "templates"
WRITE = 'I write.\n<tool_call>\n{"name": "write", "arguments": {"path": "a", "text": "1"}}\n</tool_call>'
SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {"summary": "done"}}\n</tool_call>'


@pytest.fixture(scope="module")
def directory():
    return ensure_directory(resolve_model("smollm2-135m-instruct"))


def scripted_engine(directory, answers, template):
    """An engine whose model says these answers, one for each assistant turn that the prompt has begun."""
    tokenizer = Tokenizer.from_pretrained(directory)
    end = tokenizer.encode("<|im_end|>")
    written = [[*tokenizer.encode_text(answer), *end] for answer in answers]
    begin = tokenizer.encode("<|im_start|>assistant\n")

    def script(row):
        starts = [n for n in range(len(row)) if list(row[n : n + len(begin)]) == begin]
        return written[len(starts) - 1][len(row) - starts[-1] - len(begin)]

    model = ScriptedModel(script, vocab_size=49152, context_len=8192)
    return engine_over(model, directory, chat_template=template, make_tool=None)


@pytest.mark.parametrize(
    ("template", "calls"), [("qwen2_5.jinja", "native"), ("qwen3.jinja", "native"), (None, "text")]
)
def test_calls_through_the_template_or_through_text(tmp_path, directory, template, calls):
    source = None if template is None else (TEMPLATES / template).read_text()
    engine = scripted_engine(directory, [WRITE, "Done.", SUBMIT], source)
    model = engine_model(engine, ModelSettings(name="scripted", trace=False, sampling={"temperature": 0}))
    assert (model.tool_calls, model.window) == (calls, 8192)
    run = Run(tmp_path, [], window=8192)
    agent = run.agent()
    agent.model = model
    agent.budget.count, agent.budget.max_tokens = model.count, 200
    assert agent.run().outcome == "unverified"
    assert run.ran == ["write a"]
    assert run.codes == ["NO_SUBMIT", "unverified"]
    turns = run.trajectory.turns
    assert turns[0]["content"].strip() == "I write."
    assert turns[0]["meta"]["finish_reason"] == "tool_calls"
    # The budget counts what the engine then has to read.
    prompt = run.trajectory.prompt()
    assert model.count(prompt[:1], agent.definitions) == turns[0]["meta"]["usage"]["prompt_tokens"]
    assert model.count(prompt[:3], agent.definitions) == turns[1]["meta"]["usage"]["prompt_tokens"]


def test_an_answer_that_the_limit_cuts_runs_nothing(tmp_path, directory):
    engine = scripted_engine(directory, [WRITE + WRITE.partition("\n")[2], SUBMIT], None)
    model = engine_model(engine, ModelSettings(name="scripted", trace=False, sampling={"temperature": 0}))
    run = Run(tmp_path, [], window=8192)
    agent = run.agent()
    agent.model = model
    agent.budget.count, agent.budget.max_tokens = model.count, 50
    assert agent.run().outcome == "unverified"
    assert run.ran == []
    assert run.codes == ["TRUNCATED", "unverified"]
