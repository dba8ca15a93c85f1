"""Which files an agent may not change, which parts of shared ones, and what opens them."""

from __future__ import annotations

from pathlib import Path

import pytest

from endstop.agent.protected import Protected, named_by_command
from endstop.agent.task import Task, VerifySettings
from endstop.agent.tree import Trees
from endstop.agent.verifiers import VERIFIERS
from tests.agent.projects import put


def changed(
    tmp_path: Path,
    before: dict[str, str],
    after: dict[str, str | None],
    command: str = "pytest",
    verifier: str = "pytest",
    **task: object,
) -> tuple[list[str], list[str]]:
    root = tmp_path / "workspace"
    root.mkdir(parents=True)
    trees = Trees(tmp_path / "state", root)
    put(root, dict(before))
    baseline = trees.snapshot()
    put(root, after)
    settings = {"command": command, "verifier": verifier, "required": task.pop("required", ())}
    whole = Task.model_validate({"task": "x", "verify": settings, **task})
    return Protected.of(whole).changed(trees, baseline, trees.snapshot())


@pytest.mark.parametrize(
    ("verifier", "path"),
    [
        ("pytest", "tests/test_a.py"),
        ("pytest", "pkg/tests/data/expected.json"),
        ("pytest", "test_a.py"),
        ("pytest", "pkg/a_test.py"),
        ("pytest", "pkg/deep/conftest.py"),
        ("pytest", "Tests/Test_A.py"),
        ("pytest", "tests"),
        ("unittest", "test/test_a.py"),
        ("node", "test/a.js"),
        ("node", "src/calc.test.mjs"),
        ("jest", "src/__tests__/calc.js"),
        ("jest", "__mocks__/fs.js"),
        ("jest", "jest.config.cjs"),
        ("vitest", "src/calc.spec.ts"),
        ("vitest", "vite.config.ts"),
        ("go", "pkg/calc_test.go"),
        ("go", "pkg/testdata/a.golden"),
        ("cargo", "tests/it.rs"),
        ("cargo", ".cargo/config.toml"),
        ("pytest", "golden/a.txt"),
        ("pytest", "data/expected_output.txt"),
        ("pytest", "pkg/__snapshots__/a.ambr"),
        ("cargo", "src/snapshots/calc.snap"),
        ("node", "test_data/a.json"),
        ("command", ".mocharc.cjs"),
        ("command", "src/calc.spec.ts"),
        ("command", "src/test/java/CalcTest.java"),
        ("command", "out.expected"),
    ],
)
def test_patterns(verifier: str, path: str) -> None:
    assert Protected(VERIFIERS[verifier].protected).holds(path)  # type: ignore[index]


@pytest.mark.parametrize(
    ("verifier", "path"),
    [
        ("pytest", "calc.py"),
        ("pytest", "contest.py"),
        ("pytest", "attest_a.pyx"),
        ("pytest", "latest/calc.py"),
        ("pytest", "docs/tests.md"),
        ("node", "src/test-helpers/x.py"),
        ("jest", "src/calc.js"),
        ("go", "calc.go"),
        ("cargo", "src/lib.rs"),
        ("cargo", "build.rs"),
        ("pytest", "unexpected.txt"),
        ("pytest", "expected.py"),
        ("command", "src/latest.php"),
        ("command", "contest.java"),
    ],
)
def test_what_is_not_protected(verifier: str, path: str) -> None:
    assert not Protected(VERIFIERS[verifier].protected).holds(path)  # type: ignore[index]


PYPROJECT = '[project]\nname = "x"\ndependencies = []\n\n[tool.pytest.ini_options]\naddopts = "-q"\n'
SETUP = "[metadata]\nname = x\n\n[tool:pytest]\naddopts = -q\n"
PACKAGE = '{"name": "x", "scripts": {"test": "jest"}, "dependencies": {}}'
CARGO = '[package]\nname = "x"\nversion = "0.1.0"\n\n[dependencies]\n'


