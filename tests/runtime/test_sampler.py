"""The sampler: numbers of the processors, exact ties, draws, penalties, bans, logprobs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop import SamplingParams
from endstop.runtime.distribution import (
    invert,
    invert_listed,
    largest_weights,
    restricted,
    weights_of,
)
from endstop.runtime.draw import uniform
from endstop.runtime.sampler import banned_by_bad_words, sample

NO = float("-inf")


@dataclass
class Row:
    params: SamplingParams
    prompt_token_ids: list[int] = field(default_factory=lambda: [0])
    generated_token_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    seed: int = 1
    index: int = 0
    sampled: int = 0
    sampler_state: Any = None
    bans: frozenset[int] = frozenset()

    def banned_ids(self) -> frozenset[int]:
        return self.bans


def probabilities(logits: list[float], **params: Any) -> list[float]:
    """The whole processed distribution."""
    own = [SamplingParams(**params)]
    weights = weights_of(torch.tensor([logits], dtype=torch.float32), own)
    ids, kept = restricted(weights, own)
    assert ids[kept > 0].tolist() == sorted(ids[kept > 0].tolist())
    found = torch.zeros_like(weights).scatter_add(-1, ids, kept)[0]
    return (found / found.sum()).tolist()


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(0.5, [0.8668, 0.1173, 0.0159]), (1.0, [0.6652, 0.2447, 0.0900]), (2.0, [0.5065, 0.3072, 0.1863])],
)
def test_temperature(temperature: float, expected: list[float]) -> None:
    assert probabilities([2, 1, 0], temperature=temperature) == pytest.approx(expected, abs=5e-5)


def test_top_k_two() -> None:
    assert probabilities([2, 1, 0], top_k=2) == pytest.approx([0.731059, 0.268941, 0], abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    assert probabilities([2, 1, 0], top_p=0.8) == pytest.approx([0.731059, 0.268941, 0], abs=1e-6)
    assert probabilities([2, 1, 0], top_p=0.6) == [1, 0, 0]
    assert probabilities([2, 1, 0], top_p=1e-9) == [1, 0, 0]
    assert probabilities([2, 1, 0], top_p=0.95) == pytest.approx([0.6652, 0.2447, 0.0900], abs=5e-5)


def test_min_p_is_relative_to_the_best_token() -> None:
    assert probabilities([2, 1, 0], min_p=0.3) == pytest.approx([0.731059, 0.268941, 0], abs=1e-6)
    assert probabilities([2, 1, 0], min_p=1.0) == [1, 0, 0]


def test_equal_logits_keep_an_exact_number_and_the_lower_ids() -> None:
    assert probabilities([1, 3, 1, 1], top_k=2) == pytest.approx([0.1192, 0.8808, 0, 0], abs=5e-5)
    assert probabilities([0, 0, 0, 0], top_p=0.5) == [0.5, 0.5, 0, 0]
    assert probabilities([5, 5], temperature=1e-9, top_k=1) == [1, 0]


@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 77}, {"top_k": 99, "top_p": 0.97}]
)
def test_the_length_of_the_candidate_list_does_not_show(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).tolist()[0]
    listed = probabilities(logits, **params)
    assert 64 < sum(p > 0 for p in listed) < 300
    monkeypatch.setattr("endstop.runtime.distribution.CANDIDATES", ())
    assert probabilities(logits, **params) == pytest.approx(listed, abs=1e-9)
    monkeypatch.setattr("endstop.runtime.distribution.CANDIDATES", (4, 70, 80))
    assert probabilities(logits, **params) == pytest.approx(listed, abs=1e-9)


def naive(logits: list[float], min_p: float, top_k: int, top_p: float) -> set[int]:
    """The ids that stay, by the definitions."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    mass = [math.exp(logits[i] - logits[order[0]]) for i in order]
    count = sum(m >= min_p for m in mass)
    if top_k:
        count = min(count, top_k)
    total = sum(mass[:count])
    if top_p < 1:
        count = next(
            n for n in range(1, count + 1) if sum(mass[:n]) >= top_p * total * (1 - 1e-9) or n == count
        )
    return set(order[:count])


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.05, 0.4]),
    st.integers(0, 12),
    st.sampled_from([0.31, 0.55, 0.83, 1.0]),
    st.sampled_from([(), (1,), (2, 5), (3,)]),
)
@settings(max_examples=200, deadline=None)
def test_what_is_kept_against_the_definitions(
    logits: list[int], min_p: float, top_k: int, top_p: float, lists: tuple[int, ...]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("endstop.runtime.distribution.CANDIDATES", lists)
        kept = probabilities([float(x) for x in logits], min_p=min_p, top_k=top_k, top_p=top_p)
    assert {i for i, p in enumerate(kept) if p > 0} == naive([float(x) for x in logits], min_p, top_k, top_p)


def test_draws_are_fixed_for_all_platforms() -> None:
    assert [uniform(0, 0, 0), uniform(1, 2, 3), uniform(-1, 0, 0)] == [
        0.13870941014555416,
        0.4175580595044026,
        0.9844383619111032,
    ]
    drawn = [uniform(7, j, i) for j in range(20) for i in range(500)]
    assert len(set(drawn)) == len(drawn)
    assert 0.49 < sum(drawn) / len(drawn) < 0.51
    assert all(0 <= u < 1 for u in drawn)


def test_inversion_takes_the_first_id_whose_cumulative_mass_exceeds_the_draw() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75]]).repeat(5, 1)
    draws = [0.0, 0.2499, 0.25, 0.9, 1 - 2**-52]
    assert invert(weights, draws) == [1, 1, 3, 3, 3]
    assert invert_listed(torch.tensor([[0, 1, 2, 3]] * 5), weights, draws) == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("count", [1, 5, 299, 300])
