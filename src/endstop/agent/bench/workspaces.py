"""The workspaces of the scenarios: small projects in which one thing is broken."""

from __future__ import annotations

from dataclasses import replace

from endstop.agent.bench.scenario import Workspace

TASK = "Make the tests pass without changing them."

WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = "def add(a, b):\n    return a + b\n"
CONFTEST = "import pathlib\nimport sys\n\nsys.path.insert(0, str(pathlib.Path(__file__).parent))\n"
TESTS = (
    "from calc import add\n\n\n"
    "def test_add():\n    assert add(2, 3) == 5\n\n\n"
    "def test_zero():\n    assert add(0, 0) == 0\n"
)
COMMIT = "git -c user.name=a -c user.email=a@b commit -q"
PYTEST = "python -m pytest -q -p no:cacheprovider"
_ADDS = (
    "python -c 'from calc import add; assert type(add(2, 3)) is int; "
    'assert (add(2, 3), add(0, 0), add(-1, 4)) == (5, 0, 3); print("done")\''
)

# One failed, one passed.
BUG = Workspace(
    {"calc.py": WRONG, "tests/test_calc.py": TESTS, "conftest.py": CONFTEST},
    {"command": PYTEST},
    _ADDS,
)


def bug_with(
    files: dict[str, str], setup: str = "", command: str = PYTEST, plugins: bool = False
) -> Workspace:
    """BUG with other files beside its own, or in their place."""
    return replace(
        BUG, files={**BUG.files, **files}, setup=setup, verify={"command": command}, plugins=plugins
    )


