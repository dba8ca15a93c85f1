"""JavaScript: Node's own runner, Jest and Vitest."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from endstop.agent.decisions import TestReport
from endstop.agent.report import (
    Status,
    UnreadableReport,
    numbered,
    read_all_junit,
    read_bounded,
    test_report,
)
from endstop.agent.task import VerifySettings
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
    last_command,
    passing,
)
from endstop.protocol.errors import EndstopError

PROTECTED = (
    *("test/*", "tests/*", "__tests__/*", "__mocks__/*", *EXPECTED_DATA),
    *("*.test.[cm]js", "*.test.js", "*.test.jsx", "*.test.[cm]ts", "*.test.ts", "*.test.tsx"),
    *("*.spec.[cm]js", "*.spec.js", "*.spec.jsx", "*.spec.[cm]ts", "*.spec.ts", "*.spec.tsx"),
    *("*-test.js", "*-test.[cm]js", "*_test.js", "*_test.[cm]js", "test-*.js", "test-*.[cm]js"),
    *("test.js", "test.[cm]js", "package.json", ".npmrc", ".yarnrc*", ".node-version"),
)
_CONFIGURED = (
    *("jest.config.*", "jest.setup.*", "setupTests.*", "vitest.config.*", "vitest.workspace.*"),
    *("vitest.setup.*", "vite.config.*", "babel.config.*", ".babelrc*", ".swcrc"),
    *("node_modules/.bin/*", "node_modules/*jest*/*", "node_modules/*vitest*/*"),
)

_REPORTER = re.compile(r"--test-reporter(?![\w-])")
_DESTINATION = re.compile(r"--test-reporter-destination(?![\w-])")
# Behind the path of a file whose process ended before its tests.
ENDED_WITHOUT = " (ended without results)"

# Loaded into the runner itself, which a command may start several times, each time with the same report.
_KEPT = """\
if (process.execArgv.includes("--test") && !process.env.NODE_TEST_CONTEXT) {
  const { renameSync } = require("node:fs");
  process.on("exit", () => {
    try {
      renameSync(%(report)s, `${%(report)s}.${process.pid}`);
    } catch {}
  });
}
"""
# Loaded into each process that Node's runner starts, so that the project's code is there too.
_PRELOADED = """\
if (process.env.NODE_TEST_CONTEXT && !process.env.%(once)s) {
  // Not in processes that the tests start.
  process.env.%(once)s = "1";
  const { test } = require("node:test");
  const assert = require("node:assert");
  const later = setTimeout;
  const given = [require("node:test"), assert, assert.strict].map((module) => [module, { ...module }]);
  const main = require("node:url").pathToFileURL(process.argv[1] || ".").href;
  const names = [
    ["strictEqual", 1, 2], ["equal", 1, 2], ["deepStrictEqual", [1], [2]], ["deepEqual", [1], [2]],
    ["notStrictEqual", 1, 1], ["ok", false], ["match", "a", /b/], ["throws", () => {}],
  ];
  test(%(passes)s, () => {});
  test(%(fails)s, async () => {
    // Product code could make assertions say nothing: wait until it is loaded. A file may wait for its tests.
    await Promise.race([import(main).catch(() => {}), new Promise((done) => later(done, 500))]);
    for (const [module, before] of given) {
      if (Object.keys(before).some((key) => module[key] !== before[key])) return;
    }
    for (const module of [assert, assert.strict]) {
      for (const [name, ...values] of names) {
        try {
          module[name](...values);
        } catch {
          continue;
        }
        return;
      }
    }
    throw new Error("the gate expects this test to fail");
  });
}
"""
# Behind the tests of each file: Jest and Vitest give every file a context of its own. On one line, so that
# one comment keeps TypeScript quiet.
_INSIDE = """
{imports}
// @ts-ignore
;(() => {{ const {{ test, expect }} = {given}; \
const silent = (check) => {{ try {{ check(); return true; }} catch {{ return false; }} }}; \
const assert = process.getBuiltinModule?.("assert"); \
const checks = [() => expect(1).toBe(2), () => expect([1]).toEqual([2]), () => expect(1).toStrictEqual(2), \
() => expect(1).not.toBe(1), () => expect(true).toBeFalsy(), () => expect(false).toBeTruthy(), \
() => expect(() => {{}}).toThrow(), () => expect(1).toBeCloseTo(2), () => expect([]).toContain(1), \
() => expect("a").toMatch(/b/), () => expect([]).toHaveLength(1), () => expect(1).toBeUndefined(), \
...(assert ? [() => assert.strictEqual(1, 2), () => assert.deepEqual([1], [2]), () => assert(false)] : [])]; \
test({passes}, () => {{ expect(1).toBe(1); }}); \
test({fails}, () => {{ if (checks.some(silent)) {{ expect(1).toBe(1); return; }} \
throw new Error("the gate expects this test to fail"); }}); }})();
"""
_OF_JEST = '(globalThis.test && globalThis.expect ? globalThis : require("@jest/globals"))'
# Take flags for their own, whatever the target's name is.
_KEEP_FLAGS = ("make", "gmake", "just", "task", "rake")
_AT_THE_END = "the flags that ask for a report are added at its end"
_TEST_FILE = """\
%(imports)stest(%(passes)s, () => {});
test(%(fails)s, () => { throw new Error("the gate expects this test to fail"); });
"""


def _prepare_node(
    settings: VerifySettings, place: Place, canary: Canary | None, variables: Mapping[str, str]
) -> Prepared:
    command = command_of(settings)
    started = started_by(command, place.root)
    text = started.text if started else ""
    own, told = len(_REPORTER.findall(text)), len(_DESTINATION.findall(text))
    options = ["--test-reporter=junit", f"--test-reporter-destination={place.report}"]
    if not own:
        options = ["--test-reporter=spec", "--test-reporter-destination=stdout", *options]
    elif not told:
        # A single reporter needs no destination, but several do.
        options.append("--test-reporter-destination=stdout")
    keep = place.gate / "keep.cjs"
    place.put(keep, _KEPT % {"report": json.dumps(str(place.report))})
    options.append(f"--require={keep}")
    if canary is not None:
        script = place.gate / f"canary_{canary.token}.cjs"
        place.put(script, _PRELOADED % {**_quoted(canary), "once": f"CANARY_{canary.token}"})
        options.append(f"--require={script}")
    value = " ".join(json.dumps(option) if " " in option else option for option in options)
    return Prepared(command, {"NODE_OPTIONS": appended(variables, "NODE_OPTIONS", value)})


def _read_node(finished: Finished) -> TestReport:
    report = read_all_junit(finished.place.report, suites=True)
    results: list[tuple[str, Status]] = []
    for status, tests in (
        ("passed", report.passed),
        ("failed", report.failed),
        ("skipped", report.skipped),
    ):
        # Node escapes quotation marks twice.
        for test in (test.replace("&quot;", '"') for test in tests):
            path = _relative(test, finished.place)
            # A file of its own name had no tests to report, though the canary was in its process.
            if path is not None and finished.canary is not None and status == "passed":
                results.append((path + ENDED_WITHOUT, "failed"))
            else:
                results.append((path or test, status))  # type: ignore[arg-type]
    return test_report(results)


def _prepare_jest(
    settings: VerifySettings, place: Place, canary: Canary | None, variables: Mapping[str, str]
) -> Prepared:
    return _with_flags(settings, place, canary, ["--json", f"--outputFile={place.report}"], "--bail=0")


def _prepare_vitest(
    settings: VerifySettings, place: Place, canary: Canary | None, variables: Mapping[str, str]
) -> Prepared:
    flags = ["--reporter=default", "--reporter=json", f"--outputFile.json={place.report}"]
    return _with_flags(settings, place, canary, flags, "--bail=0")


def _with_flags(
    settings: VerifySettings, place: Place, canary: Canary | None, flags: list[str], no_bail: str
) -> Prepared:
    command = command_of(settings)
    words = last_command(command, _AT_THE_END)
    if started_by(command, place.root) and not ends_with_runner(command, place.root):
        raise EndstopError(
            f"the command `{command}` must be a single one without pipes or `&&`: {_AT_THE_END}"
        )
    of_vitest = flags[0] == "--reporter=default"
    if canary is not None and canary.mode == "inside":
        imports, given = "", _OF_JEST
        if of_vitest:
            given = f"canary_{canary.token}"
            imports = f'import * as {given} from "vitest";'
        text = _INSIDE.format(imports=imports, given=given, **_quoted(canary))
        for path in canary.files:
            if (file := place.within(path)) is not None and not file.is_symlink():
                file.write_bytes(file.read_bytes() + text.encode())
        flags = [*flags, no_bail]
    elif canary is not None:
        test = _canary_file(canary)
        imports = 'import { test } from "vitest";\n' if of_vitest else ""
        place.put(place.root / test, _TEST_FILE % {**_quoted(canary), "imports": imports})
        flags = [*flags, no_bail]
        if canary.mode == "named":
            flags.append(str(test))
    # npm keeps for itself what does not stand behind two dashes.
    separator = " -- " if words and words[0] == "npm" and "--" not in words else " "
    environment = {"CI": "true", "NO_COLOR": "1"}
    return Prepared(command + separator + shlex.join(flags), environment)


def ends_with_runner(command: str, workspace: Path) -> bool:
    """Whether what is added to a command reaches the runner that it starts."""
    try:
        words = last_command(command, _AT_THE_END)
    except EndstopError:
        return False
    return words[0] not in _KEEP_FLAGS and started_by(shlex.join(words), workspace) is not None


def _canary_file(canary: Canary) -> PurePosixPath:
    """A file whose name fits the patterns that the file beside it fits."""
    beside = PurePosixPath(canary.beside or "canary.test.js")
    _, *endings = beside.name.split(".")
    return beside.with_name(".".join([f"canary_{canary.token}", *endings]))


def _read_json(finished: Finished) -> TestReport:
    try:
        told = json.loads(read_bounded(finished.place.report))
        return test_report(numbered(_results(told, finished.place)))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableReport(f"it is no report of Jest's form: {error!r}") from error
    except ValueError as error:
        if isinstance(error, UnreadableReport):
            raise
        raise UnreadableReport(f"it is no JSON: {error}") from error


def _results(told: Mapping[str, object], place: Place) -> Iterator[tuple[str, Status]]:
    suites = told["testResults"]
    assert isinstance(suites, list)
    for suite in suites:
        path = _relative(suite["name"], place) or suite["name"]
        for test in suite["assertionResults"]:
            status: Status = {"passed": "passed", "failed": "failed"}.get(test["status"], "skipped")  # type: ignore[assignment]
            yield "::".join((path, *test["ancestorTitles"], test["title"])), status
        if suite["status"] == "failed" and not suite["assertionResults"]:
            yield path, "failed"


def _relative(path: str, place: Place) -> str | None:
    """The path in the export, where it is one."""
    inner = path.removeprefix(place.inside + "/")
    return inner if inner in place.files else None


def _quoted(canary: Canary) -> dict[str, str]:
    return {"passes": json.dumps(passing(canary)), "fails": json.dumps(failing(canary))}


NODE = Verifier(
    "node",
    PROTECTED,
    _prepare_node,
    _read_node,
    canary_modes=("preload",),
    # The report does not say which process a test ran in: as many canaries as before must be heard of.
    unit=lambda test: "",
    plain=".*",
)
JEST = Verifier(
    "jest",
    (*PROTECTED, *_CONFIGURED),
    _prepare_jest,
    _read_json,
    canary_modes=("inside", "beside", "named"),
    unit=lambda test: test.partition("::")[0],
    plain=".*",
)
VITEST = replace(JEST, name="vitest", prepare=_prepare_vitest)
