"""The engine on scripted models: ends, refusals, errors, deadlines, limits, cancellation, counting."""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest

from endstop import Engine, SamplingParams, StopSet, TokenBytes
from endstop.protocol.errors import RequestRefused
from endstop.protocol.toolcalls import ToolSyntax
from endstop.runtime.requests import RequestOptions
from endstop.runtime.results import CompletionOutput, RequestOutput
from endstop.runtime.token_model import Capabilities
from endstop.testing import ScriptedModel, follow

LETTERS = TokenBytes([bytes([97 + i]) for i in range(26)], special={2})
STOPS = StopSet.of({2: "eos"})


def engine_of(script: Any, **options: Any) -> Engine:
    model_options = {
        name: options.pop(name)
        for name in ("memory", "context_len", "capabilities", "vocab_size")
        if name in options
    }
    options.setdefault("stops", STOPS)
    options.setdefault("pieces", LETTERS)
    return Engine(ScriptedModel(script, **{"vocab_size": 26, **model_options}), **options)


def one(engine: Engine, prompt: list[int], **params: Any) -> CompletionOutput:
    output = engine.generate([prompt], SamplingParams(**params))[0].outputs[0]
    assert engine.stats.rows_computed_after_stop == 0
    return output


def test_B42_ignore_eos_frees_the_model_s_ids_and_not_the_user_s() -> None:
    script = {(1,): [5, 11, 6, 10, 7]}
    stops = StopSet.of({10: "eos", 11: "turn_end"})
    output = one(engine_of(script, stops=stops), [1], max_tokens=5, ignore_eos=True)
    assert (output.token_ids, output.finish_reason) == ([5, 11, 6, 10, 7], "length")
    output = one(engine_of(script, stops=stops), [1], max_tokens=5, ignore_eos=True, stop_token_ids=[6])
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([5, 11], "stop", 6)
    assert output.stop_kind == "stop_token"


def test_B45_rows_of_a_batch_end_each_at_its_own_end() -> None:
    engine = engine_of({(3,): [5, 2, 9, 9], (4,): [6, 7, 8, 2]})
    results = engine.generate([[3], [4]], SamplingParams(logprobs=0))
    short, long = (result.outputs[0] for result in results)
    assert (short.generated_token_ids, long.generated_token_ids) == ([5, 2], [6, 7, 8, 2])
    assert (short.token_ids, long.token_ids) == ([5], [6, 7, 8])
    assert (short.finish_reason, long.finish_reason) == ("stop", "stop")
    assert [len(o.logprobs or ()) for o in (short, long)] == [1, 3]
    assert [len(o.generated_logprobs or ()) for o in (short, long)] == [2, 4]
    assert [result.usage.completion_tokens for result in results] == [2, 4]
    limited = engine_of({(3,): [5, 2], (4,): [6, 7, 8, 2]})
    assert limited.generate([[3], [4]], SamplingParams(max_tokens=3))[1].outputs[0].finish_reason == "length"
    assert engine.stats.rows_computed_after_stop == limited.stats.rows_computed_after_stop == 0


def test_B50_ids_and_logprobs_are_cut_at_one_boundary() -> None:
    script = {(3,): [5, 6, 2], (4,): [2]}
    output = one(engine_of(script), [3], logprobs=0)
    assert (output.token_ids, len(output.logprobs or ()), output.stop_logprob) == ([5, 6], 2, 0.0)
    kept = one(engine_of(script), [3], logprobs=0, include_stop_str_in_output=True)
    assert (kept.token_ids, len(kept.logprobs or ()), kept.stop_logprob) == ([5, 6, 2], 3, None)
    result = engine_of(script).generate([[4]], SamplingParams(logprobs=0))[0]
    first = result.outputs[0]
    assert (first.token_ids, first.logprobs, first.finish_reason) == ([], [], "stop")
    assert first.stop_logprob == 0.0
    assert result.usage.completion_tokens == 1


def test_a_stop_string_cuts_text_ids_and_logprobs_together() -> None:
    pieces = TokenBytes([b"x", b" is", b" Paris", b"."])
    engine = engine_of({(0,): [1, 2, 3]}, pieces=pieces, stops=None)
    output = one(engine, [0], stop="Pari", logprobs=0)
    assert (output.text, output.token_ids, output.stop_reason) == (" is ", [1], "Pari")
    assert (output.generated_token_ids, len(output.logprobs or ())) == ([1, 2], 1)


