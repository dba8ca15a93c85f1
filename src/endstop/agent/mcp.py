"""MCP servers as sources of tools, through the official SDK: over stdio or streamable HTTP.

A server is a program of the user's choice: it runs with the user's rights, outside the sandbox, and nothing
here proves or undoes what its tools do. What goes wrong with one is an answer to the model, not an exception
of the run; only a server that cannot be opened at the start is refused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TextIO

from endstop.agent.mcp_result import arguments_check, input_schema, result_of
from endstop.agent.mcp_servers import McpServer, read_servers
from endstop.agent.tool import OUTPUT_BYTES, Tool, ToolResult
from endstop.protocol.errors import EndstopError

__all__ = ["McpServer", "McpTools", "read_servers"]

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NO_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_LONGEST_NAME = 64
_MOST_PAGES = 100
# For a server to go away when it is told to: the SDK waits for it, then ends it, then kills it.
_CLOSING_SECONDS = 15.0
# Of a server's stderr, shown when it fails.
_SHOWN_STDERR = 1000


class McpTools:
    """Open connections to MCP servers, and their tools. A context manager.

    Args:
        taken: names of other tools. A tool whose name somebody else has gets its server's name before it.

    Raises EndstopError where a server cannot be opened.
    """

    def __init__(
        self,
        servers: Sequence[McpServer],
        *,
        taken: Iterable[str] = (),
        output_bytes: int = OUTPUT_BYTES,
    ) -> None:
        _require_sdk()
        _quiet_sdk()
        self.tools: list[Tool] = []
        self._output_bytes = output_bytes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endstop-mcp", daemon=True)
        self._thread.start()
        self._connections = [_Connection(server) for server in servers]
        try:
            for connection in self._connections:
                connection.open(self._loop)
            self.tools = self._all_tools(set(taken))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> McpTools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the servers that were started here. May be called twice."""
        if self._loop.is_closed():
            return
        for connection in self._connections:
            connection.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _all_tools(self, taken: set[str]) -> list[Tool]:
        offered = [(connection, spec) for connection in self._connections for spec in connection.specs]
        bare = Counter(_clean(spec.name) for _, spec in offered)
        made: list[Tool] = []
        for connection, spec in offered:
            name = _clean(spec.name)
            if name in taken or bare[name] > 1:
                name = _clean(f"{connection.server.name}_{spec.name}")
            if name in taken or any(tool.name == name for tool in made):
                raise EndstopError(
                    f"MCP server {connection.server.name}: two tools are named {name}; give the server "
                    "another name, or leave one of them out with its `tools`."
                )
            made.append(self._tool(connection, spec, name))
        return made

    def _tool(self, connection: _Connection, spec: Any, name: str) -> Tool:
        schema = input_schema(spec)
        limit = self._output_bytes

        def run(**arguments: Any) -> ToolResult:
            return connection.call(spec.name, arguments, limit)

        description = spec.description or spec.title or "(no description)"
        return Tool(name, description, schema, run, check=arguments_check(schema))


@dataclass(slots=True)
class _Opened:
    client: Any
    specs: list[Any]


