"""A model out of a wheel: pip fetches it from a page of links, and it is in the cache whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from endstop.protocol.registry import REGISTRY
from endstop.protocol.resolve import resolve_model
from tests.protocol.model_dirs import STRING, gguf_model, smollm2

MEMBER = "tiny_model/tiny.Q8_0.gguf"
SCRIPT = """
import json, sys
from endstop.protocol.errors import EndstopError
from endstop.protocol.registry import WheelSource
from endstop.protocol.wheel import cached_wheel, fetch_wheel
wheel = WheelSource(**json.loads(sys.argv[1]))
steps = []
def progress(done, total, what):
    steps.append([done, total, what])
    print(done, file=sys.stderr, flush=True)
try:
    record = fetch_wheel(wheel, "tiny", progress)
except EndstopError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
    sys.exit(1)
assert cached_wheel(wheel) == record
print(json.dumps({"directory": str(record.directory), "sizes": record.sizes, "checksums": record.checksums,
    "licence": record.licence, "source": record.source, "revision": record.revision, "steps": steps}))
"""


def make_wheel(place: Path, content: bytes, filler: int = 0) -> bytes:
    """A wheel with the GGUF file and `filler` bytes that do not compress."""
    path = place / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    files = {
        MEMBER: content,
        "tiny_model/filler": os.urandom(filler),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    with zipfile.ZipFile(path, "w") as bundle:
        for name, data in files.items():
            bundle.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}")
        bundle.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]) + "\n")
    return path.read_bytes()


class Links:
    """A server with a page of links for pip; `pause` seconds pass between the chunks of the wheel."""

    def __init__(self) -> None:
        self.wheel = b""
        self.pause = 0.0
        self.fetched = 0
        links = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                page = b'<a href="/tiny_model-1.0-py3-none-any.whl">tiny_model-1.0-py3-none-any.whl</a>'
                is_wheel = self.path.endswith(".whl")
                content = links.wheel if is_wheel else page
                links.fetched += is_wheel
                self.send_response(200)
                self.send_header("Content-Type", "application/zip" if is_wheel else "text/html")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                for at in range(0, len(content), 1 << 16):
                    self.wfile.write(content[at : at + (1 << 16)])
                    time.sleep(links.pause)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/"


@pytest.fixture
def links() -> Iterator[Links]:
    running = Links()
    threading.Thread(target=running.server.serve_forever, args=(0.05,), daemon=True).start()
    yield running
    running.server.shutdown()
    running.server.server_close()


class Fetch:
    """`fetch_wheel` in a process of its own."""

    def __init__(self, place: Path, links: Links) -> None:
        self.cache = place / "cache"
        self.content = gguf_model(["a", "b", "ab"], [1, 1, 1], more={"general.license": (STRING, "mit")})
        links.wheel = make_wheel(place, self.content, filler=3 << 20)
        self.wheel = {
            "project": "tiny-model",
            "version": "1.0",
            "member": MEMBER,
            "wheel_sha256": hashlib.sha256(links.wheel).hexdigest(),
            "file_sha256": hashlib.sha256(self.content).hexdigest(),
            "wheel_size": len(links.wheel),
        }
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        self.environment = kept | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "ENDSTOP_CACHE": str(self.cache),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": links.address,
            "PIP_NO_CACHE_DIR": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }

    def start(self, script: str = SCRIPT, **changes: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", script, json.dumps({**self.wheel, **changes})],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, script: str = SCRIPT, **changes: Any) -> dict[str, Any]:
        output, errors = self.start(script, **changes).communicate(timeout=120)
        assert output, errors
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result

    def left(self) -> list[str]:
        """What is in the cache besides locks."""
        found = self.cache.rglob("*") if self.cache.exists() else ()
        return sorted(
            path.relative_to(self.cache / "wheels").as_posix()
            for path in found
            if path.is_file() and not path.name.endswith(".lock")
        )


@pytest.fixture
def fetch(tmp_path: Path, links: Links) -> Fetch:
    return Fetch(tmp_path, links)


WHOLE = ["tiny-model-1.0/endstop.json", "tiny-model-1.0/tiny.Q8_0.gguf"]


def test_wheel(fetch, links):
    result = fetch()
    directory = fetch.cache / "wheels" / "tiny-model-1.0"
    assert result["directory"] == str(directory)
    assert (directory / "tiny.Q8_0.gguf").read_bytes() == fetch.content
    assert result["checksums"] == {"tiny.Q8_0.gguf": fetch.wheel["file_sha256"]}
    assert (result["licence"], result["revision"]) == ("mit", "1.0")
    assert result["source"] == "PyPI wheel tiny-model 1.0"
    # What was fetched is left, the wheel is not.
    assert fetch.left() == WHOLE
    assert result["steps"][0] == [0, len(links.wheel), "tiny-model-1.0"]
    assert result["steps"][-1][0] == len(links.wheel)
    assert fetch()["steps"] == []
    assert links.fetched == 1


def test_cache_can_be_moved(fetch, links):
    fetch()
    moved = fetch.cache.rename(fetch.cache.with_name("moved"))
    fetch.environment["ENDSTOP_CACHE"] = str(moved)
    assert fetch()["directory"] == str(moved / "wheels" / "tiny-model-1.0")
    assert links.fetched == 1


def test_damaged_file_is_fetched_again(fetch, links):
    fetch()
    path = fetch.cache / "wheels" / "tiny-model-1.0" / "tiny.Q8_0.gguf"
    path.write_bytes(fetch.content[:-1])
    fetch()
    assert path.read_bytes() == fetch.content
    assert links.fetched == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "it was not unpacked"),
        ({"file_sha256": "0" * 64}, "not the pinned 0000"),
        ({"member": "tiny_model/none.gguf"}, "does not hold tiny_model/none.gguf"),
    ],
)
def test_wrong_contents_leave_nothing(fetch, changes, message):
    result = fetch(**changes)
    assert result["error"] == "BrokenModel"
    assert message in result["message"]
    assert fetch.left() == []


def test_pip_finds_nothing(fetch):
    result = fetch(version="9.9")
    assert result["error"] == "ModelNotFound"
    assert result["message"].startswith(
        "pip could not fetch the wheel tiny-model==9.9: No matching distribution"
    )
    assert fetch.left() == []


def test_no_pip(fetch, tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    source = str(Path(__file__).parents[2] / "src")
    output = subprocess.run(
        [str(bare / "bin" / "python"), "-c", SCRIPT, json.dumps(fetch.wheel)],
        env={**fetch.environment, "PYTHONPATH": source},
        capture_output=True,
        text=True,
    ).stdout
    message = json.loads(output)["message"]
    assert "tiny.Q8_0.gguf comes in the wheel tiny-model==1.0, which is fetched with pip" in message
    assert "has no pip" in message


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted(fetch, links, how):
    links.pause = 0.03
    process = fetch.start()
    assert process.stderr is not None
    while not links.fetched:
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(how)
    assert process.wait(30) != 0
    if how == signal.SIGINT:
        assert fetch.left() == []
    assert not (fetch.cache / "wheels" / "tiny-model-1.0").exists()
    links.pause = 0
    fetch()
    assert fetch.left() == WHOLE


def test_two_at_once(fetch, links):
    links.pause = 0.005
    both = [fetch.start() for _ in range(2)]
    results = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in both]
    assert results[0]["directory"] == results[1]["directory"]
    assert links.fetched == 1


def test_full_disk(fetch):
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n" + SCRIPT
    result = fetch(limited)
    assert result["error"] == "EndstopError"
    assert result["message"].startswith("there is no room to write")
    assert fetch.left() == []
    fetch()
    assert fetch.left() == WHOLE


def test_full_disk_that_pip_takes_for_a_broken_connection(fetch):
    """pip says so itself; what it had to fetch is larger than what is free."""
    result = fetch(version="9.9", wheel_size=1 << 62)
    assert result["error"] == "EndstopError"
    assert result["message"].startswith("there is no room to write")
    assert fetch.left() == []


def test_smollm2_is_pinned():
    wheel = REGISTRY["smollm2-135m-instruct"].wheel
    model = resolve_model("SmolLM2-135M-Instruct", verify=True)
    if model.kind == "directory":
        pytest.skip("the Hub's own files are in the cache and come first")
    assert model.path == smollm2()
    assert (model.revision, model.licence) == ("0.1.2", "apache-2.0")
    assert model.checksums == {wheel.file_name: wheel.file_sha256}
