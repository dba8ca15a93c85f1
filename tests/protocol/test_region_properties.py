"""However the model spells its text, regions, calls and stop strings come out the same."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop import SamplingParams, StopMachine, StopSet, TokenBytes
from endstop.protocol.toolcalls import Reasoning, ToolSyntax

PARTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name":"w","arguments":{"c":"</tool_call> END"}}',
    '{"name":"w",',
    "END",
    "EN",
    "é😀",
    " \n",
    "<to",
    "text",
]


@st.composite
def texts(draw):
    return "".join(draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=8))).encode()


def outcome(data, cuts, *, opened, parallel, scope, include):
    """The row for `data`, divided into tokens at `cuts`."""
    borders = sorted({cut for cut in cuts if cut < len(data)} | {0, len(data)})
    pieces = [data[begin:end] for begin, end in itertools.pairwise(borders)]
    params = SamplingParams(stop=["END", "</think>"], stop_scope=scope, include_stop_str_in_output=include)
    machine = StopMachine(
        StopSet.of({}),
        params,
        TokenBytes(pieces),
        tools=ToolSyntax("hermes", parallel=parallel),
        reasoning=Reasoning(open=opened),
    )
    deltas = []
    for token_id in range(len(pieces)):
        deltas.append(machine.push(token_id))
        if machine.finished:
            break
    else:
        deltas.append(machine.finish("max_tokens"))
    assert "".join(step.text for step in deltas) == machine.text
    assert "".join(step.content for step in deltas) == machine.content
    assert "".join(step.reasoning for step in deltas) == machine.reasoning
    assert tuple(call for step in deltas for call in step.tool_calls) == machine.tool_calls
    assert machine.text.encode() == data[: len(machine.text.encode())]
    return (
        machine.text,
        machine.content,
        machine.reasoning,
        machine.tool_calls,
        machine.open_call,
        machine.stop_kind,
        machine.stop_reason,
        machine.finish_reason,
    )


def check(data, cuts, choices):
    whole_bytes = outcome(data, range(len(data)), **choices)
    assert outcome(data, cuts, **choices) == whole_bytes
    assert outcome(data, [], **choices) == whole_bytes


CHOICES = st.fixed_dictionaries(
    {
        "opened": st.booleans(),
        "parallel": st.booleans(),
        "scope": st.sampled_from(["answer", "all"]),
        "include": st.booleans(),
    }
)
CUTS = st.lists(st.integers(1, 120), max_size=12)


@settings(max_examples=150, deadline=None)
@given(texts(), CUTS, CHOICES)
def test_regions_do_not_depend_on_the_spelling(data, cuts, choices):
    check(data, cuts, choices)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("ENDSTOP_EXAMPLES", "4000")), deadline=None)
@given(texts(), CUTS, CHOICES)
def test_regions_do_not_depend_on_the_spelling_many(data, cuts, choices):
    check(data, cuts, choices)
