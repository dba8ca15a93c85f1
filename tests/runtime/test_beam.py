"""Beam search: the textbook example, and transformers' beam search on tiny random models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from endstop import Engine, SamplingParams, StopSet, TokenBytes
from endstop.protocol.errors import RequestRefused
from endstop.runtime.token_model import Capabilities, ForwardResult, RowChunk
from endstop.testing import ScriptedModel

A, B, C, D, E, START, END = range(7)


def textbook(tokens: tuple[int, ...]) -> list[float]:
    following = {
        (START,): {A: 0.6, B: 0.4},
        (START, A): {E: 0.51, C: 0.49},
        (START, B): {D: 0.99, C: 0.01},
    }.get(tokens, {END: 1.0})
    return [math.log(following[i]) if i in following else -math.inf for i in range(7)]


def letters_engine(**options: Any) -> Engine:
    pieces = TokenBytes([b"A", b"B", b"C", b"D", b"E", b"", b""], special={START, END})
    return Engine(ScriptedModel(textbook, vocab_size=7, **options), StopSet.of({END: "eos"}), pieces)


def test_greedy_takes_AE_and_beam_width_two_takes_BD() -> None:
    engine = letters_engine()
    greedy = engine.generate([[START]], SamplingParams(temperature=0, max_tokens=2, logprobs=0))[0].outputs[0]
    assert greedy.text == "AE"
    assert math.exp(greedy.cumulative_logprob or 0) == pytest.approx(0.306)
    for limit in (2, 5):
        result = engine.beam_search([START], SamplingParams(max_tokens=limit, n=2), width=2)[0]
        assert [output.text for output in result.outputs] == ["BD", "AE"]
        assert math.exp(result.outputs[0].cumulative_logprob or 0) == pytest.approx(0.396)
    assert engine.beam_search([START], SamplingParams(max_tokens=2), width=1)[0].outputs[0].text == "AE"
    engine.close()
    assert engine.model.rows == {}  # type: ignore[attr-defined]


def test_the_machine_ends_beams_and_cuts_their_text() -> None:
    engine = letters_engine()
    best = engine.beam_search([START], SamplingParams(max_tokens=9), width=2)[0].outputs[0]
    assert (best.stop_kind, best.stop_reason, best.token_ids) == ("eos", END, [B, D])
    assert best.generated_token_ids == [B, D, END]
    params = SamplingParams(max_tokens=9, stop="D")
    cut = engine.beam_search([START], params, width=2, length_penalty=0.0)[0].outputs[0]
    assert (cut.text, cut.stop_kind, cut.stop_reason) == ("B", "stop_string", "D")


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({}, {"on_delta": print}, "cannot stream"),
        ({}, {"make_tool": object}, "tools"),
        ({"n": 3}, {}, "width of 2"),
        ({"top_k": 5}, {}, "draws nothing"),
        ({"seed": 5}, {}, "draws nothing"),
        ({"temperature": 0.5}, {}, "draws nothing"),
        ({"logprobs": 1}, {}, "cumulative_logprob"),
        ({"max_tokens": None}, {}, "max_tokens"),
    ],
)
def test_what_a_search_cannot_do_is_refused(params: Any, options: Any, message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        letters_engine().beam_search(
            [START], SamplingParams(**{"max_tokens": 4, **params}), width=2, **options
        )


def test_a_model_without_fork_and_a_cache_too_small_are_refused() -> None:
    with pytest.raises(RequestRefused, match="forks"):
        letters_engine(capabilities=Capabilities(fork=False)).beam_search(
            [START], SamplingParams(max_tokens=2), width=2
        )
    with pytest.raises(RequestRefused, match="do not fit"):
        letters_engine(memory=9).beam_search([START], SamplingParams(max_tokens=4), width=2)


def test_a_search_is_admitted_as_a_group_and_others_go_on() -> None:
    engine = letters_engine(memory=14)
    engine.add(
        [START, A, C], SamplingParams(max_tokens=5, ignore_eos=True, temperature=0), request_id="first"
    )
    for _ in range(2):
        engine.step()
    result = engine.beam_search([START], SamplingParams(max_tokens=4), width=2)[0]
    assert result.outputs[0].text == "BD"
    assert [o.request_id for o in engine.step()] == ["first"]
    assert engine.stats.preemptions == 0
    assert engine.stats.rows_computed_after_stop == 0


def test_a_search_is_cancelled_by_its_id() -> None:
    engine = letters_engine()

    def script(tokens: tuple[int, ...]) -> list[float]:
        if len(tokens) == 3:
            engine.abort("mine")
        return textbook(tokens)

    engine.model.script = script  # type: ignore[attr-defined]
    output = engine.beam_search([START], SamplingParams(max_tokens=9), width=2, request_id="mine")[0].outputs[
        0
    ]
    assert (output.finish_reason, output.text) == ("abort", "BD")
    assert engine.model.rows == {}  # type: ignore[attr-defined]


def test_a_model_that_fails_gives_an_error_result() -> None:
    def script(tokens: tuple[int, ...]) -> list[float]:
        if len(tokens) == 2:
            raise RuntimeError("out of memory")
        return textbook(tokens)

    engine = Engine(ScriptedModel(script, vocab_size=7), StopSet.of({END: "eos"}))
    output = engine.beam_search([START], SamplingParams(max_tokens=3), width=2)[0].outputs[0]
    assert (output.finish_reason, output.error) == ("error", "RuntimeError: out of memory")
    assert engine.model.rows == {}  # type: ignore[attr-defined]


class Recomputing:
    """A TokenModel around a transformers model that computes every row from its beginning."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocab_size: int = model.config.vocab_size
        self.context_len: int | None = None
        self.capabilities = Capabilities()
        self.rows: dict[int, list[int]] = {}
        self.handles = itertools.count()

    def open_row(self) -> int:
        row = next(self.handles)
        self.rows[row] = []
        return row

    def close_row(self, row: int) -> None:
        del self.rows[row]

    def fork_row(self, row: int, length: int) -> int:
        other = self.open_row()
        self.rows[other] = self.rows[row][:length]
        return other

    def truncate_row(self, row: int, length: int) -> None:
        del self.rows[row][length:]

    def fits(self, lengths: Sequence[int]) -> bool:
        return True

    def load_weights(self, state_dict: Any) -> None:
        raise NotImplementedError

    def forward(self, chunks: Sequence[RowChunk]) -> ForwardResult:
        for chunk in chunks:
            assert len(self.rows[chunk.row]) == chunk.start
            self.rows[chunk.row] += chunk.tokens
        tokens = torch.tensor([self.rows[chunk.row] for chunk in chunks])
        with torch.no_grad():
            return ForwardResult(self.model(tokens).logits[:, -1].float())


