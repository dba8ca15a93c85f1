"""MCP servers made with the official SDK: over stdio as processes, over HTTP on loopback."""

from __future__ import annotations

import base64
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

from endstop.agent.mcp import McpServer, McpTools, read_servers
from endstop.agent.mcp_result import arguments_check
from endstop.agent.tool import ToolResult, call_tool
from endstop.protocol.errors import EndstopError
from endstop.protocol.toolcalls import ToolCall

SERVER = '''
import base64, os, sys, time
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ImageContent, TextContent

server = MCPServer("demo")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def bash(command: str) -> str:
    """Named like one of ours."""
    return "no shell"

@server.tool()
def fail() -> str:
    """Raises."""
    raise ToolError("no such record")

@server.tool()
def picture() -> list[ImageContent | TextContent]:
    """A picture."""
    data = base64.b64encode(b"12345").decode()
    return [TextContent(text="look"), ImageContent(data=data, mime_type="image/png")]

@server.tool()
def hang() -> str:
    """Hangs."""
    time.sleep(60)
    return "late"

@server.tool()
def die() -> str:
    """Ends the server."""
    print("out of cheese", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
def long() -> str:
    """Much text."""
    return "x" * 100_000

@server.tool()
def secret() -> str:
    """What is in the environment."""
    return f"{os.environ.get('GIVEN')} {os.environ.get('HIDDEN')}"
'''


def call(tools: McpTools, name: str, **arguments: Any) -> ToolResult:
    return call_tool(tools.tools, ToolCall(name, json.dumps(arguments), ""))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "demo.py"
    path.write_text(SERVER + "\nserver.run()\n")
    return path


def stdio(script: Path, **more: Any) -> McpServer:
    return McpServer(name="demo", command=sys.executable, args=(str(script),), **more)


def test_a_stdio_server(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", "t0ken")
    monkeypatch.setenv("HIDDEN", "hidden")
    server = stdio(script, env={"GIVEN": "<${TOKEN_OF_TEST}>"}, timeout=30)
    with McpTools([server], taken=["bash"], output_bytes=1000) as tools:
        names = [tool.name for tool in tools.tools]
        assert names == ["add", "demo_bash", "fail", "picture", "hang", "die", "long", "secret"]
        add = tools.tools[0]
        assert add.description == "Add two numbers."
        assert add.parameters["required"] == ["a", "b"]
        assert call(tools, "add", a=1, b=2) == ToolResult("3")
        assert call(tools, "demo_bash", command="ls") == ToolResult("no shell")
        wrong = call(tools, "add", a="x", c=1)
        assert wrong.code == "BAD_CALL"
        assert "- b: missing" in wrong.text
        assert "- a: 'x' is not of type 'integer'" in wrong.text
        failed = call(tools, "fail")
        assert not failed.ok
        assert "no such record" in failed.text
        assert call(tools, "picture").text == "look\n[image, image/png, 5 bytes: not shown, only text is]"
        text = call(tools, "long").text
        assert len(text) < 1100
        assert "[99000 bytes left out]" in text
        assert call(tools, "secret").text == "<t0ken> None"


def test_a_server_that_dies_says_its_last_words(script: Path) -> None:
    with McpTools([stdio(script, timeout=30)]) as tools:
        started = time.monotonic()
        result = call(tools, "die")
        assert time.monotonic() - started < 10
        assert not result.ok
        assert result.text.startswith("MCP server demo has ended or closed the connection; its last words: ")
        assert "out of cheese" in result.text
        assert call(tools, "add", a=1, b=2).text.startswith("MCP server demo has ended")


def test_a_server_that_hangs_is_given_up(script: Path) -> None:
    with McpTools([stdio(script, timeout=1)]) as tools:
        started = time.monotonic()
        result = call(tools, "hang")
        assert time.monotonic() - started < 5
        assert result == ToolResult(
            "MCP server demo did not answer within 1 seconds; the call is given up.", ok=False
        )


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('no database')", "cannot be opened: .*no database"),
        ("import time; time.sleep(60)", "no answer within 1 seconds"),
        ("while True: print('noise')", "no answer within 1 seconds"),
    ],
)
def test_a_server_that_cannot_be_opened(program: str, words: str) -> None:
    server = McpServer(name="bad", command=sys.executable, args=("-c", program), start_timeout=1)
    started = time.monotonic()
    with pytest.raises(EndstopError, match=f"MCP server bad .*{words}"):
        McpTools([server])
    assert time.monotonic() - started < 20
    assert not [thread for thread in threading.enumerate() if thread.name == "endstop-mcp"]


