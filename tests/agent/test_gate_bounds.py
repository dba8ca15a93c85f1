"""Bounds: whatever a model does, the run ends, and the project's check is run only so often."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from endstop.agent.decisions import Decision, End
from endstop.agent.gate import GateState
from endstop.agent.task import Bounds

from .scripted_verification import Bench

Act = Callable[[Bench], Decision | None]
VERDICTS = ("PASS", "VERIFY_FAILED", "VERIFY_TIMEOUT", "FLAKY", "NO_TESTS_RAN")


def _write(path: str, text: str) -> Act:
    return lambda bench: bench.write(path, text)


def _submit(evidence: dict[str, str]) -> Act:
    return lambda bench: bench.gate.submit("done", evidence)


def _give_up(reason: str, fact: str, hard: bool) -> Act:
    return lambda bench: bench.gate.give_up(reason, fact, hard)


EDITS = st.one_of(
    st.builds(_write, st.just("verdict"), st.sampled_from(VERDICTS)),
    st.builds(_write, st.just("calc.py"), st.sampled_from("abcdefgh")),
    st.builds(_write, st.just("tests/test_calc.py"), st.sampled_from(["forged", "def test_add(): ...\n"])),
)
ENDS = st.one_of(
    st.builds(
        _submit, st.dictionaries(st.just("add"), st.sampled_from(["", "test_add", "calc.py", "no.md"]))
    ),
    st.builds(_give_up, st.sampled_from(["", "a", "b", "c"]), st.sampled_from(["", "fact"]), st.booleans()),
    st.just(lambda bench: bench.gate.text_only()),
    st.just(lambda bench: bench.gate.ask_user("which?")),
)
NOTICES = st.one_of(
    st.just(lambda bench: bench.gate.format_error("TRUNCATED", "length")),
    st.just(lambda bench: bench.gate.good_turn()),
    st.just(lambda bench: bench.gate.not_alone("submit")),
)
BOUNDS = st.builds(
    Bounds,
    refusals=st.integers(1, 6),
    unchanged=st.integers(1, 4),
    reminders=st.integers(0, 3),
    format_errors=st.integers(1, 3),
)
quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _bench(place: str, bounds: Bounds, reruns: int, checklist: bool) -> Bench:
    items = [{"id": "add"}] if checklist else []
    bench = Bench(Path(place), bounds=bounds, verify={"reruns": reruns}, checklist=items)
    bench.verification.reruns = reruns
    return bench


@quick
@given(
    st.lists(st.tuples(st.lists(EDITS, max_size=2), ENDS), min_size=12, max_size=12),
    BOUNDS,
    st.integers(0, 2),
)
def test_every_row_of_attempts_ends_within_its_bounds(
    turns: list[tuple[list[Act], Act]], bounds: Bounds, reruns: int
) -> None:
    """At most R-1 refusals and N reminders go before the end, and the check runs at most R(1+k)+1 times."""
    with tempfile.TemporaryDirectory() as place:
        bench = _bench(place, bounds, reruns, checklist=True)
        attempts = 0
        last: Decision | None = None
        while not isinstance(last, End):
            edits, attempt = turns[attempts % len(turns)]
            for edit in edits:
                edit(bench)
            last = attempt(bench)
            attempts += 1
        assert attempts <= bounds.refusals + bounds.reminders
        assert bench.state.refusals <= bounds.refusals
        assert bench.state.gate_runs <= bounds.refusals * (1 + reruns) + 1
        assert len(bench.verification.verified) <= bounds.refusals + 1
        if last.outcome == "verified":
            assert bench.trees.read(bench.tree, "verdict") == b"PASS"
            assert bench.state.tampered == []


@quick
@given(st.lists(st.one_of(EDITS, ENDS, NOTICES), max_size=15), BOUNDS, st.booleans())
def test_a_state_that_went_through_json_decides_the_same(
    acts: list[Act], bounds: Bounds, checklist: bool
) -> None:
    with tempfile.TemporaryDirectory() as place:
        bench = _bench(place + "/one", bounds, 1, checklist)
        saved = _bench(place + "/other", bounds, 1, checklist)
        for act in acts:
            saved.gate = saved.gate_of(GateState.from_dict(json.loads(json.dumps(saved.state.to_dict()))))
            told, told_saved = act(bench), act(saved)
            assert told_saved == told
            assert saved.state == bench.state
            if isinstance(told, End):
                break
