"""Verifiers besides pytest: real runs where the runner is at hand, else reports that real ones wrote."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from endstop.agent.decisions import TestReport
from endstop.agent.report import UnreadableReport
from endstop.agent.task import VerifySettings
from endstop.agent.verifiers import VERIFIERS, find_verifier, resolved, verifier_of
from endstop.agent.verifiers.verifier import Canary, Finished, Place
from endstop.protocol.errors import EndstopError
from endstop.sandbox.settings import SandboxSettings
from tests.agent.projects import project, put

REPORTS = Path(__file__).with_name("reports")

UNITTEST = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "tests/__init__.py": "",
    "tests/test_calc.py": "import unittest\nfrom calc import add\n\n\nclass TestAdd(unittest.TestCase):\n"
    "    def test_add(self):\n        with self.subTest('five'):\n"
    "            self.assertEqual(add(2, 3), 5)\n\n"
    "    def test_zero(self):\n        self.assertEqual(add(0, 0), 0)\n\n"
    "    @unittest.skip('later')\n    def test_later(self):\n        self.fail()\n",
}
HONEST = {"calc.py": "def add(a, b):\n    return a + b\n"}
ADD, ZERO = "tests/test_calc.py::TestAdd::test_add", "tests/test_calc.py::TestAdd::test_zero"


def test_unittest(tmp_path: Path) -> None:
    made = project(tmp_path, UNITTEST, "python3 -B -m unittest discover -f")
    assert made.task.verify.verifier == "unittest"
    baseline = made.verification.start()
    assert (baseline.canary, baseline.executed) == ("runner", 1)  # -f ends the run at the first failure
    assert baseline.failed == (ADD,)
    verdict = made.verify(dict(HONEST))
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")
    assert verdict.runs[0].report == TestReport(
        frozenset([ADD, ZERO]), frozenset(), frozenset(["tests/test_calc.py::TestAdd::test_later"])
    )
    for code, expected in (
        ("import os\nos._exit(0)\n", "NO_TESTS_RAN"),
        ("import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 1\n", "VERIFY_FAILED"),
        ("import unittest\ndef add(a, b): raise unittest.SkipTest\n", "NO_TESTS_RAN"),
        (
            "import unittest\ndef run(self, result=None):\n"
            "    result.startTest(self)\n    result.addSuccess(self)\n"
            "unittest.TestCase.run = run\ndef add(a, b): return 1\n",
            "VERIFY_FAILED",
        ),
        (
            "import sys\nmain = sys.modules['__main__']\n"
            "main.write = lambda told, real=main.write: real([(test, 'passed') for test, _ in told])\n"
            "main.Result.wasSuccessful = lambda self: True\ndef add(a, b): return 1\n",
            "VERIFY_FAILED",
        ),
    ):
        assert made.verify({"calc.py": code}).code == expected, code
    # A module that stands before the runner's is not loaded by the gate's own runner, and not allowed.
    made.write(
        {"unittest.py": "raise SystemExit(0)\n", "tests/__init__.py": "def load_tests(*a): return a[1]\n"}
    )
    assert made.protected_changed() == ["tests/__init__.py", "unittest.py"]


def test_unittest_errors_outside_of_tests(tmp_path: Path) -> None:
    files = {
        "calc.py": "",
        "test_new.py": "import calc\ncalc.add\n",
        "test_set.py": "import unittest, calc\n\n\nclass T(unittest.TestCase):\n    @classmethod\n"
        "    def setUpClass(cls):\n        calc.start()\n\n    def test_a(self):\n        pass\n",
        "test_old.py": "import unittest\n\n\nclass T(unittest.TestCase):\n"
        "    def test_b(self):\n        pass\n",
    }
    made = project(tmp_path, files, "python3 -m unittest")
    baseline = made.verification.start()
    assert baseline.tests == ("test_old.py::T::test_b",)
    assert baseline.failed == ("setUpClass (test_set.T)", "unittest.loader._FailedTest.test_new")
    assert made.verify({"calc.py": "add = 1\n\n\ndef start():\n    pass\n"}).code == "FEWER_TESTS"


def test_unittest_must_be_called_by_its_name(tmp_path: Path) -> None:
    made = project(tmp_path, UNITTEST, "python3 tests/test_calc.py", verifier="unittest")
    with pytest.raises(EndstopError, match="does not hold `-m unittest`"):
        made.verification.start()


NODE = {
    "package.json": '{"name": "calc", "scripts": {"test": "node --test"}}',
    "calc.js": "exports.add = (a, b) => a - b;\n",
    "test/calc.test.js": "const { test, describe, it } = require('node:test');\n"
    "const assert = require('node:assert');\nconst { add } = require('../calc.js');\n"
    "describe('add', () => {\n  it('adds', () => assert.equal(add(2, 3), 5));\n"
    "  it('zero', () => assert.equal(add(0, 0), 0));\n});\n"
    "test('later', { skip: true }, () => {});\n"
    "test('to do', { todo: true }, () => { throw new Error(); });\n",
}
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node")


@needs_node
def test_node(tmp_path: Path) -> None:
    made = project(tmp_path, NODE, "npm test")
    assert made.task.verify.verifier == "node"
    baseline = made.verification.start()
    assert (baseline.tests, baseline.failed) == (("add::adds", "add::zero"), ("add::adds",))
    assert baseline.canary == "preload"
    verdict = made.verify({"calc.js": "exports.add = (a, b) => a + b;\n"})
    assert (verdict.code, verdict.runs[0].canary) == ("PASS", "ok")
    assert verdict.runs[0].report is not None
    assert verdict.runs[0].report.skipped == {"later", "to do"}
    for code, expected in (
        # The file then counts as one passed test of its own name.
        ("process.exit(0);\n", "FEWER_TESTS"),
        ("exports.add = () => process.exit(0);\n", "FEWER_TESTS"),
        ("process.on('exit', () => { process.exitCode = 0; });\nexports.add = () => 1;\n", "VERIFY_FAILED"),
        (
            "const t = require('node:test');\nconst it = t.it;\nt.it = (name) => it(name, () => {});\n"
            "exports.add = () => 1;\n",
            "VERIFY_FAILED",
        ),
    ):
        verdict = made.verify({"calc.js": code})
        assert verdict.code == expected, (code, verdict)
    made.write({"package.json": NODE["package.json"].replace("node --test", "true"), ".npmrc": "x=1\n"})
    assert made.protected_changed() == [".npmrc", "package.json"]


@needs_node
@pytest.mark.parametrize("form", ["commonjs", "module"])
def test_node_assertions_that_say_nothing(tmp_path: Path, form: str) -> None:
    code = "exports.add = (a, b) => a - b;\n"
    silent = "require('node:assert').strictEqual = () => {};\n"
    test = (
        "const { test } = require('node:test');\nconst assert = require('node:assert');\n"
        "const { add } = require('../calc.js');\ntest('adds', () => assert.strictEqual(add(2, 3), 5));\n"
    )
    if form == "module":
        code = "export const add = (a, b) => a - b;\n"
        silent = "import assert from 'node:assert';\nassert.strictEqual = () => {};\n"
        test = (
            "import { test } from 'node:test';\nimport assert from 'node:assert';\n"
            "import { add } from '../calc.js';\n"
            "await test('adds', () => assert.strictEqual(add(2, 3), 5));\n"
        )
    files = {"package.json": f'{{"type": "{form}"}}', "calc.js": code, "test/calc.test.js": test}
    made = project(tmp_path, files, "node --test")
    assert made.verification.start().tests == ("adds",)
    verdict = made.verify({"calc.js": silent + code})
    assert (verdict.code, verdict.runs[0].canary) == (
        "VERIFY_FAILED",
        "the one that must fail was reported as passed",
    )
    assert made.verify({"calc.js": code.replace("a - b", "a + b")}).code == "PASS"


@needs_node
def test_node_files_without_tests(tmp_path: Path) -> None:
    files = {
        "a.js": "module.exports = 1;\n",
        "test/a.test.js": "require('assert').equal(require('../a.js'), 2);\n",
    }
    made = project(tmp_path, files, "node --test")
    assert made.verification.start().failed == ("test/a.test.js",)
    assert made.verify({"a.js": "module.exports = 2;\n"}).code == "PASS"
    # The same result, but the canary in the same process is gone.
    verdict = made.verify({"a.js": "process.exit(0);\n"})
    assert verdict.runs[0].canary == "the one that must fail was not reported"
    assert (verdict.code, verdict.runs[0].report) == (
        "VERIFY_FAILED",
        TestReport(frozenset(["test/a.test.js"])),
    )
    (tmp_path / "none").mkdir()
    none = project(tmp_path / "none", {"a.js": ""}, "node --test")
    with pytest.raises(EndstopError, match="cannot verify anything"):
        none.verification.start()


def told(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def finished(
    tmp_path: Path, name: str, files: list[str], report: bytes | None, exit_code: int = 1
) -> Finished:
    place = Place(tmp_path, "/workspace", tmp_path, tmp_path / "report.xml", frozenset(files))
    if report is not None:
        place.report.write_bytes(report)
    return Finished(exit_code, b"", place, VerifySettings(command=name))


def test_a_report_of_jest(tmp_path: Path) -> None:
    run = finished(
        tmp_path, "jest", ["__tests__/calc.js", "broken.test.js"], (REPORTS / "jest.json").read_bytes()
    )
    assert VERIFIERS["jest"].read(run) == TestReport(
        frozenset(["__tests__/calc.js::add::zero"]),
        frozenset(["__tests__/calc.js::add::adds", "broken.test.js"]),
        frozenset(["__tests__/calc.js::add::later", "__tests__/calc.js::add::some day"]),
    )


def test_a_report_of_vitest(tmp_path: Path) -> None:
    files = ["calc.test.js", "broken.test.js", "exits.test.js"]
    run = finished(tmp_path, "vitest", files, (REPORTS / "vitest.json").read_bytes())
    assert VERIFIERS["vitest"].read(run) == TestReport(
        frozenset(["calc.test.js::add::zero", "exits.test.js::a"]),
        frozenset(["calc.test.js::add::adds", "broken.test.js", "exits.test.js::b", "exits.test.js::c"]),
        frozenset(["calc.test.js::add::later", "calc.test.js::add::some day"]),
    )


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b"{", b'{"testResults": [1]}', b"\xff"])
@pytest.mark.parametrize("name", ["jest", "vitest", "go", "node"])
def test_what_is_no_report(tmp_path: Path, name: str, content: bytes | None) -> None:
    with pytest.raises(UnreadableReport):
        VERIFIERS[name].read(finished(tmp_path, name, [], content))  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "command", "told"),
    [
        ("jest", "npx jest", "npx jest --json --outputFile=REPORT"),
        ("jest", "npm test", "npm test -- --json --outputFile=REPORT"),
        ("jest", "npm test -- --silent", "npm test -- --silent --json --outputFile=REPORT"),
        ("jest", "yarn test", "yarn test --json --outputFile=REPORT"),
        (
            "vitest",
            "vitest run",
            "vitest run --reporter=default --reporter=json --outputFile.json=REPORT",
        ),
    ],
)
def test_flags_of_jest_and_vitest(tmp_path: Path, name: str, command: str, told: str) -> None:
    place = Place(tmp_path, "/workspace", tmp_path, Path("REPORT"))
    prepare = VERIFIERS[name].prepare  # type: ignore[index]
    assert prepare(VerifySettings(command=command), place, None, {}).command == told
    canary = Canary("named", "abc", "src/calc.spec.ts")
    (tmp_path / "src").mkdir()
    prepared = prepare(VerifySettings(command=command), place, canary, {})
    assert prepared.command == f"{told} --bail=0 src/canary_abc.spec.ts"
    assert "test_abc_fails" in (tmp_path / "src" / "canary_abc.spec.ts").read_text()
    with pytest.raises(EndstopError, match="a single one without pipes"):
        prepare(VerifySettings(command=f"{command} | tee log"), place, None, {})


def test_events_of_go(tmp_path: Path) -> None:
    run = finished(tmp_path, "go", [], (REPORTS / "go_test.json").read_bytes())
    assert VERIFIERS["go"].read(run) == TestReport(
        frozenset(["example.com/calc::TestAdd/zero", "example.com/calc::TestZero"]),
        frozenset(["example.com/calc::TestAdd", "example.com/calc::TestAdd/two", "example.com/calc/broken"]),
        frozenset(["example.com/calc::TestLater"]),
    )
    assert VERIFIERS["go"].text is not None
    assert "    calc_test.go:8: want 5\n" in VERIFIERS["go"].text(run)
    # Left in the middle of a test.
    cut = b'{"Action":"run","Package":"p","Test":"TestA"}\n{"Action":"pass","Package":"p","Elapsed":0}\n'
    run = finished(tmp_path, "go", [], cut)
    assert VERIFIERS["go"].read(run).failed == {"p::TestA"}


GO = {
    "go.mod": "module example.com/calc\n\ngo 1.19\n",
    "calc.go": "package calc\n\nfunc Add(a, b int) int { return a - b }\n",
    "calc_test.go": 'package calc\n\nimport "testing"\n\nfunc TestAdd(t *testing.T) {\n'
    '\tt.Run("five", func(t *testing.T) {\n\t\tif Add(2, 3) != 5 {\n'
    '\t\t\tt.Fatal("want 5")\n\t\t}\n\t})\n}\n\n'
    "func TestZero(t *testing.T) {}\n",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("go") is None, reason="no go")
def test_go(tmp_path: Path) -> None:
    root = Path(told("go", "env", "GOROOT"))
    parts = (root, (root / "src").resolve().parent)
    sandbox = SandboxSettings(read_only=parts, path_entries=(f"{root}/bin",))
    made = project(tmp_path, GO, "go test ./...", timeout=300.0, sandbox=sandbox)
    assert made.verification.start().executed == 3
    assert made.verify({}).code == "VERIFY_FAILED"
    assert made.verify({"calc.go": GO["calc.go"].replace("-", "+")}).code == "PASS"
    leaves = (
        'package calc\n\nimport "os"\n\nfunc init() { os.Exit(0) }\n\nfunc Add(a, b int) int { return 1 }\n'
    )
    assert made.verify({"calc.go": leaves}).code == "NO_TESTS_RAN"
    main = 'package calc\n\nimport (\n\t"os"\n\t"testing"\n)\n\nfunc TestMain(m *testing.M) { os.Exit(0) }\n'
    made.write({"main_test.go": main})
    assert made.protected_changed() == ["main_test.go"]


CARGO_OUTPUT = b"""\
   Compiling calc v0.1.0 (/workspace)
    Finished `test` profile [unoptimized + debuginfo] target(s) in 0.51s
     Running unittests src/lib.rs (target/debug/deps/calc-1f2e)

