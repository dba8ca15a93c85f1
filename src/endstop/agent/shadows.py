"""Modules of Python that would be imported in the place of others: of the runner's, and of the tests."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection

# Loaded by Python's runners before any test: a module of the same name in the workspace would come first.
_RUNNER_MODULES = frozenset(
    [
        "pytest",
        "_pytest",
        "py",
        "pluggy",
        "iniconfig",
        "packaging",
        "exceptiongroup",
        "tomli",
        "pygments",
        "colorama",
        "xdist",
        "execnet",
        "pytest_cov",
        "coverage",
        "pytest_asyncio",
        "pytest_timeout",
        "junitparser",
    ]
)
# Of the standard library, what no runner loads: an exercise may well be called so.
_NOT_LOADED = frozenset(
    [
        "calendar",
        "statistics",
        "queue",
        "sched",
        "cmd",
        "code",
        "graphlib",
        "wave",
        "turtle",
        "chunk",
        "this",
        "fractions",
        "cmath",
        "poplib",
        "mailbox",
        "binhex",
        "aifc",
        "crypt",
        "bdb",
        "audioop",
        "sndhdr",
        "imghdr",
        *("profile", "pstats", "trace", "resource", "shelve", "dbm", "netrc", "syslog", "symtable"),
        *("smtplib", "ftplib", "imaplib", "nntplib", "telnetlib", "mailcap", "xmlrpc", "wsgiref"),
        *("cgi", "colorsys", "filecmp", "fileinput", "plistlib", "webbrowser", "tkinter", "curses"),
        *("venv", "zipapp", "modulefinder", "pyclbr", "tabnanny", "sunau", "uu", "xdrlib"),
    ]
)
_MODULE = re.compile(
    r"(?:(.*)/)?((?!__init__\.)[^/.]+)(?:\.(?:py|pyc|[\w.-]*so|pyd)|/__init__\.[^/]+)", re.IGNORECASE
)
_EXTENSION = re.compile(r"(.*/)?([^/.]+)\.(?:[\w-]+\.)*(?:so|pyd)", re.IGNORECASE)
_PACKAGE = re.compile(r"(.*/)?([^/]+)/__init__\.[^/]+", re.IGNORECASE)


def comes_before_the_runner(path: str, tops: Collection[str] = ()) -> bool:
    """Whether a module would be imported in the place of one that the runner loads. `tops`: directories,
    besides the top and src, from which modules are imported."""
    found = _MODULE.fullmatch(path)
    if found is None or (found.group(1) or "") not in ("", "src", *tops):
        return False
    name = found.group(2)
    return name in _RUNNER_MODULES or (name in sys.stdlib_module_names and name not in _NOT_LOADED)


def protected_modules(before: Collection[str], protects: Callable[[str], bool]) -> set[str]:
    """Names with their directory under which something protected is imported that another module could come
    before: modules (`tests/test_a.py`), and directories of tests without an __init__ (`tests/`)."""
    free: dict[str, bool] = {}
    for path in before:
        is_protected = protects(path)
        for place in [place for place, char in enumerate(path) if char == "/"]:
            free[path[: place + 1]] = free.get(path[: place + 1], True) and is_protected
    directories = {name for name, whole in free.items() if whole and f"{name}__init__.py" not in before}
    return {path for path in before if path.endswith(".py") and protects(path)} | directories


def stands_before(path: str, modules: Collection[str]) -> bool:
    """Whether a new module would be imported in the place of one of `protected_modules`: a package or an
    extension in that of a module, a module in that of a directory."""
    if (found := _PACKAGE.fullmatch(path)) is not None:
        return f"{found.group(1) or ''}{found.group(2)}.py" in modules
    found = _EXTENSION.fullmatch(path)
    if found is None and not path.endswith(".py"):
        return False
    name = f"{found.group(1) or ''}{found.group(2)}" if found is not None else path.removesuffix(".py")
    return f"{name}/" in modules or (found is not None and f"{name}.py" in modules)
