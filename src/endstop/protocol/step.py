"""What one push of the stop machine reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from endstop.outcomes import FinishReason, StopKind

if TYPE_CHECKING:
    from endstop.protocol.toolcalls import ToolCall


@dataclass(slots=True, eq=False)
class StopStep:
    """What a token (or a block of tokens, or an end from outside) did to a row. Read only.

    Attributes:
        text: what may be shown now; all of them, joined, are the row's text.
        finished: whether the row has ended, with finish_reason, stop_kind and stop_reason (the id or
            the string that ended it, else None).
        accepted: tokens taken, the ending one included (of a block, the rest was dropped).
        content, reasoning: the same text split for chat, without the tags of reasoning and tool
            calls; `content` is `text` where the request declared neither.
        tool_calls: the calls that became complete.
    """

    text: str = ""
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    stop_kind: StopKind | None = None
    accepted: int = 1
    parts: tuple[str, str] | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def content(self) -> str:
        return self.text if self.parts is None else self.parts[0]

    @property
    def reasoning(self) -> str:
        return "" if self.parts is None else self.parts[1]


def joined(steps: list[StopStep], accepted: int) -> StopStep:
    """Several steps of one row as one."""
    if len(steps) == 1:
        return steps[0]
    whole = StopStep("".join(step.text for step in steps), accepted=accepted)
    if any(step.parts is not None for step in steps):
        whole.parts = ("".join(step.content for step in steps), "".join(step.reasoning for step in steps))
        whole.tool_calls = tuple(call for step in steps for call in step.tool_calls)
    if steps and steps[-1].finished:
        last = steps[-1]
        whole.finished = True
        whole.stop_kind, whole.stop_reason = last.stop_kind, last.stop_reason
        whole.finish_reason = last.finish_reason
    return whole
