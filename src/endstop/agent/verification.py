"""The gate's own run of the project's tests: on a clean export of one tree, with the baseline's protected
files, in the sandbox, with the gate's own failing test in a second run."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from endstop.agent.called_files import called_files
from endstop.agent.canary import canary_problem, failed_in, is_reported, others_failed, others_missing
from endstop.agent.check_run import NOT_STARTED, CheckRun, clear_left_over, make_places_for_caches
from endstop.agent.decisions import TestReport, Verdict, VerifierRun
from endstop.agent.judging import PASSED, Expected, Finding, flaky, judge, listed
from endstop.agent.protected import Protected
from endstop.agent.pytest_files import files_pytest_obeys, files_without_skips
from endstop.agent.reading import first_fault
from endstop.agent.report import find_tests, without_parameters
from endstop.agent.task import VerifySettings
from endstop.agent.tree import Trees
from endstop.agent.verifiers import VERIFIERS
from endstop.agent.verifiers.command import reports
from endstop.agent.verifiers.node import ENDED_WITHOUT
from endstop.agent.verifiers.verifier import Canary, failing
from endstop.protocol.errors import EndstopError
from endstop.sandbox.settings import SandboxSettings

# Endings of files that are run.
_CODE = frozenset(("py", "js", "cjs", "mjs", "ts", "cts", "mts", "jsx", "tsx", "go", "rs", "sh", "mk"))
# Of others those that are read by runners: data of tests may well have such an ending.
_CONFIGURATION = re.compile(
    r"\.?(?:pytest\.(?:ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml|cargo\.toml|coveragerc|npmrc"
    r"|(?:gnu)?makefile|package\.json|.*\.(?:config|workspace)\.json)",
    re.IGNORECASE,
)
# As shells say it.
_NOT_FOUND = re.compile(r"([\w.+-]+): (?:command )?not found")
_SAYS_GIT = re.compile(r"\bgit\b", re.IGNORECASE)
_LIKE_TESTS = re.compile("test|spec|check", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """What the project's command does before any change.

    Attributes:
        executed: number of tests. tests: their ids, without those that could not be loaded.
        failed: ids, those that could not be loaded too.
        canary: the way in which the gate's own tests are brought in; "" where there is none.
        canary_units: where it is in each, what ran in a process of its own and had it.
        canary_strict: whether a run without it cannot pass. exit_tells: whether the exit code shows that the
            gate's own test failed.
        repository: whether tests ask for a git repository, so that every export is made one.
        rewrites: files deciding about the tests that the command changes by itself.
        notes: what is weaker than it could be, for the record.
        output: of the run, head and tail.
    """

    command: str
    exit_code: int | None
    executed: int
    tests: tuple[str, ...]
    failed: tuple[str, ...]
    timed_out: bool = False
    canary: str = ""
    canary_units: tuple[str, ...] = ()
    canary_strict: bool = False
    exit_tells: bool = True
    repository: bool = False
    rewrites: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    output: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What `to_dict` gives."""

    baseline_tree: str
    baseline: BaselineResult | None
    runs: int


