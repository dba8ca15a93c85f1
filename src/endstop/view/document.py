"""What a picture of a trace needs besides the trace: the model, the prompt, how the answer ended.

As JSON this is what `endstop trace --json` writes and `endstop trace --load` reads again.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from endstop.runtime.trace import Trace
from endstop.view.marks import visible

DOCUMENT_VERSION = 1


@dataclass(slots=True)
class TraceDocument:
    """A trace with its circumstances.

    Attributes:
        trace: the steps.
        texts: for each step the text that its token completes; joined they are the generated text with
            special tokens spelled out. A token that ends inside a character completes nothing.
        shown: the text that was shown. model, prompt: as the person gave them.
        params: the sampling parameters that were set.
        stop_texts: stop id -> its text.
    """

    trace: Trace
    texts: list[str]
    shown: str = ""
    model: str = ""
    prompt: str = ""
    finish_reason: str = ""
    stop_kind: str = ""
    stop_reason: int | str | None = None
    tokens_per_second: float | None = None
    params: dict[str, Any] = field(default_factory=dict)
    stop_texts: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.trace.steps):
            raise ValueError(
                f"a trace document needs one text for each step, got {len(self.texts)} texts "
                f"and {len(self.trace.steps)} steps"
            )

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": DOCUMENT_VERSION,
            "model": self.model,
            "prompt": self.prompt,
            "params": dict(self.params),
            "text": self.shown,
            "finish_reason": self.finish_reason,
            "stop_kind": self.stop_kind,
            "stop_reason": self.stop_reason,
            "tokens_per_second": self.tokens_per_second,
            "stop_texts": {str(token_id): text for token_id, text in self.stop_texts.items()},
            "texts": list(self.texts),
            "trace": self.trace.to_dict(),
        }

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TraceDocument:
        """Raises ValueError for anything that is no trace document of a version known here."""
        if not isinstance(data, Mapping) or "trace" not in data:
            raise ValueError("this is not a trace that `endstop trace --json` wrote: it has no field `trace`")
        if data.get("version") != DOCUMENT_VERSION:
            raise ValueError(
                f"version {data.get('version')!r} of a trace document is unknown, "
                f"this endstop reads {DOCUMENT_VERSION}"
            )
        try:
            return cls(
                Trace.from_dict(data["trace"]),
                [str(text) for text in data["texts"]],
                str(data["text"]),
                str(data["model"]),
                str(data["prompt"]),
                str(data["finish_reason"]),
                str(data["stop_kind"]),
                data["stop_reason"],
                data["tokens_per_second"],
                dict(data["params"]),
                {int(token_id): str(text) for token_id, text in data["stop_texts"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"this is not a trace document of version {DOCUMENT_VERSION}: {error}"
            ) from error

    def stop_text(self, token_id: int | None) -> str:
        """The text of a stop id, or the id itself where the text is not known."""
        if token_id is None:
            return ""
        return self.stop_texts.get(token_id, str(token_id))

    def ending(self) -> str:
        """How it ended in a few words: `stop, turn_end (2)`."""
        reason = "" if self.stop_reason is None else f" ({visible(str(self.stop_reason))})"
        return ", ".join(part for part in (self.finish_reason, f"{self.stop_kind}{reason}") if part)

    def p_stops(self) -> list[float | None]:
        return [step.p_stop for step in self.trace.steps]


def completed_texts(token_ids: Sequence[int], pieces: Iterable[bytes]) -> list[str]:
    """For each token the text that it completes; bytes of an unfinished character go with the last token."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(piece) for _, piece in zip(token_ids, pieces, strict=True)]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def set_params(params: Any) -> dict[str, Any]:
    """The fields of a SamplingParams that differ from its defaults, as JSON values."""
    from dataclasses import asdict, fields

    defaults = type(params)()
    values = asdict(params)
    return {
        f.name: list(values[f.name]) if isinstance(values[f.name], tuple) else values[f.name]
        for f in fields(params)
        if f.name != "trace" and getattr(params, f.name) != getattr(defaults, f.name)
    }
