"""The stop machine: is this row at its end, and what of its text may be shown?

One machine follows one row. It is given the tokens one by one and says after each what text may be
shown now, and whether, how and why the row has ended. It is the only place in endstop where the end
of a row is decided; the rules are in docs/stopping.md.
"""

from __future__ import annotations

import operator
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from endstop.outcomes import FinishReason, StopKind, finish_reason_of
from endstop.protocol.automaton import ROOT, StopAutomaton, compile_stop_strings
from endstop.protocol.params import SamplingParams
from endstop.protocol.spelledtext import Found, Run, SpelledText, shown_text
from endstop.protocol.step import StopStep, joined
from endstop.protocol.stopset import StopSet
from endstop.protocol.textstate import Match, TextState, text_states
from endstop.protocol.tokenbytes import TokenBytes

if TYPE_CHECKING:
    from endstop.protocol.regions import CompleteCall, Regions
    from endstop.protocol.toolcalls import Reasoning, ToolCall, ToolSyntax

# Ends that are decided outside: the machine cannot see them coming.
OUTSIDE_KINDS: tuple[StopKind, ...] = ("cancelled", "error", "deadline", "grammar", "max_tokens", "context")
_NEVER = sys.maxsize


class StopMachine:
    """Follows one row and decides where it ends.

    Args:
        stops: the model's stop set.
        params: what the request asks for.
        pieces: the bytes of every token.
        prompt_len: tokens of the prompt. context_len: tokens that fit in the window, if there is one.
        clock: seconds, monotonic; started_at: its value when the request arrived (default: now).
        tools: the syntax in which the model calls tools, if the request declared any.
        reasoning: the tags of reasoning, if the model has them.
        skip_special_tokens: overrides the request's.

    Raises ValueError for stop ids that the model cannot produce and for a prompt that fills the window.
    """

    __slots__ = (
        "_banned",
        "_clock",
        "_context_limit",
        "_deadline",
        "_ended_by",
        "_ending",
        "_ends",
        "_hide",
        "_ids",
        "_include",
        "_kept",
        "_min_tokens",
        "_moves",
        "_next_event",
        "_parts",
        "_pieces",
        "_position",
        "_regions",
        "_slow",
        "_spelled",
        "_state",
        "_states",
        "_stop_reason",
        "forced",
        "params",
        "stop_kind",
        "stops",
    )

    def __init__(
        self,
        stops: StopSet,
        params: SamplingParams | None = None,
        pieces: TokenBytes | None = None,
        *,
        prompt_len: int = 0,
        context_len: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        started_at: float | None = None,
        tools: ToolSyntax | None = None,
        reasoning: Reasoning | None = None,
        skip_special_tokens: bool | None = None,
    ) -> None:
        params = params or SamplingParams()
        pieces = pieces or TokenBytes(())
        if prompt_len < 0:
            raise ValueError(f"prompt_len must be 0 or more, got {prompt_len}")
        if context_len is not None and prompt_len >= context_len:
            raise ValueError(f"the prompt of {prompt_len} tokens fills the window of {context_len} tokens")
        check_ids_in_vocabulary(params, stops.vocab_size)
        self.stops = stops
        self.params = params
        self.stop_kind: StopKind | None = None
        self.forced: list[int] = []
        """Indices of the forced tokens among the generated ones."""
        self._pieces = pieces
        self._include = params.include_stop_str_in_output
        self._hide = params.skip_special_tokens if skip_special_tokens is None else skip_special_tokens
        self._ending = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else stops.ids)
        every_end = stops.ids | frozenset(params.stop_token_ids)
        self._banned = (every_end, stops.ids if params.ban_eos else frozenset())
        self._min_tokens = params.min_tokens
        room = _NEVER if context_len is None else context_len - prompt_len
        self._context_limit = room
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        self._next_event = min(limit, params.min_tokens) if params.min_tokens else limit
        self._clock = clock
        self._deadline: float | None = None
        if params.max_time is not None:
            self._deadline = (clock() if started_at is None else started_at) + params.max_time

        self._ids: list[int] = []
        # For each token the offset behind its last byte, specials spelled out.
        self._ends: list[int] = []
        self._position = 0
        self._parts: list[str] = []
        self._kept = 0
        self._ended_by: int | None = None
        self._stop_reason: int | str | None = None

        self._regions: Regions | None = None
        if tools is not None or reasoning is not None:
            from endstop.protocol.regions import Regions

            self._regions = Regions(params, tools, reasoning)
        self._spelled: SpelledText | None = None
        self._set_state(ROOT, b"")
        # Rows that need more than a table lookup for every token.
        self._slow = self._deadline is not None or params.repetition_detection is not None
        if self._regions is not None:
            self._spell_out(0).reset(self._automaton())

    def _active_stop(self) -> tuple[str, ...]:
        """The stop strings that count from here on, regions aside."""
        return () if len(self._ids) < self._min_tokens else self.params.stop

    def _automaton(self) -> StopAutomaton:
        if self._regions is not None:
            return self._regions.automaton(len(self._ids) >= self._min_tokens)
        return compile_stop_strings(self._active_stop())

    def _set_state(self, node: int, held: bytes) -> None:
        self._states = text_states(self._pieces, self._active_stop(), self._include)
        self._enter(self._states.state(node, held))

    def _enter(self, state: TextState) -> None:
        self._state = state
        self._moves = state.moves

    def push(self, token_id: int, forced: bool = False) -> StopStep:
        """Takes the next token of the row; `forced` marks one that the runtime injected.

        Raises RuntimeError after the end, ValueError for what is no token id.
        """
        # The common token is one lookup: no end, no border, nothing hidden.
        move = self._moves.get(token_id)
        if move is None or self._slow or forced or token_id in self._ending:
            return self._push(token_id, forced)
        ids = self._ids
        if len(ids) + 1 >= self._next_event:
            return self._push(token_id, forced)
        step, size, state, token_id = move
        ids.append(token_id)
        self._position = position = self._position + size
        self._ends.append(position)
        if step.text:
            self._parts.append(step.text)
        self._state = state
        self._moves = state.moves
        return step

    def _push(self, token_id: int, forced: bool) -> StopStep:
        """Any token, by the rules in their order."""
        if self.stop_kind is not None:
            raise RuntimeError(f"this row has ended ({self.stop_kind}); a machine follows one row only")
        token_id = _token_id(token_id)
        piece = self._pieces[token_id]
        hidden = self._hide and token_id in self._pieces.special
        before = self._position
        self._ids.append(token_id)
        self._position += len(piece)
        self._ends.append(self._position)
        if forced:
            self.forced.append(len(self._ids) - 1)
            return self._take_forced(piece, hidden)
        if self._spelled is None and hidden and (self._states.automaton.patterns or self._state.held):
            self._spell_out(before)
        ending = token_id in self._ending
        if self._spelled is not None:
            return self._take_spelled(token_id, piece, hidden, ending, before)
        if hidden:
            if ending:
                return self._end_by_id(token_id, [])
            return self._after(StopStep())
        move = self._moves.get(token_id) or self._states.follow(self._state, token_id)
        if isinstance(move, Match):
            cut = before - len(self._state.held) + move.cut
            stop = self.params.stop[move.pattern]
            self._kept = self._tokens_before(cut)
            return self._end("stop_string", stop, [(move.shown, False)])
        if ending:
            shown = self._state.held + (piece if self._include else b"")
            return self._end_by_id(token_id, [(shown, False)])
        step, _, state, _ = move
        self._enter(state)
        if step.text:
            self._parts.append(step.text)
        return self._after(step)

    def _spell_out(self, end: int) -> SpelledText:
        """Goes over from one automaton state to two."""
        state, automaton = self._state, self._states.automaton
        self._spelled = SpelledText(
            automaton, self._include, state.node, automaton.prefix(state.node), state.held, end
        )
        self._moves = {}
        return self._spelled

    def _take_spelled(self, token_id: int, piece: bytes, hidden: bool, ending: bool, before: int) -> StopStep:
        assert self._spelled is not None
        text = self._spelled
        if self._regions is None:
            found: Found | CompleteCall | None = text.feed(piece, hidden)
        else:
            found = self._regions.read(text, piece, hidden, len(self._ids) > self._min_tokens)
        if isinstance(found, Found):
            stop = text.automaton.patterns[found.pattern].decode("utf-8")
            cut = found.end if self._include else found.start
            self._kept = self._tokens_before(cut)
            return self._end("stop_string", stop, text.flush(cut))
        if ending:
            return self._end_by_id(token_id, text.flush(text.end if self._include else before))
        if found is not None:
            self._kept = len(self._ids)
            return self._end("tool_end", found.close_tag, text.flush(found.end))
        return self._after(self._show(text.release()))

    def _take_forced(self, piece: bytes, hidden: bool) -> StopStep:
        if self._spelled is None:
            self._spell_out(self._position - len(piece))
        assert self._spelled is not None
        if self._regions is not None:
            self._regions.take_forced(piece, hidden)
        # A border on both sides: nothing sampled and forced together is ever a match.
        self._spelled.reset(self._automaton())
        runs = self._spelled.release()
        step = self._show(runs)
        self._spelled.append(piece, hidden)
        after = self._show(self._spelled.release(), forced=True)
        return self._after(joined([step, after], accepted=1))

    def _show(self, runs: list[Run], *, forced: bool = False, last: bool = False) -> StopStep:
        """Runs of text that may be shown, as a step."""
        step = StopStep(shown_text(runs))
        if step.text:
            self._parts.append(step.text)
        if self._regions is not None:
            self._regions.show(step, runs, forced=forced, last=last)
        return step

    def _after(self, step: StopStep) -> StopStep:
        """What is tested when no stop ended the row: limits, time, repetition; then the borders."""
        count = len(self._ids)
        kind: StopKind | None = None
        if self.params.max_tokens is not None and count >= self.params.max_tokens:
            kind = "max_tokens"
        elif count >= self._context_limit:
            kind = "context"
        elif self._deadline is not None and self._clock() >= self._deadline:
            kind = "deadline"
        elif not (self.forced and self.forced[-1] == count - 1) and self._repeats():
            kind = "repetition"
        if kind is not None:
            self._kept = count
            return joined([step, self._end(kind, None, self._held())], accepted=1)
        if count == self._min_tokens and count:
            self._cross_min_tokens()
        if self._spelled is not None and self._regions is None:
            plain = self._spelled.plain()
            if plain is not None:
                self._spelled = None
                self._set_state(*plain)
        return step

    def _cross_min_tokens(self) -> None:
        """From here on stop strings count, and only text that is made from here on."""
        limit = self._context_limit
        if self.params.max_tokens is not None:
            limit = min(limit, self.params.max_tokens)
        self._next_event = limit
        if self._spelled is not None:
            self._spelled.reset(self._automaton())
        else:
            self._set_state(ROOT, self._state.held)

    def _repeats(self) -> bool:
        detection = self.params.repetition_detection
        if detection is None or len(self._ids) < self._min_tokens:
            return False
        ids = self._ids
        for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
            span = size * detection.min_count
            if span > len(ids):
                return False
            # Equal to itself one pattern further on: every repetition is the same.
            if ids[-1] == ids[-1 - size] and ids[-span + size :] == ids[-span:-size]:
                return True
        return False

    def _held(self) -> list[Run]:
        """Text that was held back, now that no match can come."""
        if self._spelled is not None:
            return self._spelled.flush(self._spelled.end)
        return [(self._state.held, False)]

    def _tokens_before(self, cut: int) -> int:
        """How many tokens have their first byte before the cut, the ending one left out unless it is kept."""
        whole = bisect_right(self._ends, cut)
        start = self._ends[whole - 1] if whole else 0
        kept = whole + (whole < len(self._ends) and start < cut)
        return kept if self._include else min(kept, len(self._ids) - 1)

    def _end_by_id(self, token_id: int, runs: list[Run]) -> StopStep:
        self._kept = len(self._ids) - (not self._include)
        named_by_model = token_id in self.stops and not self.params.ignore_eos
        kind: StopKind = self.stops.roles[token_id] if named_by_model else "stop_token"
        return self._end(kind, token_id, runs)

    def _end(self, kind: StopKind, reason: int | str | None, runs: list[Run]) -> StopStep:
        step = self._show(runs, last=True)
        self.stop_kind = kind
        self._stop_reason = reason
        self._moves = {}
        step.finished = True
        step.stop_kind, step.stop_reason, step.finish_reason = kind, reason, self.finish_reason
        return step

    def push_many(self, token_ids: Iterable[int]) -> StopStep:
        """Takes a block of tokens as if one by one, up to its first end; the rest is dropped.

        `accepted` of the step counts the tokens taken, the ending one included.
        """
        steps = []
        for token_id in token_ids:
            steps.append(self.push(token_id))
            if steps[-1].finished:
                break
        return joined(steps, accepted=len(steps))

    def finish(self, kind: StopKind) -> StopStep:
        """Ends the row from outside (cancelled, error, deadline, grammar, ...) and shows what was held.

        Raises ValueError for a kind that only tokens can bring about, RuntimeError after the end.
        """
        if kind not in OUTSIDE_KINDS:
            raise ValueError(
                f"a row is ended from outside by one of {', '.join(OUTSIDE_KINDS)}, got {kind!r}"
            )
        if self.stop_kind is not None:
            raise RuntimeError(f"this row has ended ({self.stop_kind}); a machine follows one row only")
        self._kept = len(self._ids)
        step = self._end(kind, None, self._held())
        step.accepted = 0
        return step

    def banned_ids(self) -> frozenset[int]:
        """Ids that may not be sampled next: every end before min_tokens, the stop set with ban_eos."""
        return self._banned[0] if len(self._ids) < self._min_tokens else self._banned[1]

    def fork(self) -> StopMachine:
        """A second machine in the same state (beams)."""
        other = object.__new__(StopMachine)
        for name in StopMachine.__slots__:
            setattr(other, name, getattr(self, name))
        for name in ("forced", "_ids", "_ends", "_parts"):
            setattr(other, name, list(getattr(self, name)))
        other._spelled = self._spelled and self._spelled.copy()
        other._regions = self._regions and self._regions.fork()
        return other

    @property
    def finished(self) -> bool:
        return self.stop_kind is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.stop_kind is None:
            return None
        return finish_reason_of(self.stop_kind, len(self.tool_calls))

    @property
    def stop_reason(self) -> int | str | None:
        """The id or the string that ended the row, else None."""
        return self._stop_reason

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._parts)

    @property
    def kept(self) -> int:
        """How many of the generated tokens are in `token_ids`; lists beside it are cut at the same place."""
        return len(self._ids) if self.stop_kind is None else self._kept

    @property
    def released(self) -> int:
        """How many leading tokens are shown to their last byte: what a stream may send by now."""
        if self.stop_kind is not None:
            return self._kept
        if self._spelled is not None:
            return bisect_right(self._ends, self._spelled.released)
        return bisect_right(self._ends, self._position - len(self._state.held))

    @property
    def token_ids(self) -> list[int]:
        """The completion: tokens whose first byte lies before the cut, without the ending one."""
        return self._ids[: self.kept]

    @property
    def generated_token_ids(self) -> list[int]:
        """Every token that was made, the ending one included."""
        return list(self._ids)

    @property
    def generated_mask(self) -> list[int]:
        """1 for each generated token that was sampled, 0 for each that was forced."""
        mask = [1] * len(self._ids)
        for index in self.forced:
            mask[index] = 0
        return mask

    @property
    def ending_token_dropped(self) -> bool:
        """Whether the last generated token ended the row and is left out of `token_ids`."""
        return self.stop_kind in (
            "eos",
            "turn_end",
            "tool_end",
            "stop_token",
            "stop_string",
        ) and self._kept < len(self._ids)

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls."""
        return self.text if self._regions is None else self._regions.content

    @property
    def reasoning(self) -> str:
        return "" if self._regions is None else self._regions.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The complete tool calls."""
        return () if self._regions is None else self._regions.calls

    @property
    def broken_calls(self) -> tuple[str, ...]:
        """What stands between the tags of a call but is none: broken JSON, no name."""
        return () if self._regions is None else self._regions.broken_calls

    @property
    def open_call(self) -> str | None:
        """The rest of a call that was not completed."""
        return None if self._regions is None else self._regions.open_call


def check_ids_in_vocabulary(params: SamplingParams, vocab_size: int | None) -> None:
    """Raises ValueError for ids of a request that the model's lm_head has no row for."""
    if vocab_size is None:
        return
    for name in ("stop_token_ids", "logit_bias"):
        for token_id in getattr(params, name):
            if token_id >= vocab_size:
                raise ValueError(
                    f"{name} holds {token_id}, but the model has {vocab_size} tokens (0 to {vocab_size - 1})"
                )


def _token_id(value: object) -> int:
    try:
        token_id = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"a token id is an integer, got {value!r}") from None
    if token_id < 0:
        raise ValueError(f"a token id is 0 or more, got {token_id}")
    return token_id
