"""Files of a project that pytest obeys, though no pattern tells them from others: plugins and options files
that are named by the command, by configuration or by a conftest."""

from __future__ import annotations

import re
from collections.abc import Iterator

from endstop.agent.tree import Trees

_PLUGIN_OPTION = re.compile(r"(?:^|[\s\"'=,\[])-p[\s=\"',]*(?!no:)([A-Za-z_][\w.]*)")
_FILE_OPTION = re.compile(r"(?:^|\s)(?:-c|--config-file)[\s=]+([^\s;&|]+)")
_PLUGINS = re.compile(r"^pytest_plugins\b[^=\n]*\+?=(.*?)(?:^\S|\Z)", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"[\"']([A-Za-z_][\w.]*)[\"']")
_CONFIGURATION = frozenset(
    ("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")
)


def files_pytest_obeys(trees: Trees, tree: str, command: str) -> list[str]:
    """Paths of a tree: modules that are loaded as plugins, and the options file that the command names."""
    paths = trees.paths(tree)
    named = {_plain(name) for name in _FILE_OPTION.findall(command)}
    plugins = set(_PLUGIN_OPTION.findall(command))
    for path in paths:
        name = path.rpartition("/")[2]
        if name in _CONFIGURATION:
            plugins.update(_PLUGIN_OPTION.findall(_text(trees, tree, path)))
        elif name == "conftest.py" or (name.startswith("test_") and name.endswith(".py")):
            plugins.update(_listed(_text(trees, tree, path)))
    modules = {plugin.replace(".", "/") for plugin in plugins}
    ends = tuple(f"{module}{end}" for module in modules for end in (".py", "/__init__.py"))
    found = [path for path in paths if path in named or path.endswith(tuple(f"/{end}" for end in ends))]
    return sorted({*found, *(path for path in paths if path in ends)})


def _listed(text: str) -> Iterator[str]:
    """The names in `pytest_plugins = [...]`."""
    for found in _PLUGINS.findall(text):
        yield from _QUOTED.findall(found)


def _text(trees: Trees, tree: str, path: str) -> str:
    return (trees.read(tree, path) or b"").decode("utf-8", "replace")


def _plain(path: str) -> str:
    return path.strip("\"'").removeprefix("./")
