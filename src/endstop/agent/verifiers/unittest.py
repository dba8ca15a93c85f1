"""unittest: it writes no report, so the gate's own runner stands where the command says `-m unittest`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from endstop.agent.decisions import TestReport
from endstop.agent.report import read_all_junit
from endstop.agent.task import VerifySettings
from endstop.agent.verifiers import pytest
from endstop.agent.verifiers.python_canary import put_python_tests
from endstop.agent.verifiers.verifier import (
    Canary,
    Finished,
    Place,
    Prepared,
    Verifier,
    command_of,
)
from endstop.protocol.errors import EndstopError

_RUNNER = Path(__file__).with_name("unittest_runner.py")
_MODULE = re.compile(r"-m\s+unittest(?=\s|$|[;&|)])")


def _prepare(
    settings: VerifySettings, place: Place, canary: Canary | None, variables: Mapping[str, str]
) -> Prepared:
    command = command_of(settings)
    runner = place.gate / "unittest_runner.py"
    told, count = _MODULE.subn(shlex.quote(str(runner)), command)
    if not count:
        raise EndstopError(
            f"the command `{command}` does not hold `-m unittest`, so its result cannot be read: write it as "
            "`python -m unittest ...`, or use the verifier `command` with a report"
        )
    place.put(runner, _RUNNER.read_text())
    environment = {"ENDSTOP_REPORT": str(place.report)}
    if canary is not None:
        tests = place.gate / f"canary_{canary.token}.py"
        put_python_tests(canary, place, tests)
        environment["ENDSTOP_CANARY"] = str(tests)
    return Prepared(told, environment)


def _read(finished: Finished) -> TestReport:
    return read_all_junit(finished.place.report, files=finished.place.files)


UNITTEST = Verifier("unittest", pytest.PROTECTED, _prepare, _read, canary_modes=("runner",))
