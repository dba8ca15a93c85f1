from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop.train.evaluation.pass_at_k import mean_pass_at_k, pass_at_k


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int]:
    samples = draw(st.integers(1, 400))
    return samples, draw(st.integers(0, samples)), draw(st.integers(1, samples))


@given(counts())
def test_equals_exact_arithmetic(case: tuple[int, int, int]) -> None:
    samples, correct, k = case
    exact = 1 - Fraction(comb(samples - correct, k), comb(samples, k))
    assert pass_at_k(samples, correct, k) == pytest.approx(float(exact), abs=1e-12)


@given(counts())
def test_more_correct_or_more_tries_never_lower_it(case: tuple[int, int, int]) -> None:
    samples, correct, k = case
    value = pass_at_k(samples, correct, k)
    assert 0.0 <= value <= 1.0
    if correct < samples:
        assert pass_at_k(samples, correct + 1, k) >= value - 1e-12
    if k < samples:
        assert pass_at_k(samples, correct, k + 1) >= value - 1e-12


def test_large_counts_do_not_overflow() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 0, 10) == 0.0


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_refuses_impossible_counts(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="must be between"):
        pass_at_k(samples, correct, k)


def test_mean_over_problems() -> None:
    assert mean_pass_at_k([(4, 4), (4, 0), (4, 1)], 2) == pytest.approx((1 + 0 + 0.5) / 3)
    assert mean_pass_at_k([], 1) is None
