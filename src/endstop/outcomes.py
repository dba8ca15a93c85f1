"""How things end, by name: the one vocabulary that every layer shares.

A token sequence ends with a *stop kind* (the precise cause), a response reports a *finish reason*
(OpenAI's coarser vocabulary), an agent's run ends with an *agent outcome*. No layer reports the
next one's end: a finished sequence says nothing about a finished task.
"""

from __future__ import annotations

from typing import Literal, get_args

StopKind = Literal[
    "eos",
    "turn_end",
    "tool_end",
    "stop_token",
    "stop_string",
    "grammar",
    "max_tokens",
    "context",
    "deadline",
    "repetition",
    "cancelled",
    "error",
]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
StopRole = Literal["eos", "turn_end", "tool_end"]

STOP_KINDS: tuple[StopKind, ...] = get_args(StopKind)
STOP_ROLES: tuple[StopRole, ...] = get_args(StopRole)

# `tool_calls` is not in this table: only chat, which parses calls, can turn `stop` into it.
FINISH_REASONS: dict[StopKind, FinishReason] = {
    "eos": "stop",
    "turn_end": "stop",
    "tool_end": "stop",
    "stop_token": "stop",
    "stop_string": "stop",
    "grammar": "stop",
    "max_tokens": "length",
    "context": "length",
    "deadline": "length",
    "repetition": "length",
    "cancelled": "abort",
    "error": "error",
}


def finish_reason_of(kind: StopKind, complete_tool_calls: int = 0) -> FinishReason:
    """The finish reason of a stop kind.

    `complete_tool_calls` is the number of whole calls that chat parsed; it turns a natural end into
    `tool_calls`, and never a `length`, whatever was parsed before the cut.
    """
    if complete_tool_calls and kind in ("eos", "turn_end", "tool_end"):
        return "tool_calls"
    return FINISH_REASONS[kind]


# How an agent's run ended. `verified` is the only success, and only evidence gives it; the others are
# failures or hand-overs with a name of their own, so that a cap never looks like a finish.
AgentOutcome = Literal[
    "verified",
    "blocked",
    "needs_user",
    "refusal_budget",
    "refused_no_progress",
    "stopped_without_submit",
    "repeated_format_error",
    "stuck",
    "limits",
    "cancelled",
    "error",
]
AGENT_OUTCOMES: tuple[AgentOutcome, ...] = get_args(AgentOutcome)

# The stop-shaped reward order: a false claim of success costs more than silence, silence more than
# an honest "not finished", and only a verified finish earns anything.
RewardCase = Literal["false_finish", "silent_failure", "honest_unfinished", "verified_finish"]
REWARD_WEIGHTS: dict[RewardCase, float] = {
    "false_finish": -1.0,
    "silent_failure": -0.5,
    "honest_unfinished": 0.0,
    "verified_finish": 1.0,
}