@pytest.mark.parametrize(
    ("verifier", "path", "before", "after"),
    [
        ("pytest", "pyproject.toml", PYPROJECT, PYPROJECT.replace("[]", '["httpx"]')),
        ("pytest", "pyproject.toml", PYPROJECT, PYPROJECT + '\n[tool.ruff]\nline-length = 99\n# "note"\n'),
        ("pytest", "pyproject.toml", None, '[project]\nname = "x"\n'),
        ("pytest", "setup.cfg", SETUP, SETUP.replace("name = x", "name = y")),
        (
            "jest",
            "package.json",
            PACKAGE,
            PACKAGE.replace('s": {}', 's": {"a": "1"}'),
        ),
        ("jest", "package.json", PACKAGE, PACKAGE.replace(", ", ",\n  ")),
        ("pytest", "package.json", PACKAGE, PACKAGE.replace("jest", "true")),
        ("cargo", "Cargo.toml", CARGO, CARGO + 'serde = "1"\n'),
    ],
)
def test_honest_changes_of_shared_files(
    tmp_path: Path, verifier: str, path: str, before: str | None, after: str
) -> None:
    old = {} if before is None else {path: before}
    assert changed(tmp_path, old, {path: after}, "x", verifier) == ([], [])


@pytest.mark.parametrize(
    ("verifier", "path", "before", "after"),
    [
        ("pytest", "pyproject.toml", PYPROJECT, PYPROJECT.replace("-q", "-k zero")),
        ("pytest", "pyproject.toml", None, '[tool.pytest.ini_options]\naddopts = "-k zero"\n'),
        ("pytest", "pyproject.toml", PYPROJECT, "not toml ["),
        ("pytest", "pyproject.toml", PYPROJECT, None),
        ("pytest", "pyproject.toml", PYPROJECT, PYPROJECT + '\n[project.entry-points.pytest11]\na = "b"\n'),
        ("pytest", "setup.cfg", SETUP, SETUP.replace("-q", "-k zero")),
        ("pytest", "setup.cfg", SETUP, SETUP + "\n[aliases]\ntest = x\n"),
        ("pytest", "tox.ini", None, "[pytest]\naddopts = -k zero\n"),
        ("jest", "package.json", PACKAGE, PACKAGE.replace('"jest"', '"true"')),
        ("jest", "package.json", PACKAGE, PACKAGE.replace('"name"', '"jest": {"testRegex": "x"}, "name"')),
        ("jest", "sub/package.json", None, '{"jest": {"testMatch": []}}'),
        ("node", "package.json", '{"scripts": {"test": "node --test"}}', '{"scripts": {"test": "true"}}'),
        ("node", ".npmrc", None, "script-shell=/bin/true\n"),
        ("cargo", "Cargo.toml", CARGO, CARGO + '\n[[test]]\nname = "it"\nharness = false\n'),
        ("cargo", "Cargo.toml", CARGO, CARGO + "\n[lib]\ntest = false\n"),
        ("cargo", "Cargo.toml", CARGO, CARGO.replace('name = "x"', 'name = "x"\nautotests = false')),
        ("cargo", ".cargo/config.toml", None, '[target.x86_64-unknown-linux-gnu]\nrunner = "true"\n'),
    ],
)
def test_changes_of_what_the_runner_reads(
    tmp_path: Path, verifier: str, path: str, before: str | None, after: str | None
) -> None:
    old = {} if before is None else {path: before}
    assert changed(tmp_path, old, {path: after}, "x", verifier) == ([path], [])


@pytest.mark.parametrize(
    ("command", "patterns"),
    [
        ("pytest -q", []),
        ("make test", ["Makefile", "makefile", "GNUmakefile", "*.mk"]),
        ("./run_tests.sh --fast", ["/run_tests.sh"]),
        ("bash -e scripts/test.sh && true", ["/scripts/test.sh"]),
        ("CI=1 env X=1 python -u tools/check.py calc.py", ["/tools/check.py"]),
        ("python -m pytest calc.py", []),
        ("python -c 'import calc'", []),
        ("npm test", ["package.json", ".npmrc"]),
        ("cd web && node check.js", ["check.js"]),
        ("gcc -o t calc.c t.c && ./t", ["/t"]),
        ("pytest > out.txt; cat out.txt", []),
        ("/usr/bin/python3 check.py", ["/check.py"]),
        ("timeout -k 5 60 ./run.sh", ["/run.sh"]),
        ("nice -n 5 sh verify", ["/verify"]),
        ("uv run --with x python check.py", ["/check.py"]),
        (
            "poetry run make -f ci/rules lint",
            ["Makefile", "makefile", "GNUmakefile", "*.mk", "/ci/rules", "/ci/*"],
        ),
        ("make --file=rules", ["Makefile", "makefile", "GNUmakefile", "*.mk", "/rules"]),
        ("bash -o pipefail verify", ["/verify"]),
        ("bash -lc 'cd web && sh verify'", ["verify"]),
        ("if ! sh verify; then exit 1; fi", ["/verify"]),
        ("sh < verify > log", ["/verify"]),
        ("python -W error -m checks.run", ["/checks/run.py", "/checks/run/__main__.py"]),
        ("python -m calc", []),
        ("node --import ./setup.mjs run.js", ["/setup.mjs", "/run.js"]),
        ("python checks/run.py data.txt", ["/checks/run.py", "/checks/*"]),
        ("timeout 60 calc src/main.c", []),
    ],
)
def test_what_a_command_runs_is_protected(command: str, patterns: list[str]) -> None:
    assert named_by_command(command) == patterns


