"""A user's own tools: what `@tool` made in a Python file or a module."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from endstop.agent.tool import Tool
from endstop.protocol.errors import EndstopError


def load_tools(place: str | Path) -> list[Tool]:
    """The tools at the top of a Python file or of an importable module, in the order in which they stand.

    Its code runs here, with this process's rights. Raises EndstopError where it cannot be imported or holds
    no tool.
    """
    text = str(place)
    module = _from_file(Path(place)) if text.endswith(".py") or isinstance(place, Path) else _by_name(text)
    tools = [value for name, value in vars(module).items() if isinstance(value, Tool)]
    if not tools:
        raise EndstopError(f"{place} holds no tool: put @tool (from endstop.agent.tool) before a function.")
    return tools


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise EndstopError(f"{path} is no Python file with tools.")
    # Two files of one name are two modules.
    name = f"endstop_tools_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EndstopError(f"{path} is no Python file with tools.")
    module = importlib.util.module_from_spec(spec)
    # Types of parameters are looked up through it.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise EndstopError(f"{path} cannot be imported: {type(error).__name__}: {error}.") from error
    return module


def _by_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise EndstopError(f"{name} cannot be imported: {type(error).__name__}: {error}.") from error
