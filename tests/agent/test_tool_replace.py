"""Exact replacement against an oracle that looks at every place, byte by byte."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from endstop.agent.tools.replace import Ambiguous, Candidate, NotFound, Replacement, replace_once

# Few characters, so that matches, overlaps and line ends are common.
pieces = st.sampled_from(["a", "b", "aa", "\n", "\r\n", "\r", "é", " "])
texts = st.lists(pieces, max_size=12).map("".join)
without_returns = st.lists(st.sampled_from(["a", "b", "aa", "\n", "é", " "]), max_size=5).map("".join)
changes = st.one_of(
    st.tuples(without_returns, without_returns),
    st.tuples(texts.map(lambda text: text[:4]), texts.map(lambda text: text[:4])),
)


def units(data: bytes, crlf_is_one: bool) -> list[bytes]:
    """The file as the units that are compared: bytes, and CRLF as one line end."""
    found = []
    at = 0
    while at < len(data):
        width = 2 if crlf_is_one and data[at : at + 2] == b"\r\n" else 1
        found.append(data[at : at + width])
        at += width
    return found


def oracle(data: bytes, old: str, new: str) -> bytes | list[int]:
    """The file after it, or the line numbers of all places where there is not exactly one."""
    before, after = old.encode(), new.encode()
    by_meaning = b"\r" not in before + after
    file = units(data, by_meaning)
    meant = [b"\n" if unit == b"\r\n" else unit for unit in file]
    wanted = [before[i : i + 1] for i in range(len(before))]
    places = [at for at in range(len(file)) if meant[at : at + len(wanted)] == wanted]
    if len(places) != 1:
        return [1 + meant[:at].count(b"\n") for at in places]
    at = places[0]
    span = file[at : at + len(wanted)]
    written = [after[i : i + 1] for i in range(len(after))]
    keep = 0
    while keep < min(len(span), len(written)) and wanted[keep] == written[keep]:
        keep += 1
    behind = 0
    while behind < min(len(span), len(written)) - keep and wanted[-1 - behind] == written[-1 - behind]:
        behind += 1
    ends_are_crlf = by_meaning and file.count(b"\r\n") > file.count(b"\n")
    middle = [
        b"\r\n" if unit == b"\n" and ends_are_crlf else unit for unit in written[keep : len(written) - behind]
    ]
    tail = span[len(span) - behind :]
    return b"".join([*file[:at], *span[:keep], *middle, *tail, *file[at + len(wanted) :]])


@settings(max_examples=600, deadline=None)
@given(texts, changes)
@example("a\r\nb\r\n", ("a\nb", "a\nc\nd"))
@example("aaa", ("aa", "b"))
@example("a\r\na\n", ("\na", ""))
def test_replacement_is_the_oracles(text: str, change: tuple[str, str]) -> None:
    old, new = change
    if not old:
        return
    data = text.encode()
    expected = oracle(data, old, new)
    made = replace_once(data, old, new)
    if isinstance(expected, bytes):
        assert isinstance(made, Replacement)
        assert made.data == expected
    elif expected:
        assert made == Ambiguous(tuple(expected), more=False)
    else:
        assert isinstance(made, NotFound)


@settings(max_examples=300, deadline=None)
@given(texts, changes)
def test_untouched_bytes_stay_and_a_replacement_can_be_taken_back(text: str, change: tuple[str, str]) -> None:
    old, new = change
    if not old or not new:
        return
    data = text.encode()
    made = replace_once(data, old, new)
    if not isinstance(made, Replacement):
        return
    back = replace_once(made.data, new, old)
    if (
        isinstance(back, Replacement)
        and data.count(b"\r\n") in (0, data.count(b"\n"))
        and "\r" not in old + new
        and (b"\n" in made.data) == (b"\n" in data)
    ):
        # Where a file has one kind of line end, and one is left, the way back leads to the same bytes.
        assert back.data == data
    first, last = made.new_lines
    assert made.old_lines[0] == first
    meaning = made.data.replace(b"\r\n", b"\n") if "\r" not in old + new else made.data
    lines = meaning.split(b"\n")
    assert new.encode().rstrip(b"\n") in b"\n".join(lines[first - 1 : last])


def test_lines_are_named() -> None:
    data = b"one\ntwo\nthree\nfour\n"
    made = replace_once(data, "two\nthree\n", "2\n2.5\n3\n")
    assert made == Replacement(b"one\n2\n2.5\n3\nfour\n", (2, 3), (2, 4))
    assert replace_once(b"x\ny\nx\n", "x", "z") == Ambiguous((1, 3), more=False)
    many = replace_once(b"x\n" * 100, "x", "z")
    assert many == Ambiguous(tuple(range(1, 21)), more=True)


def test_line_ends_of_the_file_are_kept() -> None:
    assert replace_once(b"a\r\nb\r\nc\r\n", "a\nb\n", "a\nx\ny\n") == Replacement(
        b"a\r\nx\r\ny\r\nc\r\n", (1, 2), (1, 3)
    )
    # Mixed: the common lines keep theirs, new ones get the ends that most lines have.
    made = replace_once(b"a\nb\r\nc\r\nd\n", "a\nb\nc", "a\nb\nx\nc")
    assert isinstance(made, Replacement)
    assert made.data == b"a\nb\r\nx\nc\r\nd\n"


def test_a_carriage_return_makes_every_byte_count() -> None:
    assert isinstance(replace_once(b"a\nb\n", "a\r\nb", "c"), NotFound)
    assert replace_once(b"a\nb\n", "a\r\nb", "c").line_ends  # type: ignore[union-attr]
    made = replace_once(b"a\nb\n", "a\n", "a\r\n")
    assert isinstance(made, Replacement)
    assert made.data == b"a\r\nb\n"


def test_bytes_that_are_no_text_are_left_alone() -> None:
    made = replace_once(b"\xff\xfe x = 1\r\n\xe9", "x = 1", "x = 2")
    assert isinstance(made, Replacement)
    assert made.data == b"\xff\xfe x = 2\r\n\xe9"


def test_nearest_lines() -> None:
    data = b"def add(a, b):\n    return a - b\n\ndef sub(a, b):\n    return a - b\n"
    assert replace_once(data, "def add(a, b):\n  return a - b\n", "x") == NotFound(
        (Candidate(1, ("def add(a, b):", "    return a - b"), blanks_only=True),)
    )
    found = replace_once(data, "def sub(a, b):\n    return a-c\n", "x")
    assert isinstance(found, NotFound)
    assert found.nearest[0] == Candidate(4, ("def sub(a, b):", "    return a - b"), blanks_only=False)
    assert replace_once(b"", "abc", "x") == NotFound(())
    assert replace_once(b"zzzz\n", "something else", "x") == NotFound(())


@pytest.mark.parametrize(
    ("data", "old"),
    [
        (b"a" * 4_000_000, "a" * 2_000_000),
        (b"ab\n" * 1_000_000, "ab\n" * 500_000 + "c"),
        (b"x" * 4_000_000, "y" * 1000),
    ],
)
def test_large_files_take_little_time(data: bytes, old: str) -> None:
    started = time.monotonic()
    replace_once(data, old, "z")
    assert time.monotonic() - started < 5
