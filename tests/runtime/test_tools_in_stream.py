"""In-stream tools: forced tokens, the waiting state, and the end of a tool with its row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from endstop import Engine, SamplingParams, StopSet, TokenBytes
from endstop.testing import ScriptedModel, follow

LETTERS = TokenBytes([bytes([97 + i]) for i in range(26)], special={2})
STOPS = StopSet.of({2: "eos"})
CALL = 9


class Tool:
    """Answers every CALL with `answer`; with `gate` it waits for that event."""

    def __init__(self, answer: list[int], gate: threading.Event | None = None) -> None:
        self.answer = answer
        self.gate = gate
        self.seen: list[int] = []
        self.closed = False

    def push(self, token_id: int) -> Callable[[], list[int]] | None:
        self.seen.append(token_id)
        return self.work if token_id == CALL else None

    def work(self) -> list[int]:
        if self.gate is not None:
            assert self.gate.wait(5)
        return self.answer

    def close(self) -> None:
        self.closed = True
        if self.gate is not None:
            self.gate.set()


def engine_of(script: Any, **options: Any) -> tuple[Engine, ScriptedModel]:
    model = ScriptedModel(script, vocab_size=26)
    return Engine(model, STOPS, LETTERS, **options), model


def test_the_answer_is_forced_counted_shown_and_computed_as_one_chunk() -> None:
    engine, model = engine_of({(1,): [5, CALL, 0, 0, 0, 7, 2]})
    tool = Tool([10, 11, 12])
    result = engine.generate([[1]], SamplingParams(logprobs=0, trace=True), make_tool=lambda: tool)[0]
    output = result.outputs[0]
    assert output.text == "fjklmh"
    assert output.generated_token_ids == [5, CALL, 10, 11, 12, 7, 2]
    assert output.generated_mask == [1, 1, 0, 0, 0, 1, 1]
    assert [entry is None for entry in output.generated_logprobs or ()] == [
        m == 0 for m in output.generated_mask
    ]
    assert result.usage.completion_tokens == 7
    assert tool.seen == [5, CALL, 7]
    assert tool.closed
    chunks = [call.tokens for calls in model.calls for call in calls]
    assert chunks == [(1,), (5,), (CALL, 10, 11, 12), (7,)]
    assert output.trace is not None
    assert [step.forced for step in output.trace.steps] == [m == 0 for m in output.generated_mask]
    assert [step.pending for step in output.trace.steps] == [1, 1, 2, 3, 4, 1, 1]


def test_forced_tokens_use_no_draw() -> None:
    flat = [0.0] * 26

    def script(tokens: tuple[int, ...]) -> int | list[float]:
        return CALL if len(tokens) == 3 else flat

    params = SamplingParams(max_tokens=8, seed=4, ban_eos=True)
    plain, _ = engine_of(script)
    forced, _ = engine_of(script)
    without = plain.generate([[1]], params)[0].outputs[0].generated_token_ids
    tools = forced.generate([[1]], params, make_tool=lambda: Tool([10, 11]))[0].outputs[0].generated_token_ids
    assert tools == [*without[:3], 10, 11, *without[3:6]]


def test_forced_tokens_end_a_row_only_by_its_limits() -> None:
    engine, _ = engine_of({(1,): [CALL, 0, 0, 0, 2]})
    params = SamplingParams(stop="k", stop_token_ids=[11])
    output = engine.generate([[1]], params, make_tool=lambda: Tool([10, 2, 11]))[0].outputs[0]
    assert output.generated_token_ids == [CALL, 10, 2, 11, 2]
    assert output.stop_kind == "eos"
    limited, model = engine_of(follow({(1,): [CALL]}))
    output = limited.generate([[1]], SamplingParams(max_tokens=3), make_tool=lambda: Tool([10, 11, 12]))[
        0
    ].outputs[0]
    assert (output.generated_token_ids, output.stop_kind) == ([CALL, 10, 11], "max_tokens")
    assert model.tokens_computed == 1
    assert limited.stats.rows_computed_after_stop == 0


def test_other_rows_go_on_while_a_tool_runs() -> None:
    gate = threading.Event()
    engine, _ = engine_of({(1,): [CALL, 0, 7, 2], (3,): [5, 5, 5, 2]})
    tool = Tool([10], gate)
    outputs: dict[str, Any] = {}
    engine.add([1], make_tool=lambda: tool, request_id="tool", on_output=lambda o: outputs.update(tool=o))
    engine.add([3], request_id="other", on_output=lambda o: outputs.update(other=o))
    while "other" not in outputs:
        engine.step()
    assert "tool" not in outputs
    gate.set()
    while "tool" not in outputs:
        engine.step()
    assert outputs["tool"].outputs[0].generated_token_ids == [CALL, 10, 7, 2]


@pytest.mark.parametrize("way", ["cancelled", "deadline"])
def test_a_row_that_ends_while_its_tool_runs_ends_the_tool(way: str) -> None:
    now = [0.0]
    gate = threading.Event()
    engine, model = engine_of({(1,): [CALL]}, clock=lambda: now[0], prefix_rows=0)
    tool = Tool([10], gate)
    request_id = engine.add([1], SamplingParams(max_time=3.0), make_tool=lambda: tool)
    engine.step()
    assert not tool.closed
    if way == "cancelled":
        engine.abort(request_id)
    else:
        now[0] = 3.0
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [o.outputs[0].stop_kind for o in outputs] == [way]
    assert outputs[0].outputs[0].generated_token_ids == [CALL]
    assert tool.closed
    assert model.rows == {}


def test_a_waiting_row_can_be_preempted() -> None:
    gate = threading.Event()
    script = follow({(1,): [5] * 9 + [2], (3,): [CALL, 0, 7, 2]})
    model = ScriptedModel(script, vocab_size=26, memory=11)
    engine = Engine(model, STOPS, LETTERS, prefix_rows=0)
    outputs: dict[str, Any] = {}
    engine.add([1], on_output=lambda o: outputs.update(long=o))
    engine.add(
        [
            3,
        ],
        make_tool=lambda: Tool([10], gate),
        on_output=lambda o: outputs.update(tool=o),
    )
    engine.add([1], on_output=lambda o: outputs.update(last=o))
    while "long" not in outputs:
        engine.step()
    assert engine.stats.preemptions > 0
    gate.set()
    while len(outputs) < 3:
        engine.step()
    assert outputs["tool"].outputs[0].generated_token_ids == [CALL, 10, 7, 2]
    assert outputs["last"].outputs[0].token_ids == [5] * 9


def test_a_tool_that_fails_or_gives_ids_outside_the_vocabulary_ends_its_row() -> None:
    class Broken(Tool):
        def work(self) -> list[int]:
            raise RuntimeError("no answer")

    for tool, message in ((Broken([]), "no answer"), (Tool([99]), "99")):
        engine, _ = engine_of({(1,): [CALL]})
        output = engine.generate([[1]], make_tool=lambda tool=tool: tool)[0].outputs[0]  # type: ignore[misc]
        assert output.finish_reason == "error"
        assert message in (output.error or "")


def test_an_empty_answer_lets_the_model_go_on() -> None:
    engine, _ = engine_of({(1,): [CALL, 7, 2]})
    output = engine.generate([[1]], make_tool=lambda: Tool([]))[0].outputs[0]
    assert output.generated_token_ids == [CALL, 7, 2]


@pytest.mark.parametrize("answer", [None, "ab", [1.5], 7, [None]])
def test_a_tool_that_gives_no_token_ids_ends_its_row_only(answer: Any) -> None:
    engine, _ = engine_of({(1,): [5, CALL], (4,): [5, 6, 7, 8, 2]})
    results: dict[str, Any] = {}
    engine.add(
        [1], request_id="tool", make_tool=lambda: Tool(answer), on_output=lambda o: results.update(a=o)
    )
    engine.add([4], request_id="other", on_output=lambda o: results.update(b=o))
    while engine.has_unfinished():
        engine.step()
    assert results["a"].outputs[0].stop_kind == "error"
    assert results["b"].outputs[0].token_ids == [5, 6, 7, 8]


def test_an_answer_may_be_any_iterable_of_ids() -> None:
    engine, _ = engine_of({(1,): [CALL, 10, 11, 7, 2]})
    tool = Tool(iter([10, 11]))  # type: ignore[arg-type]
    output = engine.generate([[1]], make_tool=lambda: tool)[0].outputs[0]
    assert (output.generated_token_ids, output.generated_mask) == ([CALL, 10, 11, 7, 2], [1, 0, 0, 1, 1])


@pytest.mark.parametrize("broken", ["push", "close"])
def test_a_tool_that_raises_costs_no_other_row_anything(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(Tool):
        def push(self, token_id: int) -> Callable[[], list[int]] | None:
            if broken == "push" and token_id == CALL:
                raise RuntimeError("broken tool")
            return None

        def close(self) -> None:
            if broken == "close":
                raise RuntimeError("broken tool")

    engine, _ = engine_of({(1,): [5, CALL, 2], (4,): [5, 6, 7, 8, 2]})
    results: dict[str, Any] = {}
    engine.add([1], make_tool=lambda: Raising([]), on_output=lambda o: results.update(tool=o.outputs[0]))
    engine.add([4], on_output=lambda o: results.update(other=o.outputs[0]))
    for _ in range(20):
        engine.step()
    assert results["other"].token_ids == [5, 6, 7, 8]
    assert results["tool"].stop_kind == ("error" if broken == "push" else "eos")
    assert results["tool"].token_ids == [5, CALL]
    assert not engine.has_unfinished()
