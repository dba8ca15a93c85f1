"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made.

    `rows_computed_after_stop`: rows that were given to the model after their end was recorded. It is
    counted where the model is called, and stays 0.
    """

    steps: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    tokens_forced: int = 0
    rows_computed_after_stop: int = 0
    preemptions: int = 0
    prefix_tokens_reused: int = 0
    requests_finished: int = 0
