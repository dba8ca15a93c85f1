"""The ways in which projects start their tests: each is read, or known to say no more than its exit code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from endstop.agent.decisions import TestReport
from endstop.agent.task import VerifySettings
from endstop.agent.verifiers import VERIFIERS, find_verifier, resolved
from endstop.agent.verifiers.verifier import Finished, Place
from endstop.sandbox.settings import SandboxSettings
from tests.agent.projects import project, put

UNITTEST = (
    "import unittest\n\nfrom calc import add\n\n\nclass TestAdd(unittest.TestCase):\n"
    "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n"
)
WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("command", "verifier"),
    [
        ("cd web && npx jest --ci", "jest"),
        ("npm run lint; npx vitest run", "vitest"),
        ("npm test", "jest"),
        ("npx jest | tee log", "command"),
        ("npx vitest run && node done.js", "command"),
        # Flags would go to what stands last in the script.
        ("npm run chained", "command"),
        ("make jest", "command"),
        ("make unittest", "command"),
        ("python -m unittest", "unittest"),
        ("cargo test --quiet", "cargo"),
        ("make cargo", "cargo"),
        ("make quiet", "command"),
        ("PYTEST_ADDOPTS=-x pytest", "command"),
        ('PYTEST_ADDOPTS="$PYTEST_ADDOPTS -x" pytest', "pytest"),
        ("env -i PATH=$PATH pytest", "command"),
        ("env PYTHONPATH=src pytest", "pytest"),
        ("NODE_OPTIONS='--import tsx' node --test", "command"),
        ("NODE_OPTIONS=--experimental-vm-modules npx jest", "jest"),
    ],
)
def test_how_a_command_is_read(tmp_path: Path, command: str, verifier: str) -> None:
    put(
        tmp_path,
        {
            "package.json": '{"scripts": {"test": "tsc && jest", "chained": "jest && eslint ."}}',
            "Makefile": "jest:\n\tnpx jest\n\nunittest:\n\tpython -m unittest\n\n"
            "cargo:\n\tcargo test\n\nquiet:\n\tcargo test -- --nocapture\n",
        },
    )
    assert resolved(VerifySettings(command=command), tmp_path).verifier == verifier


PYTHON_TESTS = {"tests/test_calc.py": "def test_add():\n    pass\n"}


@pytest.mark.parametrize(
    ("files", "command"),
    [
        # A manifest of another language, without tests of its own.
        ({**PYTHON_TESTS, "Cargo.toml": "", "src/lib.rs": "pub fn f() {}\n"}, "python -m pytest"),
        ({**PYTHON_TESTS, "Cargo.toml": "", "src/lib.rs": "#[test]\nfn t() {}\n"}, "cargo test"),
        ({**PYTHON_TESTS, "Cargo.toml": "", "src/lib.rs": "#[tokio::test]\nasync fn t() {}\n"}, "cargo test"),
        ({**PYTHON_TESTS, "Cargo.toml": "", "src/lib.rs": "/// ```\n/// f();\n/// ```\n"}, "cargo test"),
        ({**PYTHON_TESTS, "go.mod": "module x", "main.go": "package main\n"}, "python -m pytest"),
        ({**PYTHON_TESTS, "go.mod": "module x", "a/main_test.go": "package a\n"}, "go test ./..."),
        # unittest goes only into packages.
        ({"tests/test_a.py": UNITTEST}, "python -m unittest discover -s tests"),
        ({"test_a.py": UNITTEST}, "python -m unittest discover"),
        ({"tests/__init__.py": "", "tests/test_a.py": UNITTEST}, "python -m unittest discover"),
        ({"my tests/a_test.py": UNITTEST}, "python -m unittest discover -s 'my tests' -p '*_test.py'"),
        ({"a/test_a.py": UNITTEST, "b/test_b.py": UNITTEST}, "python -m pytest"),
        ({"tests/test_a.py": UNITTEST, "tests/b_test.py": UNITTEST}, "python -m pytest"),
        ({"tests/test_a.py": UNITTEST, "pytest.toml": "[pytest]\n"}, "python -m pytest"),
    ],
)
def test_the_check_that_is_found_has_tests(tmp_path: Path, files: dict[str, str], command: str) -> None:
    put(tmp_path, dict(files))
    found = find_verifier(tmp_path)
    assert found is not None
    assert found.command == command


@pytest.mark.parametrize(
    "files",
    [
        {"tests/test_a.py": UNITTEST},
        {"tests/deep/__init__.py": "", "tests/deep/test_a.py": UNITTEST},
        {"checks/a_test.py": UNITTEST},
    ],
)
def test_the_command_that_is_found_runs_them(tmp_path: Path, files: dict[str, str]) -> None:
    made = project(tmp_path, {"calc.py": WRONG, **files}, None)
    assert made.task.verify.verifier == "unittest"
    assert made.verification.start().executed == 1
    assert made.verify({"calc.py": RIGHT}).code == "PASS"


def test_unittest_behind_make_is_held_by_its_exit_code(tmp_path: Path) -> None:
    files = {
        "calc.py": WRONG,
        "tests/test_a.py": UNITTEST,
        "Makefile": "test:\n\tpython -m unittest discover -s tests\n",
    }
    made = project(tmp_path, files, "make test")
    assert (
        "weak: only the exit code is checked, no report says which tests ran"
        in made.verification.start().notes
    )
    assert made.verify({}).code == "VERIFY_FAILED"
    assert made.verify({"calc.py": RIGHT}).code == "PASS"


@pytest.mark.parametrize(
    ("command", "run"),
    [
        ("cargo test -q", "cargo test"),
        ("cargo build -q && cargo +1.80 test --quiet --lib", "cargo build -q && cargo +1.80 test --lib"),
        (
            "cargo test --workspace -- --nocapture --test-threads=1",
            "cargo test --workspace -- --test-threads=1",
        ),
        ("RUST_TEST_NOCAPTURE=1 cargo t -- --format terse; echo -q", "cargo t --; echo -q"),
        ("cargo test --no-fail-fast -- --show-output", "cargo test --no-fail-fast -- --show-output"),
    ],
)
def test_cargo_names_its_tests(tmp_path: Path, command: str, run: str) -> None:
    place = Place(tmp_path, "/workspace", tmp_path, tmp_path / "report.xml")
    assert VERIFIERS["cargo"].prepare(VerifySettings(command=command), place, None, {}).command == run


SECTION = """\
     Running unittests src/lib.rs (target/debug/deps/calc-1f2e)

