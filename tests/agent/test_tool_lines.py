"""Reading on, line by line, against the file's own lines; pieces of the file end anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop.agent.tools import lines as module
from endstop.agent.tools.lines import LineReader
from endstop.sandbox import WorkspaceFiles

pieces = st.sampled_from([b"a", b"bc", b"\n", b"\r\n", "é".encode(), b"\xff", b"long line of text", b" "])
contents = st.lists(pieces, min_size=1, max_size=30).map(b"".join)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines")


def expected(data: bytes, limit: int) -> list[str]:
    rows = data.split(b"\n")
    if not rows[-1]:
        rows.pop()
    ends = [b"\n"] * len(rows) if data.endswith(b"\n") else [b"\n"] * (len(rows) - 1) + [b""]
    shown = []
    for row, end in zip(rows, ends, strict=True):
        if len(row + end) > limit:
            shown.append((row + end)[:limit].decode("utf-8", "ignore"))
        else:
            shown.append(
                (row + end).replace(b"\r\n", b"\n").decode("utf-8", "backslashreplace").removesuffix("\n")
            )
    return shown


@settings(max_examples=300, deadline=None)
@given(contents, st.integers(4, 40), st.integers(1, 9))
def test_reading_on_gives_every_line_once(place: Path, data: bytes, limit: int, chunk: int) -> None:
    (place / "file").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        got: list[str] = []
        first = 1
        for _ in range(len(data) + 2):
            shown = LineReader(WorkspaceFiles(place), "file", limit, numbers=False).read(first, None)
            if shown.problem:
                assert "so there is no line" in shown.problem
                break
            assert len(shown.text.encode("utf-8", "ignore")) <= limit * 4  # a wrong byte is shown as \xff
            got += shown.text.split("\n")
            on = [note for note in shown.notes if "read on with first_line=" in note]
            if not on:
                break
            first = int(on[0].rpartition("=")[2])
    assert got == expected(data, limit)


@settings(max_examples=200, deadline=None)
@given(contents, st.integers(1, 12), st.integers(0, 12), st.integers(1, 9))
def test_a_range_is_those_lines(place: Path, data: bytes, first: int, more: int, chunk: int) -> None:
    (place / "file").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        shown = LineReader(WorkspaceFiles(place), "file", 10_000, numbers=True).read(first, first + more)
    rows = expected(data, 10_000)[first - 1 : first + more]
    if not rows:
        assert shown.problem.endswith(f"so there is no line {first}.")
    else:
        assert shown.text == "\n".join(f"{number:>6}\t{row}" for number, row in enumerate(rows, first))
