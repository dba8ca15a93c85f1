"""Small projects for tests of verification: written, changed, and verified for real."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from endstop.agent.decisions import Verdict
from endstop.agent.protected import Protected
from endstop.agent.task import Task, VerifySettings
from endstop.agent.tree import Trees
from endstop.agent.verification import Verification
from endstop.agent.verifiers import resolved
from endstop.sandbox.settings import SandboxSettings

# The interpreter that runs these tests has pytest; the sandbox sees it where it is.
SANDBOX = SandboxSettings(
    read_only=(Path(sys.prefix),),
    path_entries=(f"{sys.prefix}/bin",),
    # Plugins of the interpreter that runs these tests take a second to load.
    environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
)
PYTEST = "python -m pytest -q -p no:cacheprovider --junitxml=$REPORT"

BUG = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "tests/test_calc.py": (
        "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n\n\n"
        "def test_zero():\n    assert add(0, 0) == 0\n"
    ),
    "conftest.py": "import sys, pathlib\nsys.path.insert(0, str(pathlib.Path(__file__).parent))\n",
}
FIX = {"calc.py": "def add(a, b):\n    return a + b\n"}


@dataclass
class Project:
    """A workspace with its trees and its verification."""

    root: Path
    state: Path
    task: Task
    trees: Trees
    baseline: str
    verification: Verification

    def write(self, files: dict[str, str | None]) -> str:
        """Change the workspace (None removes a file) and return its tree."""
        put(self.root, files)
        return self.trees.snapshot()

    def verify(self, files: dict[str, str | None]) -> Verdict:
        return self.verification.verify(self.write(files))

    def protected_changed(self) -> list[str]:
        tree = self.trees.snapshot()
        return self.verification.protected.changed(self.trees, self.baseline, tree)[0]


def put(root: Path, files: dict[str, str | None]) -> None:
    for name, text in files.items():
        path = root / name
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def project(
    place: Path,
    files: dict[str, str],
    command: str | None = PYTEST,
    *,
    allow: tuple[str, ...] = (),
    sandbox: SandboxSettings = SANDBOX,
    dependencies: dict[str, Path] | None = None,
    **verify: object,
) -> Project:
    root, state = place / "workspace", place / "state"
    root.mkdir()
    put(root, dict(files))
    settings = VerifySettings(command=command, **{"timeout": 60.0, **verify})  # type: ignore[arg-type]
    task = Task(task="make the tests pass", verify=resolved(settings, root), allow=allow)
    trees = Trees(state, root, exclude=tuple(dependencies or ()))
    baseline = trees.snapshot()
    verification = Verification(
        trees, task.verify, Protected.of(task), baseline, sandbox, state, dependencies
    )
    return Project(root, state, task, trees, baseline, verification)
