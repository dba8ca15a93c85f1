"""Stopping faults seen in public, at the machine: each entry and further examples of its kind."""

from __future__ import annotations

import tracemalloc

import pytest

from endstop import SamplingParams, StopMachine, StopSet, StopStrings, TokenBytes


class Row:
    """A machine whose vocabulary is exactly the pieces of one row; `eos` and `hidden` are ids behind them."""

    def __init__(self, pieces, *, stop_set=None, special=(), **params):
        self.pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
        self.eos = len(self.pieces)
        table = TokenBytes([*self.pieces, b"<eos>"], special={self.eos, *special})
        stops = StopSet.of({self.eos: "eos"} if stop_set is None else stop_set)
        self.machine = StopMachine(stops, SamplingParams(**params), table)
        self.chunks = []

    def run(self, ids=None):
        """Pushes every piece in order (or `ids`) until the row ends; returns the machine."""
        for token_id in range(len(self.pieces)) if ids is None else ids:
            step = self.machine.push(token_id)
            self.chunks.append(step.text)
            if step.finished:
                break
        assert "".join(self.chunks) == self.machine.text
        return self.machine

    def run_to_eos(self):
        return self.run([*range(len(self.pieces)), self.eos])


def test_B29_stop_string_over_several_tokens_never_reaches_the_stream():
    row = Row(["DEF", "G", "HI", "J", "K"], stop=["DEFGHIJ"])
    machine = row.run()
    assert row.chunks == ["", "", "", ""]
    assert (machine.text, machine.finish_reason, machine.stop_reason) == ("", "stop", "DEFGHIJ")
    assert len(machine.generated_token_ids) == 4

    row = Row(["DEF", "G", "HI", "X"], stop=["DEFGHIJ"])
    machine = row.run_to_eos()
    assert row.chunks == ["", "", "", "DEFGHIX", ""]
    assert (machine.finish_reason, machine.stop_kind) == ("stop", "eos")

    machine = Row(["Hi", "\nUser", ":"], stop=["\nUser:"]).run()
    assert (machine.text, machine.stop_kind, machine.token_ids) == ("Hi", "stop_string", [0])


def test_B29_only_what_may_still_match_is_held():
    row = Row(["one ab", "x", "ab", "a", "b", "c!"], stop=["abc"])
    machine = row.run()
    assert row.chunks == ["one ", "abx", "", "ab", "", ""]
    assert machine.text == "one abxab"


def test_B30_stop_string_inside_one_token():
    machine = Row([" is", " Paris", "."], stop=["Pari"]).run()
    assert (machine.text, machine.finish_reason, machine.generated_token_ids) == (" is ", "stop", [0, 1])
    assert machine.token_ids == [0]

    machine = Row([" is", " Paris", "."], stop=["Pari"], include_stop_str_in_output=True).run()
    assert (machine.text, machine.token_ids) == (" is Pari", [0, 1])

    assert Row([" do", " not", " go"], stop=["ot"]).run().text == " do n"
    assert Row(["not", " any"], stop=[" any"]).run().text == "not"


def test_B31_held_text_is_shown_when_something_else_ends_the_row():
    row = Row(["UNO", " DUE", " TRE"], stop=["TRE\nAAAAAAAA"])
    machine = row.run_to_eos()
    assert row.chunks == ["UNO", " DUE", " ", "TRE"]
    assert (machine.text, machine.finish_reason) == ("UNO DUE TRE", "stop")

    row = Row(["UNO", " DUE", " TRE"], stop=["TRE\nAAAAAAAA"], max_tokens=3)
    machine = row.run()
    assert (machine.text, machine.finish_reason) == ("UNO DUE TRE", "length")


@pytest.mark.parametrize("kind", ["cancelled", "error", "deadline", "grammar", "max_tokens", "context"])
def test_B31_every_end_from_outside_shows_held_text(kind):
    row = Row(["UNO", " TRE"], stop=["TRE\nAA"])
    row.run()
    step = row.machine.finish(kind)
    assert step.text == "TRE"
    assert row.machine.text == "UNO TRE"
    assert row.machine.token_ids == [0, 1]


