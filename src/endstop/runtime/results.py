"""What a request gives back. Names as in vLLM where vLLM has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from endstop.outcomes import FinishReason, StopKind

if TYPE_CHECKING:
    from endstop.protocol.toolcalls import ToolCall
    from endstop.runtime.trace import Trace


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural-log probability in the raw distribution (before any processor).

    `rank` is 1 for the most likely token; `decoded_token` the token's own bytes as text.
    """

    logprob: float
    rank: int
    decoded_token: str = ""


# The chosen token's entry comes first, the alternatives by falling probability behind it.
TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `completion_tokens` counts every generated token of every choice:
    terminators, tokens behind a cut and forced tokens too. `cached_tokens` were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class CompletionOutput:
    """One finished choice of a request.

    Attributes:
        text: the shown text. For chat it is the raw message; see `content`, `reasoning`, `tool_calls`.
        token_ids: the tokens whose first byte lies before the cut, without the one that ended the row
            (unless `include_stop_str_in_output`).
        logprobs: one entry for each of `token_ids` where they were asked for (None for a forced token).
        stop_logprob: logprob of the ending token where it is not among `token_ids`.
        generated_token_ids, generated_mask, generated_logprobs: the raw truth, with the terminator and
            what lies behind a cut. The mask is 1 for sampled and 0 for forced tokens.
        finish_reason: `stop`, `length`, `tool_calls`, `abort` or `error`. stop_kind: the precise cause.
        stop_reason: the id or string that ended the row, else None.
        content, reasoning, tool_calls: the message, for chat. open_call: the text of a call that was cut
            and therefore is none. broken_calls: what stood between the tags of calls but is none.
        trace: P(stop) step by step, where `params.trace` asked for it.
        error: one sentence where finish_reason is `error`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_kind: StopKind
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    stop_logprob: float | None = None
    cumulative_logprob: float | None = None
    generated_token_ids: list[int] = field(default_factory=list)
    generated_mask: list[int] = field(default_factory=list)
    generated_logprobs: list[TokenLogprobs | None] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    open_call: str | None = None
    broken_calls: tuple[str, ...] = ()
    trace: Trace | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds on the engine's monotonic clock; None where the request never got there."""

    arrived: float
    first_token: float | None
    finished: float


@dataclass(slots=True)
class RequestOutput:
    """The one terminal result of a request, with all its choices in order of their index.

    `prompt_logprobs` has one entry for each prompt token; the first is None, as nothing precedes it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    timing: Timing
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = True


@dataclass(slots=True)
class Delta:
    """What is new in one choice since its last delta.

    Concatenated, `text`, `token_ids`, `logprobs`, `content`, `reasoning` and `tool_calls` of all deltas are
    those of the finished choice. A token comes with the delta that shows its last byte, or with the last one.
    Only the last delta of a choice has a `finish_reason` and the finished `output`.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    stop_kind: StopKind | None = None
    output: CompletionOutput | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
