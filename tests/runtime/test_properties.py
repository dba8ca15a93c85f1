"""Properties of the engine over random workloads on a scripted model.

What a row gives does not depend on its neighbours, on order and time of arrival, chunk size, number of rows,
preemption, prefix reuse or n; deltas concatenate to the result; cancelled at any step a request has one
result and leaves nothing behind; no row is computed after its end.
"""

from __future__ import annotations

import random
import weakref
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from endstop import Engine, SamplingParams, StopSet, TokenBytes
from endstop.runtime.results import CompletionOutput, Delta, RequestOutput
from endstop.runtime.token_model import Capabilities
from endstop.testing import ScriptedModel

VOCABULARY = 7
STOPS = StopSet.of({0: "eos", 6: "turn_end"})
# Text, a shared prefix, a split character, a special token with a text of its own.
PIECES = TokenBytes([b"", b"a", b"ab", b"\xc3", b"\xa9b", b"<s>", b"</s>"], special={0, 5, 6})
LONGEST_PROMPT = 4
LONGEST_ANSWER = 7


def script(tokens: tuple[int, ...]) -> int | list[float]:
    """Numbers that depend on the whole row; one row in eight is an id that bypasses the sampler."""
    chance = random.Random(repr(tokens))
    if chance.random() < 0.125:
        return chance.randrange(VOCABULARY)
    return [chance.gauss(0, 2) for _ in range(VOCABULARY)]


requests = st.tuples(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=LONGEST_PROMPT),
    st.builds(
        SamplingParams,
        n=st.integers(1, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.8]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        seed=st.integers(0, 3),
        stop=st.sampled_from([(), ("b",), ("aba", "é"), ("<s>",), ("ab</s>",)]),
        stop_token_ids=st.sampled_from([(), (5,)]),
        max_tokens=st.integers(3, LONGEST_ANSWER),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        ban_eos=st.sampled_from([False, False, True]),
        include_stop_str_in_output=st.booleans(),
        skip_special_tokens=st.booleans(),
        logprobs=st.sampled_from([None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        trace=st.booleans(),
    ),
)


@dataclass(frozen=True)
class Setting:
    max_rows: int
    max_batch_tokens: int
    prefix_rows: int
    memory: int | None
    capabilities: Capabilities


engine_settings = st.builds(
    Setting,
    max_rows=st.integers(1, 5),
    max_batch_tokens=st.sampled_from([1, 2, 3, 8, 100]),
    prefix_rows=st.integers(0, 3),
    memory=st.sampled_from([None, None, 12, 16, 25]),
    capabilities=st.builds(Capabilities, st.booleans(), st.booleans(), st.booleans()),
)
ALONE = Setting(1, 100, 0, None, Capabilities(False, False, False))


def engine_of(setting: Setting) -> Engine:
    model = ScriptedModel(
        script, vocab_size=VOCABULARY, memory=setting.memory, capabilities=setting.capabilities
    )
    return Engine(
        model,
        STOPS,
        PIECES,
        max_rows=setting.max_rows,
        max_batch_tokens=setting.max_batch_tokens,
        prefix_rows=setting.prefix_rows,
    )


def comparable(output: RequestOutput) -> list[CompletionOutput]:
    """Everything but the counts in traces, which tell how the row was computed."""
    choices = []
    for choice in output.outputs:
        if choice.trace is not None:
            steps = [replace(step, computed=0, pending=0) for step in choice.trace.steps]
            choice = replace(choice, trace=replace(choice.trace, steps=steps))
        choices.append(choice)
    return choices


def check_deltas(deltas: list[Delta], output: RequestOutput) -> None:
    for choice in output.outputs:
        own = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.text for delta in own) == choice.text
        assert [token_id for delta in own for token_id in delta.token_ids] == choice.token_ids
        if choice.logprobs is not None:
            assert [entry for delta in own for entry in delta.logprobs or ()] == choice.logprobs
        assert [delta.finished for delta in own] == [False] * (len(own) - 1) + [True]
        last = own[-1]
        assert (last.finish_reason, last.stop_kind) == (choice.finish_reason, choice.stop_kind)
        assert last.stop_reason == choice.stop_reason
        assert last.output == choice
        assert all(delta.text or delta.token_ids or delta.finished for delta in own)


