"""The random draw of a token: one uniform number from (seed, choice, index), and nothing else.

A counter-based hash instead of a generator with state: the i-th sampled token of choice j gets the same
number whatever else is in the batch, after preemption, under chunking, speculation and forced tokens, and
on every platform. The hash is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", 2014), chained over the three counters.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1), a multiple of 2**-52, for the `index`-th sampled token of choice `choice`.

    52 bits and not 53: times a total probability of about one, the product stays below that total.
    """
    state = _mix(seed & _MASK)
    state = _mix((state + choice) & _MASK)
    state = _mix((state + index) & _MASK)
    return (state >> 12) * 2.0**-52


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
