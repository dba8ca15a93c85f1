"""One answer of the model, and whether its calls may run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from endstop.protocol.toolcalls import ToolCall
from endstop.runtime.results import CompletionOutput, Usage

if TYPE_CHECKING:
    from endstop.agent.settings import Price

_NATURAL = frozenset({"stop", "tool_calls"})


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer as the loop needs it.

    Attributes:
        cut: why none of its calls may run, "" where the answer ended by itself.
        bad: what stands in it in the place of a call and is none, "" where there is nothing of the kind.
        cost: in the price's currency. seconds: of the model.
    """

    output: CompletionOutput
    usage: Usage
    seconds: float = 0.0
    cost: float = 0.0
    cut: str = ""
    bad: str = ""

    @property
    def content(self) -> str:
        return (self.output.text if self.output.content is None else self.output.content) or ""

    @property
    def reasoning(self) -> str:
        return self.output.reasoning or ""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return self.output.tool_calls

    def meta(self) -> dict[str, Any]:
        """How it ended and what it cost, for the record."""
        output, usage = self.output, self.usage
        values: dict[str, Any] = {
            "finish_reason": output.finish_reason,
            "stop_kind": output.stop_kind,
            "stop_reason": output.stop_reason,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            "seconds": round(self.seconds, 3),
        }
        optional: dict[str, Any] = {
            "cost": self.cost,
            "cut": self.cut,
            "bad": self.bad,
            "open_call": output.open_call,
            "broken_calls": list(output.broken_calls),
            "error": output.error,
        }
        if output.trace is not None:
            optional["trace"] = _rounded(output.trace.to_dict())
        return values | {name: value for name, value in optional.items() if value}


def read_turn(
    output: CompletionOutput,
    usage: Usage,
    *,
    seconds: float,
    max_tokens: int,
    reports_cuts: bool,
    price: Price,
) -> Turn:
    """Judge an answer: only `stop` and `tool_calls` are ends, whatever was parsed before.

    `reports_cuts` False: a backend that may call a cut answer whole, so one of exactly `max_tokens` is cut.
    """
    cut, bad = "", ""
    if output.finish_reason == "length":
        cut = f"the answer was cut off at its limit ({output.stop_kind}, {usage.completion_tokens} tokens)"
    elif output.finish_reason not in _NATURAL:
        cut = f"the answer did not end by itself ({output.stop_reason or output.finish_reason})"
    elif not reports_cuts and usage.completion_tokens >= max_tokens:
        cut = f"the answer used all {max_tokens} tokens that it had, so it may be cut off"
    elif output.broken_calls:
        bad = f"a call that cannot be read: {_start_of(output.broken_calls[0])}"
    elif output.open_call is not None:
        bad = f"a call that is not closed: {_start_of(output.open_call)}"
    return Turn(output, usage, seconds, cost_of(usage, price), cut, bad)


def cost_of(usage: Usage, price: Price) -> float:
    """What an answer costs; cached prompt tokens have their own price where it is known."""
    cached = price.input if price.cached is None else price.cached
    fresh = max(0, usage.prompt_tokens - usage.cached_tokens)
    total = fresh * price.input + usage.cached_tokens * cached + usage.completion_tokens * price.output
    return total / 1_000_000


def _rounded(value: Any) -> Any:
    """Four digits of a probability are enough for a picture, and a third of the file."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _start_of(text: str) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= 200 else f"{shown[:200]}..."
