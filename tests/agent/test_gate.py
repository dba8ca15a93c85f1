"""The gate's decisions: order of the checks, codes, bounds, what the model is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from endstop.agent.decisions import Decision, End, Refusal
from endstop.agent.gate import GateState, same_words
from endstop.agent.task import Bounds

from .scripted_verification import Bench

CHECKLIST = [{"id": "add", "text": "add() adds"}, {"id": "docs", "text": "there is a README"}]


def refusal(decision: Decision) -> Refusal:
    assert isinstance(decision, Refusal)
    return decision


def end(decision: Decision) -> End:
    assert isinstance(decision, End)
    return decision


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_s01_a_tree_that_passes_is_verified_by_the_gates_own_run(bench: Bench) -> None:
    bench.write("verdict", "PASS")
    done = end(bench.gate.submit("fixed"))
    assert (done.outcome, done.details) == ("verified", ())
    assert bench.verification.verified == [bench.tree] == [bench.state.best_verified_tree]
    assert "2 passed, 0 failed, 1 skipped" in done.message
    assert bench.state.gate_runs == 1
    assert bench.state.gate_seconds == 0.5
    assert bench.state.outcome == "verified"


def test_an_end_is_final(bench: Bench) -> None:
    bench.write("verdict", "PASS")
    bench.gate.submit("fixed")
    with pytest.raises(RuntimeError, match="ended as verified"):
        bench.gate.submit("fixed")


@pytest.mark.parametrize("outcome", ["limit:steps", "interrupted", "error"])
def test_a_run_may_be_resumed_from_an_end_that_judged_nothing(bench: Bench, outcome: Any) -> None:
    assert bench.gate.finish(outcome, "cut").outcome == outcome
    bench.write("verdict", "PASS")
    assert end(bench.gate.submit("fixed")).outcome == "verified"


def test_only_the_gate_may_say_how_a_judged_run_ended(bench: Bench) -> None:
    with pytest.raises(ValueError, match="for the gate to say"):
        bench.gate.finish("verified")


@pytest.mark.parametrize(
    ("code", "runs"),
    [
        ("VERIFY_FAILED", 2),
        ("VERIFY_TIMEOUT", 1),
        ("NO_TESTS_RAN", 2),
        ("REQUIRED_NOT_PASSED", 2),
        ("FEWER_TESTS", 2),
        ("FLAKY", 2),
    ],
)
def test_every_verdict_but_pass_is_a_refusal_of_that_code(bench: Bench, code: str, runs: int) -> None:
    bench.write("verdict", code)
    assert refusal(bench.gate.submit("done")).code == code
    assert bench.state.gate_runs == runs
    # Nothing was changed: the second refusal of the tree ends the run, without a rerun.
    last = end(bench.gate.submit("done"))
    assert (last.outcome, last.details) == ("refused_no_progress", ("NO_CHANGE_SINCE_REFUSAL",))
    assert (bench.state.refusals, bench.state.gate_runs) == (2, runs)


def test_a_refusal_tells_the_model_all_that_it_needs(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checklist=CHECKLIST)
    told = refusal(bench.gate.submit("done", {"add": "test_add", "docs": "README.md"})).message
    assert told.startswith("Not accepted (1 of 5): VERIFY_FAILED. A test failed.\n")
    for part in (
        "Command: pytest -q\nExit 1.\nOutput (tail):\nE   assert -1 == 5\n",
        "1 failed, 1 passed\n(end of output)\n",
        "What would pass: all tests pass\n",
        "Open items: add (add() adds): unproven by test_add: the test tests/test_calc.py::test_add failed; "
        "docs (there is a README): unproven by README.md: there is no path README.md\n",
        "call give_up with a reason and the fact that shows it. 4 refusals left",
        "Task: make the tests pass\n",
        f"Present tree: {bench.tree[:12]}\n",
        f"Last verification: VERIFY_FAILED on tree {bench.tree[:12]} (1 passed, 1 failed, 0 skipped)",
    ):
        assert part in told
    assert told.count("assert -1 == 5") == 1


def test_a_test_that_fails_only_beside_the_canary_is_shown_and_counted_once() -> None:
    from endstop.agent.decisions import TestReport, Verdict, VerifierRun
    from endstop.agent.refusals import Finding

    green = VerifierRun("pytest", 0, "all green", 1.0, report=TestReport(passed=frozenset({"a", "b"})))
    red = VerifierRun("pytest", 1, "b is red", 1.0, report=TestReport(frozenset({"a"}), frozenset({"b"})))
    finding = Finding.of(Verdict("FLAKY", "tree", (green, red), ("b",)))
    assert (finding.output, finding.runs) == ("b is red", 1)
    finding = Finding.of(Verdict("FLAKY", "tree", (red, green), ("b",)))
    assert (finding.output, finding.runs) == ("b is red", 2)


def test_the_output_in_a_refusal_is_its_last_2000_characters(bench: Bench) -> None:
    from endstop.agent.refusals import tail

    assert tail("x" * 2000) == "x" * 2000
    assert tail("a" + "x" * 2000) == "[1 characters left out]\n" + "x" * 2000


def test_s23_a_new_wrong_edit_before_each_submit_ends_at_the_budget(bench: Bench) -> None:
    for number in range(4):
        bench.write("calc.py", str(number))
        assert refusal(bench.gate.submit("done")).code == "VERIFY_FAILED"
    bench.write("calc.py", "4")
    last = end(bench.gate.submit("done"))
    assert (last.outcome, last.details[0]) == ("refusal_budget", "VERIFY_FAILED")
    assert bench.state.gate_runs == 10


def test_the_count_of_a_tree_is_its_own_and_the_total_never_starts_anew(bench: Bench) -> None:
    bench.gate.submit("done")
    bench.write("calc.py", "1")
    bench.gate.submit("done")
    (bench.root / "calc.py").unlink()
    # Back at the first tree, which was refused before.
    assert end(bench.gate.submit("done")).outcome == "refused_no_progress"


def test_s13_items_without_evidence_are_refused_before_any_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checklist=CHECKLIST)
    bench.write("verdict", "PASS")
    first = refusal(bench.gate.submit("done", {"add": "test_add", "docs": " "}))
    assert (first.code, first.details) == ("CHECKLIST_INCOMPLETE", ("docs",))
    assert bench.verification.verified == []
    bench.write("README.md", "# calc")
    assert end(bench.gate.submit("done", {"add": "test_add", "docs": "README.md"})).outcome == "verified"


def test_b64_the_items_come_first_and_the_check_second_each_with_its_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checklist=CHECKLIST)
    first = refusal(bench.gate.submit("done"))
    assert (first.code, first.details) == ("CHECKLIST_INCOMPLETE", ("add", "docs"))
    # The same tree with evidence is another attempt: the check has not seen it yet.
    second = refusal(bench.gate.submit("done", {"add": "test_add", "docs": "README.md"}))
    assert (second.code, second.details) == ("VERIFY_FAILED", ("tests/test_calc.py::test_add",))
    assert "Open items: add" in second.message
    # Once the tree is known to fail, an open item is refused with both reasons.
    bench = Bench(tmp_path / "other", checklist=CHECKLIST)
    bench.gate.give_up("no idea", "looked at it")
    both = refusal(bench.gate.submit("done"))
    assert both.code == "CHECKLIST_INCOMPLETE"
    assert "The check's result on this tree was VERIFY_FAILED: tests/test_calc.py::test_add." in both.message
    assert "assert -1 == 5" in both.message


def test_the_same_incomplete_checklist_twice_is_no_progress(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checklist=CHECKLIST)
    assert refusal(bench.gate.submit("done", {"add": "test_add"})).code == "CHECKLIST_INCOMPLETE"
    last = end(bench.gate.submit("really", {"add": " test_add "}))
    assert (last.outcome, last.details) == ("refused_no_progress", ("CHECKLIST_INCOMPLETE", "docs"))


@pytest.mark.parametrize("proof", ["test_add2", "NOTES.md", "tests/test_calc.py::test_sub", "test_windows"])
def test_evidence_that_does_not_hold_is_refused_after_the_run(tmp_path: Path, proof: str) -> None:
    bench = Bench(tmp_path, checklist=[{"id": "add"}])
    bench.write("verdict", "PASS")
    tree = bench.tree
    first = refusal(bench.gate.submit("done", {"add": proof}))
    assert (first.code, first.details) == ("CHECKLIST_EVIDENCE", ("add",))
    assert bench.state.best_verified_tree == tree
    assert f"Open items: add: unproven by {proof}: " in first.message
    # Better evidence for the same tree is another attempt.
    assert end(bench.gate.submit("done", {"add": "test_add"})).outcome == "verified"


def test_the_same_evidence_for_the_same_tree_is_not_run_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checklist=[{"id": "add"}])
    bench.write("verdict", "PASS")
    bench.gate.submit("done", {"add": "README.md"})
    last = end(bench.gate.submit("done", {"add": "README.md"}))
    assert (last.outcome, last.details) == ("refused_no_progress", ("NO_CHANGE_SINCE_REFUSAL",))
    assert bench.state.gate_runs == 1
    assert (
        f"The files as they are passed the project's check (best_verified_tree {bench.tree})" in last.message
    )


def test_s43_a_limit_names_the_best_verified_tree_and_keeps_its_diff(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checklist=[{"id": "docs"}])
    bench.write("verdict", "PASS")
    best = bench.tree
    bench.gate.submit("done", {"docs": "README.md"})
    bench.write("verdict", "VERIFY_FAILED")
    bench.write("calc.py", "broken")
    limit = bench.gate.finish("limit:steps", "100 steps.")
    assert limit.outcome == "limit:steps"
    assert limit.message == (
        "100 steps. An earlier state of the files, since edited, passed the project's check "
        f"(best_verified_tree {best})."
    )
    diff = bench.gate.best_diff()
    assert "+PASS" in diff
    assert "broken" not in diff


def test_an_error_is_not_hidden_by_a_workspace_that_is_gone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checklist=[{"id": "docs"}])
    bench.write("verdict", "PASS")
    best = bench.tree
    bench.gate.submit("done", {"docs": "README.md"})
    bench.root.rename(tmp_path / "gone")
    said = bench.gate.finish("error", "The model cannot be reached.").message
    assert said == (
        "The model cannot be reached. A state of the files passed the project's check "
        f"(best_verified_tree {best})."
    )


def test_s04_protected_paths_are_compared_with_the_baseline_before_any_run(bench: Bench) -> None:
    bench.write("verdict", "PASS")
    original = (bench.root / "tests/test_calc.py").read_text()
    bench.write("tests/test_calc.py", "def test_add(): assert True\n")
    first = refusal(bench.gate.submit("done"))
    assert (first.code, first.details) == ("PROTECTED_CHANGED", ("tests/test_calc.py",))
    assert bench.verification.verified == []
    assert bench.state.tampered == ["tests/test_calc.py"]
    bench.write("tests/test_calc.py", original)
    assert end(bench.gate.submit("done")).outcome == "verified"
    assert bench.state.tampered == []


@pytest.mark.parametrize("outcome", ["limit:steps", "blocked", "stopped_without_submit"])
def test_every_end_says_whether_protected_paths_are_changed(bench: Bench, outcome: Any) -> None:
    bench.write("tests/test_calc.py", "def test_add(): assert True\n")
    if outcome == "blocked":
        bench.gate.give_up("no", "fact", hard=True)
    elif outcome == "stopped_without_submit":
        for _ in range(3):
            bench.gate.text_only()
    else:
        bench.gate.finish(outcome)
    assert bench.state.outcome == outcome
    assert bench.state.tampered == ["tests/test_calc.py"]


def test_paths_that_the_task_opened_are_named_in_the_result(bench: Bench) -> None:
    bench.write("verdict", "PASS")
    bench.write("tests/new_test.py", "def test_new(): ...\n")
    assert end(bench.gate.submit("done")).details == ("OPENED:tests/new_test.py",)


def test_b70_an_empty_diff_is_a_success_with_a_warning(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write("verdict", "PASS")
    bench.baseline = bench.tree
    bench.gate = bench.gate_of(GateState())
    done = end(bench.gate.submit("nothing to change"))
    assert (done.outcome, done.details) == ("verified", ("EMPTY_DIFF",))


def test_evidence_for_what_is_no_item_is_said_in_the_result(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checklist=[{"id": "add"}])
    bench.write("verdict", "PASS")
    assert end(bench.gate.submit("done", {"add": "test_add", "more": "x"})).details == ("UNKNOWN_ITEM:more",)


def test_without_a_verifier_a_submit_ends_unverified(tmp_path: Path) -> None:
    bench = Bench(tmp_path, verified=False, checklist=[{"id": "docs"}])
    assert refusal(bench.gate.submit("done")).code == "CHECKLIST_INCOMPLETE"
    bench.write("notes", "x")
    assert end(bench.gate.submit("done", {"docs": "notes"})).outcome == "unverified"
    assert bench.state.best_verified_tree is None


def test_s19_giving_up_takes_a_failing_check_one_more_try_and_the_same_reason(bench: Bench) -> None:
    fact = "test_add wants 5, test_add2 wants 6"
    first = refusal(bench.gate.give_up("The tests contradict each other.", fact))
    assert first.code == "BLOCKED_TRY_ONCE_MORE"
    assert "The reason is recorded: The tests contradict each other." in first.message
    last = end(bench.gate.give_up("the tests  CONTRADICT each other!", fact))
    assert (last.outcome, last.details) == ("blocked", ())
    assert fact in last.message
    # The tree was known to fail, so it was not run again.
    assert bench.state.gate_runs == 2


def test_another_reason_is_another_first_try(bench: Bench) -> None:
    for reason in ("no network", "no compiler"):
        assert refusal(bench.gate.give_up(reason, "tried")).code == "BLOCKED_TRY_ONCE_MORE"
    assert end(bench.gate.give_up("no network", "tried")).outcome == "blocked"


def test_hard_ends_at_once_but_not_without_a_fact(bench: Bench) -> None:
    first = refusal(bench.gate.give_up("no key", "  ", hard=True))
    assert (first.code, first.details) == ("BLOCKED_NO_EVIDENCE", ("there is no evidence",))
    last = end(bench.gate.give_up("no key", "the server answers 401", hard=True))
    assert (last.outcome, last.details) == ("blocked", ("hard",))


@pytest.mark.parametrize("hard", [False, True])
def test_what_passes_cannot_be_given_up(bench: Bench, hard: bool) -> None:
    bench.write("verdict", "PASS")
    first = refusal(bench.gate.give_up("cannot be done", "tried", hard))
    assert first.code == "BLOCKED_BUT_VERIFY_PASSES"
    assert bench.state.best_verified_tree == bench.tree
    assert end(bench.gate.submit("then it is done")).outcome == "verified"


def test_giving_up_twice_without_evidence_is_no_progress(bench: Bench) -> None:
    bench.gate.give_up("hard", "")
    last = end(bench.gate.give_up("hard", ""))
    assert last.outcome == "refused_no_progress"
    assert last.details == ("BLOCKED_NO_EVIDENCE", "there is no evidence")


def test_s20_an_early_give_up_and_then_the_fix(bench: Bench) -> None:
    assert refusal(bench.gate.give_up("too hard", "it fails")).code == "BLOCKED_TRY_ONCE_MORE"
    bench.write("verdict", "PASS")
    assert end(bench.gate.submit("fixed")).outcome == "verified"


def test_a_submit_of_a_tree_that_a_give_up_showed_to_fail_is_not_run_again(bench: Bench) -> None:
    bench.gate.give_up("too hard", "it fails")
    assert refusal(bench.gate.submit("done")).code == "VERIFY_FAILED"
    assert bench.state.gate_runs == 2
    # And after a refused submit there is still the honest way out.
    assert end(bench.gate.give_up("too hard", "it fails")).outcome == "blocked"


def test_s03_text_for_ever_ends_after_two_reminders_with_one_run_for_the_record(bench: Bench) -> None:
    for number in (1, 2):
        told = refusal(bench.gate.text_only())
        assert told.code == "NO_SUBMIT"
        assert f"(reminder {number} of 2)" in told.message
    assert bench.verification.verified == []
    last = end(bench.gate.text_only())
    assert (last.outcome, last.details) == ("stopped_without_submit", ("VERIFY_FAILED",))
    assert len(bench.verification.verified) == 1
    assert bench.state.refusals == 0


def test_s02_a_reminder_shows_the_last_raw_result(bench: Bench) -> None:
    bench.gate.submit("done")
    assert "assert -1 == 5" in refusal(bench.gate.text_only()).message


def test_the_record_says_when_the_work_happened_to_be_right(bench: Bench) -> None:
    bench.write("verdict", "PASS")
    bench.gate.text_only()
    bench.gate.text_only()
    last = end(bench.gate.text_only())
    assert (last.outcome, last.details) == ("stopped_without_submit", ("PASS",))
    assert bench.state.best_verified_tree == bench.tree


def test_s17_a_question_without_a_user(bench: Bench) -> None:
    assert refusal(bench.gate.ask_user("ints only?")).code == "NO_USER_AVAILABLE"
    bench.write("verdict", "PASS")
    assert end(bench.gate.submit("fixed", assumptions=["numbers"])).outcome == "verified"
    assert bench.state.assumptions == ["numbers"]


def test_questions_and_text_share_their_reminders(bench: Bench) -> None:
    bench.gate.ask_user("a?")
    bench.gate.text_only()
    last = end(bench.gate.ask_user("b?"))
    assert (last.outcome, last.details) == ("needs_user", ("VERIFY_FAILED",))


def test_with_a_user_a_question_waits_and_the_run_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, interactive=True)
    asked = end(bench.gate.ask_user("ints only?"))
    assert (asked.outcome, asked.message) == ("needs_user", "ints only?")
    bench.write("verdict", "PASS")
    assert end(bench.gate.submit("fixed")).outcome == "verified"


def test_the_third_format_error_in_a_row_ends_the_run(bench: Bench) -> None:
    for code in ("TRUNCATED", "BAD_CALL"):
        told = refusal(bench.gate.format_error(code, "finish_reason length"))  # type: ignore[arg-type]
        assert told.code == code
        assert "No call of that turn ran." in told.message
    bench.gate.good_turn()
    bench.gate.format_error("TRUNCATED", "cut")
    bench.gate.format_error("TRUNCATED", "cut")
    last = end(bench.gate.format_error("BAD_CALL", "no JSON"))
    assert (last.outcome, last.details) == ("repeated_format_error", ("BAD_CALL",))
    assert bench.state.refusals == 0


def test_s26_a_submit_beside_other_calls_is_not_counted(bench: Bench) -> None:
    assert refusal(bench.gate.not_alone("submit")).code == "SUBMIT_NOT_ALONE"
    assert bench.state.refusals == 0
    assert bench.verification.verified == []


def test_a_pass_that_does_not_repeat_is_no_longer_the_best(tmp_path: Path) -> None:
    """A tree passed for a give_up, and its next run, for the submit, fails."""
    bench = Bench(tmp_path)
    bench.write("verdict", "PASS")
    bench.gate.give_up("no", "fact")
    assert bench.state.best_verified_tree == bench.tree
    bench.verification.always = "VERIFY_FAILED"
    assert refusal(bench.gate.submit("done")).code == "VERIFY_FAILED"
    assert bench.state.best_verified_tree is None


def test_the_bounds_of_the_task_are_the_gates(tmp_path: Path) -> None:
    bench = Bench(tmp_path, bounds=Bounds(refusals=1))
    assert end(bench.gate.submit("done")).outcome == "refusal_budget"
    bench = Bench(tmp_path / "u", bounds=Bounds(unchanged=1))
    assert end(bench.gate.submit("done")).outcome == "refused_no_progress"
    bench = Bench(tmp_path / "n", bounds=Bounds(reminders=0, format_errors=1))
    assert end(bench.gate_of(GateState()).text_only()).outcome == "stopped_without_submit"
    assert end(bench.gate_of(GateState()).format_error("BAD_CALL", "x")).outcome == "repeated_format_error"


def test_the_state_is_json(bench: Bench) -> None:
    bench.gate.submit("done", {"a": "b"})
    bench.gate.give_up("x", "y")
    data = json.loads(json.dumps(bench.state.to_dict()))
    assert GateState.from_dict(data) == bench.state


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("No  network.", "no network", True),
        ("Café", "cafe\u0301", True),
        ("no network", "no compiler", False),
        ("", "...", True),
    ],
)
def test_reasons_are_the_same_but_for_case_spacing_and_punctuation(one: str, other: str, same: bool) -> None:
    assert (same_words(one) == same_words(other)) is same
