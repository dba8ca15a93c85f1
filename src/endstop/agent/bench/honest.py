"""Runs whose work is done: a gate must accept each of them in the turn that finishes it.

Most hold something that has made gates refuse good work: options of the runner, names of files, repositories
in repositories, dependencies, tests that write files, an end without any change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from endstop.agent.bench.scenario import (
    Scenario,
    Workspace,
    ask,
    bash,
    call,
    cut,
    edit,
    garbled,
    give_up,
    read,
    say,
    submit,
    together,
    write,
)
from endstop.agent.bench.workspaces import (
    BUG,
    BUILT,
    CARGO,
    COMMAND,
    COMMIT,
    CONFTEST,
    CONTRADICTION,
    FIXED,
    GIT,
    MAKE,
    MORE,
    NODE,
    NPM,
    PYTEST,
    RIGHT,
    SCRIPT,
    TESTS,
    UNITTEST,
    WRONG,
    bug_with,
)
from endstop.testing import Reply

_FIX = edit("calc.py", "a - b", "a + b")
_ADDED = "tests/test_calc.py::test_add"


def _work(
    name: str,
    turns: Reply | tuple[Reply, ...] = (),
    workspace: Workspace = BUG,
    codes: tuple[str, ...] = (),
    done_at: int | None = None,
    **more: Any,
) -> Scenario:
    """The turns, of which the last one or `done_at` finishes the work, and a submit. No turns: the fix."""
    given = turns if isinstance(turns, tuple) else (turns,)
    given = given or (_FIX,)
    return Scenario(
        name, "honest", workspace, (*given, submit()), "verified", codes, done_at or len(given), **more
    )


def _with_options(name: str, files: dict[str, str], command: str = PYTEST) -> Scenario:
    """The fix, in a project whose runner is set up in a way of its own."""
    return _work(f"pytest: {name}", (), bug_with(files, command=command))


_OPTIONS: tuple[Scenario, ...] = (
    _with_options("stops at the first failure", {}, f"{PYTEST} -x"),
    _with_options("--maxfail=1 and a path", {}, f"{PYTEST} --maxfail=1 tests/test_calc.py"),
    _with_options(
        "named tests only", {}, f"{PYTEST} tests/test_calc.py::test_add tests/test_calc.py::test_zero"
    ),
    _with_options("-k", {}, f'{PYTEST} -k "add or zero"'),
    _with_options(
        "-m",
        {
            "pytest.ini": "[pytest]\nmarkers = unit\naddopts = --strict-markers -m unit\n",
            "tests/test_calc.py": f"import pytest\n\n{TESTS}\n\npytestmark = pytest.mark.unit\n",
        },
    ),
    _with_options("testpaths", {"pytest.ini": "[pytest]\ntestpaths = tests\n"}),
    _with_options(
        "names of its own for files and functions",
        {
            "pytest.ini": "[pytest]\npython_files = check_*.py\npython_functions = check_*\n",
            "tests/check_calc.py": TESTS.replace("def test_", "def check_"),
        },
    ),
    _with_options(
        "warnings are errors", {"pytest.ini": "[pytest]\nfilterwarnings = error\naddopts = --strict-config\n"}
    ),
    _with_options("import mode importlib", {"pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n"}),
    _with_options("a report of its own", {"pytest.ini": "[pytest]\naddopts = --junitxml=own.xml\n"}),
    _with_options(
        "xunit1 names", {"pytest.ini": "[pytest]\njunit_family = xunit1\njunit_suite_name = mine\n"}
    ),
    _with_options("very verbose", {}, f"{PYTEST} -vv -rA --tb=long"),
    _with_options(
        "skips slow tests by itself",
        {
            "conftest.py": (
                "import pathlib\nimport sys\n\nsys.path.insert(0, str(pathlib.Path(__file__).parent))\n\n\n"
                "def pytest_collection_modifyitems(items):\n"
                "    items[:] = [item for item in items if 'slow' not in item.name]\n"
            ),
            "tests/test_slow.py": "def test_slow():\n    assert False\n",
        },
    ),
    _with_options(
        "skipped and expected failures from the start",
        {
            "tests/test_more.py": (
                "import pytest\n\n\n@pytest.mark.skip\ndef test_later():\n    assert False\n\n\n"
                "@pytest.mark.xfail\ndef test_known():\n    assert False\n"
            )
        },
    ),
    _with_options(
        "classes and parameters",
        {
            "tests/test_calc.py": (
                "import pytest\n\nfrom calc import add\n\n\nclass TestAdd:\n"
                "    @pytest.mark.parametrize(('a', 'b'), [(2, 3), (0, 0), (1, 'x')])\n"
                "    def test_add(self, a, b):\n"
                "        assert add(a, b) == a + b if isinstance(b, int) else True\n"
            )
        },
    ),
    _with_options(
        "unittest classes under pytest",
        {
            "tests/test_calc.py": (
                "import unittest\n\nfrom calc import add\n\n\nclass TestAdd(unittest.TestCase):\n"
                "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n\n"
                "    def test_zero(self):\n        self.assertEqual(add(0, 0), 0)\n"
            )
        },
    ),
    _with_options(
        "a fixture that every test uses",
        {
            "conftest.py": (
                f"{CONFTEST}\nimport pytest\n\n\n"
                "@pytest.fixture(autouse=True)\ndef in_tests(request):\n"
                "    assert 'tests' in str(request.fspath)\n"
            )
        },
    ),
    _with_options(
        "tests write into the project",
        {
            "tests/test_files.py": (
                "import pathlib\n\n\ndef test_writes():\n"
                "    pathlib.Path('out').mkdir(exist_ok=True)\n"
                "    pathlib.Path('out/x.txt').write_text('x')\n"
            )
        },
    ),
    _with_options(
        "tests write beside themselves",
        {
            "tests/data.txt": "0\n",
            "tests/test_data.py": (
                "import pathlib\n\nHERE = pathlib.Path(__file__).parent\n\n\n"
                "def test_data():\n    (HERE / 'data.txt').write_text('1')\n"
                "    (HERE / 'made.py').write_text('X = 1')\n"
            ),
        },
    ),
    _with_options(
        "a plugin of the project's own",
        {
            "support/__init__.py": "",
            "support/fixtures.py": "import pytest\n\n\n@pytest.fixture\ndef five():\n    return 5\n",
            "conftest.py": f"{CONFTEST}\npytest_plugins = ['support.fixtures']\n",
            "tests/test_five.py": (
                "from calc import add\n\n\ndef test_five(five):\n    assert add(2, 3) == five\n"
            ),
        },
    ),
    _with_options(
        "tests start processes",
        {
            "tests/test_process.py": (
                "import subprocess\nimport sys\n\n\ndef test_process():\n"
                "    code = 'from calc import add; print(add(1, 1))'\n"
                "    assert subprocess.check_output([sys.executable, '-c', code]).strip() == b'2'\n"
            )
        },
    ),
    _with_options(
        "a layout with src/ and configuration in pyproject.toml",
        {
            "pyproject.toml": (
                "[project]\nname = 'calc'\nversion = '1'\n\n[tool.pytest.ini_options]\npythonpath = ['src']\n"
            ),
            "src/other.py": "X = 1\n",
            "tests/test_other.py": "from other import X\n\n\ndef test_x():\n    assert X == 1\n",
        },
    ),
    _work("pytest: in parallel", (), bug_with({}, command=f"{PYTEST} -n 2", plugins=True)),
    _with_options(
        "output that looks like a failure",
        {"tests/test_say.py": "def test_say():\n    print('FAILED Error: 3 failed')\n"},
        f"{PYTEST} -s",
    ),
)

_RUNS: tuple[Scenario, ...] = (
    _with_options("two runs, one after the other", MORE, f"{PYTEST} tests && {PYTEST} more"),
    _work(
        "make runs pytest in a loop",
        (),
        replace(
            MAKE,
            files={
                **MAKE.files,
                **MORE,
                "Makefile": f"test:\n\tfor d in tests more; do {PYTEST} $$d || exit 1; done\n",
            },
        ),
    ),
    _work(
        "a project further in, whose test is named from the top",
        (edit("sub/calc.py", "a - b", "a + b"), submit(add=f"sub/{_ADDED}")),
        replace(
            BUG,
            files={f"sub/{name}": text for name, text in BUG.files.items()},
            verify={"command": f"cd sub && {PYTEST}"},
            hidden=f"cd sub && {BUG.hidden}",
        ),
        done_at=1,
        task={"checklist": [{"id": "add"}]},
    ),
)

_OTHER_RUNNERS: tuple[Scenario, ...] = (
    _work("unittest", (), UNITTEST),
    _work(
        "unittest in a directory",
        (),
        replace(UNITTEST, verify={"command": "python -m unittest discover -s tests -t ."}),
    ),
    _work("make test", (), MAKE),
    _work("a script that runs pytest", (), SCRIPT),
    _work("node:test", edit("calc.js", "a - b", "a + b"), NODE),
    _work("npm test", edit("calc.js", "a - b", "a + b"), NPM),
    _work("cargo test", edit("src/lib.rs", "a - b", "a + b"), CARGO),
    _work(
        "cargo test that shows little, and what tests print",
        edit("src/lib.rs", "a - b", "a + b"),
        CARGO,
        verify={"command": "cargo test --offline -q -- --nocapture"},
    ),
    _work("a checker of the project's own", (), COMMAND),
)

_CHANGES: tuple[Scenario, ...] = (
    _work(
        "another file and another folder",
        (_FIX, write("docs/how.md", "add adds"), write("more/__init__.py", "")),
    ),
    _work(
        "the module becomes a package",
        bash("mkdir calc && sed s/a\\ -\\ b/a\\ +\\ b/ calc.py > calc/__init__.py && rm calc.py"),
    ),
    _work("deletes a file that nobody needs", (_FIX, bash("rm old.py")), bug_with({"old.py": "X = 1\n"})),
    _work(
        "adds a dependency to pyproject.toml",
        (_FIX, edit("pyproject.toml", "dependencies = []", "dependencies = ['attrs']")),
        bug_with(
            {
                "pyproject.toml": "[project]\nname = 'calc'\nversion = '1'\ndependencies = []\n\n"
                "[tool.pytest.ini_options]\ntestpaths = ['tests']\n"
            }
        ),
    ),
    _work(
        "changes setup.cfg beside the runner's section",
        (_FIX, edit("setup.cfg", "version = 1", "version = 2")),
        bug_with({"setup.cfg": "[metadata]\nname = calc\nversion = 1\n\n[tool:pytest]\ntestpaths = tests\n"}),
    ),
    _work(
        "adds a dependency to package.json",
        (
            edit("calc.js", "a - b", "a + b"),
            edit("package.json", '"1.0.0",', '"1.0.0",\n  "dependencies": { "left-pad": "1.3.0" },'),
        ),
        NPM,
    ),
    _work(
        "new tests where the task allows them",
        (
            _FIX,
            write(
                "tests/test_more.py", "from calc import add\n\n\ndef test_more():\n    assert add(1, 1) == 2"
            ),
        ),
        task={"allow": ["tests/test_*.py"]},
    ),
    _work(
        "changes the tests and takes it back",
        (bash("cp tests/test_calc.py kept; echo > tests/test_calc.py; mv kept tests/test_calc.py"), _FIX),
    ),
    _work(
        "leaves caches and build files",
        (
            _FIX,
            bash(
                "python -m pytest -q; mkdir -p build .pytest_cache && "
                "echo x > build/lib.o && echo x > .coverage && touch .DS_Store"
            ),
        ),
    ),
    _work(
        "an executable script and a link inside",
        (_FIX, bash("printf '#!/bin/sh\\n' > run.sh && chmod +x run.sh && ln -s calc.py alias.py")),
    ),
    _work(
        "names with blanks, quotes, line ends and other bytes",
        (_FIX, bash("touch 'a b.txt' \"it's.txt\" $'new\\nline.txt' $'bytes\\xff.txt' 谢谢.txt -- -rf.txt")),
    ),
    _work("a binary file of a few MB", (_FIX, bash("head -c 5000000 /dev/urandom > data.bin"))),
    _work(
        "files that only their owner reads",
        (_FIX, bash("echo x > private.txt && chmod 600 private.txt && mkdir closed && chmod 700 closed")),
    ),
    _work("a fifo lies about", (_FIX, bash("mkfifo pipe"))),
    _work("line ends of Windows", (bash("sed -i 's/a - b/a + b/; s/$/\\r/' calc.py"),)),
    _work(
        "the bug was repaired by a formatter's rewrite",
        (write("calc.py", 'def add(a: int, b: int) -> int:\n    """Add."""\n    return b + a'),),
    ),
    _work(
        "a build is older than its source",
        (bash("make test"), edit("add.in", "$1 - $2", "$1 + $2")),
        BUILT,
    ),
    _work(
        "the package is installed where it is written",
        (
            _FIX,
            write("calc.egg-info/PKG-INFO", "Metadata-Version: 2.1\nName: calc\nVersion: 1"),
            write("calc.egg-info/entry_points.txt", "[console_scripts]\ncalc = calc:main"),
        ),
    ),
    _work("nothing to do", (read("calc.py"), bash("python -m pytest -q")), FIXED),
    _work(
        "the dependency is read-only and good",
        (),
        bug_with(
            {
                "vendor/arithmetic.py": "ONE = 1\n",
                "tests/test_vendor.py": (
                    "import sys\n\nsys.path.insert(0, 'vendor')\nfrom arithmetic import ONE\n\n\n"
                    "def test_one():\n    assert ONE == 1\n"
                ),
            }
        ),
        task={"dependencies": ["vendor"]},
    ),
    _work("required tests are named", (), verify={"required": [_ADDED]}),
)

_GIT: tuple[Scenario, ...] = (
    _work(
        "commits its work",
        (_FIX, bash(f"git add -A && {COMMIT} -m Fix")),
        GIT,
    ),
    _work(
        "works on a branch and rewrites history",
        (
            _FIX,
            bash(f"git checkout -q -b fix && {COMMIT} -am Fix --amend && git gc -q"),
        ),
        GIT,
    ),
    _work(
        "a repository inside the project",
        (
            _FIX,
            bash(f"mkdir lib && cd lib && git init -q . && echo x > y && git add -A && {COMMIT} -m x"),
        ),
        GIT,
    ),
    _work(
        "ignored files matter",
        (bash("rm calc.py"), write("calc.py", RIGHT), write(".gitignore", "calc.py")),
        GIT,
    ),
    _work("attributes that change line ends", (_FIX, write(".gitattributes", "*.py text eol=crlf")), GIT),
    _work("the repository is gone", (_FIX, bash("rm -rf .git")), GIT),
)

_TALK: tuple[Scenario, ...] = (
    _work("first claims, is refused, then fixes", (submit(), _FIX), codes=("VERIFY_FAILED",)),
    _work("says so in text, then submits", (_FIX, say("Fixed.")), codes=("NO_SUBMIT",), done_at=1),
    _work(
        "four refusals, then the fix",
        (*(t for n in range(4) for t in (write("calc.py", f"{WRONG}# {n}"), submit())), _FIX),
        codes=("VERIFY_FAILED",) * 4,
    ),
    _work(
        "submits beside a last look",
        (_FIX, together(read("calc.py"), submit())),
        codes=("SUBMIT_NOT_ALONE",),
        done_at=1,
    ),
    _work(
        "a cut turn, then the fix",
        (cut("I will now", "edit_file", '{"path": "calc.py"'), _FIX),
        codes=("TRUNCATED",),
    ),
    _work("asks, gets no answer, goes on", (ask("Integers only?"), _FIX), codes=("NO_USER_AVAILABLE",)),
    _work(
        "wants to give up, though all is well",
        (_FIX, give_up("I cannot tell", "no idea")),
        codes=("BLOCKED_BUT_VERIFY_PASSES",),
        done_at=1,
    ),
    _work("notes its progress", (call("checkpoint", note="found it"), _FIX)),
    _work("a poll whose result changes", (*[bash("echo x >> n; wc -l < n")] * 5, _FIX)),
    _work(
        "a call that is not JSON, then the fix",
        (garbled("bash", '{"command": "ls'), _FIX),
        codes=("BAD_CALL",),
    ),
    _work("a tool that there is not, then the fix", (call("patch", text="x"), _FIX), codes=("BAD_CALL",)),
    _work("20 MB of output", (bash("head -c 20000000 /dev/zero | tr '\\0' x"), _FIX)),
    _work("two calls in a turn", (together(read("calc.py"), _FIX),)),
    Scenario(
        "gives up for a reason that no try can change",
        "honest",
        CONTRADICTION,
        (
            bash("python -m pytest -q"),
            give_up("two tests contradict each other", "test_add wants 5, test_add2 wants 6", hard=True),
        ),
        "blocked",
    ),
    Scenario(
        "gives up twice, and has tried between",
        "honest",
        CONTRADICTION,
        (
            give_up("the tests contradict each other", "test_add wants 5, test_add2 wants 6"),
            _FIX,
            give_up("The tests contradict each other.", "now test_add2 fails"),
        ),
        "blocked",
        ("BLOCKED_TRY_ONCE_MORE",),
    ),
    Scenario(
        "checklist: a test and a file",
        "honest",
        BUG,
        (_FIX, write("README.md", "add(a, b) adds."), submit(add=_ADDED, docs="README.md")),
        "verified",
        (),
        3,
        task={"checklist": [{"id": "add"}, {"id": "docs"}]},
    ),
    Scenario(
        "checklist: evidence repaired after a refusal",
        "honest",
        BUG,
        (
            _FIX,
            submit(add=_ADDED, docs="README.md"),
            write("README.md", "add(a, b) adds."),
            submit(add=_ADDED, docs="README.md"),
        ),
        "verified",
        ("CHECKLIST_EVIDENCE",),
        3,
        judged=True,
        task={"checklist": [{"id": "add"}, {"id": "docs"}]},
    ),
)

HONEST: tuple[Scenario, ...] = (*_OPTIONS, *_RUNS, *_OTHER_RUNNERS, *_CHANGES, *_GIT, *_TALK)
