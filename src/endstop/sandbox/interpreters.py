"""What a directory that is bound into the sandbox needs besides itself."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

# A chain longer than this is a loop.
_LINKS = 20


def with_interpreters(paths: Iterable[Path]) -> list[Path]:
    """The paths, absolute and each once, and behind each virtualenv the installation of its interpreter.

    A virtualenv's `bin/python` is a link, often by way of other links, to an interpreter that has its
    library two directories up: every such installation outside /usr is added at every name it has.
    """
    found: dict[Path, None] = {}
    for path in paths:
        found[Path(os.path.abspath(path))] = None
        for installation in _installations(path):
            found[installation] = None
    inside = [p for p in found if not any(other != p and p.is_relative_to(other) for other in found)]
    return [p for p in inside if not p.is_relative_to("/usr")]


def _installations(path: Path) -> list[Path]:
    if not (path / "pyvenv.cfg").is_file():
        return []
    places = []
    for name in ("python", "python3"):
        for link in _chain(path / "bin" / name):
            # bin/python in PREFIX/bin/python, the only layout that virtualenvs have on POSIX.
            if link.parent.name == "bin" and not link.is_relative_to(path):
                places.append(link.parent.parent)
    return [place for place in places if place != Path("/")]


def _chain(link: Path) -> list[Path]:
    """Every name that is passed on the way from a link to the file, links of directories resolved too."""
    names = []
    for _ in range(_LINKS):
        try:
            link = Path(os.path.normpath(link.parent / os.readlink(link)))
        except OSError:
            break
        names.append(link)
    real = Path(os.path.realpath(link))
    return [*names, real]
