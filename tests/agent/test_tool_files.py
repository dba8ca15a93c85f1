"""read_file, list_files and edit_file on real files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from endstop.agent.tool import ToolResult, call_tool
from endstop.agent.tools import ToolContext
from endstop.agent.tools.files import file_tools
from endstop.protocol.toolcalls import ToolCall
from endstop.sandbox import WorkspaceFiles


class Tools:
    def __init__(self, root: Path, output_bytes: int = 4000) -> None:
        self.root = root
        self.tools = file_tools(ToolContext(root, WorkspaceFiles(root), output_bytes=output_bytes))

    def __call__(self, name: str, **arguments: Any) -> ToolResult:
        return call_tool(self.tools, ToolCall(name, json.dumps(arguments), ""))

    def text(self, name: str, **arguments: Any) -> str:
        result = self(name, **arguments)
        assert result.ok, result.text
        return result.text

    def fault(self, name: str, **arguments: Any) -> str:
        result = self(name, **arguments)
        assert not result.ok
        return result.text


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    root = tmp_path / "project"
    root.mkdir()
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    return Tools(root)


def test_read_a_file(tools: Tools) -> None:
    assert tools.text("read_file", path="calc.py") == "def add(a, b):\n    return a - b"
    assert tools.text("read_file", path="/workspace/calc.py").startswith("def add")
    assert tools.text("read_file", path=str(tools.root / "calc.py")).startswith("def add")
    assert tools.text("read_file", path="calc.py", line_numbers=True) == (
        "     1\tdef add(a, b):\n     2\t    return a - b"
    )


def test_read_some_lines(tools: Tools) -> None:
    (tools.root / "ten").write_text("".join(f"line {n}\n" for n in range(1, 11)))
    assert tools.text("read_file", path="ten", first_line=3, last_line=4) == (
        "line 3\nline 4\n[ten: lines 3 to 4 of 10]"
    )
    assert tools.text("read_file", path="ten", first_line=9, last_line=99).endswith(
        "[ten: lines 9 to 10 of 10]"
    )
    assert tools.text("read_file", path="ten", first_line=10, line_numbers=True).startswith(
        "    10\tline 10\n"
    )
    assert tools.fault("read_file", path="ten", first_line=11) == (
        "Nothing of ten is shown: it has 10 lines, so there is no line 11."
    )
    assert "before first_line" in tools.fault("read_file", path="ten", first_line=3, last_line=2)
    assert "first_line: input should be greater" in tools.fault("read_file", path="ten", first_line=0)


def test_a_long_file_is_bounded_and_read_on(tools: Tools) -> None:
    lines = [f"{n} " + "x" * 90 for n in range(1, 501)]
    (tools.root / "long").write_text("\n".join(lines) + "\n")
    first, got = 1, []
    for _ in range(100):
        *shown, note = tools.text("read_file", path="long", first_line=first).split("\n")
        assert len("\n".join(shown)) <= 4000
        got += shown
        if "read on" not in note:
            break
        first = int(note.rpartition("=")[2].rstrip("]"))
    assert got == lines
    assert note == "[long: lines 463 to 500 of 500]"


def test_a_huge_file_is_read_in_part_only(tools: Tools) -> None:
    with open(tools.root / "huge", "wb") as file:
        for _ in range(3):
            file.write(b"some line of text\n" * 200_000)
    shown = tools.text("read_file", path="huge", first_line=500_000, last_line=500_001)
    assert shown == (
        "some line of text\nsome line of text\n[huge: lines 500000 to 500001 of a file of 10,800,000 bytes]"
    )
    assert tools.text("read_file", path="huge").endswith(
        "of a file of 10,800,000 bytes; read on with first_line=223]"
    )


def test_a_line_without_end(tools: Tools) -> None:
    (tools.root / "min.js").write_text("x" * 9_000_000 + "\nlast\n")
    shown = tools.text("read_file", path="min.js")
    assert shown.startswith("x" * 4000 + "\n[min.js: line 1 is longer than can be shown")
    assert tools.text("read_file", path="min.js", first_line=2).startswith("last\n")


def test_what_is_no_utf8_is_said(tools: Tools) -> None:
    (tools.root / "latin").write_bytes(b"caf\xe9\n")
    (tools.root / "bom").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    (tools.root / "image").write_bytes(b"\x89PNG\0\0")
    (tools.root / "wide").write_bytes("abc".encode("utf-16"))
    (tools.root / "empty").write_bytes(b"")
    assert tools.text("read_file", path="latin") == "caf\\xe9\n[latin: not UTF-8: 1 byte shown as \\x codes]"
    assert tools.text("read_file", path="bom") == (
        "a\nb\n[bom: begins with a byte order mark, which is not shown]"
        "\n[bom: line ends are CRLF, shown as plain ones]"
    )
    assert tools.fault("read_file", path="image") == (
        "image is a binary file (6 bytes), which is not shown. Use bash to look at it."
    )
    assert "UTF-16 text" in tools.fault("read_file", path="wide")
    assert tools.text("read_file", path="empty").strip() == "[empty: the file is empty]"


def test_what_cannot_be_read(tools: Tools) -> None:
    (tools.root / "src").mkdir()
    (tools.root / "out").symlink_to("/etc/passwd")
    os.mkfifo(tools.root / "pipe")
    assert tools.fault("read_file", path="clac.py").endswith("Near by: calc.py.")
    assert "Use list_files" in tools.fault("read_file", path="src")
    for path in ("out", "../x", "/etc/passwd", "pipe", "src/../../x"):
        assert "root:" not in tools.fault("read_file", path=path)


def test_list(tools: Tools) -> None:
    for path in (".git/config", "src/a/b.py", "src/c.py", "node_modules/x/y.js", ".hidden"):
        (tools.root / path).parent.mkdir(parents=True, exist_ok=True)
        (tools.root / path).write_text("")
    (tools.root / "link").symlink_to("src")
    (tools.root / "none").mkdir()
    assert tools.text("list_files").split("\n") == [
        ".git/", ".hidden", "calc.py", "link [link]", "node_modules/", "none/", "src/",
    ]  # fmt: skip
    assert tools.text("list_files", recursive=True).split("\n") == [
        ".git/ [not opened]", ".hidden", "calc.py", "link [link]", "node_modules/ [not opened]", "none/",
        "src/", "src/a/", "src/a/b.py", "src/c.py",
    ]  # fmt: skip
    assert tools.text("list_files", path="src/a") == "b.py"
    assert tools.text("list_files", path="none") == "[none is empty]"
    assert tools.text("list_files", path="node_modules", recursive=True).split("\n") == ["x/", "x/y.js"]
    assert "calc.py" in tools.fault("list_files", path="calc.py")
    assert tools.fault("list_files", path="..")


def test_a_long_list_is_bounded_and_near_entries_come_first(tools: Tools) -> None:
    (tools.root / "a").mkdir()
    for number in range(700):
        (tools.root / "a" / f"{number}.txt").write_text("")
    (tools.root / "z.txt").write_text("")
    lines = tools.text("list_files", recursive=True).split("\n")
    assert {"a/", "calc.py", "z.txt"} <= set(lines)
    assert lines[-1].startswith("[the ")
    assert "there are more" in lines[-1]
    assert len("\n".join(lines)) < 4200


def test_edit_and_create(tools: Tools) -> None:
    done = tools.text("edit_file", path="calc.py", old="a - b", new="a + b")
    assert done == "Edited calc.py: line 2."
    assert (tools.root / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert tools.text("edit_file", path="new/x.txt", old="", new="é\n") == "Created new/x.txt (3 bytes)."
    assert (tools.root / "new/x.txt").read_text() == "é\n"
    assert "exists already" in tools.fault("edit_file", path="calc.py", old="", new="x")
    (tools.root / "empty").write_text("")
    assert tools.text("edit_file", path="empty", old="", new="x").startswith("Wrote empty")
    assert tools.text("edit_file", path="calc.py", old="    return a + b\n", new="") == (
        "Edited calc.py: line 2."
    )
    assert (tools.root / "calc.py").read_text() == "def add(a, b):\n"


def test_an_edit_keeps_mode_and_line_ends(tools: Tools) -> None:
    path = tools.root / "run.sh"
    path.write_bytes(b"#!/bin/sh\r\necho 1\r\n")
    path.chmod(0o750)
    tools.text("edit_file", path="run.sh", old="echo 1\n", new="echo 1\necho 2\n")
    assert path.read_bytes() == b"#!/bin/sh\r\necho 1\r\necho 2\r\n"
    assert path.stat().st_mode & 0o777 == 0o750
    assert sorted(entry.name for entry in tools.root.iterdir()) == ["calc.py", "run.sh"]


def test_edits_that_are_refused_change_nothing(tools: Tools) -> None:
    (tools.root / "twice").write_text("x = 1\ny = 2\nx = 1\n")
    (tools.root / "binary").write_bytes(b"a\0b")
    outside = tools.root.parent / "outside"
    outside.write_text("secret")
    (tools.root / "link").symlink_to("../outside")
    (tools.root / "dangling").symlink_to("../new")
    assert tools.fault("edit_file", path="twice", old="x = 1", new="z") == (
        "Nothing was changed: old stands 2 times in twice, at the lines 1, 3. "
        "Take lines around the right one into old and new."
    )
    assert tools.fault("edit_file", path="calc.py", old="return a-b", new="z") == (
        "Nothing was changed: old does not stand in calc.py. White space differs: copy it as it is."
        "\nNearest, line 2:\n     2\t    return a - b"
    )
    assert "begins with a line number" in tools.fault(
        "edit_file", path="calc.py", old="     2\t    return a - b", new="z"
    )
    assert "No lines in it are like old" in tools.fault("edit_file", path="calc.py", old="zzz", new="z")
    assert "the same" in tools.fault("edit_file", path="calc.py", old="a", new="a")
    assert "binary" in tools.fault("edit_file", path="binary", old="a", new="c")
    assert "does not exist" in tools.fault("edit_file", path="none.py", old="a", new="c")
    for path in ("link", "dangling", "../outside", str(outside), "."):
        tools.fault("edit_file", path=path, old="", new="owned")
        tools.fault("edit_file", path=path, old="secret", new="owned")
    assert outside.read_text() == "secret"
    assert not (tools.root.parent / "new").exists()
    assert (tools.root / "twice").read_text() == "x = 1\ny = 2\nx = 1\n"


def test_a_dependency_is_not_edited(tools: Tools) -> None:
    root = tools.root
    (root / "web" / "vendor").mkdir(parents=True)
    (root / "web" / "vendor" / "lib.py").write_text("VALUE = 5\n")
    bind = {"web/vendor": root / "web" / "vendor"}
    tools.tools = file_tools(ToolContext(root, WorkspaceFiles(root), bind=bind))
    for path in ("web/vendor/lib.py", "./web/vendor/lib.py", str(root / "web/vendor/lib.py")):
        assert tools.fault("edit_file", path=path, old="5", new="6") == (
            f"{path} belongs to a dependency, which is only read."
        )
    assert "only read" in tools.fault("edit_file", path="web/vendor/new.py", old="", new="x = 1\n")
    assert [path.name for path in (root / "web/vendor").iterdir()] == ["lib.py"]
    assert (root / "web/vendor/lib.py").read_text() == "VALUE = 5\n"
    assert tools.text("edit_file", path="web/vendors.py", old="", new="x").startswith("Created")
