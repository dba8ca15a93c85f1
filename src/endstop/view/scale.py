"""The scale of P(stop): probabilities span many powers of ten, and the interesting ones lie near 0."""

from __future__ import annotations

import math
from collections.abc import Iterable

# Below this a probability is drawn at the bottom: it is zero to every sampler.
LOWEST = 1e-12
# From here up a token is coloured: at a P(stop) of 1 in 10,000 one answer of 100 tokens in 100 ends early.
FAINTEST = 1e-4


def log_floor(values: Iterable[float | None]) -> int:
    """The power of ten at the bottom of a log axis that shows all of `values`, at most -1."""
    known = [value for value in values if value is not None]
    smallest = min((value for value in known if value > 0), default=0.1)
    bottom = math.floor(math.log10(max(smallest, LOWEST)))
    return min(-1, bottom)


def log_height(value: float, floor: int) -> float:
    """Where `value` lies between 10**floor (0.0) and 1 (1.0)."""
    if value <= 0:
        return 0.0
    return min(1.0, max(0.0, 1 - math.log10(value) / floor))


def strength(value: float | None) -> float:
    """How strongly a token is coloured: 0 at FAINTEST and below, 1 at P(stop) = 1, in logs between."""
    if value is None or value <= FAINTEST:
        return 0.0
    return min(1.0, 1 - math.log10(value) / math.log10(FAINTEST))


def percent(value: float | None) -> str:
    """A probability for people: `0.034`, `2.1e-7`, and a dash where the model was not asked."""
    if value is None:
        return "–"
    if value == 0 or value >= 0.001:
        return f"{value:.3f}".rstrip("0").rstrip(".") or "0"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"
