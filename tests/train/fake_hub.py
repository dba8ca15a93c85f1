"""The part of the Hugging Face Hub that an upload talks to, on the loopback interface."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class UploadHub:
    """Repositories appear as they are created.

    Attributes:
        token: the only one that is let in. repositories: id -> private.
        files: (repository, name) -> content that the last commit put there.
        commits: (repository, message) in order. requests: method and path of every request.
        fail: path fragment -> status that is answered in its place.
    """

    token: str = "hf_secret"
    repositories: dict[str, bool] = field(default_factory=dict)
    files: dict[tuple[str, str], bytes] = field(default_factory=dict)
    commits: list[tuple[str, str]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    fail: dict[str, int] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    address: str = ""


def _handler(hub: UploadHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_PUT(self) -> None:
            content = self._body()
            hub.requests.append(("PUT", self.path))
            hub.blobs[urlsplit(self.path).path.rpartition("/")[2]] = content
            self._answer(200, {})

        def do_POST(self) -> None:
            body = self._body()
            path = urlsplit(self.path).path
            hub.requests.append(("POST", path))
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._answer(
                    401, {"error": f"Invalid credentials {self.headers.get('Authorization')}"}
                )
            for fragment, status in hub.fail.items():
                if fragment in path:
                    return self._answer(status, {"error": f"the Hub says no to {hub.token}"})
            if path == "/api/validate-yaml":
                return self._answer(200, {"errors": [], "warnings": []})
            if path == "/api/repos/create":
                return self._create(json.loads(body))
            if "/preupload/" in path:
                return self._preupload(json.loads(body))
            if path.endswith("/info/lfs/objects/batch"):
                return self._batch(json.loads(body))
            if "/commit/" in path:
                return self._commit("/".join(path.split("/")[3:5]), body)
            if path.endswith("/lfs-verify"):
                return self._answer(200, {})
            return self._answer(404, {"error": "unknown"})

        def do_GET(self) -> None:
            hub.requests.append(("GET", self.path))
            self._answer(404, {"error": "nothing to read here"})

        def _create(self, asked: dict[str, Any]) -> None:
            name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
            known = name in hub.repositories
            hub.repositories.setdefault(
                name, asked.get("visibility") == "private" or bool(asked.get("private"))
            )
            self._answer(409 if known else 200, {"url": f"{hub.address}/{name}", "name": name})

        def _preupload(self, asked: dict[str, Any]) -> None:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".gguf")) else "regular",
                    "shouldIgnore": False,
                }
                for file in asked["files"]
            ]
            self._answer(200, {"files": files})

        def _batch(self, asked: dict[str, Any]) -> None:
            objects = []
            for item in asked["objects"]:
                actions = {
                    "upload": {"href": f"{hub.address}/blobs/{item['oid']}", "header": {}},
                    "verify": {"href": f"{hub.address}/lfs-verify", "header": {}},
                }
                objects.append({**item, "actions": actions})
            self._answer(200, {"transfer": "basic", "objects": objects})

        def _commit(self, repository: str, body: bytes) -> None:
            message = ""
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "header":
                    message = value["summary"]
                elif entry["key"] == "file":
                    content = base64.b64decode(value["content"])
                    hub.files[(repository, value["path"])] = content
                elif entry["key"] == "lfsFile":
                    content = hub.blobs[value["oid"]]
                    assert hashlib.sha256(content).hexdigest() == value["oid"]
                    assert len(content) == value["size"]
                    hub.files[(repository, value["path"])] = content
            hub.commits.append((repository, message))
            address = f"{hub.address}/{repository}/commit/{'a' * 40}"
            self._answer(200, {"success": True, "commitOid": "a" * 40, "commitUrl": address})

        def _body(self) -> bytes:
            if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
                content = b""
                while size := int(self.rfile.readline(), 16):
                    content += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return content
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _answer(self, status: int, value: dict[str, Any]) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


@contextmanager
def upload_hub(**settings: Any) -> Iterator[UploadHub]:
    """A running Hub; it ends with the block."""
    hub = UploadHub(**settings)
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