def test_the_largest_weights_however_they_are_found(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    weights = torch.rand(3, 300, generator=torch.Generator().manual_seed(1))
    by_torch = largest_weights(weights, count) if count <= 128 else torch.topk(weights, count)
    monkeypatch.setattr("endstop.runtime.distribution._SHORT", 0)
    values, ids = largest_weights(weights, count)
    assert torch.equal(values, by_torch[0])
    assert torch.equal(ids, by_torch[1])


@given(st.integers(1, 1100), st.integers(0, 10**6), st.floats(0, 1, exclude_max=True))
@settings(max_examples=100, deadline=None)
def test_inversion_by_blocks_equals_one_cumulative_sum(size: int, salt: int, draw: float) -> None:
    generator = torch.Generator().manual_seed(salt)
    # Multiples of 2**-10: every sum is exact, so that both ways must agree.
    weights = torch.randint(0, 3, (1, size), generator=generator).float() / 1024
    weights[0, salt % size] += 1 / 1024
    assert invert(weights, [draw]) == invert_listed(torch.arange(size)[None], weights, [draw])
    assert weights[0, invert(weights, [draw])[0]] > 0


def test_draws_follow_the_distribution() -> None:
    rows = [Row(SamplingParams(), sampled=i, seed=11) for i in range(4000)]
    ids = [outcome.token_id for outcome in sample(torch.tensor([[2.0, 1.0, 0.0]]).repeat(4000, 1), rows)]
    for token_id, expected in enumerate([0.6652, 0.2447, 0.0900]):
        assert ids.count(token_id) / 4000 == pytest.approx(expected, abs=0.025)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    vocabulary = 9
    count = data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(count, vocabulary, generator=generator)
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0, 0.5, 1.0, 3.0]),
        top_k=st.integers(0, 4),
        top_p=st.sampled_from([0.3, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.2]),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        logit_bias=st.sampled_from([{}, {3: 2.0}, {4: NO}]),
        logprobs=st.sampled_from([None, 0, 2]),
        trace=st.booleans(),
    )
    ids = st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=6)

    def row() -> Row:
        return Row(
            data.draw(params),
            data.draw(ids),
            data.draw(ids),
            stop_ids=[2],
            seed=data.draw(st.integers(0, 99)),
            bans=frozenset(data.draw(st.sets(st.integers(0, 2)))),
        )

    rows = [row() for _ in range(count)]
    alone = []
    for r in range(count):
        alone += sample(logits[r : r + 1], [rows[r]])
        rows[r].sampler_state = None
    assert sample(logits, rows) == alone
    order = list(reversed(range(count)))
    assert sample(logits[order], [rows[r] for r in order]) == [alone[r] for r in order]


def chosen(logits: list[float], **row: Any) -> int:
    params = row.pop("params", SamplingParams(temperature=0))
    return sample(torch.tensor([logits]), [Row(params, **row)])[0].token_id


def test_B47_repetition_penalty_leaves_the_stop_set_alone() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.3)
    history = [9, 1, 9, 1, 9]
    logits = [NO] * 60
    logits[9], logits[50] = 5.0, 4.0
    assert chosen(logits, params=params, prompt_token_ids=history, stop_ids=[9]) == 9
    assert chosen(logits, params=params, prompt_token_ids=history, stop_ids=[]) == 50
    logits[9], logits[50] = -1.0, -1.2
    assert chosen(logits, params=params, prompt_token_ids=history, stop_ids=[9]) == 9
    assert chosen(logits, params=params, prompt_token_ids=history, stop_ids=[]) == 50
    many = SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    assert chosen(logits, params=many, generated_token_ids=history, stop_ids=[9]) == 9


def test_penalties_count_what_they_say() -> None:
    presence = SamplingParams(temperature=0, presence_penalty=1.0)
    assert chosen([3.0, 2.5], params=presence, prompt_token_ids=[0]) == 0  # the prompt does not count
    assert chosen([3.0, 2.5], params=presence, prompt_token_ids=[0], generated_token_ids=[0]) == 1
    frequency = SamplingParams(temperature=0, frequency_penalty=0.2)
    assert chosen([3.0, 2.5], params=frequency, generated_token_ids=[0, 0]) == 0
    assert chosen([3.0, 2.5], params=frequency, generated_token_ids=[0, 0, 0]) == 1
    repetition = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert chosen([3.0, 2.5], params=repetition, prompt_token_ids=[0]) == 1
    assert chosen([-1.0, -1.5], params=repetition, prompt_token_ids=[0]) == 1


