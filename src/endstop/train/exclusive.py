"""One training at a time in a directory: the others are refused while it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from endstop.protocol.errors import EndstopError
from endstop.train.distributed import Process, done_by_main


@contextmanager
def exclusive(directory: Path, process: Process) -> Iterator[None]:
    """Keep other trainings out of a directory, which is made if need be; every process must call it.

    The lock is one of the system on the directory itself: it leaves no file, and ends with the process
    however that ends. Windows, and file systems that know no locks, have none. Directories made here that are
    still empty at the end are removed. Raises EndstopError, in every process, where another training is in it
    or it cannot be made.
    """
    made: list[Path] = []
    held: list[int] = []

    def take() -> None:
        try:
            made.extend(place for place in (directory, directory.parent) if not place.exists())
            directory.mkdir(parents=True, exist_ok=True)
            if sys.platform == "win32":
                return
            held.append(os.open(directory, os.O_RDONLY))
        except OSError as error:
            raise EndstopError(f"{directory} cannot be written: {error.strerror or error}.") from error
        import fcntl

        try:
            fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EndstopError(
                f"another process is training in {directory}: wait until it ends, or choose another --run."
            ) from None
        except OSError:
            # No locks on this file system.
            return

    try:
        done_by_main(take, process)
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        for place in made:
            with suppress(OSError):
                place.rmdir()
