"""A run with tools from everywhere: the standard ones, an MCP server, a file of the user, an oracle."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from endstop.agent.run import run_agent
from endstop.agent.settings import make_settings

from . import small_repository as small

SERVER = """
from mcp.server import MCPServer
server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

server.run()
"""
OWN = """
from endstop.agent.tool import tool

@tool
def mine(word: str) -> str:
    "My own."
    return word.upper()
"""


@pytest.mark.slow
def test_tools_of_all_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    project = small.make(tmp_path / "shelf")
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "oracle").mkdir()
    turns = [
        {"calls": [{"add": {"a": 1, "b": 2}}, {"mine": {"word": "x"}}, {"add": {"a": "no"}}]},
        {"calls": [{"oracle": {"question": "Is it done?"}}]},
        {"calls": [small.FIX]},
        small.submit(),
    ]
    settings = make_settings(
        {
            "task": {"task": "Make the tests pass.", "verify": {"command": small.VERIFY}},
            "model": {"name": small.script(tmp_path / "script.json", turns, "end")},
            "sandbox": {"virtualenv": small.virtualenv()},
            "state": str(tmp_path / "state"),
            "tools": {
                "modules": [str(tmp_path / "own.py")],
                "mcp": {"sums": {"command": sys.executable, "args": [str(tmp_path / "server.py")]}},
                "oracle": {"name": small.script(tmp_path / "oracle" / "o.json", ["Looks complete."], "end")},
            },
        }
    )
    with caplog.at_level(logging.WARNING, "endstop"):
        result = run_agent(settings, project)
    assert result.outcome == "verified"
    assert "MCP servers: 1 tool definition cost about " in caplog.text
    messages = json.loads(result.trajectory.read_text())["messages"]
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert results[:2] == ["3", "X"]
    assert results[2].startswith("BAD_CALL: add did not run; its arguments are wrong:\n- b: missing")
    assert "Looks complete." in results[3]
    assert results[3].startswith("[The oracle's opinion. It is no evidence")
