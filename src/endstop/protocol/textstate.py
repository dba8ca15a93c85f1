"""Text of a row between two tokens, and what each token does to it.

Between two tokens all that matters of the text so far is the automaton's node and the bytes that
are held back: the node's own prefix, or the start of an unfinished character. So a token is one
move between two such states, and a move is computed once for a tokenizer and a set of stop strings,
not once for every row: that keeps matching and detokenising at one dictionary lookup per token.
"""

from __future__ import annotations

from typing import NamedTuple

from endstop.protocol.automaton import NO_MATCH, ROOT, StopAutomaton, compile_stop_strings, held_back
from endstop.protocol.step import StopStep
from endstop.protocol.tokenbytes import TokenBytes

# Moves are forgotten together once there are this many: many different requests must not fill the memory.
MOST_MOVES = 200_000
MOST_AUTOMATA = 64


class TextState:
    """The text of a row between two tokens: an automaton's node and the bytes held back."""

    __slots__ = ("held", "moves", "node")

    def __init__(self, node: int, held: bytes) -> None:
        self.node = node
        self.held = held
        # Only moves of shown tokens that complete no stop string; the others are never repeated.
        self.moves: dict[int, tuple[StopStep, int, TextState, int]] = {}


# What a shown token does: the step to report, how many bytes it has, the state behind it, its id.
Move = tuple[StopStep, int, TextState, int]


class Match(NamedTuple):
    """A stop string completed by a token: which, and what is shown of the text up to the cut.

    `cut` is in bytes of held text + token: where the stop string begins, or where it ends if it is kept.
    """

    pattern: int
    cut: int
    shown: bytes


class TextStates:
    """All states of one automaton over one tokenizer, with their moves."""

    __slots__ = ("_count", "_states", "automaton", "include", "pieces", "start")

    def __init__(self, pieces: TokenBytes, automaton: StopAutomaton, include: bool) -> None:
        self.pieces = pieces
        self.automaton = automaton
        self.include = include
        self.start = TextState(ROOT, b"")
        self._states: dict[tuple[int, bytes], TextState] = {(ROOT, b""): self.start}
        self._count = 0

    def state(self, node: int, held: bytes) -> TextState:
        """The state with this node and these held bytes."""
        key = (node, held)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = TextState(node, held)
        return state

    def follow(self, state: TextState, token_id: int) -> Move | Match:
        """What a shown token does to a state; a plain move is remembered in `state.moves`."""
        piece = self.pieces[token_id]
        node, pattern, read = self.automaton.scan(state.node, piece)
        text = state.held + piece
        if pattern != NO_MATCH:
            cut = len(state.held) + read
            if not self.include:
                cut -= len(self.automaton.patterns[pattern])
            return Match(pattern, cut, text[:cut])
        hold = held_back(self.automaton, node, text, self.include)
        if hold:
            shown, held = text[:-hold], text[-hold:]
        else:
            shown, held = text, b""
        after = self.state(node, held) if node or held else self.start
        move = (StopStep(shown.decode("utf-8", "replace")), len(piece), after, token_id)
        if token_id in self.pieces.special:
            return move  # rows that hide it share this table
        if self._count >= MOST_MOVES:
            self._forget()
        state.moves[token_id] = move
        self._count += 1
        return move

    def _forget(self) -> None:
        for state in self._states.values():
            state.moves.clear()
        self._states = {(ROOT, b""): self.start}
        self._count = 0


def text_states(pieces: TokenBytes, stop: tuple[str, ...], include: bool) -> TextStates:
    """The states for these stop strings over this tokenizer, shared by all rows that use them."""
    cache = pieces._states
    key = (stop, include)
    states = cache.get(key)
    if states is None:
        states = TextStates(pieces, compile_stop_strings(stop), include)
        while len(cache) >= MOST_AUTOMATA:
            # Dictionaries keep their order, so the first one is the oldest.
            cache.pop(next(iter(cache)), None)
        cache[key] = states
    return states
