"""A Hub on the loopback interface: one model, served as fast or as slowly as a test wants."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """`seconds_per_chunk` slows down every file behind its first 64 KiB. `started`: a slow file has begun."""

    def __init__(self, repository: str, directory: Path) -> None:
        self.repository = repository
        self.files = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
        self.seconds_per_chunk = 0.0
        self.started = threading.Event()
        self.url = ""

    def info(self) -> dict[str, object]:
        siblings = [
            {
                "rfilename": name,
                "size": len(content),
                "lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}
                if name.endswith(".safetensors")
                else None,
            }
            for name, content in self.files.items()
        ]
        return {
            "_id": "0",
            "id": self.repository,
            "modelId": self.repository,
            "sha": COMMIT,
            "private": False,
            "tags": ["license:apache-2.0"],
            "downloads": 0,
            "likes": 0,
            "siblings": siblings,
        }


@contextmanager
def served(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{hub.repository}"):
                self._send(json.dumps(hub.info()).encode(), "application/json", "", body)
                return
            name = path.rpartition("/")[2]
            if path.startswith(f"/{hub.repository}/resolve/") and name in hub.files:
                content = hub.files[name]
                self._send(content, "application/octet-stream", hashlib.sha256(content).hexdigest(), body)
                return
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, content: bytes, kind: str, etag: str, body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", COMMIT)
            if etag:
                self.send_header("ETag", f'"{etag}"')
            self.end_headers()
            if not body:
                return
            try:
                for start in range(0, len(content), 1 << 16):
                    if start and hub.seconds_per_chunk:
                        hub.started.set()
                        time.sleep(hub.seconds_per_chunk)
                    self.wfile.write(content[start : start + (1 << 16)])
            except OSError:
                pass  # the client was interrupted

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