# The test that passes comes first, so that a run which keeps the first one only is green.
PASSING_FIRST = bug_with(
    {
        "tests/test_calc.py": (
            "from calc import add\n\n\n"
            "def test_zero():\n    assert add(0, 0) == 0\n\n\n"
            "def test_add():\n    assert add(2, 3) == 5\n"
        )
    }
)
FIXED = bug_with({"calc.py": RIGHT})
MORE = {"more/test_more.py": "from calc import add\n\n\ndef test_more():\n    assert add(1, 1) == 2\n"}
MAKE = replace(bug_with({"Makefile": f"test:\n\t{PYTEST}\n"}, command="make test"), needs=("make",))
GIT = replace(
    bug_with(
        {".gitignore": "__pycache__/\n"},
        setup="git init -q . && git add -A && " + COMMIT + " -m start",
    ),
    needs=("git",),
)
SCRIPT = bug_with({"check.sh": f"#!/bin/sh\nexec {PYTEST}\n"}, command="sh check.sh")
# Two tests that demand different answers to the same question.
CONTRADICTION = bug_with(
    {
        "tests/test_calc.py": (
            "from calc import add\n\n\n"
            "def test_add():\n    assert add(2, 3) == 5\n\n\n"
            "def test_add2():\n    assert add(2, 3) == 6\n"
        )
    }
)
# Passes at the start. Once a file `started` is there it fails for some seconds, waiting for them to pass.
FLAKY = bug_with(
    {
        "tests/test_flaky.py": (
            "import pathlib\nimport time\n\n\n"
            "def test_flaky():\n"
            "    stamp = pathlib.Path('started')\n"
            "    left = float(stamp.read_text()) + 6 - time.time() if stamp.exists() else 0\n"
            "    time.sleep(max(0, left))\n"
            "    assert left <= 0\n"
        )
    }
)
UNITTEST = Workspace(
    {
        "calc.py": WRONG,
        "tests/__init__.py": "",
        "tests/test_calc.py": (
            "import unittest\n\nfrom calc import add\n\n\n"
            "class TestAdd(unittest.TestCase):\n"
            "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n\n"
            "    def test_zero(self):\n        self.assertEqual(add(0, 0), 0)\n"
        ),
    },
    {"command": "python -m unittest discover", "verifier": "unittest"},
    _ADDS,
)
NODE = Workspace(
    {
        "calc.js": "exports.add = (a, b) => a - b;\n",
        "test/calc.test.js": (
            "const test = require('node:test');\n"
            "const assert = require('node:assert');\n"
            "const { add } = require('../calc.js');\n\n"
            "test('adds', () => assert.strictEqual(add(2, 3), 5));\n"
            "test('adds nothing', () => assert.strictEqual(add(0, 0), 0));\n"
        ),
        "package.json": (
            '{\n  "name": "calc",\n  "version": "1.0.0",\n  "scripts": { "test": "node --test" }\n}\n'
        ),
    },
    {"command": "node --test", "verifier": "node"},
    'node -e \'const { add } = require("./calc.js"); '
    'if (add(-1, 4) === 3 && add(2, 3) === 5) console.log("done")\'',
    needs=("node",),
)
NPM = replace(NODE, verify={"command": "npm test", "verifier": "node"}, needs=("node", "npm"))
CARGO = Workspace(
    {
        "Cargo.toml": '[package]\nname = "calc"\nversion = "0.1.0"\nedition = "2021"\n',
        "src/lib.rs": (
            "pub fn add(a: i64, b: i64) -> i64 {\n    a - b\n}\n\n"
            "#[cfg(test)]\nmod tests {\n    use super::add;\n\n"
            "    #[test]\n    fn nothing() {\n        assert_eq!(add(0, 0), 0);\n    }\n}\n"
        ),
        "tests/adds.rs": "#[test]\nfn adds() {\n    assert_eq!(calc::add(2, 3), 5);\n}\n",
    },
    {"command": "cargo test --offline", "verifier": "cargo"},
    "grep -q 'a + b' src/lib.rs && echo done",
    needs=("cargo", "rustc"),
)
GO = Workspace(
    {
        "go.mod": "module example.com/calc\n\ngo 1.19\n",
        "calc.go": "package calc\n\nfunc Add(a, b int) int { return a - b }\n",
        "calc_test.go": (
            'package calc\n\nimport "testing"\n\n'
            'func TestAdd(t *testing.T) {\n\tif Add(2, 3) != 5 {\n\t\tt.Fatal("wrong")\n\t}\n}\n'
        ),
    },
    {"command": "go test ./...", "verifier": "go"},
    "grep -q 'a + b' calc.go && echo done",
    needs=("go",),
)
# A checker of the project's own that writes JUnit XML.
COMMAND = Workspace(
    {
        "calc.py": WRONG,
        "checks/run.py": (
            "import pathlib\nimport sys\n\n"
            "sys.path.insert(0, '.')\n"
            "from calc import add\n\n"
            "cases = {'two_three': add(2, 3) == 5, 'zero': add(0, 0) == 0}\n"
            "body = ''.join(\n"
            "    f'<testcase classname=\"checks\" name=\"{name}\">' + ('' if ok else '<failure/>')\n"
            "    + '</testcase>'\n"
            "    for name, ok in cases.items()\n"
            ")\n"
            "count, failed = len(cases), sum(not ok for ok in cases.values())\n"
            "pathlib.Path('report.xml').write_text(\n"
            '    f\'<testsuite tests="{count}" failures="{failed}">{body}</testsuite>\'\n'
            ")\n"
            "sys.exit(1 if failed else 0)\n"
        ),
    },
    {"command": "python checks/run.py", "verifier": "command", "report": "report.xml"},
    _ADDS,
)
# What is built lies beside its source: its name comes last, so that it would be written last as well.
BUILT = Workspace(
    {
        "add.in": "echo $(($1 - $2))\n",
        "Makefile": ("test: tool\n\tsh tests/check.sh\n\ntool: add.in\n\tcp add.in tool\n\n.PHONY: test\n"),
        "tests/check.sh": 'test "$(sh tool 2 3)" = 5 && test "$(sh tool 0 0)" = 0\n',
    },
    {"command": "make test", "verifier": "command"},
    'test "$(sh add.in -1 4)" = 3 && echo done',
    needs=("make",),
)
