"""The teaching model: its known answer, its cache lengths, cached steps against full recomputation."""

from __future__ import annotations

import pytest
import torch

from endstop import Engine, SamplingParams, StopSet
from endstop.runtime.teaching import ANSWER, EOS, PROMPT, VOCABULARY, WIDTH, TeachingModel
from endstop.runtime.token_model import RowChunk, TokenModel
from endstop.runtime.trace import Trace


def test_the_shape() -> None:
    model = TeachingModel()
    assert isinstance(model, TokenModel)
    assert model.weights["embedding"].shape == (VOCABULARY, WIDTH) == (7, 4)
    assert model.weights["head"].shape == (7, 4)


def test_the_prompt_yields_three_five_and_the_end_with_cache_lengths_two_three_four() -> None:
    engine = Engine(TeachingModel(), StopSet.of({EOS: "eos"}))
    output = engine.generate([PROMPT], SamplingParams(temperature=0, trace=True))[0].outputs[0]
    assert output.generated_token_ids == ANSWER == [3, 5, 6]
    assert (output.token_ids, output.stop_kind, output.stop_reason) == ([3, 5], "eos", 6)
    trace = output.trace
    assert trace is not None
    assert [step.computed for step in trace.steps] == [2, 3, 4]
    assert [step.visible for step in trace.steps] == [3, 4, 5]
    assert [step.pending for step in trace.steps] == [1, 1, 1]
    assert [step.best_stop_rank == 1 for step in trace.steps] == [False, False, True]
    assert trace.steps[2].p_stop == pytest.approx(1 / (1 + 6 * 2.718281828459045**-8), rel=1e-5)
    assert trace.steps[2].probability == trace.steps[2].p_stop
    assert Trace.from_dict(trace.to_dict()) == trace


def test_every_cached_step_equals_the_full_recomputation() -> None:
    model = TeachingModel()
    tokens = PROMPT + ANSWER
    row = model.open_row()
    for start, end in [(0, 2), (2, 3), (3, 5)]:
        cached = model.forward([RowChunk(row, tokens[start:end], start, "all")]).logits
        whole = model.logits(model.hidden(tokens[:end])).float()[start:]
        torch.testing.assert_close(cached, whole, rtol=0, atol=1e-6)
    assert len(model.keys[row]) == 5
