"""pytest: its JUnit report by PYTEST_ADDOPTS, so that `make test` and the like are reached too."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath

from endstop.agent.decisions import TestReport
from endstop.agent.report import read_all_junit, read_junit
from endstop.agent.task import VerifySettings
from endstop.agent.verifiers.python_canary import put_python_tests
from endstop.agent.verifiers.starting import started_by
from endstop.agent.verifiers.verifier import (
    EXPECTED_DATA,
    Canary,
    Finished,
    Place,
    Prepared,
    Verifier,
    appended,
    command_of,
    failing,
    keeping_reports,
    passing,
)

PROTECTED = (
    *("tests/*", "test/*", "test_*.py", "*_test.py", "conftest.py", *EXPECTED_DATA),
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "noxfile.py"),
    *("setup.cfg", "pyproject.toml", ".coveragerc"),
    *("sitecustomize.py", "usercustomize.py", "site-packages/*.pth", "pyvenv.cfg"),
    # Plugins are loaded out of these.
    *("*.dist-info/entry_points.txt", "*.egg-info/entry_points.txt"),
)
_SEVERAL = re.compile(
    r"(?:\bfor\b|\bwhile\b|\bxargs\b|(?:pytest|py\.test)\b.*(?:pytest|py\.test)\b)", re.DOTALL
)
_GONE_TO = re.compile(r"\b(?:cd|pushd)\s+[\"']?([\w.-][\w./-]*)")
_OWN_REPORT = re.compile(r"--junit-?xml[= ]([^\s;&|)]+)")

# Runs in the project's process, whatever version of pytest that has.
_PLUGIN = '''\
"""Put here by the gate: runs its own tests behind all of the project's."""

import os
import pathlib
import unittest.case

import pytest

CANARY = {path!r}
# A test that raises it counts as passed. unittest itself does so only for what pytest has no option for.
unittest.case._ShouldStop = ()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.option.maxfail = 0
    # The command's own paths: pytest 8 leaves out what else is in the directory of a file that is named too.
    if CANARY in config.args:
        config.args.remove(CANARY)
    if not config.args:
        here = str(config.invocation_params.dir)
        paths = config.getini("testpaths") if here == str(config.rootdir) else []
        config.args[:] = [path for path in paths if os.path.exists(path)] or [here]


def pytest_pycollect_makeitem(collector, name, obj):
    if os.path.samefile(str(collector.fspath), CANARY) and isinstance(collector, pytest.Module):
        if name in ({passes!r}, {fails!r}):
            return pytest.Function.from_parent(collector, name=name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session, config, items):
    mine = [item for item in items if os.path.samefile(str(item.fspath), CANARY)]
    mine = mine or list(session.genitems(canary_module(session)))
    others = [item for item in items if item not in mine]
    # -k and -m are about the project's tests.
    config.pluginmanager.get_plugin("mark").pytest_collection_modifyitems(items=others, config=config)
    config.option.keyword = config.option.markexpr = ""
    items[:] = [*in_modules(others, [item for item in mine if isinstance(item.parent, pytest.Module)]), *mine]


def canary_module(session):
    if int(pytest.__version__.partition(".")[0]) >= 7:
        return pytest.Module.from_parent(session, path=pathlib.Path(CANARY))
    return pytest.Module.from_parent(session, fspath=type(session.fspath)(CANARY))


def in_modules(others, mine):
    # Behind the tests of each module one that must fail there too: what product code does to a module that
    # imports it is not seen from another one.
    last = {{item.getparent(pytest.Module): item for item in others}}
    fails = next((item.function for item in mine if item.name == {fails!r}), None)
    for item in others:
        yield item
        module = item.getparent(pytest.Module)
        if fails is not None and type(module) is pytest.Module and last[module] is item:
            setattr(module.obj, {fails!r}, fails)
            yield pytest.Function.from_parent(module, name={fails!r})
'''


def _prepare(
    settings: VerifySettings, place: Place, canary: Canary | None, variables: Mapping[str, str]
) -> Prepared:
    options = [f"--junitxml={place.report}", "-o", "junit_family=xunit1"]
    if place.lenient:
        options.append("--continue-on-collection-errors")
    environment = {}
    if canary is not None:
        directory = PurePosixPath(canary.beside).parent
        if canary.mode == "conftest":
            # Found beside the canary's file, whatever a command does to the path of imports.
            directory = directory / f"canary_{canary.token}"
        test = directory / _file_name(canary)
        path = f"{place.inside}/{test}"
        words = {"path": path, "passes": passing(canary), "fails": failing(canary)}
        put_python_tests(canary, place, place.root / test)
        if canary.mode == "conftest":
            place.put(place.root / directory / "conftest.py", _PLUGIN.format(**words))
            options.append(path)
        else:
            place.put(place.gate / f"canary_{canary.token}.py", _PLUGIN.format(**words))
            options += ["-p", f"canary_{canary.token}"]
            before = variables.get("PYTHONPATH", "")
            environment["PYTHONPATH"] = f"{before}:{place.gate}" if before else str(place.gate)
    environment["PYTEST_ADDOPTS"] = appended(variables, "PYTEST_ADDOPTS", shlex.join(options))
    command = command_of(settings)
    started = started_by(command, place.root)
    by_make = started is not None and started.by == "recipe" and _SEVERAL.search(started.text) is not None
    prepared = keeping_reports(command, place, by_make=by_make)
    return Prepared(prepared.command, {**environment, **prepared.environment})


def _file_name(canary: Canary) -> str:
    """A name that fits the patterns that the file beside it fits, since a file in a directory that is
    searched anyhow is found by its name only."""
    first, *middle = PurePosixPath(canary.beside).stem.split("_")
    return f"{first}_{canary.token}_{middle[-1]}.py" if middle else f"test_{canary.token}.py"


def _read(finished: Finished) -> TestReport:
    place = finished.place
    own = _OWN_REPORT.search(finished.settings.command or "")
    path = place.report
    if own and not path.exists():
        # The command's own option goes before ours, in the directory that it has gone to.
        name, command = own.group(1).strip("'\""), finished.settings.command or ""
        for directory in ("", *_GONE_TO.findall(command)):
            written = place.within(f"{directory}/{name}".lstrip("/"))
            if written is not None and written.exists():
                return read_junit(written, files=place.files)
    return read_all_junit(path, files=place.files)


PYTEST = Verifier("pytest", PROTECTED, _prepare, _read, canary_modes=("plugin", "conftest"))
