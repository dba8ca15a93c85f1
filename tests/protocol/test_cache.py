"""What the cache lists and removes, and the records beside the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from endstop.protocol.cache import (
    RECORD,
    Record,
    cache_entries,
    cache_root,
    locked,
    remove_cache_entry,
    sha256_of,
)
from endstop.protocol.errors import BrokenModel, EndstopError, ModelNotFound
from tests.protocol.hub_server import serve


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENDSTOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(root: Path, name: str, content: bytes = b"12345", model: str = "m") -> Path:
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "file").write_bytes(content)
    checksum = sha256_of(directory / "file")
    record = Record(model, "somewhere", "1", "mit", directory, {"file": len(content)}, {"file": checksum})
    record.write(directory / RECORD, beside_files=True)
    return directory


def test_place(monkeypatch, tmp_path):
    monkeypatch.delenv("ENDSTOP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_root() == tmp_path / "x" / "endstop"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "endstop"
    monkeypatch.setenv("ENDSTOP_CACHE", "~/mine")
    assert cache_root() == Path.home() / "mine"


def test_entries(root):
    assert cache_entries() == []
    put(root, "wheels/a-1")
    (root / "gguf" / "b-123").mkdir(parents=True)
    (root / "gguf" / "b-123" / "config.json").write_text("{}")
    # Half-made things and locks are no entries.
    (root / "wheels" / ".a-2.partial").mkdir()
    (root / "wheels" / ".a-1.lock").touch()
    first, second = cache_entries()
    assert (first.name, first.size, first.model) == ("gguf/b-123", 2, None)
    size = 5 + (root / "wheels" / "a-1" / RECORD).stat().st_size
    assert (second.name, second.size, second.model, second.licence) == ("wheels/a-1", size, "m", "mit")


def test_remove(root):
    kept = put(root, "wheels/a-1", model="one")
    gone = put(root, "wheels/b-1", model="two")
    size = sum(path.stat().st_size for path in gone.iterdir())
    assert remove_cache_entry("wheels/b-1") == size
    assert not gone.exists()
    assert remove_cache_entry("one") > 0
    assert not kept.exists()
    with pytest.raises(ModelNotFound, match="has no entry 'one'; it holds nothing"):
        remove_cache_entry("one")
    assert list((root / "wheels").iterdir()) == []


@pytest.mark.parametrize("name", ["..", ".", "", "../other", "wheels"])
def test_only_entries_are_removed(root, tmp_path, name):
    put(root, "wheels/a-1")
    (tmp_path / "other").mkdir()
    with pytest.raises(ModelNotFound):
        remove_cache_entry(name)
    assert (root / "wheels" / "a-1").is_dir()
    assert (tmp_path / "other").is_dir()


def test_records_tell_what_is_missing_and_what_has_changed(root):
    directory = put(root, "wheels/a-1")
    record = Record.read(directory / RECORD)
    assert record is not None
    assert record.missing() is None
    record.verify()
    (directory / "file").write_bytes(b"12346")
    assert record.missing() is None
    with pytest.raises(BrokenModel, match="file has changed since it was fetched"):
        record.verify()
    (directory / "file").write_bytes(b"1")
    assert record.missing() == "file"
    (directory / "file").unlink()
    assert record.missing() == "file"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 99}', "\x00"])
def test_unreadable_records_are_none(tmp_path, content):
    (tmp_path / RECORD).write_text(content)
    assert Record.read(tmp_path / RECORD) is None


def test_lock_waits(root, tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from endstop.protocol.cache import locked\n"
        "with locked(Path(sys.argv[1])): print('in', flush=True); time.sleep(0.5); print('out', flush=True)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(root / "wheels" / "x")], env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"in\n"
    with locked(root / "wheels" / "x"):
        assert process.stdout.readline() == b"out\n"
    assert process.wait() == 0


def test_cache_that_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENDSTOP_CACHE", str(tmp_path / "file"))
    assert cache_entries() == []
    with pytest.raises(EndstopError, match="cannot be written"), locked(cache_root() / "wheels" / "x"):
        pass


def test_lock_that_cannot_be_taken(tmp_path):
    (tmp_path / ".x.lock").mkdir()
    with pytest.raises(EndstopError, match="point ENDSTOP_CACHE"), locked(tmp_path / "x"):
        pass


def test_hub_snapshot_is_listed_and_removed(tmp_path):
    commit = "c" * 40
    files = {
        "config.json": b"{}",
        "tokenizer.json": b'{"added_tokens": []}',
        "model.safetensors": b"x" * 1000,
    }
    code = """
import json
from endstop.protocol.resolve import cache_entries, remove_cache_entry, resolve_model
path = resolve_model("org/model").path
entries = [(e.name, e.size, e.model, e.licence, str(e.path) == str(path)) for e in cache_entries()]
freed = remove_cache_entry("org/model")
print(json.dumps([entries, freed, path.exists(), [e.name for e in cache_entries()]]))
"""
    with serve(repositories={"org/model": {commit: files}}) as hub:
        environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "PYTHONPATH": os.pathsep.join(sys.path),
            "ENDSTOP_CACHE": str(tmp_path / "cache"),
            "HF_HOME": str(tmp_path / "hf"),
            "HF_ENDPOINT": hub.address,
        }
        output = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
        ).stdout
    entries, freed, exists, after = json.loads(output)
    size = sum(len(content) for content in files.values())
    assert entries == [[f"hub/org--model/{commit}", size, "org/model", "mit", True]]
    assert (freed, exists, after) == (size, False, [])
    assert list((tmp_path / "hf" / "hub").rglob("*.safetensors")) == []
