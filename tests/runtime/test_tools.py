"""The in-stream calculator and the runtime of in-stream tools."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop.runtime.tools import Calculator, calculate, in_stream_tool


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 3", "36"),
        ("1,000 + 2,500", "3500"),
        ("12/60", "0.2"),
        ("12/4", "3.0"),
        ("7 // 2", "3"),
        ("-(2 + 3) * 4", "-20"),
        ("2.50 * 4", "10.0"),
        ("'strawberry'.count('r')", "3"),
        ('"it\'s".count("\'")', "1"),
        ("'a,b,c'.count(',')", "2"),
        ("'aa'.count('a') * 2", "4"),
        ("9" * 50 + " + 1", "1" + "0" * 50),
    ],
)
def test_what_can_be_calculated(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 ** 3",
        "9**9**9",
        "1 << 100",
        "'a' * 1000000000",
        "'a' + 'b'",
        "1 / 0",
        "1e999",
        "10 % 3",
        "(1, 2)",
        "1 if 1 else 2",
        "__import__('os').system('id')",
        "().__class__",
        "'a'.count",
        "'a'.count(1)",
        "'a'.count('a', 0)",
        "'a'.upper()",
        "'\\x41'.count('A')",
        "True",
        "0x10",
        "1_000",
        "f(1)",
        "1(2)",
        "(" * 300 + "1" + ")" * 300,
        "-" * 900 + "1",
        "1 + " * 400 + "1",
        "1" * 1001,
        "*".join(["9" * 30] * 8),
        "9" * 305 + ".0 * " + "9" * 305,
        "1 +",
        "1\n+ 2",
        "\ud800",
    ],
)
def test_what_is_no_calculation_has_no_value(expression):
    assert calculate(expression) is None


@given(st.text("0123456789+-*/(). ,'\"countab", max_size=60))
@settings(max_examples=500, deadline=None)
def test_it_never_raises_and_agrees_with_python(expression):
    value = calculate(expression)
    if value is not None and "'" not in expression and '"' not in expression:
        assert value == str(eval(expression.replace(",", "").strip(), {"__builtins__": {}}))


IDS = {"<|python_start|>": 100, "<|python_end|>": 101, "<|output_start|>": 102, "<|output_end|>": 103}


def one_row(tool=None, **options):
    make = in_stream_tool(
        tool or Calculator(),
        token_ids=IDS,
        pieces=lambda token: bytes([token]),
        encode_text=lambda text: list(text.encode()),
        **options,
    )
    return make()


def push(row, text):
    jobs = [row.push(token) for token in (100, *text.encode(), 101)]
    assert jobs[:-1] == [None] * (len(jobs) - 1)
    return jobs[-1]


def test_a_complete_call_becomes_a_job_whose_tokens_are_the_answer_between_its_tags():
    row = one_row()
    assert push(row, "12*3")() == [102, *b"36", 103]
    assert push(row, "1/0")() == []
    assert push(row, "2*3")() == [102, *b"6", 103]
    assert row.push(101) is None


def test_a_start_tag_inside_a_call_begins_it_anew():
    row = one_row()
    for token in (100, *b"9+", 100, *b"1+1"):
        row.push(token)
    assert row.push(101)() == [102, *b"2", 103]


def test_a_call_that_is_too_long_is_not_run():
    assert push(one_row(), "1" * 5000) is None


def test_a_model_without_the_tags_is_refused():
    with pytest.raises(ValueError, match=r"no token <\|output_end\|>"):
        in_stream_tool(
            Calculator(),
            token_ids={tag: token for tag, token in IDS.items() if token != 103},
            pieces=lambda token: b"",
            encode_text=lambda text: [],
        )


class Slow(Calculator):
    """Answers when it is told to, or notices that it is cancelled."""

    def __init__(self):
        self.go = threading.Event()
        self.saw_cancel = threading.Event()

    def run(self, text, cancelled):
        while not self.go.wait(0.005):
            if cancelled.is_set():
                self.saw_cancel.set()
                return "late"
        return text


def test_the_deadline_gives_no_answer_and_the_next_call_works():
    tool = Slow()
    row = one_row(tool, deadline=0.05)
    started = time.monotonic()
    assert push(row, "1")() == []
    assert time.monotonic() - started < 2
    assert tool.saw_cancel.wait(2)
    tool.go.set()
    assert push(row, "2")() == [102, *b"2", 103]


def test_the_end_of_the_row_ends_a_running_call():
    tool = Slow()
    row = one_row(tool, deadline=60)
    results = []
    job = push(row, "1")
    thread = threading.Thread(target=lambda: results.append(job()))
    thread.start()
    time.sleep(0.05)
    row.close()
    thread.join(2)
    assert results == [[]]
    assert tool.saw_cancel.wait(2)
    assert push(row, "2") is None
    assert job() == []


def test_a_tool_that_raises_has_no_answer(caplog):
    class Broken(Calculator):
        def run(self, text, cancelled):
            raise OSError("disk")

    assert push(one_row(Broken()), "1")() == []
    assert "Broken failed" in caplog.text
