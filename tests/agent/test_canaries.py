"""The gate's own tests in the runs of each runner: where they are, and what they notice."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from endstop.agent.bench.workspaces import CARGO, GO, NODE
from endstop.agent.canary import canary_problem, failed_in, is_reported, others_missing
from endstop.agent.decisions import TestReport, VerifierRun
from endstop.agent.report import without_parameters
from endstop.agent.task import VerifySettings
from endstop.agent.verifiers import VERIFIERS
from endstop.agent.verifiers.python_canary import put_python_tests
from endstop.agent.verifiers.verifier import Canary, Place
from tests.agent.projects import BUG, FIX, SANDBOX, Project, project

TOKEN = "abc123"
FAILS, PASSES = f"test_{TOKEN}_fails", f"test_{TOKEN}_passes"


def placed(tmp_path: Path, files: Mapping[str, str]) -> Place:
    root, gate = tmp_path / "export", tmp_path / "gate"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    gate.mkdir()
    return Place(root, "/workspace", gate, Path("REPORT"), frozenset(files))


def prepared(name: str, place: Place, canary: Canary, command: str) -> str:
    verifier = VERIFIERS[name]  # type: ignore[index]
    return verifier.prepare(VerifySettings(command=command), place, canary, {}).command


def ran(passed: Iterable[str] = (), failed: Iterable[str] = (), skipped: Iterable[str] = ()) -> VerifierRun:
    report = TestReport(frozenset(passed), frozenset(failed), frozenset(skipped))
    return VerifierRun(command="x", exit_code=1, output="", seconds=1.0, report=report)


def test_what_may_become_of_it() -> None:
    canary = Canary("x", TOKEN)
    good = {f"a::{PASSES}"}
    assert canary_problem(ran(good, {f"a::{FAILS}"}, {f"b::{FAILS}"}), canary, exit_tells=True) == ""
    assert "reported as passed" in canary_problem(
        ran({*good, f"b::{FAILS}"}, {f"a::{FAILS}"}), canary, exit_tells=True
    )
    assert "reported as skipped" in canary_problem(ran(good, set(), {f"a::{FAILS}"}), canary, exit_tells=True)
    assert "not reported" in canary_problem(ran(good), canary, exit_tells=True)
    assert is_reported(ran(set(), set(), {f"a::{FAILS}"}), canary)
    assert not is_reported(ran({"a::b"}), canary)
    failed = {f"src/lib.rs::{FAILS}", f"src/lib.rs::{FAILS}#2", "tests/a.rs::other"}
    assert failed_in(ran(set(), failed), canary, lambda test: test.partition("::")[0]) == {
        "src/lib.rs",
        "src/lib.rs#2",
    }


def test_tests_that_did_not_run_with_it() -> None:
    canary = Canary("x", TOKEN)
    first = ran({"a::x", "a::y[1]", "b::z"}, {"a::failed"}, {"a::skipped"})
    second = ran({"a::y[2]", f"a::{PASSES}"}, {"b::z", f"a::{FAILS}"})
    assert others_missing(first, second, canary, without_parameters) == {"a::x"}
    assert others_missing(first, ran({"a::x", "a::y", "b::z"}), canary, without_parameters) == set()


@pytest.mark.parametrize(
    "command", ["python -m pytest -q", "python -m pytest -q tests", "pytest tests/test_calc.py"]
)
@pytest.mark.parametrize("mode", ["plugin", "conftest"])
def test_pytest_collects_what_the_command_names(tmp_path: Path, command: str, mode: str) -> None:
    """Its versions 8 leave out the other files of a directory of which one is named as well."""
    hook = "\n\ndef pytest_collection(session):\n    print('PATHS', *session.config.args)\n"
    made = project(tmp_path, {**BUG, "conftest.py": BUG["conftest.py"] + hook}, command)
    made.verification.start()
    first = made.verify(dict(FIX)).runs[0]
    second, canary = made.verification._run_with_canary(made.trees.snapshot(), mode, first)
    [paths] = [line for line in second.output.splitlines() if line.startswith("PATHS")]
    named = command.partition("pytest")[2].removeprefix(" -q").strip()
    assert paths == f"PATHS {named or '/workspace'}"
    assert canary_problem(second, canary, exit_tells=True) == ""
    assert second.report is not None
    assert {test for test in second.report.passed if canary.token not in test} == {
        "tests/test_calc.py::test_add",
        "tests/test_calc.py::test_zero",
    }
    # One in a file of its own, as a function and a method, and one in the module of the project's tests.
    assert len({test for test in second.report.failed if test.endswith("_fails")}) == 3


def test_go_has_one_in_each_package(tmp_path: Path) -> None:
    place = placed(
        tmp_path,
        {
            "a/a_test.go": "// Package a.\npackage a_test\n",
            "b/x_test.go": "//go:build never\n\npackage b\n",
            "b/y_test.go": "package b\n",
            "c/c.go": "package c\n",
            "testdata/z_test.go": "package z\n",
            "vendor/v/v_test.go": "package v\n",
            "_old/o_test.go": "package o\n",
        },
    )
    assert prepared("go", place, Canary("beside", TOKEN), "go test ./...").count("go test ./...") == 1
    put = {str(path.relative_to(place.root)) for path in place.root.rglob(f"canary_{TOKEN}*")}
    assert put == {f"a/canary_{TOKEN}_test.go", f"b/canary_{TOKEN}_test.go"}
    text = (place.root / f"a/canary_{TOKEN}_test.go").read_text()
    assert text.startswith("package a_test\n")
    assert f"func Test_{FAILS}(" in text


def test_cargo_has_one_in_each_file_with_tests(tmp_path: Path) -> None:
    files = {
        "src/lib.rs": "pub mod ops;\n",
        "src/ops.rs": "#[cfg(test)]\nmod tests {\n    #[tokio::test]\n    async fn a() {}\n}",
        "tests/a.rs": "#[test]\nfn a() {}\n",
    }
    place = placed(tmp_path, files)
    canary = Canary("appended", TOKEN)
    assert prepared("cargo", place, canary, "cargo test --lib") == "cargo test --no-fail-fast --lib"
    assert (place.root / "src/lib.rs").read_text() == files["src/lib.rs"]
    for name in ("src/ops.rs", "tests/a.rs"):
        text = (place.root / name).read_text()
        assert text.startswith(files[name])
        assert f"fn {FAILS}()" in text
    assert (
        prepared("cargo", place, canary, "cargo +nightly t --no-fail-fast")
        == "cargo +nightly t --no-fail-fast"
    )


@pytest.mark.parametrize("name", ["jest", "vitest"])
def test_jest_and_vitest_have_one_in_each_file_that_ran(tmp_path: Path, name: str) -> None:
    place = placed(tmp_path, {"a.test.js": "test('a', () => {}); // end", "b.test.js": "", "calc.js": ""})
    canary = Canary("inside", TOKEN, "a.test.js", ("a.test.js",))
    assert prepared(name, place, canary, f"npx {name}").endswith(" --bail=0")
    text = (place.root / "a.test.js").read_text()
    assert text.startswith("test('a', () => {}); // end\n")
    assert f'test("{FAILS}", ' in text
    assert ('import * as canary_abc123 from "vitest";' in text) == (name == "vitest")
    assert (place.root / "b.test.js").read_text() == ""


# What stands in a test's place in both runners, and what asserts.
_HARNESS = """
const results = [];
globalThis.test = (name, body) => {
  try { body(); results.push(name + ' ok'); } catch { results.push(name); }
};
const fails = (holds) => { if (!holds) throw new Error('no'); };
globalThis.expect = (value) => ({
  not: { toBe: (other) => fails(value !== other) }, toBe: (other) => fails(value === other),
  toEqual: (other) => fails(JSON.stringify(value) === JSON.stringify(other)),
  toStrictEqual: (other) => fails(value === other), toBeFalsy: () => fails(!value),
  toBeTruthy: () => fails(value), toThrow: () => fails(false), toBeCloseTo: (other) => fails(value === other),
  toContain: () => fails(false), toMatch: () => fails(false), toHaveLength: () => fails(false),
  toBeUndefined: () => fails(value === undefined),
});
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
@pytest.mark.parametrize(
    ("product", "passes"),
    [
        ("", False),
        ("globalThis.expect = () => new Proxy({}, { get: () => () => {} });", True),
        ("const given = test; globalThis.test = (name) => given(name, () => {});", True),
        ("const e = expect; globalThis.expect = (v) => ({ ...e(v), toThrow: () => {} });", True),
    ],
)
def test_it_hears_expectations_that_say_nothing(tmp_path: Path, product: str, passes: bool) -> None:
    place = placed(tmp_path, {"a.test.js": f"{_HARNESS}{product}"})
    prepared("jest", place, Canary("inside", TOKEN, "a.test.js", ("a.test.js",)), "npx jest")
    with (place.root / "a.test.js").open("a") as file:
        file.write("console.log(JSON.stringify(results));\n")
    done = subprocess.run(["node", "a.test.js"], cwd=place.root, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f'["{PASSES} ok","{FAILS}{" ok" if passes else ""}"]', done.stderr


@pytest.mark.parametrize(
    ("product", "heard"),
    [
        ("", True),
        ("import unittest; unittest.TestCase.assertLess = lambda *_: None", False),
        ("from unittest.mock import NonCallableMock as M; M.assert_not_called = lambda _: None", False),
        ("import builtins; builtins.all = lambda _: True", False),
        (
            "import builtins; g = compile; builtins.compile = lambda *a, **k: g(*a, **{**k, 'optimize': 1})",
            False,
        ),
        ("import pytest; pytest.fail = print", False),
        ("import pytest; pytest.warns = __import__('contextlib').nullcontext", False),
        ("import math; math.isclose = lambda *_: True", False),
    ],
)
def test_python_hears_assertions_that_say_nothing(tmp_path: Path, product: str, heard: bool) -> None:
    place = placed(tmp_path, {})
    put_python_tests(Canary("runner", TOKEN), place, place.gate / "canary.py")
    program = f"{product}\nimport math, pytest, canary\nprint(canary.are_heard())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=place.gate, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split()[-1:] == [str(heard)], done.stderr


def test_a_module_that_is_skipped_or_has_broken_fixtures_keeps_the_canary(tmp_path: Path) -> None:
    files = {
        **BUG,
        "tests/test_later.py": (
            "import pytest\n\npytestmark = pytest.mark.skip\n\n\ndef test_later():\n    pass\n"
        ),
        "tests/test_broken.py": (
            "import pytest\n\nfrom calc import add\n\n\n"
            "@pytest.fixture(autouse=True, scope='module')\ndef ready():\n    assert add(1, 1) == 2\n\n\n"
            "def test_ready():\n    pass\n"
        ),
    }
    made = project(tmp_path, files)
    baseline = made.verification.start()
    assert (baseline.canary, baseline.notes) == ("plugin", ())
    verdict = made.verify(dict(FIX))
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")


def node(tmp_path: Path, files: dict[str, str]) -> Project:
    return project(tmp_path, {**NODE.files, **files}, "node --test")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_every_process_of_node_has_it(tmp_path: Path) -> None:
    other = "require('node:test')('other', () => {});\n"
    made = node(tmp_path, {"test/other.test.js": other})
    assert made.verification.start().canary_units == ("", "#2")
    right = NODE.files["calc.js"].replace("a - b", "a + b")
    assert made.verify({"calc.js": right}).code == "PASS"
    # One process writes what another one reported, and is gone before its canary is.
    forged = (
        "const code = `const { test } = require('node:test');`\n"
        "  + ['adds', 'adds nothing'].map((name) => `test('${name}', () => {});`).join('');\n"
        "const env = { ...process.env, NODE_OPTIONS: '' };\n"
        "const made = require('child_process').spawnSync(process.execPath, ['-e', code], { env });\n"
        "require('fs').writeSync(1, made.stdout);\nprocess.exit(0);\n"
    )
    verdict = made.verify({"calc.js": forged})
    assert verdict.code == "VERIFY_FAILED"
    assert (
        verdict.runs[0].canary == "the one that must fail was not reported in every process that runs tests"
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("go") is None, reason="no go")
@pytest.mark.parametrize("loads", [True, False])
def test_go(tmp_path: Path, loads: bool) -> None:
    files = {
        **GO.files,
        "other/o_test.go": 'package other\n\nimport "testing"\n\nfunc TestO(t *testing.T) {}\n',
    }
    if not loads:
        files = {**GO.files, "calc.go": "package calc\n\nfunc"}
    made = project(tmp_path, files, "go test ./...", timeout=300.0)
    baseline = made.verification.start()
    expected = ("example.com/calc", "example.com/calc/other") if loads else ()
    assert (baseline.canary, baseline.canary_units) == ("beside" if loads else "", expected)
    verdict = made.verify({"calc.go": GO.files["calc.go"].replace("a - b", "a + b")})
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")
    forged = (
        'package calc\n\nimport (\n\t"os"\n\t"syscall"\n)\n\nfunc Add(a, b int) int {\n'
        '\tos.Stdout.WriteString("--- PASS: TestAdd (0.00s)\\nPASS\\n")\n\tsyscall.Exit(0)\n'
        "\treturn a - b\n}\n"
    )
    verdict = made.verify({"calc.go": forged})
    where = " in example.com/calc" if loads else ""
    assert (verdict.code, verdict.runs[0].canary) == (
        "VERIFY_FAILED",
        f"the one that must fail was not reported{where}",
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("rustc") is None, reason="no cargo")
@pytest.mark.parametrize(
    ("command", "broken", "canary"),
    [
        ("cargo test --offline", False, "appended"),
        ("cargo test --offline", True, ""),
        ("cargo test --offline adds", False, ""),  # a filter leaves it out
    ],
)
def test_cargo(tmp_path: Path, command: str, broken: bool, canary: str) -> None:
    done = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True)
    root = Path(done.stdout.strip())
    sandbox = replace(SANDBOX, read_only=(root,), path_entries=(f"{root}/bin",))
    wrong = CARGO.files["src/lib.rs"]
    files = {**CARGO.files, "src/lib.rs": wrong.replace("a - b", "a -")} if broken else dict(CARGO.files)
    made = project(tmp_path, files, command, timeout=300.0, sandbox=sandbox)
    baseline = made.verification.start()
    assert baseline.canary == canary
    assert baseline.canary_units == (("src/lib.rs", "tests/adds.rs") if canary else ())
    assert made.verify({"src/lib.rs": wrong.replace("a - b", "a + b")}).code == "PASS"
    forged = wrong.replace(
        "    a - b",
        "    if a == 2 {\n        use std::io::Write;\n"
        '        let told = "test adds ... ok\\n\\ntest result: ok. 1 passed; 0 failed; 0 ignored;\\n";\n'
        "        std::io::stdout().write_all(told.as_bytes()).unwrap();\n"
        "        std::process::exit(0)\n    }\n    a - b",
    )
    if "adds" not in command:
        verdict = made.verify({"src/lib.rs": forged})
        assert verdict.code == "VERIFY_FAILED"
        # How it is noticed depends on where its lines come to stand among those of the canary beside it.
        assert verdict.runs[0].canary not in ("ok", "none")
