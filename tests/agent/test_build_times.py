"""What was built from files is as new or as old in an export as it was: builders look at nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from endstop.agent.tree import Trees
from tests.agent.projects import project

# The order of the names is the order in which files are written: what is built comes last.
MAKE = {
    "a_source": "wrong\n",
    "Makefile": "test: z_built\n\tgrep -q right z_built\n\nz_built: a_source\n\tcp a_source z_built\n",
}
OLD, NEW = 1_600_000_000_000_000_000, 1_700_000_000_123_456_789


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("built_before_the_run", [False, True])
def test_a_stale_build_is_built_again(tmp_path: Path, built_before_the_run: bool) -> None:
    files = MAKE | ({"z_built": "wrong\n"} if built_before_the_run else {})
    made = project(tmp_path, files, "make test")
    made.verification.start()
    made.write({"z_built": "wrong\n", "a_source": "right\n"})
    os.utime(made.root / "z_built", ns=(OLD, OLD))
    assert made.verification.verify(made.trees.snapshot()).code == "PASS"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_a_fresh_build_is_kept(tmp_path: Path) -> None:
    files = MAKE | {"Makefile": MAKE["Makefile"].replace("cp a_source z_built", "false")}
    made = project(tmp_path, files | {"z_built": "right\n"}, "make test")
    os.utime(made.root / "a_source", ns=(OLD, OLD))
    assert made.verification.verify(made.trees.snapshot()).code == "PASS"


def test_times_of_an_export(tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    (root / "d").mkdir(parents=True)
    for name in ("kept", "d/kept", "changed"):
        (root / name).write_text(name)
        os.utime(root / name, ns=(NEW, NEW))
    trees = Trees(tmp_path / "state", root)
    before = trees.snapshot()
    (root / "changed").write_text("other")
    os.utime(root / "changed", ns=(OLD, OLD))
    after = trees.snapshot()
    for tree, changed in ((after, OLD), (before, None)):
        trees.export(tree, tmp_path / tree)
        times = {name: (tmp_path / tree / name).stat().st_mtime_ns for name in ("kept", "d/kept", "changed")}
        assert (times["kept"], times["d/kept"]) == (NEW, NEW)
        # What the workspace no longer has is new, and whatever is built from it is built again.
        assert times["changed"] == changed if changed else times["changed"] > NEW
    # The same files, known from another process only.
    assert Trees(tmp_path / "state", root).snapshot() == after
