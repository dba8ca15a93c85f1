"""The virtualenv that the project's commands are run with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from endstop.protocol.errors import EndstopError
from endstop.sandbox.settings import SandboxSettings


def find_virtualenv(named: str, directory: Path) -> Path | None:
    """`auto` is the activated one (or conda's), `none` none, else a path, relative to `directory`.

    Raises EndstopError for a path where none is."""
    if named == "none":
        return None
    if named == "auto":
        active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
        return Path(active) if active and (Path(active) / "bin").is_dir() else None
    path = Path(os.path.abspath(directory / Path(named).expanduser()))
    if not (path / "bin").is_dir():
        raise EndstopError(f"{path} is no virtualenv: it has no bin.")
    return path


def with_virtualenv(sandbox: SandboxSettings, virtualenv: Path | None) -> SandboxSettings:
    """A sandbox in which commands find its programs, and can write none of them."""
    if virtualenv is None:
        return sandbox
    return replace(
        sandbox,
        # Its scripts name the place where it was made, which a link may hide.
        read_only=(*sandbox.read_only, *dict.fromkeys((virtualenv, virtualenv.resolve()))),
        path_entries=(str(virtualenv / "bin"), *sandbox.path_entries),
    )


def at_home(sandbox: SandboxSettings, workspace: Path) -> SandboxSettings:
    """A sandbox in which the workspace is found at its own path too, where packages that are installed as
    editable look for it."""
    names: dict[Path, None] = {workspace: None}
    for path in sandbox.read_only:
        names |= {parent: None for parent in path.parents if parent.resolve() == workspace}
    return replace(sandbox, also_at=(*sandbox.also_at, *names))


def dependencies_of(named: tuple[str, ...], sandbox: SandboxSettings, workspace: Path) -> tuple[str, ...]:
    """The dependencies that are named, and those that the sandbox brings, such as a virtualenv that lies in
    the workspace: who works there must not be able to change it."""
    inside = []
    for path in sandbox.read_only:
        place = path.parent.resolve() / path.name
        if place != workspace and place.is_relative_to(workspace) and place.exists():
            inside.append(place.relative_to(workspace).as_posix())
    return tuple(dict.fromkeys((*named, *inside)))
