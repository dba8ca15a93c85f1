"""One HTTP request to an OpenAI-compatible endpoint, read in a thread of its own.

The thread is what makes deadlines and cancellation prompt: whoever waits for the next chunk waits on a queue,
and `close` shuts the socket down under the reader.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from endstop.protocol.errors import EndstopError, RequestRefused
from endstop.runtime.results import Usage

# Answers that may be different the next time; others are final.
_RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
_LONGEST_WAIT = 30.0
_LONGEST_ERROR = 65536
# Bytes of one answer: more is a server that has lost its way, and would fill the memory.
_LONGEST_ANSWER = 256 << 20


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. `retries` count only requests of which nothing has come back yet.

    `timeout`: seconds without anything of an answer; what only keeps the connection open is nothing.
    `key`: stands in the headers, and in no text that tells of an error.
    """

    url: str
    headers: Mapping[str, str]
    retries: int
    backoff: float
    timeout: float
    key: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is over. `error`: why it is not whole, None if it ended as it should."""

    error: Exception | None = None


class WireRequest:
    """A request in flight: `get` gives its chunks (JSON objects) and at last one Ended."""

    def __init__(self, client: httpx.Client, endpoint: Endpoint, body: Mapping[str, Any]) -> None:
        self._client = client
        self._endpoint = endpoint
        self._body = dict(body)
        self._items: queue.SimpleQueue[dict[str, Any] | Ended] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._got_some = False
        self._last = time.monotonic()  # when something of an answer came
        threading.Thread(target=self._read, name="endstop-http", daemon=True).start()

    def get(self, timeout: float | None) -> dict[str, Any] | Ended | None:
        """The next chunk or the end; None if neither has come after `timeout` seconds."""
        try:
            return self._items.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Drop the connection, so that the server stops. May come from any thread."""
        with self._lock:
            self._closed.set()
            if self._socket is not None:
                # Closing would not wake up a reader that waits for bytes.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def wake(self) -> None:
        """Let a waiting `get` return: the request is over for whoever waits."""
        self._items.put(Ended())

    def _read(self) -> None:
        for attempt in range(self._endpoint.retries + 1):
            try:
                wait = self._attempt(last=attempt == self._endpoint.retries)
            except (
                httpx.ConnectError,
                httpx.ConnectTimeout,
                httpx.ReadError,
                httpx.RemoteProtocolError,
            ) as error:
                if self._got_some or self._closed.is_set() or attempt == self._endpoint.retries:
                    self._items.put(Ended(_broken(error, self._endpoint.url)))
                    return
                wait = None
            except Exception as error:
                self._items.put(Ended(_broken(error, self._endpoint.url)))
                return
            else:
                if wait is not None and wait < 0:
                    return
            pause = self._endpoint.backoff * 2**attempt if wait is None else wait
            if self._closed.wait(min(pause, _LONGEST_WAIT)):
                self._items.put(Ended(EndstopError("the request was cancelled")))
                return

    def _attempt(self, last: bool) -> float | None:
        """Send the request once. Seconds to wait before the next time (None: no hint), -1 if it is over."""
        endpoint = self._endpoint
        self._last = time.monotonic()
        with self._client.stream(
            "POST", endpoint.url, json=self._body, headers=dict(endpoint.headers)
        ) as response:
            with self._lock:
                if self._closed.is_set():
                    return -1
                stream = response.extensions.get("network_stream")
                self._socket = stream.get_extra_info("socket") if stream is not None else None
            try:
                if response.status_code in _RETRYABLE and not last:
                    return _retry_after(response.headers.get("retry-after"))
                if not response.is_success:
                    self._items.put(Ended(_refusal(response, self._pieces(response), endpoint.key)))
                elif response.headers.get("content-type", "").startswith("text/event-stream"):
                    self._items.put(self._read_events(self._pieces(response)))
                else:
                    content = b"".join(self._pieces(response))
                    self._got_some = True
                    self._items.put(_object(content, endpoint.key))
                    self._items.put(Ended())
            finally:
                with self._lock:
                    self._socket = None
        return -1

    def _pieces(self, response: httpx.Response) -> Iterator[bytes]:
        size = 0
        for piece in response.iter_bytes():
            size += len(piece)
            if size > _LONGEST_ANSWER:
                raise EndstopError(f"the server sent an answer of more than {_LONGEST_ANSWER >> 20} MiB")
            if time.monotonic() - self._last > self._endpoint.timeout:
                raise EndstopError(f"{self._endpoint.url} has sent nothing of an answer for too long")
            yield piece

    def _read_events(self, data: Iterable[bytes]) -> Ended:
        for text in server_sent_events(data):
            self._got_some = True
            self._last = time.monotonic()
            if text.strip() == "[DONE]":
                return Ended()
            self._items.put(_object(text.encode("utf-8"), self._endpoint.key))
        return Ended()


