"""go test: its events as JSON by a `go` of the gate's own in PATH, so that `make test` and the like are
reached. Not by GOFLAGS alone: `go list` and `go vet` would write JSON as well."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping

from endstop.agent.decisions import TestReport
from endstop.agent.report import Status, UnreadableReport, read_bounded, test_report
from endstop.agent.task import VerifySettings
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
    passing,
)

PROTECTED = ("*_test.go", "tests/*", "test/*", "go.work", *EXPECTED_DATA)
_PACKAGE = re.compile(rb"^package (\w+)", re.MULTILINE)
_CONDITION = re.compile(rb"^//\s*(?:go:build|\+build)\b", re.MULTILINE)
_CANARY = """package {package}

import canary "testing"

func Test_{passes}(t *canary.T) {{}}

func Test_{fails}(t *canary.T) {{ t.Fatal("the gate expects this test to fail") }}
"""
_BUILD_FAILED = re.compile(r"^FAIL\s+(\S+) \[(?:build|setup) failed\]", re.MULTILINE)

# A result that comes behind output without an end of line: Go tells no event for it before 1.20.
_RESULT = re.compile(r"[^\n]--- (PASS|FAIL|SKIP): (\S+) \(\d")
_STATUS: Mapping[str, Status] = {"pass": "passed", "fail": "failed", "skip": "skipped"}

_FLAGS = "-json -count=1"
_GO = """\
#!/bin/sh
# Put here by the gate: tells the events of tests, and leaves every other command alone.
case "$GOFLAGS" in
  *%(flags)s*) GOFLAGS="${GOFLAGS%%%%%(flags)s*}${GOFLAGS#*%(flags)s}" ;;
esac
IFS=:
for directory in $PATH; do
  [ "$directory" = %(gate)s ] || [ ! -x "$directory/go" ] || break
done
if [ "$1" = test ]; then
  shift
  set -- test -json -count=1 "$@"
fi
exec "$directory/go" "$@"
"""


def _prepare(
    settings: VerifySettings, place: Place, canary: Canary | None, variables: Mapping[str, str]
) -> Prepared:
    place.put(place.gate / "go", _GO % {"gate": shlex.quote(str(place.gate)), "flags": f"'{_FLAGS}'"})
    (place.gate / "go").chmod(0o755)
    # Apart from stderr, which would come in the middle of a line.
    if canary is not None:
        _put_canary(place, canary)
    command = (
        f"PATH={shlex.quote(str(place.gate))}:$PATH\n"
        f"{{ {command_of(settings)}\n}} >{shlex.quote(str(place.report))}"
    )
    # Where a command names Go by its path, GOFLAGS are what is left.
    environment = {"GOFLAGS": appended(variables, "GOFLAGS", _FLAGS)}
    for name, value in (("GOTOOLCHAIN", "local"), ("GOPROXY", "off")):
        if name not in variables:
            environment[name] = value
    return Prepared(command, environment)


def _put_canary(place: Place, canary: Canary) -> None:
    """The gate's tests in every package that has some."""
    names: dict[str, bytes] = {}
    for path in sorted(place.files):
        directory = path.rpartition("/")[0]
        left_out = any(part in ("testdata", "vendor") or part[0] in "_." for part in path.split("/"))
        file = place.within(path)
        if (
            not path.endswith("_test.go")
            or left_out
            or directory in names
            or file is None
            or file.is_symlink()
        ):
            continue
        content = file.read_bytes()
        # One with conditions may not be a part of the package here.
        if (found := _PACKAGE.search(content)) and not _CONDITION.search(content):
            names[directory] = found.group(1)
    for directory, name in names.items():
        text = _CANARY.format(package=name.decode(), passes=passing(canary), fails=failing(canary))
        place.put(place.root / directory / f"canary_{canary.token}_test.go", text)


def _events(finished: Finished) -> Iterator[dict[str, str] | str]:
    """Events, and lines that are none."""
    for line in read_bounded(finished.place.report).decode("utf-8", "replace").splitlines():
        try:
            event = json.loads(line) if line.startswith("{") else line
        except ValueError:
            event = line
        yield event if isinstance(event, dict) and "Action" in event else line


def _read(finished: Finished) -> TestReport:
    results: list[tuple[str, Status]] = []
    begun: dict[str, bool] = {}
    events = 0
    for event in _events(finished):
        if isinstance(event, str):
            results += [(package, "failed") for package in _BUILD_FAILED.findall(event)]
            continue
        events += 1
        package, test, action = event.get("Package", ""), event.get("Test"), event["Action"]
        name = f"{package}::{test}" if test else package
        if action == "run" and test:
            begun[name] = False
        elif action in _STATUS and test:
            begun[name] = True
            results.append((name, _STATUS[action]))
        elif action == "output" and (told := _RESULT.search(event.get("Output", ""))):
            name = f"{package}::{told.group(2)}"
            if begun.get(name) is False:
                begun[name] = True
                results.append((name, _STATUS[told.group(1).lower()]))
        elif action == "fail":
            begun.setdefault(name, True)
            results += [(name, "failed")] if not _has_failed(package, results) else []
    # Begun and never ended: the process was left in the middle of a test.
    results += [(name, "failed") for name, ended in begun.items() if not ended]
    if not events and not results:
        raise UnreadableReport("there are no events of `go test` in the output")
    return test_report(results)


def _has_failed(package: str, results: list[tuple[str, Status]]) -> bool:
    return any(status == "failed" and name.startswith(package + "::") for name, status in results)


def _text(finished: Finished) -> str:
    try:
        events = list(_events(finished))
    except UnreadableReport:
        events = []
    told = "".join(e + "\n" if isinstance(e, str) else e.get("Output", "") for e in events)
    return finished.output.decode("utf-8", "replace") + told


GO = Verifier(
    "go",
    PROTECTED,
    _prepare,
    _read,
    canary_modes=("beside",),
    unit=lambda test: test.partition("::")[0],
    plain=r"\s*go test(?:\s+(?:\./\S*|\.|--?(?!run|skip|list|test\.)\S+))*\s*",
    text=_text,
)