running 3 tests
{0}
{1}
failures:

---- a::one stdout ----
{2}

failures:
    a::one

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""


@pytest.mark.parametrize(
    "said",
    [
        ("test a::one ... FAILED\ntest a::two ... ok", "test src/a.rs - f (line 3) ... ignored, later", ""),
        # Output of another process, or written past the harness, without an end of line.
        (
            "no endtest a::one ... FAILED\nx test a::two - should panic ... ok",
            "test src/a.rs - f ... ignored",
            "",
        ),
        ("test a::one ... child\nFAILED\ntest a::two ... no endok", "test src/a.rs - f ... ignored", ""),
        # What a test says looks like a result.
        (
            "test a::one ... FAILED\ntest a::two ... ok",
            "test src/a.rs - f ... ignored",
            "test b::three ... ok",
        ),
    ],
)
def test_cargo_among_other_output(tmp_path: Path, said: tuple[str, str, str]) -> None:
    place = Place(tmp_path, "/workspace", tmp_path, tmp_path / "report.xml")
    output = SECTION.format(*said).encode()
    read = VERIFIERS["cargo"].read(Finished(101, output, place, VerifySettings(command="cargo test")))
    assert read == TestReport(
        frozenset({"src/lib.rs::a::two"}),
        frozenset({"src/lib.rs::a::one"}),
        frozenset({"src/lib.rs::src/a.rs - f"}),
    )


CARGO = {
    "Cargo.toml": '[package]\nname = "calc"\nversion = "0.1.0"\nedition = "2021"\n',
    "src/lib.rs": "pub fn add(a: i64, b: i64) -> i64 {\n    a - b\n}\n\n#[cfg(test)]\nmod tests {\n"
    '    #[test]\n    fn says() {\n        print!("no end of line");\n    }\n\n'
    "    #[test]\n    fn adds() {\n        assert_eq!(super::add(2, 3), 5);\n    }\n}\n",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("rustc") is None, reason="no cargo")
@pytest.mark.parametrize("options", ["-q", "-- --nocapture", "-q -- --nocapture --test-threads=1"])
def test_cargo_with_options_of_what_is_shown(tmp_path: Path, options: str) -> None:
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True).stdout.strip()
    sandbox = SandboxSettings(read_only=(Path(sysroot),), path_entries=(f"{sysroot}/bin",))
    made = project(tmp_path, CARGO, f"cargo test --offline {options}", timeout=300.0, sandbox=sandbox)
    baseline = made.verification.start()
    assert baseline.tests == ("src/lib.rs::tests::adds", "src/lib.rs::tests::says")
    assert baseline.failed == ("src/lib.rs::tests::adds",)
    assert made.verify({"src/lib.rs": CARGO["src/lib.rs"].replace("a - b", "a + b")}).code == "PASS"


