"""The stop machine against the plain rules of oracle.py, over random bytes, stops and limits."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from endstop.outcomes import FINISH_REASONS
from endstop.protocol.machine import OUTSIDE_KINDS, StopMachine
from endstop.protocol.params import RepetitionDetection, SamplingParams
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenbytes import TokenBytes

from . import oracle

# Few different bytes, so that matches, overlaps and broken characters are common.
ALPHABET = ["a", "b", "é", "😀", "|", "<"]
FRAGMENTS = [b"\xf0", b"\x9f", b"\x98\x80", b"\xc3", b"\xa9", b"\xe2\x82", b"\xff", b"<|", b"|>", b""]
PIECES = st.one_of(
    st.text(alphabet=ALPHABET, min_size=1, max_size=4).map(str.encode), st.sampled_from(FRAGMENTS)
)


@st.composite
def stop_strings(draw, tokens, pieces):
    """Stop strings cut out of what the row writes, sometimes with something else at the end."""
    written = b"".join(pieces[token] for token, _ in tokens if token < len(pieces)).decode("utf-8", "ignore")
    stops = []
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, max(len(written) - 1, 0)))
        text = written[begin : begin + draw(st.integers(1, 6))] + draw(
            st.sampled_from(["", "", "a", "é", "X"])
        )
        if text:
            stops.append(text)
    return stops


@st.composite
def rows(draw):
    pieces = draw(st.lists(PIECES, min_size=2, max_size=9))
    size = len(pieces)
    forced = st.sampled_from([False] * 15 + [True])
    tokens = draw(st.lists(st.tuples(st.integers(0, size), forced), min_size=1, max_size=14))
    return {
        "tokens": tokens,
        "pieces": pieces,
        "special": draw(st.sets(st.integers(0, size - 1), max_size=3)),
        "stop_set": draw(
            st.dictionaries(st.integers(0, size - 1), st.sampled_from(["eos", "turn_end"]), max_size=1)
        ),
        "stop": draw(stop_strings(tokens, pieces)),
        "stop_token_ids": draw(st.lists(st.integers(0, size - 1), max_size=1)),
        "include": draw(st.booleans()),
        "hide": draw(st.booleans()),
        "min_tokens": draw(st.sampled_from([0, 0, 0, 1, 2, 4])),
        "max_tokens": draw(st.sampled_from([None, None, 5, 9])),
        "ignore_eos": draw(st.booleans()),
        "room": draw(st.sampled_from([None, None, 7])),
        "late_from": draw(st.sampled_from([None, None, None, 0, 3, 6])),
        "repetition": draw(st.sampled_from([None, None, (1, 1, 3), (3, 1, 2), (2, 2, 2)])),
    }


def machine_for(row) -> StopMachine:
    params = SamplingParams(
        stop=row["stop"],
        stop_token_ids=row["stop_token_ids"],
        include_stop_str_in_output=row["include"],
        skip_special_tokens=row["hide"],
        min_tokens=row["min_tokens"],
        max_tokens=row["max_tokens"],
        ignore_eos=row["ignore_eos"],
        max_time=None if row["late_from"] is None else 1.0,
        repetition_detection=row["repetition"] and RepetitionDetection(*row["repetition"]),
    )
    prompt_len = 3
    late_from = row["late_from"]
    machine = StopMachine(
        StopSet.of(row["stop_set"]),
        params,
        TokenBytes(row["pieces"], special=row["special"]),
        prompt_len=prompt_len,
        context_len=None if row["room"] is None else prompt_len + row["room"],
        # Time passes with the tokens: it is over from token `late_from` on.
        clock=lambda: float(late_from is not None and len(machine.generated_token_ids) > late_from),
        started_at=0.0,
    )
    return machine


def check_against_oracle(row, outside) -> None:
    expected = oracle.run(**row)
    machine = machine_for(row)
    shown = ""
    for index, (token, forced) in enumerate(row["tokens"]):
        if machine.finished:
            break
        released_before = machine.released
        step = machine.push(token, forced)
        shown += step.text
        assert shown == expected.shown[index]
        assert machine.text == shown
        assert released_before <= machine.released <= index + 1
    assert machine.stop_kind == expected.kind
    assert machine.generated_token_ids == expected.generated
    assert machine.token_ids == expected.token_ids
    assert machine.stop_reason == expected.reason
    if expected.kind is None:
        assert machine.finish_reason is None
        shown += machine.finish(outside).text
        assert (machine.stop_kind, machine.finish_reason) == (outside, FINISH_REASONS[outside])
    else:
        assert machine.finish_reason == FINISH_REASONS[expected.kind]
    assert shown == machine.text == expected.text


def check_any_split(row, cuts) -> None:
    """Blocks of any size give the same row as tokens one by one."""
    row = {**row, "tokens": [(token, False) for token, _ in row["tokens"]]}
    tokens = [token for token, _ in row["tokens"]]
    one, many = machine_for(row), machine_for(row)
    taken = 0
    for token in tokens:
        one.push(token)
        taken += 1
        if one.finished:
            break
    accepted, text, position = 0, "", 0
    sizes = iter([*cuts, len(tokens)])
    while position < len(tokens) and not many.finished:
        size = next(sizes)
        step = many.push_many(tokens[position : position + size])
        accepted += step.accepted
        text += step.text
        position += size
    assert accepted == taken
    assert many.finished == one.finished
    assert text == many.text == one.text
    for name in ("token_ids", "generated_token_ids", "stop_kind", "stop_reason", "finish_reason", "released"):
        assert getattr(many, name) == getattr(one, name)


def check_fork(row, at) -> None:
    """A fork goes on as the original would, and neither disturbs the other."""
    # The clock here is the first machine's, so it cannot tell the fork's time.
    machine = machine_for({**row, "late_from": None})
    for token, forced in row["tokens"][:at]:
        if not machine.finished:
            machine.push(token, forced)
    fork = machine.fork()
    for token, forced in row["tokens"][at:]:
        if not fork.finished:
            fork.push(token, forced)
    between = machine.generated_token_ids
    for token, forced in row["tokens"][at:]:
        if not machine.finished:
            machine.push(token, forced)
    assert len(between) <= at
    for name in ("text", "token_ids", "generated_token_ids", "generated_mask", "stop_kind", "stop_reason"):
        assert getattr(fork, name) == getattr(machine, name)


quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
slow = settings(
    max_examples=int(os.environ.get("ENDSTOP_EXAMPLES", "4000")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@quick
@given(rows(), st.sampled_from(OUTSIDE_KINDS))
def test_machine_equals_the_plain_rules(row, outside):
    check_against_oracle(row, outside)


@quick
@given(rows(), st.lists(st.integers(0, 5), max_size=14))
def test_any_split_into_blocks_gives_the_same_row(row, cuts):
    check_any_split(row, cuts)


@quick
@given(rows(), st.integers(0, 14))
def test_fork_goes_on_as_the_original_would(row, at):
    check_fork(row, at)


@pytest.mark.slow
@slow
@given(rows(), st.sampled_from(OUTSIDE_KINDS))
def test_machine_equals_the_plain_rules_many(row, outside):
    check_against_oracle(row, outside)


@pytest.mark.slow
@slow
@given(rows(), st.lists(st.integers(0, 5), max_size=14))
def test_any_split_into_blocks_gives_the_same_row_many(row, cuts):
    check_any_split(row, cuts)


@pytest.mark.slow
@slow
@given(rows(), st.integers(0, 14))
def test_fork_goes_on_as_the_original_would_many(row, at):
    check_fork(row, at)
