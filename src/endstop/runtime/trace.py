"""Traces: P(stop) step by step, from the raw distribution, before any processor touched it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TRACE_VERSION = 1


@dataclass(slots=True)
class TraceStep:
    """One committed token.

    Attributes:
        token_id, token: the committed token and its own bytes as text.
        forced: injected by the runtime; the distribution was not asked, so the five numbers are None.
        probability: of the committed token. entropy: of the distribution, in nats.
        p_stop: total probability of the stop set. best_stop: its likeliest token (None for an empty stop
            set), best_stop_rank: that token's rank in the whole distribution, 1 is the likeliest.
        visible, computed, pending: tokens of the sequence right after this commit: prompt + committed;
            with keys and values in the cache; committed and not computed yet.
    """

    token_id: int
    token: str = ""
    forced: bool = False
    probability: float | None = None
    entropy: float | None = None
    p_stop: float | None = None
    best_stop: int | None = None
    best_stop_rank: int | None = None
    visible: int = 0
    computed: int = 0
    pending: int = 0


@dataclass(slots=True, repr=False)
class Trace:
    """The steps of one choice. As JSON it carries a version; older versions stay readable."""

    prompt_tokens: int
    stop_ids: list[int]
    steps: list[TraceStep] = field(default_factory=list)

    def __repr__(self) -> str:
        # A result is looked at in shells and notebooks; hundreds of steps would bury it.
        return f"Trace(prompt_tokens={self.prompt_tokens}, stop_ids={self.stop_ids}, {len(self.steps)} steps)"

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": TRACE_VERSION,
            "prompt_tokens": self.prompt_tokens,
            "stop_ids": list(self.stop_ids),
            "steps": [asdict(step) for step in self.steps],
        }

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=indent)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trace:
        """Raises ValueError for another version or a step that does not fit TRACE_SCHEMA."""
        if data.get("version") != TRACE_VERSION:
            raise ValueError(
                f"trace version {data.get('version')!r} is unknown, this endstop reads {TRACE_VERSION}"
            )
        try:
            steps = [TraceStep(**step) for step in data["steps"]]
            return cls(int(data["prompt_tokens"]), list(data["stop_ids"]), steps)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not a trace of version {TRACE_VERSION}: {error}") from error


def _field(
    kind: str | list[str], minimum: float | None = None, maximum: float | None = None
) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": kind}
    if minimum is not None:
        schema["minimum"] = minimum
    if maximum is not None:
        schema["maximum"] = maximum
    return schema


# JSON Schema (draft 2020-12) of Trace.to_dict().
TRACE_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "endstop trace",
    "type": "object",
    "required": ["version", "prompt_tokens", "stop_ids", "steps"],
    "additionalProperties": False,
    "properties": {
        "version": {"const": TRACE_VERSION},
        "prompt_tokens": _field("integer", 0),
        "stop_ids": {"type": "array", "items": _field("integer", 0)},
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["token_id", "token", "forced", "visible", "computed", "pending"],
                "properties": {
                    "token_id": _field("integer", 0),
                    "token": _field("string"),
                    "forced": _field("boolean"),
                    "probability": _field(["number", "null"], 0, 1),
                    "entropy": _field(["number", "null"], 0),
                    "p_stop": _field(["number", "null"], 0, 1),
                    "best_stop": _field(["integer", "null"], 0),
                    "best_stop_rank": _field(["integer", "null"], 1),
                    "visible": _field("integer", 1),
                    "computed": _field("integer", 0),
                    "pending": _field("integer", 0),
                },
            },
        },
    },
}


def measure(logprobs: torch.Tensor, stop_ids: Sequence[int], token_id: int) -> TraceStep:
    """A step from the raw log-softmax `logprobs` (float32 [V]) and the token that was chosen."""
    entropy = -(logprobs.exp() * logprobs.clamp_min(-1e30)).sum().item()
    step = TraceStep(
        token_id,
        probability=min(1.0, math.exp(logprobs[token_id].item())),
        entropy=max(0.0, entropy),
        p_stop=0.0,
    )
    if stop_ids:
        stops = logprobs[list(stop_ids)]
        best, position = stops.max(dim=-1)
        step.p_stop = min(1.0, stops.double().exp().sum().item())
        step.best_stop = stop_ids[int(position)]
        step.best_stop_rank = 1 + int((logprobs > best).sum())
    return step


def certain(stop_ids: Sequence[int], token_id: int) -> TraceStep:
    """The step of a scripted id: a distribution with all its mass on that id."""
    stops = token_id in stop_ids
    return TraceStep(
        token_id,
        probability=1.0,
        entropy=0.0,
        p_stop=1.0 if stops else 0.0,
        best_stop=token_id if stops else None,
        best_stop_rank=1 if stops else None,
    )
