"""Fetching shards from a server on the loopback interface that fails in every way a server can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from endstop.protocol.errors import EndstopError
from endstop.train.data.shards import SHARD_SETS, ShardSet, fetch_shards, shard_sources
from tests.protocol.hub_server import serve

NAME = "shards/test"
SET = ShardSet("test", NAME, 6, 1, "CC0", "made here")


def parquet(number: int, rows: int = 3) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"text": [f"shard {number} row {row}" for row in range(rows)]})
    pyarrow.parquet.write_table(table, sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


def large(number: int) -> bytes:
    return bytes([number]) * 700_000


def files(make=parquet) -> dict[str, bytes]:
    return {SET.file_name(number): make(number) for number in range(6)}


def fetch(hub, place, count=2, **options):
    url = f"{hub.address}/{NAME}/resolve/main"
    return fetch_shards(SET, count, place, base_url=url, pause=0.01, **options)


def content(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def test_shards_are_fetched_once_and_the_last_is_for_validation(tmp_path):
    reports = []
    with serve(repositories={NAME: {"c0": files()}}) as hub:
        found = fetch(hub, tmp_path / "corpus", progress=lambda *report: reports.append(report))
        assert [path.name for path in found.training] == ["shard_00000.parquet", "shard_00001.parquet"]
        assert found.validation.name == "shard_00005.parquet"
        assert sorted(hub.fetched()) == [*(path.name for path in found.training), found.validation.name]
        asked = len(hub.requests)
        assert fetch(hub, tmp_path / "corpus") == found
        assert len(hub.requests) == asked
        fetch(hub, tmp_path / "corpus", 3)
        assert hub.fetched()[3:] == ["shard_00002.parquet"]
    training, validation = shard_sources(found)
    assert list(training) == [f"shard {shard} row {row}" for shard in range(2) for row in range(3)]
    assert list(validation) == [f"shard 5 row {row}" for row in range(3)]
    assert (training.name, training.licence) == ("test training", "CC0")
    assert "made here" in training.origin
    assert list(training.blocks) == [0, 2, 3, 5, 6]
    sizes = {name: len(data) for name, data in files().items()}
    assert {(done, total) for done, total, name in reports if name == "shard_00000.parquet"} == {
        (sizes["shard_00000.parquet"],) * 2
    }
    assert not [name for name in content(tmp_path) if "partial" in name]


def test_a_dropped_connection_goes_on_where_it_was(tmp_path):
    with serve(repositories={NAME: {"c0": files(large)}}, drop_after={"shard_00000.parquet": 300_000}) as hub:
        found = fetch(hub, tmp_path, 1, workers=1)
        ranges = [asked for method, path, asked in hub.requests if method == "GET" and "00000" in path]
    assert ranges[0] is None
    assert 0 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= 300_000
    assert found.training[0].read_bytes() == large(0)


def test_a_process_that_was_killed_is_continued(tmp_path):
    script = (
        "import sys\n"
        "from endstop.train.data.shards import ShardSet, fetch_shards\n"
        f"fetch_shards({SET!r}, 1, sys.argv[1], base_url=sys.argv[2], workers=1)\n"
    )
    with serve(repositories={NAME: {"c0": files(large)}}, pause=0.1) as hub:
        command = [sys.executable, "-c", script, str(tmp_path), f"{hub.address}/{NAME}/resolve/main"]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": "src"})
        partial = tmp_path / "training" / "shard_00000.parquet.partial"
        try:
            deadline = time.monotonic() + 30
            while not (partial.exists() and partial.stat().st_size):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        left = partial.stat().st_size
        assert 0 < left < len(large(0))
        assert not (tmp_path / "training" / "shard_00000.parquet").exists()
        hub.pause = 0.0
        hub.requests.clear()
        found = fetch(hub, tmp_path, 1)
        ranges = [asked for method, path, asked in hub.requests if method == "GET" and "00000" in path]
    assert ranges == [f"bytes={left}-"]
    assert found.training[0].read_bytes() == large(0)
    assert not [name for name in content(tmp_path) if "partial" in name]


def test_what_has_changed_on_the_server_is_not_glued_together(tmp_path):
    changed = files(lambda number: bytes([number + 1]) * 700_000)
    with serve(repositories={NAME: {"c0": files(large)}}, drop_after={"shard_00000.parquet": 300_000}) as hub:
        with pytest.raises(EndstopError, match="could not be fetched in 1 attempts"):
            fetch(hub, tmp_path, 1, workers=1, attempts=1)
        hub.repositories[NAME] = {"c1": changed}
        found = fetch(hub, tmp_path, 1)
    assert found.training[0].read_bytes() == changed["shard_00000.parquet"]


def test_a_checksum_that_does_not_agree(tmp_path, monkeypatch):
    import tests.protocol.hub_server as server

    monkeypatch.setattr(server, "is_large", lambda name: True)
    data = files(large)
    wrong = {"shard_00001.parquet": large(9)}
    with serve(repositories={NAME: {"c0": data}}, wrong=wrong) as hub:
        with pytest.raises(EndstopError, match=r"has sha256 .*, the server announces"):
            fetch(hub, tmp_path, 2, attempts=2)
        assert not list((tmp_path / "training").glob("shard_00001*parquet"))
        hub.wrong.clear()
        assert fetch(hub, tmp_path, 2).training[1].read_bytes() == large(1)


def test_a_file_that_does_not_exist_ends_it_at_once(tmp_path):
    data = files()
    del data["shard_00005.parquet"]
    with serve(repositories={NAME: {"c0": data}}) as hub:
        with pytest.raises(EndstopError, match=r"shard_00005.parquet does not exist there \(status 404\)"):
            fetch(hub, tmp_path, 1)
        assert sum("00005" in path for _, path, _ in hub.requests) == 1


def test_a_private_set_needs_the_token_of_the_hub(tmp_path, monkeypatch):
    with serve(repositories={NAME: {"c0": files()}}, tokens={"secret"}) as hub:
        with pytest.raises(EndstopError, match="set HF_TOKEN"):
            fetch(hub, tmp_path, 1)
        monkeypatch.setenv("HF_TOKEN", "secret")
        # A token is for the Hub, not for any server.
        with pytest.raises(EndstopError, match="set HF_TOKEN"):
            fetch(hub, tmp_path, 1)
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        fetch(hub, tmp_path, 1)


def test_the_endpoint_of_the_environment_is_asked(tmp_path, monkeypatch):
    with serve(repositories={}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address + "/")
        with pytest.raises(EndstopError, match="does not exist there"):
            fetch_shards(SHARD_SETS["fineweb-edu"], 1, tmp_path)
        assert {path for _, path, _ in hub.requests} <= {
            f"/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main/shard_{number:05d}.parquet"
            for number in (0, 1822)
        }


def test_a_server_that_is_not_there(tmp_path):
    with pytest.raises(EndstopError, match="could not be fetched in 2 attempts"):
        fetch_shards(SET, 1, tmp_path, base_url="http://127.0.0.1:9/x", attempts=2, pause=0.01)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with serve(repositories={NAME: {"c0": files()}}) as hub, pytest.raises(EndstopError):
        fetch(hub, tmp_path / "file" / "corpus", 1)


def test_a_full_disk_is_one_sentence_and_keeps_what_came(tmp_path):
    script = (
        "import resource, sys\n"
        "from endstop.train.data.shards import ShardSet, fetch_shards\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try:\n"
        f"    fetch_shards({SET!r}, 1, sys.argv[1], base_url=sys.argv[2], workers=1)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    with serve(repositories={NAME: {"c0": files(large)}}) as hub:
        command = [sys.executable, "-c", script, str(tmp_path), f"{hub.address}/{NAME}/resolve/main"]
        environment = {**os.environ, "PYTHONPATH": "src"}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert said.startswith("EndstopError")
        assert "cannot be written: File too large; what was fetched is kept" in said
        assert fetch(hub, tmp_path, 1).training[0].read_bytes() == large(0)


@pytest.mark.parametrize("count", [0, 6])
def test_a_number_of_shards_that_is_not_there(tmp_path, count):
    with pytest.raises(ValueError, match="ask for 1 to 5"):
        fetch_shards(SET, count, tmp_path)