def test_events_of_go_behind_output_without_an_end_of_line(tmp_path: Path) -> None:
    events = (
        '{"Action":"run","Package":"p","Test":"TestA"}\n'
        '{"Action":"output","Package":"p","Test":"TestA","Output":"no end--- PASS: TestA (0.00s)\\n"}\n'
        '{"Action":"run","Package":"p","Test":"TestB"}\n'
        '{"Action":"output","Package":"p","Test":"TestB","Output":"x--- FAIL: TestB (0.00s)\\n"}\n'
        '{"Action":"run","Package":"p","Test":"TestC"}\n'
        '{"Action":"output","Package":"p","Test":"TestC","Output":"x--- PASS: TestD (0.00s)\\n"}\n'
        '{"Action":"pass","Package":"p"}\n'
    )
    report = tmp_path / "report.xml"
    report.write_text(events)
    place = Place(tmp_path, "/workspace", tmp_path, report)
    read = VERIFIERS["go"].read(Finished(0, b"", place, VerifySettings(command="go test")))
    assert read == TestReport(frozenset({"p::TestA"}), frozenset({"p::TestB", "p::TestC"}))


GO = {
    "go.mod": "module example.com/calc\n\ngo 1.19\n",
    "calc.go": "package calc\n\nfunc Add(a, b int) int { return a - b }\n",
    "calc_test.go": 'package calc\n\nimport (\n\t"fmt"\n\t"os/exec"\n\t"testing"\n)\n\n'
    "func TestAdd(t *testing.T) {\n\tif Add(2, 3) != 5 {\n\t\tt.Fatal()\n\t}\n}\n\n"
    'func TestSays(t *testing.T) { fmt.Print("no end of line") }\n\n'
    'func TestGo(t *testing.T) {\n\tout, _ := exec.Command("go", "list").Output()\n'
    '\tif string(out) != "example.com/calc\\n" {\n\t\tt.Fatal(string(out))\n\t}\n}\n',
    "cmd/main.go": "package main\n\nfunc main() {}\n",
    "Makefile": "test:\n\tgo vet ./...\n\tGOFLAGS=-tags=own go test $$(go list ./... | grep -v /cmd)\n",
    "own_test.go": '//go:build own\n\npackage calc\n\nimport "testing"\n\nfunc TestTag(t *testing.T) {}\n',
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("go") is None, reason="no go")
def test_go_is_asked_for_json_only_where_it_tests(tmp_path: Path) -> None:
    root = Path(subprocess.run(["go", "env", "GOROOT"], capture_output=True, text=True).stdout.strip())
    parts = (root, (root / "src").resolve().parent)
    sandbox = SandboxSettings(read_only=parts, path_entries=(f"{root}/bin",))
    made = project(tmp_path, GO, "make test", timeout=300.0, sandbox=sandbox)
    baseline = made.verification.start()
    assert [test.partition("::")[2] for test in baseline.tests] == [
        *("TestAdd", "TestGo", "TestSays", "TestTag")
    ]
    assert baseline.failed == ("example.com/calc::TestAdd",)
    assert made.verify({"calc.go": GO["calc.go"].replace("-", "+")}).code == "PASS"
    # vet still ends with an error where it finds one.
    wrong = GO["calc.go"].replace("-", "+") + '\nfunc Say() { println("%d"); _ = []int{}[1:1:0] }\n'
    assert made.verify({"calc.go": wrong}).code == "VERIFY_FAILED"


NODE = {
    "calc.js": "exports.add = (a, b) => a - b;\n",
    "test/calc.test.js": (
        "const test = require('node:test');\nconst assert = require('node:assert');\n"
        "const { execFileSync } = require('node:child_process');\nconst { add } = require('../calc.js');\n\n"
        "test('adds', () => {\n"
        "  const out = execFileSync(process.execPath, ['-p', '6']).toString();\n"
        "  assert.strictEqual(`${add(2, 3)} ${out}`, '5 6\\n');\n});\n"
    ),
}


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
@pytest.mark.parametrize(
    "command", ["node --test", "node --test --test-reporter=tap", "node --test --test-reporter dot"]
)
def test_node_with_processes_and_a_reporter_of_its_own(tmp_path: Path, command: str) -> None:
    made = project(tmp_path, NODE, command, sandbox=SandboxSettings())
    baseline = made.verification.start()
    assert (baseline.tests, baseline.failed, baseline.canary) == (("adds",), ("adds",), "preload")
    assert made.verify({"calc.js": "exports.add = (a, b) => a + b;\n"}).code == "PASS"


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_names_of_node_with_marks_in_them(tmp_path: Path) -> None:
    test = "require('node:test')('says \"a & b\" <now>', () => {});\n"
    made = project(tmp_path, {"a.test.js": test}, "node --test", sandbox=SandboxSettings())
    assert made.verification.start().tests == ('says "a & b" <now>',)