def test_B32_a_failed_match_can_contain_a_new_start():
    machine = Row(["L M", " N", " O", " P", " Q", " R"], stop=["O P Q"]).run()
    assert (machine.text, machine.finish_reason) == ("L M N ", "stop")
    assert len(machine.generated_token_ids) == 5
    assert Row(["a", "a", "b"], stop=["ab"]).run().text == "a"
    assert Row(["a", "b"], stop=["ac", "b"]).run().text == "a"
    assert Row(["O O P", " O P Q"], stop=["O P Q"]).run().text == "O O P "
    assert Row(["aab", "aab", "aac"], stop=["aabaac"]).run().text == "aab"


def test_B32_completing_together_the_longest_wins_and_the_earliest_before_all():
    machine = Row(["xabc"], stop=["c", "abc", "bc"]).run()
    assert (machine.text, machine.stop_reason) == ("x", "abc")
    machine = Row(["xabcd"], stop=["abcd", "bc"]).run()
    assert (machine.text, machine.stop_reason) == ("xa", "bc")
    machine = Row([" is a"], stop=["a", "is"]).run()
    assert (machine.text, machine.stop_reason) == (" ", "is")


def test_B35_text_of_the_prompt_is_never_searched():
    machine = Row([" 2", ".", "\n\n", "Q"], stop=["\n\n"]).run()
    assert (machine.text, len(machine.generated_token_ids)) == (" 2.", 3)
    # The prompt ended in one newline; the border is no place for a match.
    row = Row(["\nHi", " there"], stop=["\n\n"])
    row.run()
    assert not row.machine.finished
    assert row.machine.text == "\nHi there"


def test_B36_a_hidden_ending_token_costs_no_text():
    def ended(**params):
        row = Row(["today", "?", "<|im_end|>"], special={2}, stop_token_ids=[2], **params)
        return row.run()

    machine = ended()
    assert (machine.text, machine.finish_reason, machine.stop_reason) == ("today?", "stop", 2)
    assert ended(skip_special_tokens=False).text == "today?"
    kept = ended(skip_special_tokens=False, include_stop_str_in_output=True)
    assert (kept.text, kept.token_ids) == ("today?<|im_end|>", [0, 1, 2])
    hidden = ended(include_stop_str_in_output=True)
    assert (hidden.text, hidden.token_ids) == ("today?", [0, 1, 2])


def test_B36_an_ordinary_token_that_ends_the_row_is_not_shown():
    machine = Row(["one", " two", " END", " three"], stop_token_ids=[2]).run()
    assert (machine.text, machine.token_ids, machine.stop_kind) == ("one two", [0, 1], "stop_token")


