"""An answer with in-stream tool calls, taken apart by its token ids.

Between the tags stands what the model asked (`python`) and what the runtime put in (`python_output`); the
rest is the answer's own words (`text`). A message's content may be such a list of parts; templates written
for it (`endstop.train.chat_format`) render it back to the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from endstop.protocol.tokenbytes import TokenBytes

Part = dict[str, str]


@dataclass(frozen=True, slots=True)
class StreamTags:
    """The token ids around a call and around its answer."""

    call_start: int
    call_end: int
    output_start: int
    output_end: int

    @classmethod
    def of(cls, ids: Mapping[str, int]) -> StreamTags | None:
        """nanochat's tags, by the ids of the special tokens' texts; None unless all four are there."""
        names = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
        return cls(*(ids[name] for name in names)) if all(name in ids for name in names) else None


def stream_parts(token_ids: Sequence[int], pieces: TokenBytes, tags: StreamTags) -> list[Part]:
    """The parts of an answer, in order; hidden special tokens other than the tags are left out.

    token_ids: the generated ids, with or without the one that ended the answer. A region that is not closed
    reaches to the end. Empty texts are no parts. Bytes that are no UTF-8 become U+FFFD.
    """
    parts: list[Part] = []
    kind, held = "text", bytearray()
    opens = {tags.call_start: "python", tags.output_start: "python_output"}
    closes = {tags.call_end: "python", tags.output_end: "python_output"}

    def close() -> None:
        if held or kind != "text":
            parts.append({"type": kind, "text": held.decode("utf-8", "replace")})
        held.clear()

    for token_id in token_ids:
        if token_id in opens:
            close()
            kind = opens[token_id]
        elif closes.get(token_id) == kind:
            close()
            kind = "text"
        elif token_id not in pieces.special:
            held += pieces[token_id]
    close()
    return parts
