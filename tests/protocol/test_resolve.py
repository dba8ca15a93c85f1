"""Models from paths, caches, the Hub (a loopback server) and a wheel; and everything that can go wrong."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from endstop.protocol.errors import BrokenModel, ModelNotFound, UnsupportedModel
from endstop.protocol.resolve import refuse_remote_code, resolve_model
from tests.protocol.hub_server import HubServer, serve
from tests.protocol.model_dirs import CHATML, gguf_model, tokenizer_json, write_model

FIRST, SECOND = "a" * 40, "b" * 40
# More than one of the chunks of 10 MB in which huggingface_hub writes and reports.
LARGE = 16 << 20
TENSORS = b"weights of the model" * 10_000
SHARDS = {
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "model-00001-of-00002.safetensors": b"first" * 50_000,
    "model-00002-of-00002.safetensors": b"second" * 50_000,
}
SMALL = {
    "config.json": json.dumps({"eos_token_id": 2, "vocab_size": 5000}).encode(),
    "tokenizer.json": json.dumps(tokenizer_json({"<|im_start|>": 1, "<|im_end|>": 2})).encode(),
    "tokenizer_config.json": json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}).encode(),
}
WHOLE = {**SMALL, "model.safetensors": TENSORS, "pytorch_model.bin": b"pickle", "onnx/model.onnx": b"other"}

SCRIPT = """
import json, sys
from endstop.protocol.errors import EndstopError
from endstop.protocol.resolve import resolve_model
arguments = json.loads(sys.argv[1])
steps = []
def progress(done, total, what):
    steps.append((done, total))
    print(done, file=sys.stderr, flush=True)
try:
    model = resolve_model(arguments.pop("name"), progress=progress, **arguments)
except EndstopError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
    sys.exit(1)
print(json.dumps({"path": str(model.path), "kind": model.kind, "source": model.source,
    "revision": model.revision, "licence": model.licence, "checksums": model.checksums, "steps": steps}))
