"""Settings, task and suite files: reading YAML and TOML, and a sentence for what does not fit in them."""

from __future__ import annotations

import difflib
import re
import reprlib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from endstop.protocol.errors import EndstopError


def read_mapping(path: Path, what: str = "settings") -> dict[str, Any]:
    """A file: TOML by its ending, else YAML (which JSON is too). Raises EndstopError with one sentence."""
    text = read_text(path)
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else read_yaml(text)
    except ValueError as error:
        raise EndstopError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise EndstopError(f"{path} holds no {what}: it must hold a mapping, not a {type(data).__name__}.")
    return data


def read_text(path: Path, what: str = "") -> str:
    """The text of a file that a person named; `what` says what it is. Raises EndstopError."""
    name = f"{what} {path}".lstrip()
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise EndstopError(f"{name} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise EndstopError(f"{name} cannot be read: line {line} is not UTF-8.") from error


def read_yaml(text: str) -> Any:
    """Raises ValueError for text that is no YAML, or that gives a key twice."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise EndstopError("YAML needs a package: pip install 'endstop[agent]'.") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        def flatten_mapping(self, node: Any) -> None:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
            if twice is not None:
                line = node.start_mark.line + 1
                raise ValueError(f"{twice} is given twice in the mapping that begins in line {line}")
            super().flatten_mapping(node)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def validation_sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault that pydantic found, as a sentence; of an unknown key the nearest known one."""
    # A name that is misspelled is the cause of one that is missing.
    fault = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"unknown key {name}; the nearest is {nearest(_without_places(name), names_of(model))}."
    if fault["type"] == "missing":
        return f"{name} is missing."
    text = fault["msg"].removeprefix("Value error, ")
    if text.startswith("has "):
        return f"{name} {text}."
    text = re.sub(r"valid dictionary( or instance of \w+)?", "mapping", text).replace("valid tuple", "list")
    text = text.replace("Tuple should", "A list should")
    return f"{name}: {text}, got {reprlib.repr(fault['input'])}."


def first_fault(error: ValidationError) -> str:
    """Where the first fault is, and of what kind."""
    fault = error.errors()[0]
    return f"{'.'.join(str(part) for part in fault['loc']) or 'all of it'}: {fault['msg']}"


def names_of(model: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted names of all settings; of what a list holds too."""
    names = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += names_of(kind, f"{prefix}{name}.")
    return names


def nearest(name: str, known: Iterable[str]) -> str:
    """The name that is spelled most alike, those in the same place first."""
    place, _, last = name.rpartition(".")

    def likeness(candidate: str) -> float:
        own_place, _, own = candidate.rpartition(".")
        return difflib.SequenceMatcher(None, last, own).ratio() + 0.3 * (place == own_place)

    return max(sorted(known), key=likeness)


def _without_places(name: str) -> str:
    """`checklist.0.id` as its name in the model: `checklist.id`."""
    return ".".join(part for part in name.split(".") if not part.isdigit())