def test_penalties_follow_the_row_token_by_token() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    row = Row(params)
    ids = []
    for _ in range(4):
        ids.append(sample(torch.tensor([[3.0, 2.5, 0.0]]), [row])[0].token_id)
        row.generated_token_ids.append(ids[-1])
    assert ids == [0, 1, 0, 1]


def test_bad_words_ban_the_last_token_behind_the_others() -> None:
    words = [[7], [1, 2], [1, 2, 3]]
    assert banned_by_bad_words(words, []) == {7}
    assert banned_by_bad_words(words, [5, 1]) == {7, 2}
    assert banned_by_bad_words(words, [1, 2]) == {7, 3}
    assert banned_by_bad_words(words, [2, 1, 2, 9]) == {7}
    assert chosen([0.0, 5.0, 1.0], params=SamplingParams(temperature=0, bad_words="x"), bad_words=[[1]]) == 2


def test_bans_win_over_bias_and_bias_over_logits() -> None:
    biased = SamplingParams(temperature=0, logit_bias={1: 10.0, 2: math.inf})
    assert chosen([5.0, 1.0, 0.0], params=biased) == 2
    assert chosen([5.0, 1.0, 0.0], params=biased, bans=frozenset({2})) == 1
    forbidden = SamplingParams(logit_bias={0: -math.inf, 1: -math.inf})
    assert chosen([5.0, 1.0, -9.0], params=forbidden) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_min_tokens_bans_all_that_is_legal_the_end_may_come(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=3)
    assert chosen([NO, NO, 1.0], params=params, bans=frozenset({2}), stop_ids=[2]) == 2
    never = SamplingParams(temperature=temperature, min_tokens=3, ban_eos=True)
    outcome = sample(torch.tensor([[NO, NO, 1.0]]), [Row(never, bans=frozenset({2}), stop_ids=[2])])[0]
    assert (outcome.end, outcome.error is not None) == ("error", True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_continuation_is_grammar_unless_a_token_was_needed(temperature: float) -> None:
    row = Row(SamplingParams(temperature=temperature))
    assert sample(torch.tensor([[NO, NO]]), [row])[0].end == "grammar"
    needed = Row(SamplingParams(temperature=temperature, min_tokens=2), generated_token_ids=[1])
    assert sample(torch.tensor([[NO, NO]]), [needed])[0].end == "error"


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_their_own_row_only(poison: float, temperature: float) -> None:
    rows = [Row(SamplingParams(temperature=temperature)) for _ in range(3)]
    outcomes = sample(torch.tensor([[0.0, 99.0], [poison, 1.0], [99.0, 0.0]]), rows)
    assert [(o.token_id, o.end) for o in outcomes] == [(1, None), (-1, "error"), (0, None)]


def test_logprobs_are_raw() -> None:
    params = SamplingParams(temperature=0, logit_bias={2: 9.0}, logprobs=2)
    outcome = sample(torch.tensor([[2.0, 1.0, 0.0]]), [Row(params)])[0]
    assert outcome.logprobs is not None
    assert list(outcome.logprobs) == [2, 0, 1]
    assert [entry.rank for entry in outcome.logprobs.values()] == [3, 1, 2]
    assert outcome.logprobs[2].logprob == pytest.approx(math.log(0.0900), abs=1e-3)
    only = sample(torch.tensor([[2.0, 1.0, 0.0]]), [Row(params.replace(logprobs=0))])[0]
    assert only.logprobs is not None
    assert list(only.logprobs) == [2]


def test_the_logits_given_are_not_changed() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    params = SamplingParams(logit_bias={2: 9.0}, repetition_penalty=2.0, top_k=1, top_p=0.5, min_p=0.1)
    sample(logits, [Row(params, bans=frozenset({0}))])
    assert logits.tolist() == [[2.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("logits", "params", "possible"),
    [
        ([1.0, 2.0, NO], {"temperature": 1e39}, {0, 1}),
        ([1.0, 2.0, NO], {"temperature": 5e-324}, {1}),
        ([0.0, 2.0, -3.0], {"repetition_penalty": 1e300}, {0, 1, 2}),
        ([0.0, 2.0, -3.0], {"repetition_penalty": 1e300, "temperature": 0.0}, {0, 1}),
        ([1.0, 20.0, -3.0], {"repetition_penalty": 1e-38}, {1}),
        ([3e38, 20.0, -3e38], {"repetition_penalty": 1e-320}, {0}),
    ],
)
def test_extreme_values_leave_a_distribution(
    logits: list[float], params: dict[str, Any], possible: set[int]
) -> None:
    rows = [Row(SamplingParams(**params), [0, 1], seed=seed) for seed in range(20)]
    assert {out.token_id for out in sample(torch.tensor([logits] * 20), rows)} <= possible