def test_eos_on_the_last_allowed_token_is_stop() -> None:
    output = one(engine_of({(3,): [5, 2]}), [3], max_tokens=2)
    assert (output.finish_reason, output.stop_kind, output.stop_reason) == ("stop", "eos", 2)


def test_the_window_ends_a_row_and_the_last_token_is_never_computed() -> None:
    engine = engine_of(lambda tokens: 5, context_len=6)
    output = one(engine, [3, 4])
    assert (output.stop_kind, output.finish_reason) == ("context", "length")
    assert output.token_ids == [5, 5, 5, 5]
    assert engine.stats.tokens_computed == 5


def test_memory_for_less_than_the_window_is_the_window() -> None:
    engine = engine_of(lambda tokens: 5, context_len=100, memory=9)
    assert engine.context_len == 9
    assert one(engine, [3, 4]).stop_kind == "context"
    assert engine_of(lambda tokens: 5).context_len is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt has no tokens"),
        ([3, 26], "ids 0 to 25"),
        ([3, -1], "ids 0 to 25"),
        ([3, True], "token ids"),
        ([1] * 8, "shorten the prompt"),
        ("text", "no tokenizer"),
    ],
)
def test_prompts_that_cannot_be_computed_are_refused(prompt: Any, message: str) -> None:
    engine = engine_of(lambda tokens: 5, context_len=8)
    with pytest.raises(RequestRefused, match=message):
        engine.add(prompt)
    assert not engine.has_unfinished()


def test_a_dict_is_not_taken_for_a_list_of_its_keys() -> None:
    for prompt in ({"prompt": "Hi"}, {"prompt_token_ids": [3, 4]}):
        with pytest.raises(RequestRefused, match="a prompt is a text or a list of token ids, got"):
            engine_of(lambda tokens: 5).generate(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"stop_token_ids": [26]}, {"logit_bias": {26: 1.0}}, {"bad_words": "x"}])
def test_parameters_that_the_model_cannot_serve_are_refused(params: dict[str, Any]) -> None:
    engine = engine_of(lambda tokens: 5)
    with pytest.raises(ValueError, match=r"26 tokens|tokenizer"):
        engine.add([3], SamplingParams(**params))
    assert not engine.has_unfinished()


def test_one_refused_prompt_refuses_the_batch() -> None:
    engine = engine_of(lambda tokens: 5)
    with pytest.raises(RequestRefused):
        engine.generate([[3], [99]], SamplingParams(max_tokens=2))
    assert not engine.has_unfinished()
    assert engine.model.calls == []  # type: ignore[attr-defined]


def test_an_id_in_use_is_refused() -> None:
    engine = engine_of(lambda tokens: 5)
    engine.add([3], request_id="a")
    with pytest.raises(RequestRefused, match="in use"):
        engine.add([3], request_id="a")


def test_nan_logits_end_their_row_only() -> None:
    def script(tokens: tuple[int, ...]) -> list[float]:
        row = [0.0] * 26
        row[5] = math.nan if tokens == (3, 5) else 9.0
        return row

    engine = engine_of(script)
    broken, whole = engine.generate([[3], [4]], SamplingParams(temperature=0, max_tokens=4))
    assert (broken.outputs[0].finish_reason, broken.outputs[0].token_ids) == ("error", [5])
    assert "NaN" in (broken.outputs[0].error or "")
    assert (whole.outputs[0].finish_reason, whole.outputs[0].token_ids) == ("length", [5] * 4)
    assert engine.stats.rows_computed_after_stop == 0


def test_no_continuation_ends_with_grammar() -> None:
    nothing = [-math.inf] * 26
    engine = engine_of(lambda tokens: 5 if len(tokens) < 3 else nothing)
    output = one(engine, [1])
    assert (output.stop_kind, output.finish_reason, output.token_ids) == ("grammar", "stop", [5, 5])
    output = one(engine_of(lambda tokens: nothing), [1], min_tokens=1)
    assert (output.stop_kind, output.finish_reason) == ("error", "error")