class Verification:
    """Verifies trees of one workspace against its baseline.

    Attributes:
        settings: with command and verifier filled in (`verifiers.resolved`).
        protected: after `start` with the files of the baseline's tests.
        runs: number of runs of the command so far, second runs for the canary not counted.
    """

    def __init__(
        self,
        trees: Trees,
        settings: VerifySettings,
        protected: Protected,
        baseline_tree: str,
        sandbox: SandboxSettings,
        state: Path,
        dependencies: Mapping[str, Path] | None = None,
        baseline: BaselineResult | None = None,
    ) -> None:
        if settings.command is None or settings.verifier is None:
            raise EndstopError("no command to verify with is set, and none was found in the project")
        self.trees, self.settings, self.protected = trees, settings, protected
        self.baseline_tree = baseline_tree
        self.runs = 0
        self._verifier = VERIFIERS[settings.verifier]
        self._weak = settings.verifier == "command" and not reports(settings)
        self._directory = state.resolve() / "runs"
        self._run = CheckRun(
            trees,
            settings,
            self._verifier,
            self._weak,
            sandbox,
            self._directory,
            dict(dependencies or {}),
        )
        if self._weak and settings.required:
            raise EndstopError(
                "required tests need a report: let the command write JUnit XML to $REPORT, or set `report`"
            )
        for path, host in self._run.dependencies.items():
            if not host.exists():
                raise EndstopError(f"the dependency {path} is not there: {host} does not exist")
            make_places_for_caches(host)
        self.baseline = baseline
        self._without_skips: frozenset[str] | None = None
        if baseline is not None:
            self._run = replace(self._run, repository=baseline.repository)
            self._widen(baseline)

    def start(self) -> BaselineResult:
        """Run the baseline, unless it is known. Raises EndstopError where it executes no test."""
        clear_left_over(self._directory)
        if self.baseline is None:
            self.baseline = self._run_baseline()
            self._widen(self.baseline)
        return self.baseline

    def verify(self, tree: str) -> Verdict:
        """Run the command on a tree and judge it. A failing run is repeated on the same tree, a passing one
        is followed by one with the canary."""
        baseline = self.start()
        whole = self.protected.overlaid(self.trees, self.baseline_tree, tree)
        runs = [self._check(whole)]
        finding = self._judge(runs[0])
        if finding.code == "VERIFY_FAILED":
            for _ in range(self.settings.reruns):
                runs.append(self._check(whole))
                if self._judge(runs[-1]).code == "PASS":
                    finding = flaky(_failed(runs[0]))
                    break
        elif rewritten := sorted({*runs[0].rewritten} - {*baseline.rewrites}):
            finding = _rewritten(rewritten) if finding.code == "PASS" else finding
        elif finding.code == "PASS" and self._verifier.canary_modes:
            finding = self._with_canary(whole, runs, baseline)
        return Verdict(finding.code, tree, tuple(runs), finding.details, finding.problem, finding.would_pass)

    def to_dict(self) -> dict[str, Any]:
        """What a resumed run needs so that the baseline is not run again."""
        baseline = asdict(self.baseline) if self.baseline is not None else None
        return {"baseline_tree": self.baseline_tree, "baseline": baseline, "runs": self.runs}

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        trees: Trees,
        settings: VerifySettings,
        protected: Protected,
        sandbox: SandboxSettings,
        state: Path,
        dependencies: Mapping[str, Path] | None = None,
    ) -> Verification:
        try:
            saved = TypeAdapter(_Saved).validate_python(data)
        except ValidationError as error:
            raise EndstopError(f"what was saved of the baseline is damaged: {first_fault(error)}") from error
        kept = saved.baseline
        baseline = kept if kept is not None and kept.command == settings.command else None
        made = cls(trees, settings, protected, saved.baseline_tree, sandbox, state, dependencies, baseline)
        made.runs = saved.runs
        return made

    def _widen(self, baseline: BaselineResult) -> None:
        # Found by a pattern of the project's. Tests that are in the code itself do not close it.
        files = {path for test in baseline.tests if _LIKE_TESTS.search(path := test.partition("::")[0])}
        known = self.trees.paths(self.baseline_tree)
        # A runner further in tells paths from there.
        ends = tuple(f"/{path}" for path in files if path not in known)
        files.update(path for path in known if path.endswith(ends))
        if self.settings.verifier == "pytest":
            files.update(files_pytest_obeys(self.trees, self.baseline_tree, self.settings.command or ""))
        called = called_files(self.trees, self.baseline_tree, self.settings.command or "")
        files.update(called)
        report = TestReport(passed=frozenset(baseline.tests))
        required = [test for wanted in self.settings.required for test in find_tests(wanted, report)]
        absent = ["/" + path for path in called if path not in known]
        self.protected = self.protected.widened(sorted(files & known.keys()), required, absent)

    def _run_baseline(self) -> BaselineResult:
        run = self._check(self.baseline_tree, lenient=True)
        run, repository = self._in_repository(run)
        report = run.report or TestReport()
        tests = frozenset(filter(self._was_loaded, report.passed | report.failed))
        notes = []
        if run.report_problem.startswith(NOT_STARTED):
            raise EndstopError(
                f"`{self.settings.command}` cannot be started in the sandbox: {run.output.strip()}"
            )
        if run.timed_out:
            notes.append(f"before any change the command does not end within {self.settings.timeout:g} s")
        elif self._weak:
            notes.append("weak: only the exit code is checked, no report says which tests ran")
            if missing := _missing_program(run):
                notes.append(f"before any change the command is not found{missing}")
        elif report.executed == 0:
            finding = judge(run, self.settings, None, weak=False)
            raise EndstopError(
                f"`{self.settings.command}` cannot verify anything: before any change {finding.problem}. "
                f"Its output ends: {_last_words(run.output)}{_missing_program(run)}"
            )
        if unloaded := sorted(report.failed - tests):
            notes.append(f"could not be loaded before any change: {', '.join(unloaded[:20])}")
        result = BaselineResult(
            command=run.command,
            exit_code=run.exit_code,
            executed=report.executed,
            tests=tuple(sorted(tests)),
            failed=tuple(sorted(report.failed)),
            repository=repository,
            rewrites=run.rewritten,
            timed_out=run.timed_out,
            seconds=run.seconds,
            output=run.output,
        )
        return self._with_baseline_canary(result, run, notes)

    def _in_repository(self, run: VerifierRun) -> tuple[VerifierRun, bool]:
        """The baseline's run, in a git repository where more passes there: an export has none by itself."""
        asks = _failed(run) and _SAYS_GIT.search(run.output) and (self.trees.root / ".git").exists()
        if not asks:
            return run, False
        outside, self._run = self._run, replace(self._run, repository=True)
        second = self._check(self.baseline_tree, lenient=True)
        if second.report is not None and len(second.report.failed) < len(_failed(run)):
            return second, True
        self._run = outside
        return run, False

    def _with_baseline_canary(
        self, result: BaselineResult, run: VerifierRun, notes: list[str]
    ) -> BaselineResult:
        if not self._verifier.canary_modes:
            notes.append(f"no canary; in its place: {self._verifier.instead}")
            return replace(result, notes=tuple(notes))
        problem = ""
        # Where nothing runs yet, nothing can be found out: then a canary is asked for.
        if not result.timed_out and result.tests:
            for mode in self._verifier.canary_modes:
                second, canary = self._run_with_canary(self.baseline_tree, mode, run, lenient=True)
                problem = canary_problem(second, canary, exit_tells=False) or self._alone(run, second, canary)
                if not problem and not _flipped(run, second, canary):
                    exit_tells = second.exit_code != 0
                    if not exit_tells:
                        notes.append("the command's exit code says nothing about failures, only its report")
                    unit = self._verifier.unit
                    return replace(
                        result,
                        canary=mode,
                        canary_units=tuple(sorted(failed_in(second, canary, unit))) if unit else (),
                        canary_strict=True,
                        exit_tells=exit_tells,
                        notes=tuple(notes),
                    )
            notes.append(f"no canary, since it does not work in this project: {problem}")
            return replace(result, notes=tuple(notes))
        if not result.timed_out and self._canary_cannot_pass(run):
            notes.append("no canary, since the gate's own test does not pass in this project")
            return replace(result, notes=tuple(notes))
        notes.append("whether a canary works here is not known before tests run")
        return replace(result, canary_strict=True, notes=tuple(notes))

    def _canary_cannot_pass(self, run: VerifierRun) -> bool:
        """Whether the project itself, before any change, lets no test pass that is not its own: a fixture for
        all may ask for what the gate's test does not have."""
        for mode in self._verifier.canary_modes:
            second, canary = self._run_with_canary(self.baseline_tree, mode, run, lenient=True)
            report = second.report or TestReport()
            told = [test for test in report.failed | report.skipped if canary.token in test]
            if all(failing(canary) in test for test in told):
                return False
        return True

    def _was_loaded(self, test: str) -> bool:
        """Whether a result is a test's, and not that of a file, package or crate that could not be loaded."""
        if "::" in test or self._verifier.name not in ("node", "command"):
            return "::" in test
        return not test.endswith(ENDED_WITHOUT) and test not in self.trees.paths(self.baseline_tree)

    def _group(self, test: str) -> str:
        return _go_group(test) if self._verifier.name == "go" else without_parameters(test)

    def _judge(self, run: VerifierRun) -> Finding:
        baseline = self.baseline
        assert baseline is not None
        if self._without_skips is None:
            unloaded = {*baseline.failed} - {*baseline.tests}
            self._without_skips = files_without_skips(self.trees, self.baseline_tree, unloaded)
        tests = frozenset(baseline.tests)
        expected = Expected(tests, baseline.executed, baseline.timed_out, self._group, self._without_skips)
        return judge(run, self.settings, expected, weak=self._weak)

    def _with_canary(self, tree: str, runs: list[VerifierRun], baseline: BaselineResult) -> Finding:
        if not baseline.canary_strict:
            return PASSED
        modes = (baseline.canary,) if baseline.canary else self._verifier.canary_modes
        first, problem = runs[0], ""
        for mode in modes:
            second, canary = self._run_with_canary(tree, mode, first)
            problem = canary_problem(second, canary, exit_tells=baseline.exit_tells)
            if not problem and (unstable := _flipped(first, second, canary)):
                runs.append(second)
                return flaky(unstable)
            problem = self._in_units(tree, first, second, canary, problem)
            problem = problem or self._alone(first, second, canary)
            others = sorted(others_failed(second, canary))
            if not problem and others:
                problem = f"with it other tests failed: {listed(others)}"
            if not problem:
                runs[0] = replace(first, canary="ok")
                return PASSED
        runs[0] = replace(first, canary=problem)
        return Finding(
            "VERIFY_FAILED",
            problem="the result cannot be trusted: the gate ran the tests once more with two tests of its "
            f"own, one of which must fail, and {problem}",
            would_pass="every test's result is reported as it is; nothing in the code changes or hides any",
        )

    def _alone(self, first: VerifierRun, second: VerifierRun, canary: Canary) -> str:
        # A file without tests of its own has some with the canary in its process.
        missing = sorted(filter(self._was_loaded, others_missing(first, second, canary, self._group)))
        return f"other tests did not run with it: {listed(missing)}" if missing else ""

    def _in_units(
        self, tree: str, first: VerifierRun, second: VerifierRun, canary: Canary, problem: str
    ) -> str:
        """The problem, where a canary can be asked for in what runs in processes of its own."""
        if (unit := self._verifier.unit) is None or self.baseline is None:
            return problem
        ran = {unit(test) for test in (first.report.passed if first.report else ())}
        if self.baseline.canary:
            expected = {name for name in self.baseline.canary_units if name.partition("#")[0] in ran}
        elif (
            second.report is None
            or is_reported(second, canary)
            or re.fullmatch(self._verifier.plain, self.settings.command or "")
        ):
            # Nothing ran on the baseline. Of Rust, documentation has none, nor has a harness of one's own.
            texts = {name: self.trees.read(tree, name) for name in ran if " " not in name}
            expected = {name for name, text in texts.items() if text is None or b"[test]" in text}
        else:
            return ""  # the command may leave it out
        without = sorted(expected - failed_in(second, canary, unit))
        names = listed([name for name in without if name.partition("#")[0]])
        missing = f"the one that must fail was not reported in {names or 'every process that runs tests'}"
        return problem or (missing if without else "")

    def _run_with_canary(
        self, tree: str, mode: str, first: VerifierRun, *, lenient: bool = False
    ) -> tuple[VerifierRun, Canary]:
        files = self._test_files(tree, first)
        canary = Canary(mode, uuid4().hex[:12], next(iter(files), ""), files)
        return self._run(tree, canary=canary, lenient=lenient), canary

    def _test_files(self, tree: str, run: VerifierRun) -> tuple[str, ...]:
        """The one with the most tests first, so that what is meant for tests meets the gate's own too."""
        report = run.report or TestReport()
        counts = Counter(test.partition("::")[0] for test in report.passed | report.failed)
        known = self.trees.paths(tree)
        files = [path for path, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
        found: list[str] = []
        for path in files:
            # A runner further in tells paths from there.
            further = [path] if path in known else sorted(o for o in known if o.endswith(f"/{path}"))
            found += further[:1]
        return tuple(dict.fromkeys(found))

    def _check(self, tree: str, *, lenient: bool = False) -> VerifierRun:
        self.runs += 1
        return self._run(tree, lenient=lenient, guarded=self._guarded)

    def _guarded(self, path: str) -> bool:
        """Protected code and configuration. Data of tests may well be written to by them."""
        name = path.rpartition("/")[2]
        decides = name.rpartition(".")[2].lower() in _CODE or _CONFIGURATION.fullmatch(name)
        return bool(decides) and self.protected.holds(path)


def _rewritten(paths: list[str]) -> Finding:
    return Finding(
        "VERIFY_FAILED",
        tuple(paths),
        problem="the result cannot be trusted: while the command ran, files that decide about the tests were "
        f"changed: {', '.join(paths[:5])}",
        would_pass="the tests run as they are; no code changes them",
    )


def _last_words(output: str) -> str:
    """The last lines that say something, for a sentence."""
    lines = [line for line in map(str.strip, output.splitlines()) if any(map(str.isalnum, line))]
    return " / ".join(lines[-3:])[-500:] or "(none)"


def _missing_program(run: VerifierRun) -> str:
    """Where commands could find what they did not find, as far as that is known."""
    missing = _NOT_FOUND.search(run.output) if run.exit_code == 127 else None
    name = missing[1] if missing else ""
    here = Path(shutil.which(name) or "") if name and not name.startswith("py") else Path()
    if here.is_absolute() and not here.is_relative_to("/usr"):
        return (
            f". {name} is in {here.parent}: name this in sandbox.path, and what it needs in sandbox.read_only"
        )
    if run.exit_code != 127 and "No module named pytest" not in run.output:
        return ""
    return (
        ". Commands find the system's programs and those of one virtualenv: activate the project's, or name "
        "it (`-c sandbox.virtualenv=DIR`; `--virtualenv DIR` for `endstop gate`)"
    )


def _failed(run: VerifierRun) -> frozenset[str]:
    return run.report.failed if run.report is not None else frozenset()


def _flipped(first: VerifierRun, second: VerifierRun, canary: Canary) -> set[str]:
    """Tests that passed in the first run and failed in the second."""
    return others_failed(second, canary) & set(first.report.passed if first.report else ())


def _go_group(test: str) -> str:
    """Subtests come and go with the data that they are made from."""
    package, separator, name = test.partition("::")
    return package + separator + name.partition("/")[0]