def test_a_command_that_does_not_exist_and_a_port_where_nobody_listens() -> None:
    with pytest.raises(EndstopError, match=r"MCP server none cannot be opened: .*no-such-program"):
        McpTools([McpServer(name="none", command="/no-such-program")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EndstopError, match="MCP server none cannot be opened: "):
        McpTools([McpServer(name="none", url=f"http://127.0.0.1:{port}/mcp", start_timeout=5)])


def test_an_http_server_that_refuses() -> None:
    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/mcp"
        with pytest.raises(EndstopError, match=r"MCP server x cannot be opened: .*\(HTTP status 401\)"):
            McpTools([McpServer(name="x", url=url)])
        server.shutdown()


@pytest.fixture
def http_server() -> Iterator[str]:
    """A streamable HTTP server in a thread, with a real socket."""
    server = MCPServer("remote")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add on the other side."""
        return a + b

    @server.tool()
    def hang() -> str:
        """Hangs."""
        time.sleep(3)
        return "late"

    @server.tool()
    def who(ctx: Context) -> str:
        """The header that came."""
        request = ctx.request_context.request
        return str(None if request is None else request.headers.get("authorization"))

    config = uvicorn.Config(server.streamable_http_app(), host="127.0.0.1", port=0, log_level="critical")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.02)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/mcp"
    running.should_exit = True
    thread.join(10)


def test_an_http_server(http_server: str, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", "t0ken")
    remote = McpServer(
        name="far-away",
        url=http_server,
        headers={"Authorization": "Bearer ${TOKEN_OF_TEST}"},
        timeout=1,
    )
    with McpTools([remote, stdio(script, tools=("add", "fail"))]) as tools:
        # Both have add and neither may hide the other.
        assert [tool.name for tool in tools.tools] == ["far-away_add", "hang", "who", "demo_add", "fail"]
        assert call(tools, "far-away_add", a=2, b=3) == ToolResult("5")
        assert call(tools, "demo_add", a=2, b=4) == ToolResult("6")
        assert call(tools, "who").text == "Bearer t0ken"
        assert call(tools, "hang").text.startswith("MCP server far-away did not answer within 1 seconds")
        assert call(tools, "far-away_add", a=2, b=5) == ToolResult("7")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"x": {}}, "MCP server x: needs either command"),
        ({"x": {"command": "a", "url": "http://b"}}, "MCP server x: needs either command"),
        ({"x": {"url": "ftp://b"}}, "must begin with http://"),
        ({"x": {"comand": "a"}}, "MCP server x: unknown key comand; known are command, args"),
        ({"x": "a"}, "MCP server x: a mapping with command or url, got 'a'"),
        ({"x": {"command": "a", "timeout": 0}}, "MCP server x: timeout: Input should be greater than 0"),
        ({"mcpServers": []}, "mcpServers must be a mapping"),
    ],
)
def test_settings_that_are_wrong(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(EndstopError, match=words):
        read_servers(entries)


def test_settings_as_other_programs_write_them() -> None:
    (server,) = read_servers(
        {"mcpServers": {"db": {"type": "stdio", "command": "npx", "args": ["-y", "db"]}}}
    )
    assert (server.name, server.command, server.args) == ("db", "npx", ("-y", "db"))


def test_a_variable_that_is_not_set_and_a_tool_that_is_not_there(script: Path) -> None:
    with pytest.raises(EndstopError, match="the environment variable NOT_SET_ANYWHERE is not set"):
        McpTools([stdio(script, env={"A": "${NOT_SET_ANYWHERE}"})])
    with pytest.raises(EndstopError, match="it has no tool sub; it has add, bash"):
        McpTools([stdio(script, tools=("sub",))])


def test_sizes_of_what_is_not_shown() -> None:
    from endstop.agent.mcp_result import _size

    for length in range(10):
        assert _size(base64.b64encode(b"x" * length).decode()) == length


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/nowhere"},
        {"$ref": "http://127.0.0.1:1/x"},
        {"$ref": "#"},
        {"type": "nothing"},
        {"properties": 5},
        {"properties": {"a": {"pattern": "("}}},
        {"properties": {"a": {"multipleOf": 0.1}}},
        {"$schema": 5, "required": ["b"]},
        {"$schema": ["x"], "required": ["b"]},
    ],
)
def test_a_schema_that_is_none_lets_everything_through(schema: dict[str, Any]) -> None:
    given = {"a": 10**400}
    assert arguments_check(schema)(given) == given


def test_a_secret_that_no_header_can_hold_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"Authorization": "Bearer ${A_TOKEN}"}
    server = McpServer(name="x", url="http://127.0.0.1:1/mcp", headers=headers)
    for value in ("tok-hunter2\ntok-hunter2", "tok-hunter2\u00e9"):
        monkeypatch.setenv("A_TOKEN", value)
        with pytest.raises(EndstopError, match="the header Authorization holds what no header can") as error:
            McpTools([server]).__enter__()
        assert "hunter2" not in str(error.value)
    monkeypatch.setenv("A_TOKEN", "tok-hunter2\r\n")
    with pytest.raises(EndstopError, match="MCP server x cannot be opened: ") as error:
        McpTools([server]).__enter__()
    assert "hunter2" not in str(error.value)