@pytest.mark.parametrize("batched", [True, False])
def test_an_exception_in_forward_ends_the_affected_rows_and_the_engine_goes_on(batched: bool) -> None:
    def script(tokens: tuple[int, ...]) -> int:
        if tokens == (3, 5):
            raise RuntimeError("out of memory")
        return 5

    engine = engine_of(script, capabilities=Capabilities(batched=batched))
    params = SamplingParams(max_tokens=3)
    failing, other = (r.outputs[0] for r in engine.generate([[3], [4]], params))
    assert (failing.finish_reason, failing.text) == ("error", "f")
    assert failing.error == "RuntimeError: out of memory"
    assert other.finish_reason == ("error" if batched else "length")
    assert one(engine, [4], max_tokens=3).token_ids == [5, 5, 5]


def test_deadlines_hold_in_the_queue_and_in_a_row() -> None:
    now = [0.0]

    def script(tokens: tuple[int, ...]) -> int:
        now[0] += 1.0
        return 5

    engine = engine_of(script, max_rows=1, clock=lambda: now[0])
    first, queued = engine.generate(
        [[3], [4]], [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, max_time=3.0)]
    )
    assert (queued.outputs[0].stop_kind, queued.outputs[0].token_ids) == ("deadline", [])
    assert first.outputs[0].stop_kind == "max_tokens"
    output = one(engine, [4], max_time=3.0)
    assert (output.stop_kind, output.finish_reason, len(output.token_ids)) == ("deadline", "length", 3)


def test_a_deadline_holds_within_a_long_prompt() -> None:
    now = [0.0]

    class Slow(ScriptedModel):
        def forward(self, chunks: Any) -> Any:
            now[0] += 1.0
            return super().forward(chunks)

    engine = Engine(
        Slow(lambda tokens: 5, vocab_size=26), STOPS, LETTERS, max_batch_tokens=2, clock=lambda: now[0]
    )
    result = engine.generate([[3] * 20], SamplingParams(max_time=4.0))[0]
    assert (result.outputs[0].stop_kind, result.outputs[0].generated_token_ids) == ("deadline", [])
    assert now[0] == 4.0


def test_results_and_stop_reasons_come_through_step() -> None:
    engine = engine_of({(3,): [5, 2], (4,): [6, 7, 2]})
    ids = [engine.add([3]), engine.add([4], request_id="mine")]
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [output.request_id for output in outputs] == [ids[0], "mine"]
    assert engine.step() == []
    assert outputs[0].timing.arrived <= outputs[0].timing.first_token <= outputs[0].timing.finished  # type: ignore[operator]


def test_a_waiting_caller_does_not_swallow_the_results_of_others() -> None:
    engine = engine_of({(3,): [5, 2], (4,): [6, 7, 2]})
    engine.add([3], request_id="other")
    assert engine.generate([[4]])[0].outputs[0].token_ids == [6, 7]
    assert [output.request_id for output in engine.step()] == ["other"]
    assert not engine.has_unfinished()


def test_rows_are_admitted_in_order_of_arrival() -> None:
    model = ScriptedModel(follow({(p,): [5, 5, 2] for p in range(3, 9)}), vocab_size=26)
    engine = Engine(model, STOPS, LETTERS, max_rows=2, prefix_rows=0)
    engine.generate([[p] for p in range(3, 9)])
    started = [call.tokens[0] for calls in model.calls for call in calls if call.start == 0]
    assert started == [3, 4, 5, 6, 7, 8]
    assert max(len(calls) for calls in model.calls) == 2


def test_long_prompts_are_computed_in_chunks_beside_decoding_rows() -> None:
    model = ScriptedModel(lambda tokens: 5, vocab_size=26)
    engine = Engine(model, STOPS, LETTERS, max_batch_tokens=4)
    engine.add([3], SamplingParams(max_tokens=6))
    engine.step()
    engine.add([4] * 8, SamplingParams(max_tokens=2))
    while engine.has_unfinished():
        engine.step()
    sizes = [[len(call.tokens) for call in calls] for calls in model.calls]
    assert sizes == [[1], [1, 3], [1, 3], [1, 2], [1, 1], [1]]
    assert all(sum(size) <= 4 for size in sizes)


