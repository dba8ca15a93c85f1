"""The chance that at least one of k samples is right, estimated from n of which c are."""

from __future__ import annotations

from collections.abc import Iterable


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): unbiased, whatever the order of the samples (Chen et al., arXiv 2107.03374).

    Computed as a product of k or c factors in (0, 1), whichever are fewer, so that nothing overflows. Raises
    ValueError unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"correct must be between 0 and the {samples} samples, got {correct}")
    if not 1 <= k <= samples:
        raise ValueError(f"k must be between 1 and the {samples} samples, got {k}")
    if samples - correct < k:
        return 1.0
    none_right = 1.0
    # C(n-c, k) / C(n, k) is the same with c and k exchanged.
    few, many = min(k, correct), max(k, correct)
    for i in range(few):
        none_right *= 1 - many / (samples - i)
    return 1.0 - none_right


def mean_pass_at_k(counts: Iterable[tuple[int, int]], k: int) -> float | None:
    """The mean over problems given as (samples, correct); None where there is no problem."""
    values = [pass_at_k(samples, correct, k) for samples, correct in counts]
    return sum(values) / len(values) if values else None
