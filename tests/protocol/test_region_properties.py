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


def plain_scopes(data, stops, *, opened, scope, include):
    """Where reasoning regions and stop strings put the end, byte by byte and from the start each time.

    Returns the bytes shown and the stop string, or everything and None.
    """
    inside, begin = opened, 0
    for end in range(1, len(data) + 1):
        seen = data[begin:end]
        counting = [s for s in stops if scope == "all" or not inside or s in ("<think>", "</think>")]
        complete = [s for s in counting if seen.endswith(s.encode())]
        if complete:
            stop = max(complete, key=lambda s: len(s.encode()))
            return data[: end if include else end - len(stop.encode())], stop
        if seen.endswith(b"</think>" if inside else b"<think>"):
            inside, begin = not inside, end
    return data, None


SCOPE_PARTS = ["<think>", "</think>", "END", "EN", "D", "k>", "<th", "é", "x"]
SCOPE_STOPS = ["END", "D", "k>EN", "<th", "think>", "</think>", "<think>", "é", "EN<th", "x</think>"]


def check_scopes(data, cuts, stops, opened, scope, include):
    borders = sorted({cut for cut in cuts if cut < len(data)} | {0, len(data)})
    pieces = [data[begin:end] for begin, end in itertools.pairwise(borders)]
    params = SamplingParams(stop=stops, stop_scope=scope, include_stop_str_in_output=include)
    machine = StopMachine(StopSet.of({}), params, TokenBytes(pieces), reasoning=Reasoning(open=opened))
    machine.push_many(range(len(pieces)))
    shown, stop = plain_scopes(data, stops, opened=opened, scope=scope, include=include)
    assert machine.stop_reason == stop
    if stop is None:
        machine.finish("max_tokens")
    assert machine.text == shown.decode("utf-8", "replace")


SCOPES = {
    "data": st.lists(st.sampled_from(SCOPE_PARTS), min_size=1, max_size=9).map(lambda p: "".join(p).encode()),
    "cuts": st.lists(st.integers(1, 60), max_size=12),
    "stops": st.lists(st.sampled_from(SCOPE_STOPS), max_size=3, unique=True),
    "opened": st.booleans(),
    "scope": st.sampled_from(["answer", "all"]),
    "include": st.booleans(),
}


@settings(max_examples=300, deadline=None)
@given(**SCOPES)
def test_scopes_equal_the_plain_rules(data, cuts, stops, opened, scope, include):
    check_scopes(data, cuts, stops, opened, scope, include)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("ENDSTOP_EXAMPLES", "4000")), deadline=None)
@given(**SCOPES)
def test_scopes_equal_the_plain_rules_many(data, cuts, stops, opened, scope, include):
    check_scopes(data, cuts, stops, opened, scope, include)


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
