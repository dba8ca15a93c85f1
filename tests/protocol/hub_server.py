"""A loopback server with the few endpoints of the Hugging Face Hub that fetching a model uses."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class HubServer:
    """Repositories: id -> {commit: {file: content}}; the last commit is `main`.

    Attributes:
        requests: (method, path, Range header) of every request, in order.
        tokens: if given, the only bearer tokens that are let in.
        gated: repositories that answer as gated ones do.
        drop_after: files whose connection is cut once, after that many bytes.
        pause: seconds between the chunks of large files.
        wrong: files that are served with another content than the Hub announces.
    """

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    drop_after: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, bytes] = field(default_factory=dict)
    pause: float = 0.0
    address: str = ""

    def fetched(self) -> list[str]:
        """The files whose content was asked for."""
        return [
            path.rpartition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        ]


def is_large(name: str) -> bool:
    """Whether the Hub keeps a file in LFS, with a sha256."""
    return name.endswith((".safetensors", ".gguf", ".bin"))


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range")))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if hub.tokens and token not in hub.tokens:
                return self._error(401, None)
            parts = path.strip("/").split("/")
            if parts[0] == "datasets":
                parts = parts[1:]
            if parts[:2] in (["api", "models"], ["api", "datasets"]):
                return self._info("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
            if len(parts) > 4 and parts[2] == "resolve":
                return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)
            return self._error(404, None)

        def _error(self, status: int, code: str | None) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _commit(self, repository: str, revision: str) -> str | None:
            commits = hub.repositories.get(repository)
            if commits is None:
                self._error(404, "RepoNotFound")
                return None
            if revision == "main":
                return list(commits)[-1]
            if revision not in commits:
                self._error(404, "RevisionNotFound")
                return None
            return revision

        def _info(self, repository: str, revision: str) -> None:
            if repository in hub.gated:
                return self._error(403, "GatedRepo")
            commit = self._commit(repository, revision)
            if commit is None:
                return None
            siblings = []
            for name, content in hub.repositories[repository][commit].items():
                entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
                if is_large(name):
                    checksum = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"sha256": checksum, "size": len(content), "pointerSize": 134}
                siblings.append(entry)
            content = json.dumps(
                {
                    "_id": "0" * 24,
                    "id": repository,
                    "sha": commit,
                    "private": False,
                    "gated": False,
                    "tags": ["license:mit"],
                    "cardData": {"license": "mit"},
                    "siblings": siblings,
                }
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return None

        def _file(self, repository: str, revision: str, name: str, body: bool) -> None:
            if repository in hub.gated:
                return self._error(403, "GatedRepo")
            commit = self._commit(repository, revision)
            if commit is None:
                return None
            content = hub.repositories[repository][commit].get(name)
            if content is None:
                return self._error(404, "EntryNotFound")
            start = 0
            asked = self.headers.get("Range")
            if asked and body:
                start = int(asked.removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if start else 200)
            algorithm = hashlib.sha256 if is_large(name) else hashlib.sha1
            self.send_header("ETag", f'"{algorithm(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(content) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if body:
                self._send(name, hub.wrong.get(name, content)[start:])
            return None

        def _send(self, name: str, content: bytes) -> None:
            drop = hub.drop_after.pop(name, None)
            if drop is not None:
                self.wfile.write(content[:drop])
                self.wfile.flush()
                self.connection.shutdown(2)
                self.close_connection = True
                return
            pause = hub.pause if len(content) > 1 << 16 else 0
            for at in range(0, len(content), 1 << 16):
                self.wfile.write(content[at : at + (1 << 16)])
                time.sleep(pause)

    return Handler


@contextmanager
def serve(**settings: Any) -> Iterator[HubServer]:
    """A running server; it stops with the block."""
    hub = HubServer(**settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
