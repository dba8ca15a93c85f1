"""Large corpora in shards of Parquet: fetched in parallel, resumed where interrupted, whole or not there.

Shards are shuffled as a whole, so that the first n of them are a sample of the corpus; the last one is kept
for validation, as in nanochat.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from endstop.models.directory import write_json
from endstop.protocol.cache import Progress, locked, sha256_of
from endstop.protocol.errors import EndstopError
from endstop.train.data.records import ParquetRows
from endstop.train.data.sources import TextSource, text_source

if TYPE_CHECKING:
    import httpx

# Seconds without an answer or a byte before a connection is given up.
_TIMEOUT = 30.0
_RETRIED = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class ShardSet:
    """A corpus on the Hub: `shard_00000.parquet` and so on.

    Attributes:
        repository: the data set on the Hub. count: shards in all.
        megabytes: of one shard, about.
    """

    name: str
    repository: str
    count: int
    megabytes: int
    licence: str
    origin: str

    def file_name(self, shard: int) -> str:
        return f"shard_{shard:05d}.parquet"


SHARD_SETS = {
    shard_set.name: shard_set
    for shard_set in (
        ShardSet(
            "fineweb-edu",
            "karpathy/fineweb-edu-100b-shuffle",
            1823,
            100,
            "ODC-By 1.0",
            "FineWeb-Edu (Hugging Face), a sample of 100 billion tokens, shuffled",
        ),
        ShardSet(
            "climbmix",
            "karpathy/climbmix-400b-shuffle",
            6543,
            100,
            "CC BY-NC 4.0",
            "ClimbMix (NVIDIA), 400 billion tokens, shuffled",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """Fetched shards."""

    training: list[Path]
    validation: Path


def fetch_shards(
    shard_set: ShardSet,
    count: int,
    directory: str | Path,
    *,
    base_url: str | None = None,
    workers: int = 4,
    attempts: int = 6,
    pause: float = 1.0,
    progress: Progress | None = None,
) -> ShardFiles:
    """Fetch the first `count` shards into `directory`/training and the last into `directory`/validation.

    Shards that are there are not fetched again. A shard is written to NAME.partial, compared with the size
    and the sha256 that the server announces, and renamed. What is interrupted, or killed, goes on at the byte
    where it was, unless the file on the server has changed.

    Args:
        base_url: where the files lie, instead of the Hub (HF_ENDPOINT, HF_TOKEN are honoured there).
        workers: shards fetched at once.
        attempts: for each shard; `pause` seconds before the second, twice as many before each further one.

    Raises EndstopError for a file that does not exist, a server that does not answer, wrong content, a full
    disk.
    """
    if not 1 <= count < shard_set.count:
        raise ValueError(
            f"{shard_set.name} has {shard_set.count} shards, the last of them for validation; ask for 1 to "
            f"{shard_set.count - 1}, not {count}"
        )
    if workers < 1 or attempts < 1:
        raise ValueError("workers and attempts must be at least 1")
    directory = Path(directory)
    training = [directory / "training" / shard_set.file_name(shard) for shard in range(count)]
    validation = directory / "validation" / shard_set.file_name(shard_set.count - 1)
    url = base_url or f"{_endpoint()}/datasets/{shard_set.repository}/resolve/main"
    with locked(directory):
        for place in (training[0].parent, validation.parent):
            _make_directory(place)
            _write_manifest(shard_set, place)
        missing = [path for path in (*training, validation) if not path.is_file()]
        if missing:
            _fetch_all(url.rstrip("/"), missing, workers, attempts, pause, progress)
    return ShardFiles(training, validation)


def local_shards(shard_set: ShardSet, directory: str | Path) -> ShardFiles:
    """The training shards that lie in a directory as `fetch_shards` leaves them, from the first on without a
    gap; the one for validation need not be there."""
    directory = Path(directory)
    training = []
    for shard in range(shard_set.count - 1):
        path = directory / "training" / shard_set.file_name(shard)
        if not path.is_file():
            break
        training.append(path)
    return ShardFiles(training, directory / "validation" / shard_set.file_name(shard_set.count - 1))


def shard_sources(files: ShardFiles) -> tuple[TextSource, TextSource]:
    """(training, validation) documents of fetched shards; other shards that lie beside them are left out."""
    training, validation = (
        text_source(ParquetRows(paths, ["text"]), paths[0].parent)
        for paths in (files.training, [files.validation])
    )
    return training, validation


class _Retry(Exception):
    """This attempt failed in a way that another one may not; `seconds` is what the server asks to wait."""

    def __init__(self, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.seconds = seconds


def _fetch_all(
    url: str,
    targets: Sequence[Path],
    workers: int,
    attempts: int,
    pause: float,
    progress: Progress | None,
) -> None:
    import httpx

    stop = threading.Event()
    limits = httpx.Limits(max_connections=workers, max_keepalive_connections=workers)
    with (
        httpx.Client(timeout=_TIMEOUT, limits=limits, headers=_headers(url)) as client,
        ThreadPoolExecutor(workers) as pool,
    ):
        fetches = [_Fetch(client, f"{url}/{path.name}", path, stop, progress) for path in targets]
        futures = [pool.submit(fetch.run, attempts, pause) for fetch in fetches]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            _give_up(stop, futures)
            raise
        failed = next((future for future in done if future.exception() is not None), None)
        if failed is not None:
            _give_up(stop, futures)
            failed.result()


def _give_up(stop: threading.Event, futures: Sequence[Future[None]]) -> None:
    """End the other downloads at their next chunk; what they have stays for the next time."""
    stop.set()
    for future in futures:
        future.cancel()


@dataclass(frozen=True, slots=True)
class _Remote:
    """What the server says about a file. `identity` tells one version of it from another."""

    size: int | None
    sha256: str | None
    identity: str


class _Fetch:
    """One file."""

    def __init__(
        self,
        client: httpx.Client,
        url: str,
        target: Path,
        stop: threading.Event,
        progress: Progress | None,
    ) -> None:
        self.client, self.url, self.target, self.stop, self.progress = client, url, target, stop, progress
        self.partial = target.with_name(f"{target.name}.partial")
        self.facts = target.with_name(f"{target.name}.partial.json")

    def run(self, attempts: int, pause: float) -> None:
        import httpx

        for attempt in range(attempts):
            try:
                self._attempt()
                return
            except (httpx.HTTPError, _Retry) as error:
                reason = str(error) or type(error).__name__
                asked = error.seconds if isinstance(error, _Retry) else 0.0
            except OSError as error:
                raise EndstopError(
                    f"{self.partial} cannot be written: {error.strerror or error}; what was fetched is kept, "
                    "make room and run it again."
                ) from error
            if attempt + 1 < attempts and self.stop.wait(max(asked, pause * 2**attempt)):
                return
        raise EndstopError(
            f"{self.url} could not be fetched in {attempts} attempts ({reason}); what has come is kept, run "
            "it again later."
        )

    def _attempt(self) -> None:
        remote = self._look()
        have = self._usable(remote)
        if remote.size is None or have < remote.size:
            self._receive(remote, have)
        if self.stop.is_set():
            return
        size = self.partial.stat().st_size
        if remote.size is not None and size != remote.size:
            if size > remote.size:
                self._discard()
            raise _Retry(f"{size} of {remote.size} bytes came")
        if remote.sha256 is not None and (found := sha256_of(self.partial)) != remote.sha256:
            self._discard()
            raise _Retry(f"the content has sha256 {found}, the server announces {remote.sha256}")
        os.replace(self.partial, self.target)
        self.facts.unlink(missing_ok=True)

    def _look(self) -> _Remote:
        # The Hub tells the checksum in the answer that redirects to the storage.
        response = self.client.head(self.url, follow_redirects=False)
        if response.status_code in (405, 501):
            return _Remote(None, None, "")
        if not response.is_redirect:
            self._check(response)
        headers = response.headers
        size = headers.get("X-Linked-Size") or (
            None if response.is_redirect else headers.get("Content-Length")
        )
        tag = (headers.get("X-Linked-ETag") or headers.get("ETag") or "").removeprefix("W/").strip('"')
        sha256 = tag if re.fullmatch(r"[0-9a-f]{64}", tag) else None
        return _Remote(None if size is None else int(size), sha256, f"{tag} {size}")

    def _usable(self, remote: _Remote) -> int:
        """Bytes that an earlier attempt has left of this version of the file."""
        try:
            same = json.loads(self.facts.read_text(encoding="utf-8"))["identity"] == remote.identity
        except (OSError, ValueError, KeyError, TypeError):
            same = False
        if not same or remote.size is None:
            self._discard()
            self.facts.write_text(json.dumps({"identity": remote.identity}), encoding="utf-8")
        return self.partial.stat().st_size if self.partial.exists() else 0

    def _receive(self, remote: _Remote, have: int) -> None:
        headers = {"Range": f"bytes={have}-"} if have else {}
        with self.client.stream("GET", self.url, headers=headers, follow_redirects=True) as response:
            if response.status_code == 416:
                self._discard()
                raise _Retry("the server has no more bytes than are here")
            self._check(response)
            # A server that knows no ranges sends all of it.
            if response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                mode = "r+b"
            else:
                have, mode = 0, "wb"
            with self.partial.open(mode) as file:
                file.seek(have)
                for chunk in response.iter_raw():
                    if self.stop.is_set():
                        return
                    file.write(chunk)
                    have += len(chunk)
                    if self.progress is not None:
                        self.progress(have, remote.size, self.target.name)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status < 400:
            return
        if status in _RETRIED:
            asked = response.headers.get("Retry-After", "")
            raise _Retry(f"the server answers {status}", float(asked) if asked.isdigit() else 0.0)
        if status in (401, 403):
            raise EndstopError(
                f"{self.url} may not be read (status {status}); set HF_TOKEN to a token that may."
            )
        raise EndstopError(f"{self.url} does not exist there (status {status}).")

    def _discard(self) -> None:
        self.partial.unlink(missing_ok=True)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _headers(url: str) -> dict[str, str]:
    """A token goes to the Hub alone; httpx drops it when it is redirected to another host."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "endstop"}
    token = os.environ.get("HF_TOKEN")
    if token and url.startswith(f"{_endpoint()}/"):
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EndstopError(f"{directory} cannot be made: {error.strerror or error}.") from error


def _write_manifest(shard_set: ShardSet, directory: Path) -> None:
    content = {
        "name": f"{shard_set.name} {directory.name}",
        "licence": shard_set.licence,
        "origin": f"{shard_set.origin}; {shard_set.repository} on the Hugging Face Hub",
    }
    manifest = directory.with_name(f"{directory.name}.manifest.json")
    partial = manifest.with_name(f".{manifest.name}.partial")
    write_json(partial, content)
    os.replace(partial, manifest)
