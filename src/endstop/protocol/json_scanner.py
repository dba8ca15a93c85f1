"""Finding the end of a JSON object in bytes that arrive piece by piece.

The scanner is the grammar of RFC 8259 as a pushdown automaton over bytes: it says at the very byte
where the object is complete, or at the very byte where it can no longer become one. So its verdict
does not depend on how the bytes were split. It builds no values; `json.loads` does that once, at the end.
"""

from __future__ import annotations

import re
from typing import Literal

JsonStatus = Literal["more", "done", "bad"]

MAX_DEPTH = 128

_STRING_RUN = re.compile(rb'[^"\\\x00-\x1f]+')
_SPACE = frozenset(b" \t\r\n")
_DIGITS = b"0123456789"
_ESCAPES = frozenset(b'"\\/bfnrt')
_HEX = frozenset(b"0123456789abcdefABCDEF")
_LITERALS = {ord("t"): b"true", ord("f"): b"false", ord("n"): b"null"}

_VALUE, _FIRST_MEMBER, _MEMBER, _COLON, _AFTER, _FIRST_ITEM, _STRING, _ESCAPE, _UNICODE, _NUMBER, _LITERAL = (
    range(11)
)


def _number_steps() -> dict[str, dict[int, str]]:
    """The number grammar: from a named place, byte -> next place. Places in `_NUMBER_ENDS` may end it."""

    def table(*steps: tuple[bytes, str]) -> dict[int, str]:
        return {byte: place for group, place in steps for byte in group}

    return {
        "start": table((b"-", "minus"), (b"0", "zero"), (b"123456789", "integer")),
        "minus": table((b"0", "zero"), (b"123456789", "integer")),
        "zero": table((b".", "point"), (b"eE", "exponent")),
        "integer": table((_DIGITS, "integer"), (b".", "point"), (b"eE", "exponent")),
        "point": table((_DIGITS, "fraction")),
        "fraction": table((_DIGITS, "fraction"), (b"eE", "exponent")),
        "exponent": table((b"+-", "sign"), (_DIGITS, "power")),
        "sign": table((_DIGITS, "power")),
        "power": table((_DIGITS, "power")),
    }


_NUMBER_STEPS = _number_steps()
_NUMBER_ENDS = frozenset({"zero", "integer", "fraction", "power"})


class JsonObjectScanner:
    """Recognises one JSON object, white space in front of it allowed.

    `scan(data, position)` reads `data` from `position` on and returns a status and an index:
    `more` (everything was read, the object is still open), `done` (index behind the closing brace) or
    `bad` (index of the byte that no JSON object can have here). Objects nested deeper than MAX_DEPTH are bad.
    """

    __slots__ = ("_key", "_place", "_rest", "_stack", "_state")

    def __init__(self) -> None:
        self._stack = bytearray()
        self._state = _VALUE
        self._key = False
        self._place = "start"
        self._rest = b""

    def copy(self) -> JsonObjectScanner:
        other = JsonObjectScanner()
        other._stack = bytearray(self._stack)
        other._state, other._key = self._state, self._key
        other._place, other._rest = self._place, self._rest
        return other

    def scan(self, data: bytes | bytearray, position: int) -> tuple[JsonStatus, int]:
        size = len(data)
        while position < size:
            if self._state == _STRING:
                run = _STRING_RUN.match(data, position)
                if run is not None:
                    position = run.end()
                    continue
            byte = data[position]
            if self._state == _NUMBER:
                place = _NUMBER_STEPS[self._place].get(byte)
                if place is not None:
                    self._place = place
                    position += 1
                    continue
                if self._place not in _NUMBER_ENDS:
                    return "bad", position
                self._state = _AFTER  # this byte is read again behind the number
            if not self._step(byte):
                return "bad", position
            position += 1
            if not self._stack and self._state == _AFTER:
                return "done", position
        return "more", position

    def _step(self, byte: int) -> bool:
        """Take one byte; False where the grammar has no place for it."""
        state = self._state
        if state == _STRING:
            if byte == 0x22:
                self._state = _COLON if self._key else _AFTER
            elif byte == 0x5C:
                self._state = _ESCAPE
            else:
                return False  # a control character: everything else was taken by the run
            return True
        if state == _ESCAPE:
            if byte == 0x75:
                self._state, self._rest = _UNICODE, b"uuuu"
                return True
            self._state = _STRING
            return byte in _ESCAPES
        if state == _UNICODE:
            self._rest = self._rest[1:]
            if not self._rest:
                self._state = _STRING
            return byte in _HEX
        if state == _LITERAL:
            if byte != self._rest[0]:
                return False
            self._rest = self._rest[1:]
            if not self._rest:
                self._state = _AFTER
            return True
        if byte in _SPACE:
            return True
        if state == _COLON:
            self._state = _VALUE
            return byte == 0x3A
        if state == _AFTER:
            return self._separator(byte)
        if state in (_FIRST_MEMBER, _MEMBER):
            if byte == 0x7D and state == _FIRST_MEMBER:
                return self._close()
            self._state, self._key = _STRING, True
            return byte == 0x22
        if byte == 0x5D and state == _FIRST_ITEM:
            return self._close()
        return self._value(byte)

    def _separator(self, byte: int) -> bool:
        inside_object = self._stack[-1] == 0x7B
        if byte == 0x2C:
            self._state = _MEMBER if inside_object else _VALUE
            return True
        return byte == (0x7D if inside_object else 0x5D) and self._close()

    def _value(self, byte: int) -> bool:
        if byte == 0x7B:
            self._state = _FIRST_MEMBER
            self._stack.append(byte)
            return len(self._stack) <= MAX_DEPTH
        if not self._stack:
            return False  # only an object may stand at the top
        if byte == 0x5B:
            self._state = _FIRST_ITEM
            self._stack.append(byte)
            return len(self._stack) <= MAX_DEPTH
        if byte == 0x22:
            self._state, self._key = _STRING, False
            return True
        if byte in _LITERALS:
            self._state, self._rest = _LITERAL, _LITERALS[byte][1:]
            return True
        place = _NUMBER_STEPS["start"].get(byte)
        if place is None:
            return False
        self._state, self._place = _NUMBER, place
        return True

    def _close(self) -> bool:
        self._stack.pop()
        self._state = _AFTER
        return True