def test_the_youngest_row_is_preempted_and_nothing_is_lost() -> None:
    model = ScriptedModel(lambda tokens: tokens[0], vocab_size=26, memory=12)
    engine = Engine(model, STOPS, LETTERS, prefix_rows=0)
    results = engine.generate([[3, 3], [4, 4]], SamplingParams(max_tokens=8))
    assert [r.outputs[0].token_ids for r in results] == [[3] * 8, [4] * 8]
    assert engine.stats.preemptions == 1
    assert {call.row for calls in model.calls for call in calls if call.tokens[0] == 3} == {0}
    assert model.rows == {}


def test_the_next_turn_computes_only_what_is_new() -> None:
    model = ScriptedModel(lambda tokens: 2 if len(tokens) in (4, 8) else 5, vocab_size=26)
    engine = Engine(model, STOPS, LETTERS)
    first = engine.generate([[3, 4]])[0]
    assert first.outputs[0].generated_token_ids == [5, 5, 2]
    second = engine.generate([[3, 4, 5, 5, 2, 7]])[0]
    assert second.usage.cached_tokens == 4  # the terminator itself was never computed
    assert [len(call.tokens) for call in model.calls[3]] == [2]
    assert engine.stats.prefix_tokens_reused == 4


@pytest.mark.parametrize("fork", [True, False])
def test_n_choices_share_the_prompt_where_the_model_can_fork(fork: bool) -> None:
    model = ScriptedModel(lambda tokens: 5, vocab_size=26, capabilities=Capabilities(fork=fork))
    engine = Engine(model, STOPS, LETTERS)
    result = engine.generate([[3, 4, 6, 7, 8]], SamplingParams(n=3, max_tokens=2))[0]
    assert [o.index for o in result.outputs] == [0, 1, 2]
    assert [o.token_ids for o in result.outputs] == [[5, 5]] * 3
    assert result.usage.completion_tokens == 6
    prompt_tokens = model.tokens_computed - 3
    assert prompt_tokens == (5 + 1 + 1 if fork else 15)


