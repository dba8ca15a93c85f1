"""The cycle model: transformers says what is foretold, and the same directory runs here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from endstop import LLM, SamplingParams, StopSet, TokenBytes
from endstop.protocol.tokenizer import Tokenizer
from endstop.testing import CycleModel, cycle_model

USER = [{"role": "user", "content": "Count."}]


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> CycleModel:
    return cycle_model(tmp_path_factory.mktemp("cycle"))


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> CycleModel:
    return cycle_model(tmp_path_factory.mktemp("ending"), follow={" three": "<|im_end|>"})


def test_the_tokenizer_and_the_pieces_agree(cycle: CycleModel) -> None:
    tokenizer = Tokenizer.from_pretrained(cycle.path)
    ids = tokenizer.encode("Say é one")
    assert tokenizer.decode(ids) == "Say é one"
    pieces = TokenBytes.from_pretrained(cycle.path)
    assert pieces.join(ids).decode() == "Say é one"
    one = cycle.id_of(" one")
    assert (pieces[one], pieces[cycle.id_of("<|im_end|>")]) == (b" one", b"<|im_end|>")
    assert cycle.continuation(one, 5) == [one + 1, one + 2, one + 3, one + 4, one]


def test_transformers_says_what_is_foretold(cycle: CycleModel, ending: CycleModel) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    for model, count in ((cycle, 12), (ending, 4)):
        network = transformers.AutoModelForCausalLM.from_pretrained(model.path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model.path)
        prompt = tokenizer("Count.")["input_ids"]
        said = network.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0].tolist()
        assert said[len(prompt) :] == model.continuation(prompt[-1], count)


def test_its_stop_set_is_the_terminator(ending: CycleModel) -> None:
    stops = StopSet.from_pretrained(ending.path)
    assert stops.ids == {ending.id_of("<|im_end|>")}
    assert stops.terminator == ending.id_of("<|im_end|>")


def backends() -> list[Any]:
    return [pytest.param(name, id=name) for name in ("native", "transformers")]


@pytest.mark.parametrize("backend", backends())
def test_generate_chat_and_stream_of_a_real_checkpoint(ending: CycleModel, backend: Any) -> None:
    greedy = SamplingParams(temperature=0, logprobs=1, trace=True)
    with LLM(ending.path, backend=backend, dtype="float32") as llm:
        raw, other = llm.generate(["Count.", "Hello there"], greedy)
        for result in (raw, other):
            output = result.outputs[0]
            assert (output.text, output.finish_reason) == (" one two three", "stop")
            assert output.stop_reason == ending.id_of("<|im_end|>")
            assert output.trace is not None
            assert [step.best_stop_rank == 1 for step in output.trace.steps] == [False] * 3 + [True]
            assert (output.trace.steps[-1].p_stop or 0) > 0.9
        chat = llm.chat(USER, greedy)[0]
        assert chat.outputs[0].content == " one two three"
        assert chat.prompt == "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\n"
        assert "".join(delta.content for delta in llm.stream(USER, greedy)) == " one two three"
        history = [*USER, {"role": "assistant", "content": " one two three"}, *USER]
        again = llm.chat(history, greedy)[0]
        assert again.outputs[0].content == " one two three"
        assert again.usage.cached_tokens == len(chat.prompt_token_ids) + 3
        choices = llm.generate("Count.", SamplingParams(temperature=0, n=3, max_tokens=2))[0].outputs
        assert [choice.text for choice in choices] == [" one two"] * 3
        prefill = [*USER, {"role": "assistant", "content": " one"}]
        continued = llm.chat(prefill, greedy, continue_final_message=True)[0].outputs[0]
        assert continued.content == " two three"
        assert llm.engine.stats.rows_computed_after_stop == 0
        banned = llm.generate("Count.", SamplingParams(temperature=0, bad_words=" two", max_tokens=2))
        assert " two" not in banned[0].outputs[0].text


def test_a_word_may_look_like_a_byte(tmp_path: Path) -> None:
    cycle = cycle_model(tmp_path, words=("é", " two"), follow={"é": "<|im_end|>"})
    word = len(cycle.pieces) - 2 - (cycle.pieces[-1] == "<|unused|>")
    assert cycle.id_of("é") == word
    assert cycle.continuation(cycle.id_of(" two"), 2) == [word, cycle.id_of("<|im_end|>")]
    assert TokenBytes.from_pretrained(tmp_path)[word] == "é".encode()
    with pytest.raises(ValueError, match="three"):
        cycle_model(tmp_path, words=("é", " two"), follow={" three": "é"})
