"""What the message parser reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from endstop.protocol.tool_syntax import ToolCall

EventKind = Literal["content", "reasoning", "border", "call"]
Region = Literal["answer", "reasoning", "tool"]


@dataclass(frozen=True, slots=True)
class MessageEvent:
    """Something that became certain.

    Attributes:
        kind: `content` and `reasoning` carry `text`, `border` the `region` that begins, `call` a `call`.
        end: how many bytes of the pushed data had to be read for it; 0 for what `finish` settles. A border
            lies right behind the tag that makes it: `end` is the offset of the new region's first byte.
    """

    kind: EventKind
    end: int
    text: str = ""
    region: str = ""
    call: ToolCall | None = None
