"""Rows that share a tokenizer's tables do not see each other's parameters."""

from __future__ import annotations

import pytest

from endstop import SamplingParams, StopMachine, StopSet, TokenBytes


@pytest.mark.parametrize("stop", [(), ("ab",)])
@pytest.mark.parametrize("include", [False, True])
def test_a_row_that_shows_specials_leaves_one_that_hides_them_alone(
    stop: tuple[str, ...], include: bool
) -> None:
    pieces = TokenBytes([b"x", b"<s>", b"a"], special={1})
    shared = SamplingParams(stop=stop, include_stop_str_in_output=include)
    texts = []
    for skip in (True, False, True, False):
        machine = StopMachine(StopSet.of({}), shared.replace(skip_special_tokens=skip), pieces)
        for token_id in (0, 1, 2, 1, 0):
            machine.push(token_id)
        machine.finish("cancelled")
        texts.append(machine.text)
    assert texts == ["xax", "x<s>a<s>x"] * 2
