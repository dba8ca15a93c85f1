"""bash and code_search in the real sandbox."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from endstop.agent.tool import Tool, ToolResult, call_tool
from endstop.agent.tools import ToolContext, standard_tools
from endstop.agent.tools.search import code_search_tool
from endstop.protocol.toolcalls import ToolCall
from endstop.sandbox import CommandLimits, SandboxSettings, WorkingCopy, WorkspaceFiles


def call(tools: list[Tool], name: str, **arguments: Any) -> ToolResult:
    return call_tool(tools, ToolCall(name, json.dumps(arguments), ""))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for path, text in {
        "src/calc.py": "def add(a, b):\r\n    return a - b\r\n",
        "src/deep/more.py": "import calc\n\n\ndef addition():\n    return calc.add(1, 2)",
        "src/naïve.txt": "Größe add\n",
        ".hidden/x.py": "add = 1\n",
        ".gitignore": "ignored.py\n",
        "ignored.py": "add = 2\n",
        "node_modules/m/index.js": "add\n",
        ".git/config": "add\n",
        "long.min.js": "x" * 2000 + "add\n" + "add" + "y" * 2000 + "\n",
        "-odd name:1.py": "add\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, newline="")
    (root / "binary.bin").write_bytes(b"add\0add\n")
    (root / "latin.txt").write_bytes(b"\xe9 add\n")
    (root / "outside").symlink_to("/etc")
    (root / "to_src").symlink_to("src")
    return root


@pytest.fixture
def context(project: Path, tmp_path: Path) -> Any:
    settings = SandboxSettings(limits=CommandLimits(seconds=20))
    with WorkingCopy.open(project, tmp_path / "state", settings) as working:
        yield ToolContext(working.root, WorkspaceFiles(working.root), settings, working, output_bytes=4000)


def test_bash_says_output_exit_code_and_time(context: ToolContext) -> None:
    tools = standard_tools(context)
    result = call(tools, "bash", command="echo out; echo err >&2; exit 3")
    assert result.text.startswith("out\nerr\n[exit code 3]")
    assert not result.ok
    assert (result.details["exit_code"], result.details["cause"]) == (3, "exit")
    assert call(tools, "bash", command="pwd; ls src").text.startswith("/workspace\ncalc.py\ndeep\n")
    assert call(tools, "bash", command="printf x").text.startswith("x\n[exit code 0]")
    assert call(tools, "bash", command="true").text.startswith("[exit code 0]")
    assert "NUL" in call(tools, "bash", command="a\0b").text
    assert call(tools, "bash", command="").code == "BAD_CALL"


def test_bash_changes_reach_the_workspace(context: ToolContext, project: Path) -> None:
    tools = standard_tools(context)
    assert call(tools, "bash", command="echo new > made.txt; rm ignored.py").ok
    assert (project / "made.txt").read_text() == "new\n"
    assert not (project / "ignored.py").exists()
    assert (project / "made.txt").stat().st_uid == os.getuid()
    assert call(tools, "edit_file", path="made.txt", old="new", new="newer").ok
    assert (project / "made.txt").read_text() == "newer\n"
    assert call(tools, "bash", command="cat made.txt").text.startswith("newer\n")


def test_what_cannot_be_brought_back_is_said(context: ToolContext, project: Path) -> None:
    if context.root == project:
        pytest.skip("commands work in the workspace itself")
    (project / "notes.txt").mkdir()
    (project / "notes.txt" / "mine").write_text("of the user, meanwhile\n")
    result = call(standard_tools(context), "bash", command="echo of the agent > notes.txt")
    assert result.text.endswith("[not brought to the workspace, where something else stands now: notes.txt]")
    assert (project / "notes.txt" / "mine").read_text() == "of the user, meanwhile\n"


def test_dependencies_are_seen_by_commands(context: ToolContext, tmp_path: Path) -> None:
    host = tmp_path / "dependencies"
    (host / "lib").mkdir(parents=True)
    (host / "lib" / "index.js").write_text("needle\n")
    tools = standard_tools(replace(context, bind={"vendor": host}))
    assert call(tools, "bash", command="cat vendor/lib/index.js").text == "needle\n[exit code 0]"
    assert call(tools, "code_search", pattern="needle", path="vendor").text == "vendor/lib/index.js:1:needle"
    assert call(tools, "read_file", path="vendor/lib/index.js").text == (
        "vendor/lib/index.js belongs to a dependency, which only commands see: use bash or code_search."
    )


def test_bash_is_ended_at_its_time_and_nothing_lives_on(context: ToolContext, project: Path) -> None:
    tools = standard_tools(context)
    started = time.monotonic()
    command = "echo begin; (setsid sh -c 'while :; do date +%N > alive; sleep 0.05; done' &) ; sleep 30"
    result = call(tools, "bash", command=command, timeout=1)
    assert time.monotonic() - started < 8
    assert result.text.startswith("begin\n[killed at its time limit of 1 seconds")
    assert result.details["cause"] == "timeout"
    seen = (context.root / "alive").read_text()
    time.sleep(0.3)
    assert (context.root / "alive").read_text() == seen


def test_bash_output_is_bounded_while_it_is_read(context: ToolContext) -> None:
    result = call(standard_tools(context), "bash", command="echo first; seq 1000000; echo last")
    assert len(result.text) < 4400
    assert result.text.startswith("first\n1\n2\n")
    assert "\n1000000\nlast\n[exit code 0]" in result.text
    assert "bytes left out]" in result.text
    assert result.details["omitted_bytes"] > 6_000_000


def test_bash_has_no_network_and_no_environment(
    context: ToolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret-value")
    tools = standard_tools(context)
    assert "secret-value" not in call(tools, "bash", command="env").text
    result = call(tools, "bash", command="exec 3<>/dev/tcp/192.0.2.1/80")
    assert not result.ok
    if context.root != context.working.workspace or result.details["mode"] != "process":  # type: ignore[union-attr]
        assert result.details["net_attempt"] is True


@pytest.fixture(params=["rg", "python"])
def search(request: pytest.FixtureRequest, context: ToolContext) -> Any:
    tool = code_search_tool(context, None if request.param == "rg" else "")
    note = "" if request.param == "rg" else "\n[ripgrep (rg) is not installed;"

    def run(**arguments: Any) -> list[str]:
        result = call([tool], "code_search", **arguments)
        text, separator, _ = result.text.partition("\n[ripgrep (rg) is not installed")
        assert bool(separator) == bool(note)
        return text.split("\n")

    return run


def test_search_finds_lines_everywhere_but_in_what_is_fetched(search: Any) -> None:
    assert search(pattern="add") == [
        "-odd name:1.py:1:add",
        ".hidden/x.py:1:add = 1",
        "ignored.py:1:add = 2",
        "latin.txt:1:\ufffd add",
        "long.min.js:1:" + "x" * 300 + " [long line, match at byte 2001]",
        "long.min.js:2:add" + "y" * 297 + " [long line]",
        "src/calc.py:1:def add(a, b):",
        "src/deep/more.py:4:def addition():",
        "src/deep/more.py:5:    return calc.add(1, 2)",
        "src/naïve.txt:1:Größe add",
    ]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ({"pattern": r"def \w+\(\):$"}, ["src/deep/more.py:4:def addition():"]),
        ({"pattern": r"b\):$"}, ["src/calc.py:1:def add(a, b):"]),
        ({"pattern": r"Gr\w+e"}, ["src/naïve.txt:1:Größe add"]),
        ({"pattern": "add(a", "literal": True}, ["src/calc.py:1:def add(a, b):"]),
        ({"pattern": "GRÖSSE|IMPORT", "ignore_case": True}, ["src/deep/more.py:1:import calc"]),
        ({"pattern": "IMPORT"}, ["No matches."]),
        ({"pattern": "add", "path": "src/calc.py"}, ["src/calc.py:1:def add(a, b):"]),
        ({"pattern": "add", "path": "/workspace/src", "glob": "*.txt"}, ["src/naïve.txt:1:Größe add"]),
        ({"pattern": "calc", "glob": "src/**/*.py"}, [
            "src/deep/more.py:1:import calc", "src/deep/more.py:5:    return calc.add(1, 2)"]),
        ({"pattern": "add", "glob": "{calc,x}.py"}, [
            ".hidden/x.py:1:add = 1", "src/calc.py:1:def add(a, b):"]),
        ({"pattern": "Gr|import", "glob": "!*.txt"}, ["src/deep/more.py:1:import calc"]),
        ({"pattern": "add", "path": "node_modules"}, ["node_modules/m/index.js:1:add"]),
        ({"pattern": "return a", "path": "to_src"}, ["to_src/calc.py:2:    return a - b"]),
        ({"pattern": "-b", "path": "src", "literal": True}, ["No matches."]),
        ({"pattern": "root", "path": "outside"}, ["outside leads out of the workspace"]),
        ({"pattern": "x", "path": "nowhere"}, ["There is no file or directory 'nowhere' to search."]),
    ],
)  # fmt: skip
def test_search(context: ToolContext, arguments: dict[str, Any], lines: list[str]) -> None:
    for program in (None, ""):
        tool = code_search_tool(context, program)
        text = call([tool], "code_search", **arguments).text.partition("\n[ripgrep")[0]
        assert text.split("\n") == lines, program


def test_a_wrong_pattern_is_said(search: Any) -> None:
    text = "\n".join(search(pattern="a(b"))
    assert text.startswith("The search failed: ")


def test_many_results_are_bounded(context: ToolContext) -> None:
    (context.root / "many.txt").write_text("needle\n" * 5000)
    (context.root / "few.txt").write_text("needle\n")
    for program in (None, ""):
        tool = code_search_tool(context, program)
        lines = call([tool], "code_search", pattern="needle").text.split("\n")
        assert lines[0] == "few.txt:1:needle"
        assert any(line.startswith("[") and "of 5001 lines shown" in line for line in lines)
        assert len("\n".join(lines)) < 4000


def test_a_pattern_that_takes_for_ever_is_ended(
    context: ToolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("endstop.agent.tools.search._SECONDS", 1.0)
    (context.root / "a.txt").write_text("a" * 40 + "!\n")
    started = time.monotonic()
    text = call([code_search_tool(context, "")], "code_search", pattern="^(a+)+$").text
    assert time.monotonic() - started < 10
    assert text.startswith("[the search took too long")