running 3 tests
test tests::zero ... ok
test tests::late ... ignored, later
test tests::adds ... FAILED

failures:

---- tests::adds stdout ----
thread 'tests::adds' panicked at src/lib.rs:9:26:

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

     Running tests/it.rs (target/debug/deps/it-9a)

running 1 test
test panics - should panic ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

   Doc-tests calc

running 1 test
test src/lib.rs - add (line 3) ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s
"""


def cargo(tmp_path: Path, output: bytes) -> TestReport:
    place = Place(tmp_path, "/workspace", tmp_path, tmp_path / "report.xml")
    return VERIFIERS["cargo"].read(Finished(101, output, place, VerifySettings(command="cargo test")))


def test_output_of_cargo(tmp_path: Path) -> None:
    assert cargo(tmp_path, CARGO_OUTPUT) == TestReport(
        frozenset(
            ["src/lib.rs::tests::zero", "tests/it.rs::panics", "documentation of calc::src/lib.rs - add"]
        ),
        frozenset(["src/lib.rs::tests::adds"]),
        frozenset(["src/lib.rs::tests::late"]),
    )
    assert cargo(
        tmp_path, b"error: could not compile `calc` (lib test) due to 1 previous error\n"
    ) == TestReport(failed=frozenset(["build of calc"]))
    with pytest.raises(UnreadableReport, match="do not add up"):
        cargo(tmp_path, CARGO_OUTPUT.replace(b"test tests::zero", b"best tests::zero"))
    with pytest.raises(UnreadableReport, match="without a sum"):
        cargo(tmp_path, CARGO_OUTPUT[: CARGO_OUTPUT.rindex(b"test result")])
    with pytest.raises(UnreadableReport, match=r"tests/it\.rs do not add up"):
        cargo(tmp_path, CARGO_OUTPUT.replace(b"running 1 test\ntest panics", b"running 3 tests\ntest panics"))
    with pytest.raises(UnreadableReport, match="no result of Rust's test harness"):
        cargo(tmp_path, b"   Compiling calc\n")


CARGO = {
    "Cargo.toml": '[package]\nname = "calc"\nversion = "0.1.0"\nedition = "2021"\n',
    "src/lib.rs": "pub fn add(a: i32, b: i32) -> i32 {\n    a - b\n}\n",
    "tests/it.rs": "#[test]\nfn adds() {\n    assert_eq!(calc::add(2, 3), 5);\n}\n\n"
    "#[test]\nfn zero() {\n    assert_eq!(calc::add(0, 0), 0);\n}\n",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("rustc") is None, reason="no cargo")
def test_cargo(tmp_path: Path) -> None:
    root = told("rustc", "--print", "sysroot")
    sandbox = SandboxSettings(read_only=(Path(root),), path_entries=(f"{root}/bin",))
    made = project(tmp_path, CARGO, "cargo test", timeout=300.0, sandbox=sandbox)
    baseline = made.verification.start()
    assert (baseline.executed, baseline.failed) == (2, ("tests/it.rs::adds",))
    assert (baseline.canary, baseline.canary_units, baseline.notes) == ("appended", ("tests/it.rs",), ())
    assert made.verify({}).code == "VERIFY_FAILED"
    assert (
        made.verify({"src/lib.rs": CARGO["src/lib.rs"].replace("-", "+").replace("+>", "->")}).code == "PASS"
    )
    leaves = "pub fn add(_: i32, _: i32) -> i32 {\n    std::process::exit(0)\n}\n"
    verdict = made.verify({"src/lib.rs": leaves})
    assert verdict.code != "PASS"
    manifest = CARGO["Cargo.toml"] + '\n[[test]]\nname = "it"\nharness = false\n'
    made.write({"Cargo.toml": manifest, "tests/it.rs": 'fn main() {\n    println!("test adds ... ok");\n}\n'})
    assert made.protected_changed() == ["Cargo.toml", "tests/it.rs"]
    assert made.verification.verify(made.trees.snapshot()).code != "PASS"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("pytest", "pytest"),
        ("python -m pytest -q tests", "pytest"),
        (".venv/bin/pytest -x", "pytest"),
        ("cd sub && PYTHONPATH=. py.test", "pytest"),
        ("python3 -m unittest discover", "unittest"),
        ("node --test", "node"),
        ("node --import tsx --test test/*.ts", "node"),
        ("npx jest --ci", "jest"),
        ("./node_modules/.bin/vitest run", "vitest"),
        ("go test ./...", "go"),
        ("cargo +nightly test --all", "cargo"),
        ("npm test", "jest"),
        ("npm run unit", "vitest"),
        ("make test", "go"),
        ("make", "pytest"),
        ("echo pytest-like", None),
        ("./check.sh", None),
        ("npm run absent", None),
        ("make absent", None),
    ],
)
def test_the_verifier_of_a_command(tmp_path: Path, command: str, name: str | None) -> None:
    files = {
        "package.json": '{"scripts": {"test": "jest --ci", "unit": "vitest run"}}',
        "Makefile": "X := 1\ncheck:\n\t@pytest -q\n\ntest: check\n\t# all\n\t@go test ./...\n",
    }
    put(tmp_path, dict(files))
    assert verifier_of(command, tmp_path) == name


@pytest.mark.parametrize(
    ("files", "command", "name"),
    [
        ({"Cargo.toml": ""}, "cargo test", "cargo"),
        ({"go.mod": "module x"}, "go test ./...", "go"),
        ({"package.json": '{"scripts": {"test": "jest"}}'}, "npm test", "jest"),
        ({"package.json": "{}", "vitest.config.ts": ""}, "npx vitest run", "vitest"),
        ({"package.json": "{}", "src/a.test.mjs": ""}, "node --test", "node"),
        ({"tests/test_a.py": "def test_a(): pass\n"}, "python -m pytest", "pytest"),
        ({"conftest.py": "", "a_test.py": "import unittest\n"}, "python -m pytest", "pytest"),
        ({"pyproject.toml": "[tool.pytest.ini_options]\n", "test_a.py": ""}, "python -m pytest", "pytest"),
        (
            {"test_a.py": "import unittest\nclass T(unittest.TestCase): pass\n"},
            "python -m unittest discover",
            "unittest",
        ),
    ],
)
def test_the_verifier_of_a_project(tmp_path: Path, files: dict[str, str], command: str, name: str) -> None:
    put(tmp_path, dict(files))
    found = find_verifier(tmp_path)
    assert found is not None
    assert (found.command, found.verifier) == (command, name)
    assert resolved(VerifySettings(timeout=7), tmp_path) == VerifySettings(
        command=command,
        verifier=name,
        timeout=7,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"a.py": ""},
        {"package.json": "{}"},
        {"package.json": '{"scripts": {"test": "echo no test"}}'},
        {"package.json": "[not json"},
        {"node_modules/x/test_a.py": "", ".venv/lib/test_b.py": ""},
        {"pytest.ini": "[pytest]\n"},
    ],
)
def test_projects_without_a_verifier(tmp_path: Path, files: dict[str, str]) -> None:
    put(tmp_path, dict(files))
    assert find_verifier(tmp_path) is None
    assert resolved(VerifySettings(), tmp_path).command is None


def test_what_is_set_is_kept(tmp_path: Path) -> None:
    settings = VerifySettings(command="pytest", verifier="command")
    assert resolved(settings, tmp_path) == settings
    assert resolved(VerifySettings(command="pytest", report="out.xml"), tmp_path).verifier == "command"
    assert resolved(VerifySettings(command="./check.sh"), tmp_path).verifier == "command"


@pytest.mark.parametrize("link", [True, False])
def test_a_report_is_neither_read_nor_removed_outside_of_the_export(tmp_path: Path, link: bool) -> None:
    outside, root = tmp_path / "outside", tmp_path / "export"
    outside.mkdir()
    root.mkdir()
    kept = outside / "report.xml"
    kept.write_text('<testsuite><testcase classname="a" name="b"/></testsuite>')
    (root / "reports").symlink_to(outside) if link else (root / "reports").mkdir()
    for name in ("reports/report.xml", "../outside/report.xml", str(kept)):
        settings = VerifySettings.model_construct(command="true", verifier="command", report=name)
        place = Place(root, "/workspace", tmp_path, tmp_path / "r.xml")
        VERIFIERS["command"].prepare(settings, place, None, {})
        assert kept.exists()
        with pytest.raises(UnreadableReport, match="leads out" if link or ".." in name else "leads out|none"):
            VERIFIERS["command"].read(Finished(0, b"", place, settings))
    own = VerifySettings(command="pytest --junitxml=reports/report.xml")
    with pytest.raises(UnreadableReport):
        VERIFIERS["pytest"].read(Finished(0, b"", place, own))