def server_sent_events(data: Iterable[bytes]) -> Iterator[str]:
    """The data of each event of a text/event-stream, in any pieces.

    Lines end with CR LF, LF or CR, and only with these: JSON may hold other line separators as they are.
    An event that the end of the stream cuts off is dropped, as the format says.
    """
    lines: list[str] = []
    for line in _lines(data):
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        elif not line and lines:
            yield "\n".join(lines)
            lines = []


def _lines(data: Iterable[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    for piece in data:
        held.append(piece)
        # Only a piece with a line break is worth a look; a CR at the very end may be half of one.
        if not (b"\n" in piece or b"\r" in piece or (len(held) > 1 and held[-2].endswith(b"\r"))):
            continue
        rest = b"".join(held)
        ready, half = (rest[:-1], rest[-1:]) if rest.endswith(b"\r") else (rest, b"")
        parts = ready.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        held = [parts.pop() + half]
        yield from parts
    rest = b"".join(held)
    if rest.endswith((b"\r", b"\n")):
        yield rest[:-1]


def _object(text: bytes, key: str) -> dict[str, Any]:
    try:
        chunk = json.loads(text)
    except ValueError as error:
        raise EndstopError(f"the server sent something that is not JSON: {_start_of(text, key)!r}") from error
    except RecursionError as error:
        raise EndstopError("the server sent JSON that is nested too deeply") from error
    if not isinstance(chunk, dict):
        raise EndstopError(f"the server sent something that is not a JSON object: {_start_of(text, key)!r}")
    if chunk.get("error"):
        raise EndstopError(f"the server ended the answer: {_message(chunk)}")
    if wrong := _misshapen(chunk):
        raise EndstopError(
            f"the server sent an answer that is not of the form of OpenAI's API, by its {wrong}: "
            f"{_start_of(text, key)!r}"
        )
    return chunk


def usage_of(reported: Mapping[str, Any]) -> Usage:
    """The usage that a server reports, 0 for what cannot be true."""

    def number(values: Any, name: str) -> int:
        value = values.get(name) if isinstance(values, dict) else None
        return int(value) if isinstance(value, int | float) and 0 <= value < 1 << 53 else 0

    return Usage(
        number(reported, "prompt_tokens"),
        number(reported, "completion_tokens"),
        number(reported.get("prompt_tokens_details"), "cached_tokens"),
    )


def _misshapen(chunk: Mapping[str, Any]) -> str:
    """Which part of a chunk is of a type that nobody can read, "" where all are as they should be."""
    choices = chunk.get("choices") or []
    if not _objects(choices):
        return "choices"
    for choice in choices:
        for name in ("delta", "message"):
            message = choice.get(name) or {}
            if not isinstance(message, dict):
                return name
            calls = message.get("tool_calls") or []
            if not _objects(calls) or not _objects([call.get("function") or {} for call in calls]):
                return f"{name}.tool_calls"
    return ""


def _objects(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) for item in items)


def _start_of(text: bytes, key: str, length: int = 80) -> str:
    """The beginning of what a server sent. The key goes first: half of it would not be found later."""
    shown = text.decode("utf-8", "replace")
    return (shown.replace(key, "[key]") if key else shown)[:length]


def _refusal(response: httpx.Response, pieces: Iterable[bytes], key: str) -> EndstopError:
    content = b""
    for piece in pieces:
        content += piece
        if len(content) > _LONGEST_ERROR:
            break
    try:
        text = _message(json.loads(content))
    except (ValueError, RecursionError):
        text = _start_of(content, key, 200).strip() or response.reason_phrase
    kind = RequestRefused if response.status_code in (400, 404, 413, 422) else EndstopError
    return kind(f"the server answered {response.status_code}: {text}")


def _message(content: Any) -> str:
    """The sentence in an error object, which servers nest in different ways."""
    error = content.get("error", content) if isinstance(content, dict) else content
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or json.dumps(error)
    return str(error).strip()


def _broken(error: Exception, url: str) -> EndstopError:
    if isinstance(error, EndstopError):
        return error
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return EndstopError(f"{url} cannot be reached: {error}")
    if isinstance(error, httpx.TimeoutException):
        return EndstopError(f"{url} has sent nothing for too long ({type(error).__name__})")
    return EndstopError(f"the connection to {url} broke: {error or type(error).__name__}")


def _retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header; its other form, a date, is no hint worth a calendar."""
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None