def test_B38_characters_cut_by_token_borders():
    row = Row(["ok ", b"\xf0\x9f", b"\x98\x80", "!"])
    row.run_to_eos()
    assert row.chunks == ["ok ", "", "😀", "!", ""]

    row = Row(["ok ", b"\xf0\x9f"], max_tokens=2)
    machine = row.run()
    assert (machine.text, machine.finish_reason) == ("ok �", "length")

    row = Row([b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd"], stop=["好"])
    machine = row.run()
    assert (machine.text, machine.stop_reason) == ("你", "好")


@pytest.mark.parametrize("text", ["é", "你好", "😀👍🏽", "aé你😀", "\u00a0\u2028", "🇩🇪"])
def test_B38_text_spelled_byte_by_byte_streams_whole_characters(text):
    data = text.encode()
    row = Row([bytes([byte]) for byte in data])
    row.run_to_eos()
    assert "".join(row.chunks) == text
    assert "�" not in "".join(row.chunks)


def test_B40_min_tokens_covers_stop_strings():
    row = Row(["a", "\n", "b", "c", "\n", "d"], stop=["\n"], min_tokens=3)
    machine = row.run()
    assert (machine.text, machine.finish_reason, len(machine.generated_token_ids)) == ("a\nbc", "stop", 5)
    # Text before the border does not begin a later match.
    row = Row(["a", "\n", "b", "\n"], stop=["\nb"], min_tokens=2)
    row.run()
    assert not row.machine.finished
    with pytest.raises(ValueError, match="below min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    machine = Row(["a", "b", "c"], stop=["b"], min_tokens=3, max_tokens=3).run()
    assert (machine.finish_reason, machine.text) == ("length", "abc")


def test_B40_banned_ids_until_min_tokens():
    row = Row(["a", "b", "c"], min_tokens=2, stop_token_ids=[1])
    assert row.machine.banned_ids() == {1, row.eos}
    row.run([0, 2])
    assert row.machine.banned_ids() == frozenset()
    # One that is pushed all the same (nothing else was legal) ends the row.
    row = Row(["a", "b"], min_tokens=2)
    assert row.run([row.eos]).stop_kind == "eos"


def test_B42_ignore_eos_leaves_the_users_own_ids_active():
    stop_set = {10: "eos", 11: "turn_end"}
    params = {"ignore_eos": True, "max_tokens": 5}
    table = TokenBytes([b"x"] * 12)
    machine = StopMachine(StopSet.of(stop_set), SamplingParams(**params), table)
    machine.push_many([5, 11, 6, 10, 7])
    assert (machine.token_ids, machine.finish_reason) == ([5, 11, 6, 10, 7], "length")

    machine = StopMachine(StopSet.of(stop_set), SamplingParams(stop_token_ids=[6], **params), table)
    step = machine.push_many([5, 11, 6, 10, 7])
    assert (machine.token_ids, machine.finish_reason, machine.stop_reason) == ([5, 11], "stop", 6)
    assert step.accepted == 3

    # An id that is in both is named by the stop set, unless the stop set is ignored.
    both = SamplingParams(stop_token_ids=[10])
    machine = StopMachine(StopSet.of(stop_set), both, table)
    machine.push(10)
    assert machine.stop_kind == "eos"
    machine = StopMachine(StopSet.of(stop_set), both.replace(ignore_eos=True), table)
    machine.push(10)
    assert machine.stop_kind == "stop_token"


def test_B42_ban_eos_bans_and_ignore_eos_does_not():
    stops = StopSet.of({10: "eos"})
    assert StopMachine(stops, SamplingParams(ban_eos=True)).banned_ids() == {10}
    assert StopMachine(stops, SamplingParams(ignore_eos=True)).banned_ids() == frozenset()


def test_B43_an_end_in_the_middle_of_a_block_cuts_the_block():
    table = TokenBytes([b"", b"", b"<eos>", b"", b"", b"5", b"6", b"7", b"8", b"9"], special={2})
    machine = StopMachine(StopSet.of({2: "eos"}), SamplingParams(), table)
    assert machine.push_many([5, 6]).accepted == 2
    step = machine.push_many([7, 2, 8, 9])
    assert (step.accepted, step.finished, step.finish_reason, step.stop_reason) == (2, True, "stop", 2)
    assert (machine.text, machine.token_ids, machine.generated_token_ids) == ("567", [5, 6, 7], [5, 6, 7, 2])
    with pytest.raises(RuntimeError):
        machine.push(8)

    row = Row(["a ", "END", "x", "y"], stop=["END"])
    row.machine.push_many([0])
    step = row.machine.push_many([1, 2, 3])
    assert (row.machine.text, step.accepted, step.stop_reason) == ("a ", 1, "END")


def test_B50_lists_are_cut_at_one_boundary():
    table = TokenBytes([b"x"] * 60)
    for include, kept in ((False, [50, 51]), (True, [50, 51, 2])):
        params = SamplingParams(stop_token_ids=[2], include_stop_str_in_output=include)
        machine = StopMachine(StopSet.of({}), params, table)
        machine.push_many([50, 51, 2])
        assert machine.token_ids == kept
        assert machine.kept == len(kept)
        assert machine.ending_token_dropped is not include
    machine = StopMachine(StopSet.of({2: "eos"}), SamplingParams(), table)
    machine.push(2)
    assert (machine.token_ids, machine.generated_token_ids, machine.finish_reason) == ([], [2], "stop")


def test_hidden_specials_before_the_cut_stay_and_those_in_the_match_go():
    table = TokenBytes([b"Hi", b"<|x|>", b"END", b"foo", b"bar"], special={1})

    def row(ids, stop):
        machine = StopMachine(StopSet.of({}), SamplingParams(stop=stop), table)
        machine.push_many(ids)
        return machine

    machine = row([0, 1, 2], ["END"])
    assert (machine.text, machine.token_ids) == ("Hi", [0, 1])
    machine = row([0, 1, 2], ["<|x|>END"])
    assert (machine.text, machine.token_ids, machine.stop_reason) == ("Hi", [0], "<|x|>END")
    machine = row([3, 1, 4], ["foobar"])
    assert (machine.text, machine.token_ids) == ("", [])
    machine = row([0, 1], ["<|x|>"])
    assert (machine.text, machine.token_ids, machine.stop_kind) == ("Hi", [0], "stop_string")


def test_a_stop_string_goes_before_the_id_that_completes_it():
    table = TokenBytes([b"a", b"<eos>"], special={1})
    machine = StopMachine(StopSet.of({1: "eos"}), SamplingParams(stop=["<eos>"]), table)
    machine.push_many([0, 1])
    assert (machine.stop_kind, machine.stop_reason) == ("stop_string", "<eos>")


def test_an_end_on_the_last_allowed_token_is_a_stop():
    row = Row(["a", "b"], max_tokens=3)
    assert row.run_to_eos().finish_reason == "stop"
    row = Row(["a", "bX"], max_tokens=2, stop=["X"])
    assert row.run().finish_reason == "stop"
    # The limit comes first: what lies beyond it is not looked at.
    row = Row(["a", "b"], max_tokens=2)
    assert row.run_to_eos().finish_reason == "length"


def test_the_window_ends_a_row_as_context():
    table = TokenBytes([b"x"])
    machine = StopMachine(StopSet.of({}), SamplingParams(), table, prompt_len=6, context_len=8)
    machine.push_many([0, 0, 0])
    assert (machine.stop_kind, machine.finish_reason, machine.text) == ("context", "length", "xx")
    with pytest.raises(ValueError, match="fills the window"):
        StopMachine(StopSet.of({}), SamplingParams(), table, prompt_len=8, context_len=8)


def test_the_deadline_counts_from_the_request():
    now = [0.0]
    table = TokenBytes([b"x", b"y"])
    machine = StopMachine(StopSet.of({1: "eos"}), SamplingParams(max_time=2.0), table, clock=lambda: now[0])
    machine.push(0)
    now[0] = 1.9
    assert not machine.push(0).finished
    now[0] = 2.0
    step = machine.push(0)
    assert (step.stop_kind, step.finish_reason, machine.text) == ("deadline", "length", "xxx")
    # A stop and a limit go before the deadline.
    late = {"clock": lambda: now[0], "started_at": 0.0}
    machine = StopMachine(StopSet.of({1: "eos"}), SamplingParams(max_time=1.0), table, **late)
    assert machine.push(1).stop_kind == "eos"
    machine = StopMachine(StopSet.of({}), SamplingParams(max_time=1.0, max_tokens=1), table, **late)
    assert machine.push(0).stop_kind == "max_tokens"


@pytest.mark.parametrize(
    ("ids", "sizes", "ends_at"),
    [
        ([1, 2, 1, 2], (2, 1, 2), 4),
        ([1, 1], (1, 1, 2), 2),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], (3, 1, 3), 9),
        ([1, 2, 1, 2, 1], (2, 2, 3), None),
        ([9, 5, 5, 5], (4, 2, 2), None),
        ([9, 5, 5, 5, 5], (4, 2, 2), 5),
    ],
)
def test_repetition_ends_a_row(ids, sizes, ends_at):
    most, least, count = sizes
    detection = {"max_pattern_size": most, "min_pattern_size": least, "min_count": count}
    table = TokenBytes([b"x"] * 10)
    machine = StopMachine(StopSet.of({}), SamplingParams(repetition_detection=detection), table)
    step = machine.push_many(ids)
    assert step.finished == (ends_at is not None)
    if ends_at is not None:
        assert (step.accepted, step.stop_kind, step.finish_reason) == (ends_at, "repetition", "length")
        assert machine.token_ids == ids[:ends_at]


def test_forced_tokens_are_shown_counted_and_never_matched():
    table = TokenBytes([b"a E", b"N", b"D", b"<eos>"], special={3})
    params = SamplingParams(stop=["END"], max_tokens=6)
    machine = StopMachine(StopSet.of({3: "eos"}), params, table)
    texts = [machine.push(0).text, machine.push(1, forced=True).text, machine.push(2).text]
    assert texts == ["a ", "EN", "D"]
    assert not machine.finished
    assert machine.push(3, forced=True).text == ""
    assert machine.generated_mask == [1, 0, 1, 0]
    machine.push(0, forced=True)
    step = machine.push(0, forced=True)
    assert (step.stop_kind, machine.text) == ("max_tokens", "a ENDa Ea E")


def test_text_streams_use_the_same_automaton():
    stream = StopStrings(["END", "ENOUGH"])
    assert [stream.push_text(text).text for text in ("a E", "N", "x EN")] == ["a ", "", "ENx "]
    step = stream.push_text("D and more")
    assert (step.finished, step.finish_reason, step.stop_reason, stream.text) == (
        True,
        "stop",
        "END",
        "a ENx ",
    )
    with pytest.raises(RuntimeError):
        stream.push_text("x")
    held = StopStrings(["END"])
    assert held.push_text("EN").text == ""
    assert held.finish().text == "EN"
    kept = StopStrings("END", include_stop_str_in_output=True)
    assert kept.push_text("aENDb").text == "aEND"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": [""]}, "empty string"),
        ({"stop": ""}, "empty string"),
        ({"stop": [3]}, "must hold strings"),
        ({"stop": ["\ud800"]}, "valid Unicode"),
        ({"stop_token_ids": ["7"]}, "integer"),
        ({"stop_token_ids": [1.5]}, "integer"),
        ({"stop_token_ids": [True]}, "integer"),
        ({"stop_token_ids": [-1]}, "0 or more"),
        ({"stop_token_ids": 7}, "must be a list"),
        ({"max_tokens": 0}, "at least 1"),
        ({"min_tokens": -1}, "0 or more"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n must be"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_time": -1}, "max_time"),
        ({"stop_scope": "some"}, "stop_scope"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 1}}, "min_count"),
        ({"repetition_detection": {"sizes": 2}}, "takes max_pattern_size"),
        ({"logit_bias": {"x": 1}}, "integer"),
        ({"ignore_eos": 1}, "true or false"),
    ],
)
def test_parameters_out_of_range_are_refused_in_one_sentence(params, message):
    with pytest.raises(ValueError, match=message) as caught:
        SamplingParams(**params)
    assert "\n" not in str(caught.value)


