"""Dependencies that are bound into every run of the check: whether they are as they were at the start."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from endstop.agent.tree import CACHES
from endstop.protocol.errors import EndstopError

# Written by tools that only use what is installed.
_WRITTEN = CACHES | {".cache", ".vite", ".vite-temp"}
_NAMED = 20

Stamp = tuple[int, int, int, int, int]


class Dependencies:
    """What stands at the paths of the host, by the times and sizes of its files.

    Nothing is compared before `remember`. `file`: where the stamps are kept for a run that is resumed; one
    that holds no stamps raises EndstopError.
    """

    def __init__(self, places: Mapping[str, Path], file: Path) -> None:
        self._places, self._file = dict(places), file
        self._before: dict[str, Stamp] | None = None

    def remember(self) -> None:
        """Take what is there now for what there was at the start, unless that is known."""
        if not self._places:
            return
        try:
            kept = json.loads(self._file.read_bytes())
            self._before = {path: tuple(stamp) for path, stamp in kept.items()}
        except FileNotFoundError:
            self._before = dict(self._stamps())
            self._file.parent.mkdir(parents=True, exist_ok=True)
            beside = self._file.with_suffix(".part")
            beside.write_text(json.dumps(self._before))
            beside.replace(self._file)
        except (ValueError, TypeError, AttributeError) as error:
            raise EndstopError(
                f"what {self._file} says of the dependencies at the start is damaged; start the run anew."
            ) from error

    def changed(self) -> list[str]:
        """Paths, as the workspace has them, that differ from the start: the first few."""
        if self._before is None:
            return []
        now = dict(self._stamps())
        paths = now.keys() | self._before.keys()
        return sorted(path for path in paths if now.get(path) != self._before.get(path))[:_NAMED]

    def _stamps(self) -> Iterator[tuple[str, Stamp]]:
        for path, host in self._places.items():
            path, top = os.path.normpath(path), str(host)
            if not host.is_dir():
                yield path, _stamp(top)
            for directory, inner, names in os.walk(top):
                inner[:] = [name for name in inner if name not in _WRITTEN]
                place = path + directory[len(top) :]
                for name in names:
                    yield f"{place}/{name}", _stamp(f"{directory}/{name}")


def _stamp(path: str) -> Stamp:
    """The time of the last change of state cannot be set by who owns a file."""
    try:
        state = os.lstat(path)
    except OSError:
        return (0, 0, 0, 0, 0)
    return (state.st_mode, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