@pytest.fixture(scope="module")
def tiny() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.35,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=23,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("width", [2, 4])
def test_results_are_those_of_transformers(
    tiny: Any, early_stopping: bool, length_penalty: float, width: int
) -> None:
    ends = [7, 11, 13]
    engine = Engine(Recomputing(tiny), StopSet.of(ends), prefix_rows=0)
    reasons = set()
    for prompt in ([1, 2, 3], [9, 4], [5, 5, 6, 8]):
        expected = tiny.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=9,
            eos_token_id=ends,
            pad_token_id=23,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            return_dict_in_generate=True,
            output_scores=True,
        )
        params = SamplingParams(max_tokens=9, n=width)
        result = engine.beam_search(
            [prompt], params, width=width, length_penalty=length_penalty, early_stopping=early_stopping
        )[0]
        assert len(result.outputs) == width
        for output, ids, score in zip(
            result.outputs, expected.sequences.tolist(), expected.sequences_scores.tolist(), strict=True
        ):
            count = len(output.generated_token_ids)
            assert output.generated_token_ids == ids[len(prompt) : len(prompt) + count]
            assert set(ids[len(prompt) + count :]) <= {23}
            assert (output.cumulative_logprob or 0) / count**length_penalty == pytest.approx(score, abs=1e-4)
            reasons.add(output.stop_kind)
    assert "eos" in reasons or length_penalty > 1


def test_min_tokens_and_penalties_are_applied_as_in_transformers(tiny: Any) -> None:
    expected = tiny.generate(
        torch.tensor([[1, 2, 3]]),
        attention_mask=torch.ones(1, 3, dtype=torch.long),
        num_beams=3,
        do_sample=False,
        max_new_tokens=9,
        min_new_tokens=5,
        eos_token_id=[7],
        pad_token_id=23,
    )[0].tolist()
    engine = Engine(Recomputing(tiny), StopSet.of([7]), prefix_rows=0)
    output = engine.beam_search([1, 2, 3], SamplingParams(max_tokens=9, min_tokens=5), width=3)[0].outputs[0]
    assert output.generated_token_ids == expected[3:]
    assert 7 not in output.generated_token_ids[:5]


@pytest.mark.parametrize(
    ("poison", "kind"), [(math.nan, "error"), (math.inf, "error"), (-math.inf, "grammar")]
)
def test_logits_without_a_next_token_end_the_search(poison: float, kind: str) -> None:
    def script(tokens: tuple[int, ...]) -> list[float]:
        return [poison] * 7 if len(tokens) == 3 else textbook((START,))

    engine = Engine(ScriptedModel(script, vocab_size=7), StopSet.of({END: "eos"}), TokenBytes([b"x"] * 7))
    result = engine.beam_search([START], SamplingParams(max_tokens=9), width=2)[0].outputs[0]
    assert (result.stop_kind, result.token_ids) == (kind, [A, A])
    assert engine.model.rows == {}  # type: ignore[attr-defined]


def test_weights_are_not_swapped_under_a_search() -> None:
    errors = []

    def script(tokens: tuple[int, ...]) -> list[float]:
        try:
            engine.load_weights({})
        except RequestRefused as error:
            errors.append(str(error))
        return textbook(tokens)

    engine = Engine(ScriptedModel(script, vocab_size=7), StopSet.of({END: "eos"}), TokenBytes([]))
    result = engine.beam_search([START], SamplingParams(max_tokens=2), width=2)[0].outputs[0]
    assert (result.token_ids, set(errors)) == ([B, D], {"weights cannot be swapped while a beam search runs"})
