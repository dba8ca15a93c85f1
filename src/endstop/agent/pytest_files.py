"""What the files of a project tell about a run of Python's tests: plugins and options files that are named by
the command, by configuration or by a conftest, and which files cannot skip a test of theirs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from endstop.agent.tree import Trees

_PLUGIN_OPTION = re.compile(r"(?:^|[\s\"'=,\[])-p[\s=\"',]*(?!no:)([A-Za-z_][\w.]*)")
_FILE_OPTION = re.compile(r"(?:^|\s)(?:-c|--config-file)[\s=]+([^\s;&|]+)")
_PLUGINS = re.compile(r"^pytest_plugins\b[^=\n]*\+?=(.*?)(?:^\S|\Z)", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"[\"']([A-Za-z_][\w.]*)[\"']")
_CONFIGURATION = frozenset(
    ("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")
)
_MAY_SKIP = re.compile("skip|xfail|expectedfailure|requires", re.IGNORECASE)
_HAS_TESTS = re.compile(r"^\s*(?:async\s+)?def\s+test|^class\s+\w*Test", re.MULTILINE)
_AMONG_TESTS = re.compile(r"tests?(?:ing)?[^/]*/", re.IGNORECASE)
_IMPORT = re.compile(r"^[ \t]*(?:from|import)\b(?:[^\n(]*\([^)]*\)|[^\n]*)", re.MULTILINE)
_WORD = re.compile(r"\w+")
# What unittest names a module that it could not load.
_FAILED = "unittest.loader._FailedTest."


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


def files_without_skips(trees: Trees, tree: str, unloaded: Collection[str]) -> frozenset[str]:
    """Of test files that could not be loaded those in which, once they are, every test must run: neither they
    nor what they import from among the tests nor a conftest say a word of skipping. Of tests that never ran
    nothing else is known."""
    if not unloaded:
        return frozenset()
    paths = [path for path in trees.paths(tree) if path.endswith(".py")]
    if any(
        _MAY_SKIP.search(_text(trees, tree, path))
        for path in paths
        if path.rpartition("/")[2] == "conftest.py"
    ):
        return frozenset()
    modules = {name.removeprefix(_FAILED).replace(".", "/") + ".py" for name in unloaded if _FAILED in name}
    ends = tuple(f"/{module}" for module in modules)
    found = [path for path in paths if path in unloaded or path in modules or path.endswith(ends)]
    texts = {path: _text(trees, tree, path) for path in {*found, *filter(_AMONG_TESTS.search, paths)}}
    return frozenset(
        path
        for path in found
        if _HAS_TESTS.search(texts[path]) and not any(map(_MAY_SKIP.search, _with_imported(path, texts)))
    )


def _with_imported(path: str, texts: Mapping[str, str]) -> Iterator[str]:
    """The text of a file and of those whose modules it names in imports, and so on."""
    names = {other: other.removesuffix(".py").removesuffix("/__init__").rpartition("/")[2] for other in texts}
    waiting, seen = [path], {path}
    while waiting:
        text = texts[waiting.pop()]
        yield text
        words = {word for line in _IMPORT.findall(text) for word in _WORD.findall(line)}
        imported = {other for other, name in names.items() if name in words} - seen
        seen |= imported
        waiting += imported


def _listed(text: str) -> Iterator[str]:
    """The names in `pytest_plugins = [...]`."""
    for found in _PLUGINS.findall(text):
        yield from _QUOTED.findall(found)


def _text(trees: Trees, tree: str, path: str) -> str:
    return (trees.read(tree, path) or b"").decode("utf-8", "replace")


def _plain(path: str) -> str:
    return path.strip("\"'").removeprefix("./")