def test_prompt_logprobs_read_no_cached_prefix() -> None:
    flat = [0.0] * 26
    model = ScriptedModel(lambda tokens: flat, vocab_size=26)
    engine = Engine(model, STOPS, LETTERS, max_batch_tokens=3)
    engine.generate([[3, 4, 5, 6]], SamplingParams(max_tokens=1))
    result = engine.generate([[3, 4, 5, 6]], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert result.usage.cached_tokens == 0
    entries = result.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert [list(entry or ()) for entry in entries] == [[], [4], [5], [6]]
    assert entries[1] is not None
    assert entries[1][4].logprob == pytest.approx(-math.log(26))
    assert entries[1][4].decoded_token == "e"


def test_prompt_logprobs_of_a_model_of_ids_end_that_request_only() -> None:
    class IdsOnly(ScriptedModel):
        def forward(self, chunks: Any) -> Any:
            return replace(super().forward(chunks), logits=None)

    engine = Engine(IdsOnly(lambda tokens: 5, vocab_size=26), STOPS, LETTERS)
    params = [SamplingParams(max_tokens=2, prompt_logprobs=0), SamplingParams(max_tokens=2)]
    scored, plain = (r.outputs[0] for r in engine.generate([[3, 4], [4, 4]], params))
    assert (scored.finish_reason, plain.finish_reason) == ("error", "length")
    assert "prompt_logprobs needs logits" in (scored.error or "")


def test_weights_are_swapped_under_way() -> None:
    model = ScriptedModel(lambda tokens: 5, vocab_size=26)
    engine = Engine(model, STOPS, LETTERS)
    engine.generate([[7, 8]], SamplingParams(max_tokens=1))
    engine.add([3, 4], SamplingParams(max_tokens=4))
    engine.step()
    engine.load_weights({"w": 1})
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert outputs[0].outputs[0].token_ids == [5] * 4
    assert model.loaded == [{"w": 1}]


# Cancellation.


def cancelled_at(steps: int, **options: Any) -> tuple[Engine, list[RequestOutput], list[weakref.ref[Any]]]:
    model = ScriptedModel(lambda tokens: 5, vocab_size=26, **options)
    engine = Engine(model, STOPS, LETTERS, max_batch_tokens=2)
    outputs: list[RequestOutput] = []
    request_id = engine.add(
        [3, 4, 6], SamplingParams(max_tokens=5, stop="ffz", n=2), on_output=outputs.append
    )
    engine.add([7], SamplingParams(max_tokens=3))
    held = engine._requests[request_id]
    references: list[weakref.ref[Any]] = [weakref.ref(held), *(weakref.ref(c) for c in held.choices)]
    del held
    for _ in range(steps):
        engine.step()
    engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()
    return engine, outputs, references


@pytest.mark.parametrize("steps", range(14))
def test_cancelled_at_any_step_there_is_one_result_and_nothing_is_left(steps: int) -> None:
    engine, outputs, references = cancelled_at(steps)
    assert len(outputs) == 1
    for choice in outputs[0].outputs:
        assert choice.finish_reason in ("abort", "length")
        assert choice.text == "f" * len(choice.token_ids)
        assert choice.generated_token_ids == choice.token_ids
    assert engine.stats.rows_computed_after_stop == 0
    engine.scheduler.clear_cache()
    assert engine.model.rows == {}  # type: ignore[attr-defined]
    assert [reference() for reference in references] == [None] * 3


def test_a_cancelled_row_is_not_kept_for_reuse() -> None:
    engine = engine_of(lambda tokens: 5)
    request_id = engine.add([3, 4], SamplingParams(max_tokens=9))
    engine.step()
    assert engine.abort(request_id)
    assert engine.model.rows == {}  # type: ignore[attr-defined]
    assert [o.outputs[0].finish_reason for o in engine.step()] == ["abort"]
    assert not engine.abort(request_id)


def test_cancelled_from_another_thread_during_the_step() -> None:
    computing, cancelled = threading.Event(), threading.Event()

    def script(tokens: tuple[int, ...]) -> int:
        if len(tokens) == 3:
            computing.set()
            assert cancelled.wait(5)
        return 5

    engine = engine_of(script)
    outputs: list[RequestOutput] = []
    request_id = engine.add([3], SamplingParams(max_tokens=9), on_output=outputs.append)

    def cancel() -> None:
        assert computing.wait(5)
        engine.abort(request_id)
        cancelled.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    while engine.has_unfinished():
        engine.step()
    thread.join()
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort"]
    assert outputs[0].outputs[0].token_ids == [5, 5]  # the token under way is not appended
    assert engine.stats.rows_computed_after_stop == 0


def test_closing_a_stream_cancels_its_request() -> None:
    engine = engine_of(lambda tokens: 5)
    stream = engine.stream([3], SamplingParams(max_tokens=9))
    assert next(stream).text == "f"
    stream.close()  # type: ignore[attr-defined]
    assert not engine.has_unfinished()
    assert engine.model.rows == {}  # type: ignore[attr-defined]


def test_an_interrupt_in_the_model_cancels_the_batch_and_the_engine_goes_on() -> None:
    interrupts = [True]

    def script(tokens: tuple[int, ...]) -> int:
        if len(tokens) == 3 and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return 5

    engine = engine_of(script)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[3], [4]], SamplingParams(max_tokens=4))
    assert not engine.has_unfinished()
    assert one(engine, [3], max_tokens=4).token_ids == [5] * 4


def test_a_consumer_that_fails_costs_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(lambda tokens: 5)

    def broken(delta: Any) -> None:
        raise RuntimeError("consumer")

    engine.add([3], SamplingParams(max_tokens=4), on_delta=broken, request_id="broken")
    engine.add([4], SamplingParams(max_tokens=4), request_id="whole")
    reasons = {}
    while engine.has_unfinished():
        reasons.update({o.request_id: o.outputs[0].finish_reason for o in engine.step()})
    assert reasons == {"broken": "abort", "whole": "length"}
    assert "consumer" in caplog.text


def test_a_consumer_may_cancel_from_within_the_step() -> None:
    engine = engine_of(lambda tokens: 5)
    outputs: list[RequestOutput] = []
    engine.add(
        [3],
        SamplingParams(max_tokens=9, n=2),
        request_id="a",
        on_delta=lambda delta: engine.abort("a"),
        on_output=outputs.append,
    )
    while engine.has_unfinished():
        engine.step()
    assert [choice.finish_reason for choice in outputs[0].outputs] == ["abort", "abort"]


