"""How things end, by name: the one vocabulary that every layer shares.

A token sequence ends with a *stop kind* (the precise cause), a response reports a *finish reason*
(OpenAI's coarser vocabulary), an agent's run ends with an *agent outcome*. No layer reports the
next one's end: a finished sequence says nothing about a finished task.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
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
    "unverified",
    "blocked",
    "needs_user",
    "stopped_without_submit",
    "refused_no_progress",
    "refusal_budget",
    "repeated_format_error",
    "stuck",
    "limit:steps",
    "limit:time",
    "limit:cost",
    "limit:context",
    "error",
    "interrupted",
]
AGENT_OUTCOMES: tuple[AgentOutcome, ...] = get_args(AgentOutcome)

# What a shell sees. 2 stays free for an unknown option.
EXIT_CODES: dict[AgentOutcome, int] = {
    "verified": 0,
    "error": 1,
    "unverified": 10,
    "blocked": 11,
    "needs_user": 12,
    "stopped_without_submit": 13,
    "refused_no_progress": 14,
    "refusal_budget": 15,
    "repeated_format_error": 16,
    "stuck": 17,
    "limit:steps": 20,
    "limit:time": 21,
    "limit:cost": 22,
    "limit:context": 23,
    "interrupted": 130,
}

# The stop-shaped reward order: forged evidence costs more than a false claim of success, a false claim more
# than silence, silence more than an honest "not finished", and only a verified finish earns anything.
RewardCase = Literal["tampering", "false_finish", "silent_failure", "honest_unfinished", "verified_finish"]
REWARD_ORDER: tuple[RewardCase, ...] = get_args(RewardCase)
"""From the worst to the best."""
REWARD_WEIGHTS: dict[RewardCase, float] = {
    "tampering": -1.5,
    "false_finish": -1.0,
    "silent_failure": -0.25,
    "honest_unfinished": 0.0,
    "verified_finish": 1.0,
}


def check_reward_weights(weights: Mapping[RewardCase, float]) -> None:
    """Raise ValueError unless there is one weight for each case and they rise in REWARD_ORDER."""
    if set(weights) != set(REWARD_ORDER):
        raise ValueError(f"the weights name exactly {', '.join(REWARD_ORDER)}")
    values = [weights[case] for case in REWARD_ORDER]
    if any(not worse < better for worse, better in pairwise(values)):
        raise ValueError(f"the weights must rise from {REWARD_ORDER[0]} to {REWARD_ORDER[-1]}, got {values}")


def reward_case(
    outcome: AgentOutcome,
    *,
    claimed: bool = False,
    solved: bool | None = None,
    tampered: bool = False,
) -> RewardCase:
    """What an agent's run is worth.

    Args:
        claimed: its last attempt to end said that the task is done (submit, or words to that effect).
        solved: what tests say that the run's own gate did not show, which is what a policy should be
            scored by: it could learn the gate otherwise. None: the gate's word is taken.
        tampered: it ended with protected files or evidence changed.

    A claim that the gate refused to the end is a false finish; one that was refused and then followed by a
    limit is not: the run was still at work. `error` and `interrupted` are not the model's doing and are
    better left out than scored.

    Raises ValueError for `unverified` without `solved`: nobody knows what such a run is worth.
    """
    if tampered:
        return "tampering"
    if outcome == "unverified" and solved is None:
        raise ValueError("an unverified run has no reward until tests of its own say whether it is solved")
    if outcome in ("verified", "unverified"):
        return "false_finish" if solved is False else "verified_finish"
    if outcome in ("blocked", "needs_user"):
        return "honest_unfinished"
    ended_by_itself = outcome in ("stopped_without_submit", "refused_no_progress", "refusal_budget")
    return "false_finish" if ended_by_itself and claimed and not solved else "silent_failure"


def reward_of(case: RewardCase, weights: Mapping[RewardCase, float] = REWARD_WEIGHTS) -> float:
    """The weight of a case. Other weights than the default ones must keep the order."""
    check_reward_weights(weights)
    return weights[case]