def run(
    engine: Engine, jobs: list[tuple[int, list[int], SamplingParams]]
) -> tuple[dict[int, RequestOutput], dict[int, list[Delta]]]:
    """Add each job when its step comes; results and deltas by place in `jobs`."""
    outputs: dict[int, RequestOutput] = {}
    deltas: dict[int, list[Delta]] = defaultdict(list)
    step = 0
    while len(outputs) < len(jobs):
        for place, (at, prompt, params) in enumerate(jobs):
            if at == step:
                engine.add(
                    prompt,
                    params,
                    request_id=str(place),
                    on_delta=deltas[place].append,
                    on_output=lambda output, place=place: outputs.update({place: output}),  # type: ignore[misc]
                )
        engine.step()
        step += 1
        assert step < 5000
    return outputs, deltas


def check_independence(data: st.DataObject) -> None:
    jobs = [
        (at, prompt, params)
        for at, (prompt, params) in data.draw(
            st.lists(st.tuples(st.integers(0, 6), requests), min_size=1, max_size=4)
        )
    ]
    engine = engine_of(data.draw(engine_settings))
    outputs, deltas = run(engine, jobs)
    for place, (_, prompt, params) in enumerate(jobs):
        alone = engine_of(ALONE).generate([prompt], params)[0]
        assert comparable(outputs[place]) == comparable(alone)
        assert outputs[place].prompt_logprobs == alone.prompt_logprobs
        assert outputs[place].usage.completion_tokens == alone.usage.completion_tokens
        check_deltas(deltas[place], outputs[place])
        more = engine_of(ALONE).generate([prompt], params.replace(n=params.n + 1, prompt_logprobs=None))[0]
        assert comparable(more)[: params.n] == comparable(alone)
    assert engine.stats.rows_computed_after_stop == 0
    engine.close()
    assert engine.model.rows == {}  # type: ignore[attr-defined]


def check_cancellation(data: st.DataObject) -> None:
    jobs = data.draw(st.lists(requests, min_size=1, max_size=3))
    engine = engine_of(data.draw(engine_settings))
    cancelled_at = data.draw(st.lists(st.integers(0, 25), min_size=len(jobs), max_size=len(jobs)))
    outputs: dict[str, list[RequestOutput]] = defaultdict(list)
    deltas: dict[str, list[Delta]] = defaultdict(list)
    references: list[weakref.ref[Any]] = []
    for place, (prompt, params) in enumerate(jobs):
        name = str(place)
        params = params.replace(prompt_logprobs=None)
        engine.add(
            prompt, params, request_id=name, on_delta=deltas[name].append, on_output=outputs[name].append
        )
        request = engine._requests[name]
        references += [weakref.ref(request), *(weakref.ref(choice) for choice in request.choices)]
        del request
    step = 0
    while engine.has_unfinished():
        for place, at in enumerate(cancelled_at):
            if at == step:
                engine.abort(str(place))
        engine.step()
        step += 1
    for place, (prompt, params) in enumerate(jobs):
        (output,) = outputs[str(place)]
        check_deltas(deltas[str(place)], output)
        whole = engine_of(ALONE).generate([prompt], params.replace(prompt_logprobs=None))[0]
        for choice, complete in zip(output.outputs, whole.outputs, strict=True):
            if choice.finish_reason == "abort":
                count = len(choice.generated_token_ids)
                assert choice.generated_token_ids == complete.generated_token_ids[:count]
                assert choice.token_ids == choice.generated_token_ids
            else:
                assert comparable(output)[choice.index].text == complete.text
    assert engine.stats.rows_computed_after_stop == 0
    engine.close()
    assert engine.model.rows == {}  # type: ignore[attr-defined]
    assert [reference() for reference in references if reference() is not None] == []


quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))


@given(st.data())
@quick
def test_a_row_depends_on_its_request_only(data: st.DataObject) -> None:
    check_independence(data)


@given(st.data())
@quick
def test_cancelled_at_any_step_one_result_and_nothing_left(data: st.DataObject) -> None:
    check_cancellation(data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(st.data())
@thorough
def test_a_row_depends_on_its_request_only_2000(data: st.DataObject) -> None:
    check_independence(data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(st.data())
@thorough
def test_cancelled_at_any_step_one_result_and_nothing_left_2000(data: st.DataObject) -> None:
    check_cancellation(data)