class _Connection:
    """One server. The SDK's contexts are entered and left in one task; calls come from other threads."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.specs: list[Any] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None
        self._closing = asyncio.Event()
        self._task: concurrent.futures.Future[None] | None = None
        self._status = 0  # of the last HTTP response
        self._stderr: TextIO = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        server = self.server
        opened: concurrent.futures.Future[_Opened] = concurrent.futures.Future()
        self._loop = loop
        # Read here, so that a missing variable is an error of the caller's.
        connect = self._connector()
        self._task = asyncio.run_coroutine_threadsafe(self._live(connect, opened), loop)
        try:
            result = opened.result(server.start_timeout + _CLOSING_SECONDS)
        except Exception as error:
            reason = _reason(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                reason = f"no answer within {server.start_timeout:g} seconds"
            raise EndstopError(
                f"MCP server {server.name} cannot be opened: {reason}{self._last_words()}."
            ) from error
        self._client, self.specs = result.client, result.specs

    def close(self) -> None:
        if self._task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            try:
                self._task.result(_CLOSING_SECONDS)
            except Exception as error:  # it is given up in any case
                logger.info("MCP server %s did not close: %s", self.server.name, error)
        self._stderr.close()

    def call(self, name: str, arguments: Mapping[str, Any], limit: int) -> ToolResult:
        """Call a tool of the server; every fault becomes an answer."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        assert self._loop is not None
        server = self.server
        if self._task is None or self._task.done():
            return ToolResult(f"{self._gone()}.", ok=False)
        seconds = server.timeout
        coroutine = self._client.call_tool(name, dict(arguments), read_timeout_seconds=seconds)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            # The SDK keeps the time; this is for a server that does not even let it.
            result = future.result(seconds + 5)
        except (TimeoutError, concurrent.futures.TimeoutError):
            future.cancel()
            return self._no_answer(seconds)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                return self._no_answer(seconds)
            if error.code == CONNECTION_CLOSED:
                return ToolResult(f"{self._gone()}.", ok=False)
            return ToolResult(f"MCP server {server.name} answered with an error: {error.message}", ok=False)
        except concurrent.futures.CancelledError:
            return ToolResult(f"{self._gone()}.", ok=False)
        except Exception as error:
            return ToolResult(f"MCP server {server.name}: the call failed: {_reason(error)}", ok=False)
        except BaseException:
            future.cancel()
            raise
        return result_of(result, limit)

    async def _live(
        self,
        connect: Callable[[AsyncExitStack], Awaitable[Any]],
        opened: concurrent.futures.Future[_Opened],
    ) -> None:
        """The whole life of the connection."""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.server.start_timeout):
                    client = await connect(stack)
                    specs = await self._list(client)
                opened.set_result(_Opened(client, specs))
                await self._closing.wait()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error if isinstance(error, Exception) else EndstopError(str(error)))

    def _connector(self) -> Callable[[AsyncExitStack], Awaitable[Any]]:
        from mcp import Client, StdioServerParameters, stdio_client

        server = self.server
        if server.command is not None:
            parameters = StdioServerParameters(
                command=server.command,
                args=[self._filled(text) for text in server.args],
                env={name: self._filled(text) for name, text in server.env.items()},
                cwd=server.cwd,
            )

            async def start(stack: AsyncExitStack) -> Any:
                return await stack.enter_async_context(Client(stdio_client(parameters, errlog=self._stderr)))

            return start
        assert server.url is not None
        url = self._filled(server.url)
        headers = {name: self._filled(text).strip() for name, text in server.headers.items()}
        for name, text in headers.items():
            if not text.isascii() or not text.isprintable():
                # The text is not shown: it may be a secret.
                raise EndstopError(
                    f"MCP server {server.name}: the header {name} holds what no header can: "
                    "only printable ASCII."
                )

        async def reach(stack: AsyncExitStack) -> Any:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            times = httpx2.Timeout(server.start_timeout, read=server.timeout + 5)
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=headers, timeout=times, event_hooks={"response": [self._seen]})
            )
            return await stack.enter_async_context(Client(streamable_http_client(url, http_client=http)))

        return reach

    async def _seen(self, response: Any) -> None:
        """The SDK's errors do not name the status of HTTP."""
        self._status = response.status_code

    async def _list(self, client: Any) -> list[Any]:
        specs: list[Any] = []
        cursor = None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            specs += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        wanted = self.server.tools
        if wanted is None:
            return specs
        absent = sorted(set(wanted) - {spec.name for spec in specs})
        if absent:
            offered = ", ".join(spec.name for spec in specs)
            raise EndstopError(f"it has no tool {', '.join(absent)}; it has {offered}")
        return [spec for spec in specs if spec.name in wanted]

    def _filled(self, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            name = found[1]
            if name not in os.environ:
                raise EndstopError(
                    f"MCP server {self.server.name}: the environment variable {name} is not set."
                )
            return os.environ[name]

        return _VARIABLE.sub(value, text)

    def _no_answer(self, seconds: float) -> ToolResult:
        return ToolResult(
            f"MCP server {self.server.name} did not answer within {seconds:g} seconds; the call is given up.",
            ok=False,
        )

    def _gone(self) -> str:
        return f"MCP server {self.server.name} has ended or closed the connection{self._last_words()}"

    def _last_words(self) -> str:
        """The end of what a server that was started here wrote to stderr, or the status of HTTP."""
        if self.server.command is None:
            return f" (HTTP status {self._status})" if self._status >= 300 else ""
        self._stderr.seek(0)
        text = self._stderr.read()[-_SHOWN_STDERR:].strip()
        return f"; its last words: {text}" if text else ""


def _require_sdk() -> None:
    try:
        from mcp import Client  # noqa: F401  (version 2 and later have it)
    except ImportError as error:
        raise EndstopError("MCP servers need the mcp package: pip install 'endstop[agent]'.") from error


def _quiet_sdk() -> None:
    """A banner on a server's stdout is a traceback in the SDK's log; what matters is said here."""
    log = logging.getLogger("mcp.client")
    if log.level == logging.NOTSET:
        log.setLevel(logging.CRITICAL)


def _clean(name: str) -> str:
    """A name that servers of models take."""
    return _NO_NAME.sub("_", name)[:_LONGEST_NAME] or "_"


def _reason(error: BaseException) -> str:
    """The innermost cause: the SDK wraps errors in groups."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