"""


class Pull:
    """`resolve_model` in a process of its own, with caches of its own."""

    def __init__(self, place: Path, hub: HubServer | None) -> None:
        self.hub = hub
        self.cache, self.home = place / "cache", place / "hf"
        kept = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "SSL_CERT_FILE", "PIP_CERT")
        self.environment = {name: os.environ[name] for name in kept if name in os.environ} | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "ENDSTOP_CACHE": str(self.cache),
            "HF_HOME": str(self.home),
            # Nothing listens on this port: the Hub is out of reach.
            "HF_ENDPOINT": hub.address if hub else "http://127.0.0.1:9",
        }

    def start(self, name: str, script: str = SCRIPT, **arguments: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", script, json.dumps({"name": name, **arguments})],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, name: str, script: str = SCRIPT, **arguments: Any) -> dict[str, Any]:
        process = self.start(name, script, **arguments)
        output, errors = process.communicate(timeout=120)
        assert output, errors
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        assert process.returncode == (1 if "error" in result else 0)
        assert "Traceback" not in errors, errors
        return result

    def half_files(self) -> list[str]:
        """Files that a pull has left half-made."""
        found = [path for root in (self.cache, self.home) for path in root.rglob("*")]
        return [str(path) for path in found if path.name.endswith((".incomplete", ".partial", ".part"))]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serve(repositories={"org/model": {FIRST: WHOLE, SECOND: {**WHOLE, "extra.json": b"{}"}}}) as server:
        yield server


@pytest.fixture
def pull(tmp_path: Path, hub: HubServer) -> Pull:
    return Pull(tmp_path, hub)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Paths


def test_directory_and_gguf_file(tmp_path):
    directory = write_model(tmp_path / "m", {"</s>": 2})
    (directory / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\ntext\n")
    model = resolve_model(str(directory))
    assert (model.path, model.kind, model.source) == (directory, "directory", "local path")
    assert (model.licence, model.revision) == ("apache-2.0", None)
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf_model(["a", "b", "ab"], [1, 1, 1]))
    assert (resolve_model(file).kind, resolve_model(file).path) == ("gguf", file)
    # A directory that holds nothing but one GGUF file stands for that file.
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "only.gguf").write_bytes(file.read_bytes())
    assert resolve_model(tmp_path / "g").path == tmp_path / "g" / "only.gguf"


@pytest.mark.parametrize("name", ["/no/such/dir", "./none", "none.gguf", "../x/y/z.gguf"])
def test_paths_that_do_not_exist(name):
    with pytest.raises(ModelNotFound, match="no such file or directory"):
        resolve_model(name)


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(BrokenModel, match=r"give a directory with config\.json .* or a \.gguf file"):
        resolve_model(tmp_path / "model.safetensors")


def test_pickled_weights_are_refused(tmp_path):
    directory = write_model(tmp_path, {"</s>": 2})
    (directory / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=r"only pickled weights \(pytorch_model\.bin\)"):
        resolve_model(directory)
    # The small files can be read all the same.
    assert resolve_model(directory, weights=False).kind == "directory"
    (directory / "model.safetensors").write_bytes(b"x")
    assert resolve_model(directory).kind == "directory"


def test_remote_code_is_refused_by_name(tmp_path):
    directory = write_model(
        tmp_path, {"</s>": 2}, config={"model_type": "odd", "auto_map": {"AutoModel": "m.M"}}
    )
    with pytest.raises(UnsupportedModel, match=r"model_type odd.*trust_remote_code"):
        refuse_remote_code(directory)
    refuse_remote_code(write_model(tmp_path / "b", {"</s>": 2}))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2-135m", "did you mean smollm2-135m-instruct"),
        ("zzz", "give a directory, a .gguf file, a Hub id"),
    ],
)
def test_unknown_names_come_with_a_hint(name, hint):
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name)
    assert hint in str(caught.value)


def test_revision_of_a_path(tmp_path):
    with pytest.raises(ValueError, match="a revision belongs to a model that is fetched"):
        resolve_model(write_model(tmp_path, {"</s>": 2}), revision="main")


# The Hub


def test_hub_model(pull, hub):
    result = pull("org/model")
    path = Path(result["path"])
    assert (result["kind"], result["revision"], result["licence"]) == ("directory", SECOND, "mit")
    assert result["source"] == f"{hub.address}/org/model"
    assert path.is_relative_to(pull.home)
    # Pickled weights and other formats stay where they are.
    assert sorted(entry.name for entry in path.iterdir()) == sorted(
        [*SMALL, "extra.json", "model.safetensors"]
    )
    assert result["checksums"]["model.safetensors"] == sha256(TENSORS)
    total = sum(len(content) for name, content in WHOLE.items() if name in SMALL) + len(TENSORS) + 2
    assert result["steps"][-1] == [total, total]
    assert [done for done, _ in result["steps"]] == sorted(done for done, _ in result["steps"])
    record = json.loads((pull.cache / "hub" / "org--model" / SECOND / "endstop.json").read_text())
    assert record["files"]["model.safetensors"] == {"size": len(TENSORS), "sha256": sha256(TENSORS)}
    # The second time nothing is asked of the Hub.
    hub.requests.clear()
    again = pull("org/model")
    assert (again["path"], again["steps"], hub.requests) == (result["path"], [], [])
    assert pull("org/model", offline=True)["checksums"] == result["checksums"]


def test_revision_pins(pull, hub):
    assert pull("org/model", revision=FIRST)["revision"] == FIRST
    hub.requests.clear()
    assert pull("org/model", revision=FIRST, offline=True)["revision"] == FIRST
    assert hub.requests == []
    # Another revision is not answered with the one that is here.
    assert pull("org/model", offline=True)["error"] == "ModelNotFound"
    assert pull("org/model")["revision"] == SECOND
    result = pull("org/model", revision="v9")
    assert result["message"] == "org/model has no revision 'v9' on the Hub."


def test_shards(pull, hub):
    hub.repositories["org/big"] = {FIRST: {**SMALL, **SHARDS, "consolidated.safetensors": b"twice"}}
    result = pull("org/big")
    names = {entry.name for entry in Path(result["path"]).iterdir()}
    assert names == {*SMALL, *SHARDS}
    # A shard that vanished is fetched again, alone.
    shard = Path(result["path"]) / "model-00002-of-00002.safetensors"
    shard.resolve().unlink()
    shard.unlink()
    hub.requests.clear()
    assert pull("org/big")["path"] == result["path"]
    assert hub.fetched() == [shard.name]


def test_small_files_first_and_weights_later(pull, hub):
    script = SCRIPT.replace("resolve_model(arg", "resolve_model(weights=False, name=arg")
    assert pull("org/model", script)["steps"]
    assert "model.safetensors" not in hub.fetched()
    hub.requests.clear()
    assert pull("org/model")["checksums"]["model.safetensors"] == sha256(TENSORS)
    assert hub.fetched() == ["model.safetensors"]


def test_stop_set_needs_the_small_files_only(pull, hub):
    script = """
