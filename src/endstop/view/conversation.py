"""A rendered conversation for people: in colour what the model would have produced, and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from endstop.view.marks import readable

if TYPE_CHECKING:
    from rich.text import Text

    from endstop.protocol.render import Rendered


def rendered_text(rendered: Rendered) -> Text:
    """The text, token by token: green is the model's own, blue is a control token's text kept as text.

    Neighbours differ in shade. What is the model's is also bold, so that it can be told without colour.
    """
    from rich.text import Text

    text = Text()
    mask = rendered.mask or [0] * len(rendered.ids)
    end = 0
    for number, ((start, stop), supervised) in enumerate(zip(rendered.offsets, mask, strict=True)):
        start = max(start, end)  # tokens inside one character share its place
        if start > end:
            text.append(_shown(rendered.text[end:start]))
        if stop <= start:
            continue
        escaped = any(a < stop and start < b for a, b in rendered.escaped)
        color = "blue underline" if escaped else "bold green" if supervised else ""
        shade = "" if number % 2 else " dim" if not supervised and not escaped else ""
        text.append(_shown(rendered.text[start:stop]), style=f"{color}{shade}".strip())
        end = stop
    text.append(_shown(rendered.text[end:]))
    return text


def _shown(text: str) -> str:
    return "".join(char if char in "\n\t" else readable(char) for char in text)


def rendered_dict(rendered: Rendered) -> dict[str, Any]:
    """Text, ids, spans of the messages in characters, and the mask or the reason why there is none."""
    return {
        "text": rendered.text,
        "ids": list(rendered.ids),
        "offsets": [list(span) for span in rendered.offsets],
        "messages": [
            {
                "index": span.index,
                "role": span.role,
                "content": [list(piece) for piece in span.content],
                "whole": None if span.whole is None else list(span.whole),
            }
            for span in rendered.message_spans
        ],
        "mask": rendered.mask,
        "refusal": rendered.refusal,
        "escaped": [list(span) for span in rendered.escaped],
    }
