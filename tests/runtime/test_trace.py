"""Traces: the raw distribution, whatever the processors do; three counts; JSON with version and schema."""

from __future__ import annotations

import json
import math

import pytest
import torch

from endstop import Engine, SamplingParams, StopSet, TokenBytes
from endstop.runtime.trace import TRACE_SCHEMA, TRACE_VERSION, Trace, measure
from endstop.testing import ScriptedModel

LOGITS = [2.0, 1.0, 0.0, 3.0]
P = [math.exp(x) / sum(map(math.exp, LOGITS)) for x in LOGITS]


def traced(**params: object) -> Trace:
    model = ScriptedModel(lambda tokens: LOGITS, vocab_size=4)
    engine = Engine(model, StopSet.of({0: "eos", 2: "turn_end"}), TokenBytes([b"</s>", b"a", b"<e>", b"b"]))
    trace = engine.generate([[1, 1]], SamplingParams(trace=True, max_tokens=3, **params))[0].outputs[0].trace  # type: ignore[arg-type]
    assert trace is not None
    return trace


def test_a_step_sums_the_stop_set() -> None:
    step = measure(torch.log_softmax(torch.tensor(LOGITS), -1), [0, 2], 3)
    assert step.p_stop == pytest.approx(P[0] + P[2], rel=1e-6)
    assert (step.best_stop, step.best_stop_rank) == (0, 2)
    assert step.probability == pytest.approx(P[3], rel=1e-6)
    assert step.entropy == pytest.approx(-sum(p * math.log(p) for p in P), rel=1e-6)


def test_impossible_tokens_and_an_empty_stop_set_give_finite_numbers() -> None:
    logprobs = torch.log_softmax(torch.tensor([0.0, -math.inf, 0.0]), -1)
    step = measure(logprobs, [], 0)
    assert (step.p_stop, step.best_stop, step.best_stop_rank) == (0.0, None, None)
    assert step.entropy == pytest.approx(math.log(2))
    assert measure(logprobs, [1], 0).p_stop == 0.0


def test_processors_do_not_change_what_is_measured() -> None:
    plain = traced(temperature=0)
    bent = traced(temperature=0.3, top_k=1, ban_eos=True, logit_bias={3: 1.0}, presence_penalty=0.1)
    for step in plain.steps + bent.steps:
        assert (step.token_id, step.token) == (3, "b")
        assert step.p_stop == pytest.approx(P[0] + P[2], rel=1e-6)
        assert step.probability == pytest.approx(P[3], rel=1e-6)


def test_the_three_counts() -> None:
    steps = traced(temperature=0).steps
    assert [(s.visible, s.computed, s.pending) for s in steps] == [(3, 2, 1), (4, 3, 1), (5, 4, 1)]


def test_json_has_a_version_and_keeps_everything() -> None:
    trace = traced(temperature=0)
    data = json.loads(trace.to_json())
    assert data["version"] == TRACE_VERSION == 1
    assert data["stop_ids"] == [0, 2]
    assert Trace.from_dict(data) == trace
    with pytest.raises(ValueError, match="version 2 is unknown"):
        Trace.from_dict({**data, "version": 2})
    with pytest.raises(ValueError, match="not a trace"):
        Trace.from_dict({"version": 1})
    step = TRACE_SCHEMA["properties"]["steps"]["items"]
    assert set(step["properties"]) == set(data["steps"][0])
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(data, TRACE_SCHEMA)


def test_no_trace_unless_asked() -> None:
    engine = Engine(ScriptedModel({(1,): [2]}), StopSet.of({2: "eos"}))
    assert engine.generate([1])[0].outputs[0].trace is None
