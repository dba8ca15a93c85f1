"""Learning rate and momentum at every step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop.train.schedule import learning_rate_multiplier, muon_momentum


def test_warm_up_constant_and_warm_down() -> None:
    rates = [
        learning_rate_multiplier(step, 10, warmup_steps=2, warmdown_fraction=0.4, final_fraction=0.2)
        for step in range(10)
    ]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])


def test_nanochats_shape_of_october_2025() -> None:
    # No warm-up, the last fifth falls to 0, which the step after the last would have.
    rates = [learning_rate_multiplier(step, 20) for step in range(20)]
    assert rates == pytest.approx([1.0] * 17 + [0.75, 0.5, 0.25])


def test_the_initial_fraction_scales_everything() -> None:
    full = [learning_rate_multiplier(step, 9, warmup_steps=3, warmdown_fraction=1 / 3) for step in range(9)]
    low = [
        learning_rate_multiplier(step, 9, warmup_steps=3, warmdown_fraction=1 / 3, initial_fraction=0.02)
        for step in range(9)
    ]
    assert low == pytest.approx([0.02 * rate for rate in full])


@given(
    total=st.integers(1, 300),
    warmup=st.floats(0, 1),
    warmdown=st.floats(0, 1),
    final=st.floats(0, 1),
)
def test_rates_rise_once_and_fall_once(total: int, warmup: float, warmdown: float, final: float) -> None:
    warmup_steps = int(warmup * total)
    rates = [
        learning_rate_multiplier(
            step, total, warmup_steps=warmup_steps, warmdown_fraction=warmdown, final_fraction=final
        )
        for step in range(total)
    ]
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup_steps]))
    after = rates[warmup_steps:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    if after:
        assert min(after) >= final - 1e-12


@pytest.mark.parametrize(
    ("step", "total", "options"),
    [
        (3, 3, {}),
        (-1, 3, {}),
        (0, 0, {}),
        (0, 3, {"warmup_steps": 4}),
        (0, 3, {"warmdown_fraction": 1.5}),
        (0, 3, {"final_fraction": -0.1}),
        (0, 3, {"initial_fraction": -1.0}),
    ],
)
def test_what_is_no_schedule_is_refused(step: int, total: int, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        learning_rate_multiplier(step, total, **options)  # type: ignore[arg-type]


def test_momentum_warms_up() -> None:
    assert [muon_momentum(step) for step in (0, 150, 300, 10_000)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert muon_momentum(0, warmup_steps=0) == 0.95
