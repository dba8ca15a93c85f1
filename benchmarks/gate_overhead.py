"""What the gate costs besides the tests themselves, on a repository of 1,500 files.

    python benchmarks/gate_overhead.py [--files 1500] [--repeats 7] [--json FILE]

Timed are the steps of one verification around the run of the command: fingerprint (a snapshot of the
workspace), overlay (comparing and laying the baseline's protected files over), export, and reading a JUnit
report of as many tests as there are test files. Cold: no state yet, every file is read and kept. Warm: one
file has changed since. Limits: 1 s cold, 0.5 s warm, as user and system time, since other work on the
machine counts in wall-clock time; the least of the repeats. Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from endstop.agent.protected import Protected
from endstop.agent.removal import remove_path
from endstop.agent.report import read_junit
from endstop.agent.tree import Trees
from endstop.agent.verifiers.pytest import PROTECTED

COLD, WARM = 1.0, 0.5
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one step: wall clock, and CPU time of this process with its children."""

    name: str
    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--files", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gate-overhead-") as directory:
        place = Path(directory)
        root = place / "workspace"
        size = build(root, arguments.files)
        report = write_report(place / "report.xml", root)
        runs: dict[str, list[list[Step]]] = {"cold": [], "warm": []}
        for number in range(arguments.repeats):
            shutil.rmtree(place / "state", ignore_errors=True)
            os.sync()  # so that writing back the last repeat is not in this one
            runs["cold"].append(verification(place, root, report))
            (root / "package_0" / "module_0.py").write_text(f"value = {number}\n")
            runs["warm"].append(verification(place, root, report))
    best = {name: min(steps, key=lambda run: sum(step.cpu for step in run)) for name, steps in runs.items()}
    show(best, arguments.files, size)
    missed = [name for name, limit in (("cold", COLD), ("warm", WARM)) if total(best[name]).cpu > limit]
    if arguments.json is not None:
        kept = {
            "files": arguments.files,
            "bytes": size,
            "repeats": arguments.repeats,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "limits": {"cold": COLD, "warm": WARM},
            "best": {name: [asdict(step) for step in (*run, total(run))] for name, run in best.items()},
            "all_cpu": {name: [total(run).cpu for run in steps] for name, steps in runs.items()},
        }
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
    raise SystemExit(1 if missed else 0)


def build(root: Path, files: int) -> int:
    """A repository of Python packages with tests and some data, 13 KB a file on average."""
    draw = random.Random(0)
    size = 0
    for number in range(files):
        package = root / f"package_{number // 50}"
        if number % 5 == 0:
            path = package / "tests" / f"test_{number}.py"
            text = f"def test_{number}():\n    assert True\n" * 40
        elif number % 5 == 1:
            path = package / "data" / f"table_{number}.json"
            text = json.dumps([draw.random() for _ in range(1600)])
        else:
            path = package / f"module_{number}.py"
            text = "".join(f"value_{line} = {draw.random()}\n" for line in range(350))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        size += len(text)
    (root / "package_0" / "module_0.py").write_text("value = None\n")
    return size


def write_report(path: Path, root: Path) -> Path:
    cases = [
        f'<testcase classname="{test.parent.parent.name}.tests.{test.stem}" name="{test.stem}"'
        f' file="{test.relative_to(root)}" time="0.001"/>'
        for test in sorted(root.rglob("test_*.py"))
    ]
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def verification(place: Path, root: Path, report: Path) -> list[Step]:
    """The steps of one verification; the tests themselves are left out."""
    steps: list[Step] = []

    def timed(name: str, run: Callable[[], Result]) -> Result:
        wall, cpu = time.perf_counter(), cpu_seconds()
        result = run()
        steps.append(Step(name, time.perf_counter() - wall, cpu_seconds() - cpu))
        return result

    export = place / "export"
    trees = timed("open", lambda: Trees(place / "state", root))
    protected = Protected([*PROTECTED, "Makefile"], python=True)
    tree = timed("fingerprint", trees.snapshot)
    baseline = baseline_of(place / "state", tree)
    overlaid = timed("overlay", lambda: protected.overlaid(trees, baseline, tree))
    timed("export", lambda: trees.export(overlaid, export))
    files = trees.paths(overlaid)
    timed("report", lambda: read_junit(report, files=files))
    timed("removal", lambda: remove_path(export))
    return steps


def baseline_of(state: Path, tree: str) -> str:
    """The tree of the cold verification, which the warm one compares with."""
    path = state / "baseline"
    if not path.exists():
        path.write_text(tree)
    return path.read_text()


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def total(steps: list[Step]) -> Step:
    return Step("total", sum(step.wall for step in steps), sum(step.cpu for step in steps))


def show(best: dict[str, list[Step]], files: int, size: int) -> None:
    print(f"{files} files, {size / 1e6:.1f} MB; seconds, the best of the repeats\n")
    print(f"{'':14}{'cold CPU':>10}{'wall':>8}{'warm CPU':>12}{'wall':>8}")
    rows = zip([*best["cold"], total(best["cold"])], [*best["warm"], total(best["warm"])], strict=True)
    for cold, warm in rows:
        print(f"{cold.name:14}{cold.cpu:>10.3f}{cold.wall:>8.3f}{warm.cpu:>12.3f}{warm.wall:>8.3f}")
    print(f"{'limit':14}{COLD:>10.3f}{'':8}{WARM:>12.3f}")


if __name__ == "__main__":
    main()