import json, sys
from endstop import StopSet
arguments = json.loads(sys.argv[1])
stops = StopSet.from_pretrained(arguments.pop("name"), **arguments)
print(json.dumps({"roles": stops.roles, "texts": stops.texts}))
"""
    assert pull("org/model", script) == {"roles": {"2": "turn_end"}, "texts": {"2": "<|im_end|>"}}
    assert "model.safetensors" not in hub.fetched()
    assert pull("org/model", script, offline=True)["roles"] == {"2": "turn_end"}


def test_snapshot_of_another_tool_is_used(pull, hub):
    names = [*SMALL, "model.safetensors"]
    fetch = f"import huggingface_hub as h; [h.hf_hub_download('org/model', name) for name in {names}]"
    subprocess.run([sys.executable, "-c", fetch], env=pull.environment, check=True, capture_output=True)
    hub.requests.clear()
    result = pull("org/model")
    assert (result["revision"], result["checksums"], hub.requests) == (SECOND, {}, [])


def test_connection_that_breaks_is_taken_up_where_it_broke(pull, hub):
    content = os.urandom(LARGE)
    hub.repositories["org/slow"] = {FIRST: {**SMALL, "model.safetensors": content}}
    hub.drop_after["model.safetensors"] = 11 << 20
    result = pull("org/slow")
    assert result["checksums"]["model.safetensors"] == sha256(content)
    ranges = [r for method, path, r in hub.requests if method == "GET" and path.endswith(".safetensors")]
    # huggingface_hub writes in chunks of 10 MB, and goes on behind the last whole one.
    assert ranges == [None, "bytes=10485760-"]


def test_wrong_content_is_noticed_and_removed(pull, hub):
    hub.wrong["model.safetensors"] = b"X" * len(TENSORS)
    result = pull("org/model")
    assert result["error"] == "BrokenModel"
    assert "came with sha256" in result["message"]
    hub.wrong.clear()
    assert pull("org/model")["checksums"]["model.safetensors"] == sha256(TENSORS)


def test_verify_finds_a_changed_file(pull, hub):
    result = pull("org/model")
    (Path(result["path"]) / "model.safetensors").resolve().write_bytes(b"Y" * len(TENSORS))
    assert pull("org/model")["path"] == result["path"]
    assert pull("org/model", verify=True)["path"] == result["path"]
    assert (Path(result["path"]) / "model.safetensors").read_bytes() == TENSORS


def test_no_such_model(pull):
    assert pull("org/none")["message"] == (
        "the Hub has no model org/none, or it is private; check the name, or set HF_TOKEN."
    )


def test_token(pull, hub):
    hub.tokens.add("secret")
    assert "set HF_TOKEN" in pull("org/model")["message"]
    pull.environment["HF_TOKEN"] = "secret"
    assert pull("org/model")["revision"] == SECOND


def test_gated(pull, hub):
    hub.gated.add("org/model")
    assert pull("org/model")["message"].startswith("org/model is gated: accept its terms at http://127.0.0.1")


def test_only_pickled_weights_on_the_hub(pull, hub):
    hub.repositories["org/old"] = {FIRST: {**SMALL, "pytorch_model.bin": b"pickle"}}
    result = pull("org/old")
    assert result["error"] == "UnsupportedModel"
    assert "only pickled weights (pytorch_model.bin)" in result["message"]
    assert hub.fetched() == []


def test_gguf_repositories(pull, hub):
    content = gguf_model(["a", "b", "ab"], [1, 1, 1])
    hub.repositories["org/one"] = {FIRST: {"README.md": b"x", "m.Q8_0.gguf": content}}
    hub.repositories["org/many"] = {FIRST: {"m.Q4_0.gguf": content, "m.Q8_0.gguf": content}}
    one = pull("org/one")
    assert (one["kind"], Path(one["path"]).name) == ("gguf", "m.Q8_0.gguf")
    assert "name one of them, as in org/many/m.Q4_0.gguf" in pull("org/many")["message"]
    many = pull("org/many/m.Q8_0.gguf")
    assert (many["kind"], Path(many["path"]).read_bytes()) == ("gguf", content)
    assert pull("org/many/m.Q8_0.gguf", offline=True)["path"] == many["path"]
    assert "has no file 'x.gguf'" in pull("org/many/x.gguf")["message"]


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "ENDSTOP_OFFLINE"])
def test_offline_by_environment(pull, hub, name):
    pull.environment[name] = "1"
    assert "nothing is fetched offline" in pull("org/model")["message"]
    assert hub.requests == []


def test_hub_out_of_reach(tmp_path):
    result = Pull(tmp_path, None)("org/model")
    assert result["error"] == "ModelNotFound"
    assert result["message"].startswith(
        "org/model is not on this machine, and the Hub at http://127.0.0.1:9 "
    )


def test_ctrl_c(pull, hub):
    hub.repositories["org/slow"] = {FIRST: {**SMALL, "model.safetensors": os.urandom(LARGE)}}
    hub.pause = 0.006
    process = pull.start("org/slow")
    wait_for_line(process, lambda done: done > 1 << 20)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    assert pull.half_files() == []
    hub.pause = 0
    assert pull("org/slow")["kind"] == "directory"


def test_kill(pull, hub):
    content = os.urandom(LARGE)
    hub.repositories["org/slow"] = {FIRST: {**SMALL, "model.safetensors": content}}
    hub.pause = 0.006
    process = pull.start("org/slow")
    wait_for_line(process, lambda done: done > 1 << 20)
    process.kill()
    process.wait()
    hub.pause = 0
    hub.requests.clear()
    result = pull("org/slow")
    assert result["checksums"]["model.safetensors"] == sha256(content)
    # What had arrived whole is not fetched again.
    assert hub.fetched() == ["model.safetensors"]


def test_two_pulls_at_once(pull, hub):
    hub.repositories["org/slow"] = {FIRST: {**SMALL, "model.safetensors": os.urandom(1 << 20)}}
    hub.pause = 0.02
    both = [pull.start("org/slow") for _ in range(2)]
    results = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in both]
    assert results[0]["path"] == results[1]["path"]
    assert hub.fetched().count("model.safetensors") == 1


def test_cache_that_cannot_be_written(pull, hub):
    pull.home.write_text("a file where the Hub's cache should be")
    result = pull("org/model")
    assert result["error"] == "EndstopError"
    assert result["message"].startswith(f"{pull.home}")


def test_full_disk(pull, hub):
    # A limit on the size of files fails in the same place as a full disk.
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n" + SCRIPT
    result = pull("org/model", limited)
    assert result["error"] == "EndstopError"
    assert result["message"].startswith("there is no room to write")
    assert pull.half_files() == []
    assert pull("org/model")["revision"] == SECOND


def wait_for_line(process: subprocess.Popen[str], enough: Any) -> None:
    assert process.stderr is not None
    deadline = time.monotonic() + 60
    for line in process.stderr:
        if line.strip().isdigit() and enough(int(line)):
            return
        assert time.monotonic() < deadline
    raise AssertionError("the pull ended before it was interrupted")
