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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from endstop.protocol.errors import EndstopError, RequestRefused

# Answers that may be different the next time; others are final.
_RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
_LONGEST_WAIT = 30.0
_LONGEST_ERROR = 65536


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. `retries` count only requests of which nothing has come back yet."""

    url: str
    headers: Mapping[str, str]
    retries: int
    backoff: float


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
                if response.status_code >= 400:
                    self._items.put(Ended(_refusal(response)))
                elif response.headers.get("content-type", "").startswith("text/event-stream"):
                    self._items.put(self._read_events(response.iter_bytes()))
                else:
                    response.read()
                    self._got_some = True
                    self._items.put(_object(response.content))
                    self._items.put(Ended())
            finally:
                with self._lock:
                    self._socket = None
        return -1

    def _read_events(self, data: Iterable[bytes]) -> Ended:
        for text in server_sent_events(data):
            self._got_some = True
            if text.strip() == "[DONE]":
                return Ended()
            self._items.put(_object(text))
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
    rest = b""
    for piece in data:
        rest += piece
        # A CR at the very end may be half of a line break.
        ready, held = (rest[:-1], rest[-1:]) if rest.endswith(b"\r") else (rest, b"")
        parts = ready.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        rest = parts.pop() + held
        yield from parts
    if rest.endswith((b"\r", b"\n")):
        yield rest[:-1]


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(text)
    except ValueError as error:
        raise EndstopError(f"the server sent something that is not JSON: {text[:80]!r}") from error
    if not isinstance(chunk, dict):
        raise EndstopError(f"the server sent something that is not a JSON object: {text[:80]!r}")
    if chunk.get("error"):
        raise EndstopError(f"the server ended the answer: {_message(chunk)}")
    return chunk


def _refusal(response: httpx.Response) -> EndstopError:
    content = b""
    for piece in response.iter_bytes():
        content += piece
        if len(content) > _LONGEST_ERROR:
            break
    try:
        text = _message(json.loads(content))
    except ValueError:
        text = content.decode("utf-8", "replace").strip()[:200] or response.reason_phrase
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