def test_added_files_are_changes_too(tmp_path: Path) -> None:
    added: dict[str, str | None] = {"tests/test_new.py": "", "new.py": "", "sub/conftest.py": ""}
    assert changed(tmp_path, {"tests/test_a.py": ""}, added) == (["sub/conftest.py", "tests/test_new.py"], [])


def test_what_is_opened_is_named(tmp_path: Path) -> None:
    before = {"tests/test_a.py": "a", "tests/conftest.py": "c", "pytest.ini": ""}
    after: dict[str, str | None] = {
        "tests/test_a.py": "b",
        "tests/test_b.py": "",
        "tests/conftest.py": "d",
        "pytest.ini": "[pytest]\n",
    }
    # What changes how every test is read is opened by its own name only.
    assert changed(tmp_path / "1", before, after, allow=["tests/*", "*.ini"]) == (
        ["pytest.ini", "tests/conftest.py"],
        ["tests/test_a.py", "tests/test_b.py"],
    )
    assert changed(tmp_path / "2", before, after, allow=["tests/*", "conftest.py", "pytest.ini"]) == (
        [],
        ["pytest.ini", "tests/conftest.py", "tests/test_a.py", "tests/test_b.py"],
    )
    # Never the file of a listed test.
    required = ["tests/test_a.py::test_add"]
    assert changed(
        tmp_path / "3", before, {"tests/test_a.py": "b"}, allow=["tests/*"], required=required
    ) == (
        ["tests/test_a.py"],
        [],
    )


def test_patterns_of_a_task(tmp_path: Path) -> None:
    before = {"data/gold.txt": "a", "docs/spec.md": "a", "web/data/x.txt": "a", "pyproject.toml": PYPROJECT}
    after: dict[str, str | None] = {name: text + "\nx = 1\n" for name, text in before.items()}
    after["pyproject.toml"] = PYPROJECT.replace("[]", '["httpx"]')
    assert changed(tmp_path / "1", before, after, protected=["/data/", "spec.md", "pyproject.toml"]) == (
        ["data/gold.txt", "docs/spec.md"],
        [],
    )
    # With a slash a shared file is held whole.
    assert changed(tmp_path / "2", before, after, protected=["/pyproject.toml"]) == (["pyproject.toml"], [])


@pytest.mark.parametrize(
    ("path", "closed"),
    [
        ("pytest.py", True),
        ("src/pytest/__init__.py", True),
        ("json.py", True),
        ("unittest/__init__.py", True),
        ("_pytest.cpython-311-x86_64-linux-gnu.so", True),
        ("pkg/json.py", False),
        ("calendar.py", False),
        ("html/index.html", False),
        ("html/page.py", False),
        ("solution.py", False),
    ],
)
def test_modules_that_stand_before_the_runners(tmp_path: Path, path: str, closed: bool) -> None:
    assert changed(tmp_path / "1", {}, {path: "x"}) == ([path] if closed else [], [])
    # One that was there before is the project's own.
    assert changed(tmp_path / "2", {path: "x"}, {path: "y"}) == ([], [])
    assert changed(tmp_path / "3", {}, {path: "x"}, "go test", "go") == ([], [])


