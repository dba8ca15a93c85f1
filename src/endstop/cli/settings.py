"""Where an option's value comes from: flags, then ENDSTOP_* variables, then a file."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from endstop.protocol.errors import EndstopError
from endstop.protocol.params import FIELD_NAMES

SAMPLING_NAMES = FIELD_NAMES - {"trace"}
MODEL_NAMES = frozenset({"dtype", "device", "backend", "revision", "offline", "max_rows"})
NAMES = SAMPLING_NAMES | MODEL_NAMES | {"preset"}
_TEXTS = frozenset({"dtype", "device", "backend", "revision", "preset", "stop_scope"})
_LISTS_OF_TEXTS = frozenset({"stop", "bad_words"})


def resolve(
    given: Mapping[str, Any],
    names: Collection[str],
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> dict[str, Any]:
    """The values of `names` that are set anywhere, the nearest source winning.

    Raises EndstopError for a value that cannot be read and for an unknown key in a file.
    """
    values = {name: value for name, value in from_file(directory).items() if name in names}
    values |= from_environment(os.environ if environment is None else environment, names)
    return values | {name: value for name, value in given.items() if name in names}


def from_environment(environment: Mapping[str, str], names: Collection[str]) -> dict[str, Any]:
    """ENDSTOP_MAX_TOKENS=64 and so on; lists and objects as JSON, one string may stand bare."""
    values: dict[str, Any] = {}
    for name in sorted(names):
        variable = f"ENDSTOP_{name.upper()}"
        text = environment.get(variable, "")
        if text == "":
            continue
        if name in _TEXTS or (name in _LISTS_OF_TEXTS and not text.startswith("[")):
            values[name] = text
            continue
        try:
            values[name] = json.loads(text)
        except ValueError:
            raise EndstopError(f"{variable} is {text!r}, which is no number, true, false or JSON.") from None
    return values


def from_file(directory: Path | None = None) -> dict[str, Any]:
    """Options from the nearest endstop.toml, or pyproject.toml with [tool.endstop], `directory` upwards."""
    start = Path.cwd() if directory is None else directory
    for place in (start, *start.parents):
        own = place / "endstop.toml"
        if own.is_file():
            return _checked(own, _read(own))
        project = place / "pyproject.toml"
        if project.is_file():
            table = _read(project).get("tool", {}).get("endstop")
            if table is not None:
                return _checked(project, table)
    return {}


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EndstopError(f"{path} cannot be read as TOML: {error}.") from error


def _checked(path: Path, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise EndstopError(f"{path}: tool.endstop must be a table.")
    values = {str(key).replace("-", "_"): value for key, value in table.items()}
    unknown = sorted(values.keys() - NAMES)
    if unknown:
        raise EndstopError(
            f"{path}: unknown option {', '.join(unknown)}; known are {', '.join(sorted(NAMES))}."
        )
    return values
