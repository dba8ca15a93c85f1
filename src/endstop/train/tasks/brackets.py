"""Closing brackets: the answer ends when the stack is empty."""

from __future__ import annotations

from random import Random

from endstop.train.tasks.example import Drawn
from endstop.train.tasks.strings import Range

CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}


def draw_close(random: Random, depth: Range = (1, 7), closed: float = 0.2) -> Drawn:
    """`close ([{` -> `}])`.

    closed: chance, behind each opening bracket, that a pair follows which is closed already.
    """
    written, stack = "", ""
    for _ in range(random.randint(*depth)):
        bracket = random.choice("([{<")
        written += bracket
        stack += bracket
        if random.random() < closed:
            pair = random.choice("([{<")
            written += pair + CLOSING[pair]
    return Drawn(f"close {written}", "".join(CLOSING[bracket] for bracket in reversed(stack)))