def test_an_executable_bit_is_no_change(tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    put(root, {"tests/test_a.py": "a"})
    trees = Trees(tmp_path / "state", root)
    baseline = trees.snapshot()
    (root / "tests" / "test_a.py").chmod(0o755)
    tree = trees.snapshot()
    assert tree != baseline
    assert Protected(["tests/*"]).changed(trees, baseline, tree) == ([], [])
    (root / "tests" / "test_a.py").unlink()
    (root / "tests" / "test_a.py").symlink_to("../a")
    assert Protected(["tests/*"]).changed(trees, baseline, trees.snapshot())[0] == ["tests/test_a.py"]


def test_an_overlay_makes_room(tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    put(root, {"tests/a/test_a.py": "a", "conftest.py": "c", "tests/test_b.py": "b", "calc.py": "1"})
    trees = Trees(tmp_path / "state", root)
    baseline = trees.snapshot()
    protected = Protected(["tests/*", "conftest.py"])
    put(root, {"tests/a/test_a.py": None, "conftest.py": None, "calc.py": "2"})
    (root / "tests" / "a").rmdir()
    (root / "tests" / "a").symlink_to("/tmp")
    put(root, {"conftest.py/inner.py": "x", "tests/test_new.py": "n"})
    tree = trees.snapshot()
    overlaid = protected.overlaid(trees, baseline, tree)
    assert trees.changed(baseline, overlaid) == ["calc.py"]
    assert trees.read(overlaid, "calc.py") == b"2"


def test_settings_without_a_verifier_protect_what_the_task_names() -> None:
    task = Task(task="x", protected=("a.txt",))
    assert Protected.of(task).patterns == ("a.txt",)
    assert Protected.of(task, VerifySettings(command="make check")).patterns[:2] == ("a.txt", "Makefile")


@pytest.mark.parametrize(
    ("before", "path"),
    [
        ({"conftest.py": ""}, "conftest/__init__.py"),
        ({"test_a.py": ""}, "test_a.cpython-311-x86_64-linux-gnu.so"),
        ({"conftest.py": ""}, "conftest.abi3.so"),
        ({"tests/test_a.py": ""}, "tests.py"),
        ({"pkg/tests/test_a.py": ""}, "pkg/tests.py"),
        ({"tests/test_a.py": ""}, "tests.so"),
    ],
)
def test_a_module_that_would_be_imported_in_the_place_of_tests(
    tmp_path: Path, before: dict[str, str], path: str
) -> None:
    before = {**before, "tests/test_b.py": ""}
    assert changed(tmp_path, before, {path: "x = 1\n"}) == ([path], [])


@pytest.mark.parametrize(
    "path", ["calc/__init__.py", "pkg/conftest_of/__init__.py", "pkg/test.json", "app.py"]
)
def test_other_new_modules_are_free(tmp_path: Path, path: str) -> None:
    before = {
        "conftest.py": "",
        "calc.py": "",
        "tests/__init__.py": "",
        "app/tests/test_a.py": "",
        "app/x.py": "",
    }
    assert changed(tmp_path, before, {path: "x = 1\n"}) == ([], [])


def test_a_package_of_tests_goes_before_a_module_of_its_name(tmp_path: Path) -> None:
    assert changed(tmp_path, {"tests/__init__.py": ""}, {"tests.py": ""}) == ([], [])


@pytest.mark.parametrize(
    "command",
    ["cd backend && python -m pytest", "PYTHONPATH=./backend python -m pytest", "cd 'backend/'; pytest"],
)
def test_modules_before_the_runners_where_the_command_goes(tmp_path: Path, command: str) -> None:
    before = {"backend/calc.py": "", "lib/calc.py": ""}
    after: dict[str, str | None] = {"backend/pluggy.py": "", "backend/queue.py": "", "lib/pluggy.py": ""}
    assert changed(tmp_path, before, after, command) == (["backend/pluggy.py"], [])


def test_a_link_in_the_place_of_a_directory_of_plugins(tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    trees = Trees(tmp_path / "state", root)
    baseline = trees.snapshot()
    put(root, {"meta/entry_points.txt": "[pytest11]\ngreen = green\n"})
    (root / "green-1.dist-info").symlink_to("meta")
    (root / "latest").symlink_to("meta")
    task = Task(task="x", verify=VerifySettings(command="pytest", verifier="pytest"))
    assert Protected.of(task).changed(trees, baseline, trees.snapshot()) == (["green-1.dist-info"], [])


STRICT = "[tool:pytest]\nxfail_strict = true\n"


@pytest.mark.parametrize(
    "after",
    [
        STRICT.replace("xfail", "Xfail"),
        "[DEFAULT]\nxfail_strict = true\n[tool:pytest]\n",
        STRICT.replace("[tool:pytest]", "[tool:pytest] # here"),
        f"{STRICT}[tool:pytest]\nxfail_strict = false\n",
    ],
)
def test_setup_cfg_as_pytest_reads_it(tmp_path: Path, after: str) -> None:
    assert changed(tmp_path, {"setup.cfg": STRICT}, {"setup.cfg": after}) == (["setup.cfg"], [])
    honest = f"[metadata]\nname = calc\n\n# of pytest\n{STRICT}\n\n[options]\ninstall_requires = attrs\n"
    again = tmp_path / "again"
    again.mkdir()
    assert changed(again, {"setup.cfg": STRICT}, {"setup.cfg": honest}) == ([], [])