def test_ids_outside_the_lm_head_are_refused():
    with pytest.raises(ValueError, match="stop_token_ids holds 100"):
        StopMachine(StopSet.of({2: "eos"}, vocab_size=100), SamplingParams(stop_token_ids=[100]))
    machine = StopMachine(StopSet.of({}), SamplingParams(), TokenBytes([b"a"]))
    for wrong in (-1, "a", None, 1.5):
        with pytest.raises(ValueError, match="token id"):
            machine.push(wrong)
    # A failed push leaves the row as it was.
    assert machine.generated_token_ids == []
    machine.push(7)
    assert (machine.text, machine.token_ids) == ("", [7])


def test_duplicate_stop_strings_are_merged():
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop_token_ids=[3, 3, 1]).stop_token_ids == (3, 1)


def test_rows_that_show_specials_and_rows_that_hide_them_share_a_table():
    table = TokenBytes([b"a", b"<x>", b"b"], special={1})
    shown = StopMachine(StopSet.of({}), SamplingParams(skip_special_tokens=False, stop=["ab"]), table)
    shown.push_many([1, 0, 1, 2])
    assert (shown.text, shown.stop_kind) == ("<x>a<x>b", None)
    hidden = StopMachine(StopSet.of({}), SamplingParams(stop=["ab"]), table)
    hidden.push_many([1, 0, 1, 2])
    assert (hidden.text, hidden.stop_kind, hidden.token_ids) == ("", "stop_string", [1])


def test_a_long_stop_string_takes_memory_for_its_length_only():
    tracemalloc.start()
    stops = StopStrings(["ab" * 20_000 + "c"])
    assert tracemalloc.get_traced_memory()[1] < 60_000_000
    tracemalloc.stop()
    assert stops.push_text("x" + "ab" * 20_000).text == "x"
    assert stops.push_text("d").text == "ab" * 20_000 + "d"


@pytest.mark.parametrize(
    "params",
    [{"temperature": 10**400}, {"top_p": 10**400}, {"max_time": 10**400}, {"logit_bias": {5: -(10**400)}}],
)
def test_numbers_beyond_a_float_are_refused(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**params)