def test_close_ends_everything() -> None:
    engine = engine_of(lambda tokens: 5)
    outputs: list[RequestOutput] = []
    engine.add([3], SamplingParams(max_tokens=9), on_output=outputs.append)
    engine.generate([[4]], SamplingParams(max_tokens=1))
    engine.close()
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort"]
    assert engine.model.rows == {}  # type: ignore[attr-defined]


def test_cancelled_comes_before_an_error_of_the_same_step() -> None:
    def script(tokens: tuple[int, ...]) -> int:
        if len(tokens) == 3:
            engine.abort("x")
            raise RuntimeError("no memory")
        return 5

    engine = engine_of(script)
    engine.add([3], request_id="x")
    results = []
    while engine.has_unfinished():
        results += engine.step()
    output = results[0].outputs[0]
    assert (output.stop_kind, output.token_ids, output.error) == ("cancelled", [5, 5], None)


def test_several_conditions_at_once_are_tested_in_order() -> None:
    now = [0.0]

    def script(tokens: tuple[int, ...]) -> int:
        now[0] += len(tokens) == 3  # the third token comes behind the deadline
        return {1: 5, 2: 5, 3: 7}[len(tokens)]

    engine = engine_of(script, clock=lambda: now[0])
    base = SamplingParams(
        stop="h",
        stop_token_ids=[7],
        max_tokens=3,
        max_time=0.5,
        repetition_detection={"max_pattern_size": 1, "min_count": 3},  # type: ignore[arg-type]
    )
    expected = {
        "stop_string": {},
        "stop_token": {"stop": ()},
        "max_tokens": {"stop": (), "stop_token_ids": ()},
    }
    for kind, changes in expected.items():
        now[0] = 0.0
        output = engine.generate([[3]], base.replace(**changes))[0].outputs[0]
        assert output.stop_kind == kind
        assert output.generated_token_ids == [5, 5, 7]
    now[0] = 0.0
    later = base.replace(stop=(), stop_token_ids=(), max_tokens=9)
    assert engine.generate([[3]], later)[0].outputs[0].stop_kind == "deadline"


def test_a_consumer_may_end_another_request_within_the_step() -> None:
    engine = engine_of({(3,): [5, 6, 7, 2], (4,): [5, 6, 7, 2]})
    results = {}

    def consume(delta: Any) -> None:
        engine.cancel([other])

    engine.add([3], request_id="first", on_delta=consume)
    other = engine.submit([4], SamplingParams(), RequestOptions(request_id="other"))
    while engine.has_unfinished():
        results.update({output.request_id: output.outputs[0] for output in engine.step()})
    assert (results["first"].stop_kind, results["first"].token_ids) == ("eos", [5, 6, 7])
    assert results["other"].stop_kind == "cancelled"
    assert engine.stats.rows_computed_after_stop == 0


def test_several_threads_may_wait_at_once() -> None:
    model = ScriptedModel(lambda tokens: tokens[0], vocab_size=26)
    engine = Engine(model, STOPS, LETTERS, max_rows=4)
    texts: dict[int, list[str]] = {}

    def work(first: int) -> None:
        prompts = [[first + i] for i in range(4)]
        streamed = "".join(delta.text for delta in engine.stream([first], SamplingParams(max_tokens=20)))
        results = engine.generate(prompts, SamplingParams(max_tokens=20))
        texts[first] = [streamed, *(result.outputs[0].text for result in results)]

    threads = [threading.Thread(target=work, args=(first,)) for first in (3, 7, 11, 15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for first in (3, 7, 11, 15):
        letters = [chr(97 + first), *(chr(97 + first + i) for i in range(4))]
        assert texts[first] == [letter * 20 for letter in letters]
    assert not engine.has_unfinished()
    assert engine.stats.rows_computed_after_stop == 0


def test_a_request_with_a_tool_syntax_has_the_fields_of_a_message() -> None:
    pieces = TokenBytes([b"hi ", b'<tool_call>{"name": "f"}</tool_call>', b"<eos>"], special={2})
    model = ScriptedModel({(0,): [0, 1, 2]}, vocab_size=3)
    engine = Engine(model, StopSet.of({2: "eos"}), pieces)
    output = engine.generate([[0]], tools=ToolSyntax("hermes"))[0].outputs[0]
    assert (output.finish_reason, output.stop_kind, output.content) == ("tool_calls", "eos", "hi ")
    assert [call.name for call in output.tool_calls] == ["f"]
