"""Stop strings over text alone, for streams that have no token ids."""

from __future__ import annotations

from collections.abc import Iterable

from endstop.outcomes import StopKind, finish_reason_of
from endstop.protocol.automaton import NO_MATCH, ROOT, compile_stop_strings, held_back
from endstop.protocol.params import SamplingParams
from endstop.protocol.step import StopStep


class StopStrings:
    """Watches a stream of text (or of bytes) for stop strings, as the stop machine does.

    `push_text` returns what may be shown now and whether a string has completed; `finish` ends the
    stream and shows what was held back. Joined, the steps' texts are `text`.

    Raises ValueError for empty strings and for what is not a string.
    """

    __slots__ = ("_automaton", "_held", "_include", "_node", "_parts", "finished", "stop", "stop_reason")

    def __init__(self, stop: str | Iterable[str], *, include_stop_str_in_output: bool = False) -> None:
        self.stop = SamplingParams(stop=(stop,) if isinstance(stop, str) else tuple(stop)).stop
        self._automaton = compile_stop_strings(self.stop)
        self._include = include_stop_str_in_output
        self._node = ROOT
        self._held = b""
        self._parts: list[str] = []
        self.finished = False
        self.stop_reason: str | None = None

    def push_text(self, text: str) -> StopStep:
        """Takes more text. Raises RuntimeError after the end."""
        return self.push_bytes(text.encode("utf-8", "surrogatepass"))

    def push_bytes(self, data: bytes) -> StopStep:
        """Takes more bytes; a character may be divided between two calls."""
        if self.finished:
            raise RuntimeError("this stream has ended; a matcher follows one stream only")
        self._node, pattern, read = self._automaton.scan(self._node, data)
        held = self._held + data[:read]
        if pattern != NO_MATCH:
            self.stop_reason = self.stop[pattern]
            cut = len(held) if self._include else len(held) - len(self._automaton.patterns[pattern])
            return self._end("stop_string", held[:cut])
        shown = len(held) - held_back(self._automaton, self._node, held, self._include)
        self._held = held[shown:]
        return self._show(held[:shown])

    def finish(self, kind: StopKind = "eos") -> StopStep:
        """The stream ended by itself, in the way `kind` says: what was held back is shown."""
        if self.finished:
            raise RuntimeError("this stream has ended; a matcher follows one stream only")
        return self._end(kind, self._held)

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._parts)

    def _show(self, data: bytes) -> StopStep:
        step = StopStep(data.decode("utf-8", "replace"))
        self._parts.append(step.text)
        return step

    def _end(self, kind: StopKind, data: bytes) -> StopStep:
        step = self._show(data)
        self.finished = step.finished = True
        step.stop_kind, step.stop_reason = kind, self.stop_reason
        step.finish_reason = finish_reason_of(kind)
        return step
