"""Learning rate and momentum over a run, as functions of the step: nothing to save, nothing to restore.

Steps count from 0; step `total - 1` is the last. The shape (linear warm-up, constant, linear warm-down) and
the momentum's warm-up are those of nanochat (Karpathy, 2025).
"""

from __future__ import annotations


def learning_rate_multiplier(
    step: int,
    total: int,
    *,
    warmup_steps: int = 0,
    warmdown_fraction: float = 0.2,
    final_fraction: float = 0.0,
    initial_fraction: float = 1.0,
) -> float:
    """What every learning rate is multiplied by at a step.

    It rises linearly to `initial_fraction` within `warmup_steps` (the first step has 1/warmup_steps of it),
    stays there, and falls linearly over the last `warmdown_fraction` of `total` towards `final_fraction` of
    it. The step after the last would have exactly that. Fine-tuning from trained weights begins lower, with
    an `initial_fraction` below 1. Raises ValueError for numbers that describe no schedule.
    """
    if total < 1 or not 0 <= step < total:
        raise ValueError(f"a step must be in 0..{total - 1}, not {step}")
    if not 0 <= warmup_steps <= total:
        raise ValueError(f"warmup_steps must be in 0..{total}, not {warmup_steps}")
    if not 0.0 <= warmdown_fraction <= 1.0 or not 0.0 <= final_fraction <= 1.0 or initial_fraction < 0.0:
        raise ValueError("warmdown and final fraction must be in 0..1, initial_fraction not negative")
    if step < warmup_steps:
        return initial_fraction * (step + 1) / warmup_steps
    warmdown = round(warmdown_fraction * total)
    left = total - step
    if left >= warmdown:
        return initial_fraction
    share = left / warmdown
    return initial_fraction * (share + (1.0 - share) * final_fraction)


def muon_momentum(step: int, *, warmup_steps: int = 300, start: float = 0.85, end: float = 0.95) -> float:
    """Muon's momentum: linear from `start` at step 0 to `end` at `warmup_steps`, then constant."""
    if step >= warmup_steps:
        return end
    return start + (end - start) * step / warmup_steps
