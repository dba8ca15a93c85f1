"""The gate for somebody else's agent: a session kept outside the workspace, asked by a stop hook.

There is no submit tool there: to stop is to submit. What submit, give_up and ask_user would carry stands in
a file of the workspace (`evidence_file` of the task), left out of the fingerprint and of what is checked.

A session has one budget of refusals. When it is used up the agent is let go and the outcome says so; only a
start, which a person or a person's prompt causes, gives a new one. All of a session is one file, written
whole; a process killed at any moment leaves the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from endstop.agent.decisions import Decision, Refusal
from endstop.agent.evidence_file import Request, how_to_ask, read_regular, read_request
from endstop.agent.gate import Gate, GateState, Verifies
from endstop.agent.hooks import Answer, HookEvent
from endstop.agent.protected import Protected
from endstop.agent.reading import first_fault
from endstop.agent.task import Task, VerifySettings
from endstop.agent.tree import Trees
from endstop.agent.verification import Verification
from endstop.agent.verifiers import resolved
from endstop.agent.virtualenv import at_home, dependencies_of
from endstop.outcomes import AgentOutcome
from endstop.protocol.errors import EndstopError
from endstop.sandbox.settings import SandboxSettings

# Reads the task and says where from.
Loader = Callable[[], tuple[Task, str]]
VERSION = 1
HISTORY_LIMIT = 100
_SESSION_LIMIT = 64 << 20


@dataclass
class Session:
    """What is kept of a session.

    Attributes:
        task: as it was at the start; a later change of the file changes nothing.
        protected_from_start: False where the first stop came before a start: what was changed until then
            cannot be seen, so nothing in this session can be `verified`.
        round: how often a budget was given. gate: GateState of this round.
        verify: the project's check; None where it has none. verification: what is known of the baseline
            once the check ran on it.
        dependencies: of the task, and what the sandbox holds of the workspace, a virtualenv for one.
        heard: ways out that ended a round; they count once. judged_tree: of the last answer.
        checking_since: set while a check runs; found at a start of one, that one was killed.
        answer, answered: the last answer, and when.
    """

    workspace: str
    session: str
    task: dict[str, Any]
    task_file: str
    baseline: str
    started: float
    protected_from_start: bool
    round: int = 1
    gate: dict[str, Any] = field(default_factory=lambda: GateState().to_dict())
    verify: dict[str, Any] | None = None
    verification: dict[str, Any] | None = None
    dependencies: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    judged_tree: str = ""
    checking_since: float | None = None
    answer: dict[str, Any] | None = None
    answered: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    version: int = VERSION


@dataclass(frozen=True)
class Guard:
    """One workspace, as hooks see it.

    Args:
        state: directory outside of the workspace where sessions and trees are kept.
        sandbox: where the project's check runs. evidence: read in place of the task's evidence file.
        headless: nobody is there to answer a question.
    """

    workspace: Path
    state: Path
    sandbox: SandboxSettings
    evidence: Path | None = None
    headless: bool = False

    def start(self, event: HookEvent, load: Loader, *, anew: bool = False, run_baseline: bool = False) -> str:
        """Record the baseline, or give a session that has ended a new budget. Returns what the agent is told.

        A session that is under way is left as it is: starts come at resumes and compactions too.

        Args:
            anew: record the baseline again, whatever there is.
            run_baseline: run the check on it now, and not at the first stop.
        """
        with self._locked():
            before = self._load(event.session)
            if before is None or anew:
                session = self._new(event.session, load, from_start=True)
                if before is not None:
                    anew_at = {"baseline_anew": time.time()}
                    session.history = [*before.history, anew_at][-HISTORY_LIMIT:]
            else:
                session = before
            has_ended = session.gate["outcome"] is not None and not event.compacted
            if has_ended:
                session.round += 1
                session.gate, session.judged_tree = GateState().to_dict(), ""
            if run_baseline:
                self._gate(session)
            self._save(session)
            if event.kind == "prompt" and before is not None and not has_ended:
                return ""
            return self._introduction(session)

    def check(self, event: HookEvent, load: Loader) -> Answer:
        """Judge a stop: go on, or stop with an outcome."""
        if event.kind != "stop" or event.not_judged:
            return Answer("silent")
        asked = time.time()
        with self._locked() as waited:
            session = self._load(event.session)
            if session is not None and waited and session.answer is not None and session.answered >= asked:
                # The same hook configured twice: one stop, one judgement.
                return Answer(**session.answer)
            if session is None:
                session = self._new(event.session, load, from_start=False)
            notes = _notes(session, load)
            session.checking_since = asked
            self._save(session)
            answer = self._judge(session)
            answer = Answer(answer.kind, "\n".join([answer.message, *notes]), answer.outcome)
            session.checking_since = None
            session.answer, session.answered = asdict(answer), time.time()
            entry = {"time": session.answered, "round": session.round, "outcome": answer.outcome}
            session.history = [*session.history, {**entry, "codes": session.gate["codes"][-2:]}][
                -HISTORY_LIMIT:
            ]
            self._save(session)
            return answer

    def sessions(self) -> list[Session]:
        """Every session of this workspace, the last one first."""
        files = self._place.glob("session-*.json")
        read = [session for session in map(_read, files) if session is not None]
        return sorted(read, key=lambda session: session.answered or session.started, reverse=True)

    # One stop

    def _judge(self, session: Session) -> Answer:
        gate, trees = self._gate(session)
        state = gate.state
        tree = trees.snapshot()
        if state.outcome in ("verified", "unverified") and tree == session.judged_tree:
            return Answer("stop", f"endstop gate: {state.outcome}, nothing has changed since.", state.outcome)
        if state.outcome in ("verified", "unverified"):
            # The verdict was on other files. These are judged within what is left of the budget.
            state.outcome = None
        if state.outcome not in (None, "needs_user"):
            return _released(state.outcome)
        request, problem = read_request(self.evidence or self.workspace / gate.task.evidence_file)
        if request.way_out in session.heard:
            request = request.model_copy(update={"give_up": None, "ask_user": None})
        decision = _ask(gate, request)
        session.judged_tree = tree
        if isinstance(decision, Refusal):
            session.gate = state.to_dict()
            told = (decision.message, problem, self._how_to_ask(gate.task))
            return Answer("go_on", "\n\n".join(part for part in told if part))
        outcome, message = decision.outcome, decision.message
        if outcome == "verified" and not session.protected_from_start:
            state.outcome = outcome = "unverified"
            state.codes[-1] = "END unverified"
            message = (
                f"The check passes on tree {tree}, but the session had no start: what was changed before its "
                "first stop, tests included, cannot be seen. Call `endstop gate start` at its beginning."
            )
        if request.way_out:
            session.heard.append(request.way_out)
        session.gate = state.to_dict()
        return Answer("stop", _ended(outcome, message, decision.details), outcome)

    # What the agent is told beside the gate's own words

    def _how_to_ask(self, task: Task) -> str:
        return how_to_ask(task, str(self.evidence or task.evidence_file))

    def _introduction(self, session: Session) -> str:
        task = Task.model_validate(session.task)
        lines = ["A gate judges every stop of this session. What you ran or say does not count."]
        if session.verify is None:
            lines.append("No check of the project was found, so nothing here can end as verified.")
        else:
            lines.append(
                f"`{session.verify['command']}`, run by the gate in a clean copy of the files, must pass, "
                "and the tests and their configuration must be as they are now."
            )
        if task.checklist:
            lines.append("Each of these items needs evidence, a test that passes or a path that is there:")
            lines += [f"- {item.id}: {item.text}" if item.text else f"- {item.id}" for item in task.checklist]
        return "\n".join([*lines, self._how_to_ask(task)])

    # A session and its parts

    def _new(self, name: str, load: Loader, *, from_start: bool) -> Session:
        task, source = load()
        dependencies = dependencies_of(task.dependencies, self.sandbox, self.workspace)
        trees = self._trees(task, dependencies)
        verify = resolved(task.verify, self.workspace)
        return Session(
            workspace=str(self.workspace),
            session=name,
            task=task.model_dump(mode="json"),
            task_file=source,
            baseline=trees.snapshot(),
            started=time.time(),
            protected_from_start=from_start,
            verify=None if verify.command is None else verify.model_dump(mode="json"),
            dependencies=list(dependencies),
        )

    def _gate(self, session: Session) -> tuple[Gate, Trees]:
        task = Task.model_validate(session.task)
        trees = self._trees(task, session.dependencies)
        verification = self._verification(session, task, trees)
        state = GateState.from_dict(session.gate)
        return Gate(task, trees, verification, state, session.baseline, not self.headless), trees

    def _trees(self, task: Task, dependencies: Iterable[str]) -> Trees:
        return Trees(self._place, self.workspace, exclude=(*dependencies, task.evidence_file))

    def _verification(self, session: Session, task: Task, trees: Trees) -> Verifies | None:
        """The project's check, which ran on the baseline once in a session. Raises EndstopError where it runs
        no test there."""
        if session.verify is None:
            return None
        settings = VerifySettings.model_validate(session.verify)
        protected = Protected.of(task, settings)
        dependencies = {path: self.workspace / path for path in session.dependencies}
        sandbox = at_home(self.sandbox, self.workspace)
        if session.verification is not None:
            return Verification.from_dict(
                session.verification, trees, settings, protected, sandbox, self._place, dependencies
            )
        verification = Verification(
            trees, settings, protected, session.baseline, sandbox, self._place, dependencies
        )
        verification.start()
        session.verification = verification.to_dict()
        self._save(session)
        return verification

    # Files

    @property
    def _place(self) -> Path:
        return self.state / _key(str(self.workspace))

    def _file(self, session: str) -> Path:
        return self._place / f"session-{_key(session)}.json"

    def _load(self, session: str) -> Session | None:
        return _read(self._file(session))

    def _save(self, session: Session) -> None:
        file = self._file(session.session)
        part = file.with_suffix(".part")
        with part.open("w", encoding="utf-8") as stream:
            json.dump(asdict(session), stream)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """One process at a time works on a workspace. Yields whether another one was at it."""
        from filelock import FileLock, Timeout

        if self.state.resolve().is_relative_to(self.workspace):
            raise EndstopError(
                f"the state directory {self.state} must not lie in the workspace {self.workspace}"
            )
        self._place.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(self._place / "lock")
        waited = False
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waited = True
            lock.acquire()
        try:
            yield waited
        finally:
            lock.release()


def _ask(gate: Gate, request: Request) -> Decision:
    if request.give_up is not None:
        asked = request.give_up
        return gate.give_up(asked.reason, asked.evidence, asked.hard)
    if request.ask_user:
        return gate.ask_user(request.ask_user)
    return gate.submit(request.summary, request.checklist, request.assumptions)


def _read(file: Path) -> Session | None:
    """A saved session; None where there is none. Raises EndstopError for one of another version, and for what
    this program has not written."""
    try:
        data = json.loads(read_regular(file, _SESSION_LIMIT))
        if isinstance(data, dict) and data.get("version", VERSION) != VERSION:
            raise EndstopError("it is of another version of endstop")
        session = TypeAdapter(Session).validate_python(data)
        GateState.from_dict(session.gate)
        Task.model_validate(session.task)
        if session.verify is not None:
            VerifySettings.model_validate(session.verify)
        return session
    except FileNotFoundError:
        return None
    except ValidationError as error:
        why = first_fault(error)
    except OSError as error:
        why = error.strerror or str(error)
    except (EndstopError, ValueError, RecursionError) as error:
        why = str(error)
    raise EndstopError(f"{file} cannot be used: {why}; remove it to begin anew")


def _notes(session: Session, load: Loader) -> list[str]:
    """What a person should know beside the answer."""
    notes = []
    if session.checking_since is not None:
        notes.append("The check before this one did not finish: perhaps the hook's timeout is too short.")
    try:
        same = load()[0].model_dump(mode="json") == session.task
    except EndstopError:
        same = False
    if not same:
        notes.append(f"{session.task_file} is not as it was at the start; what was recorded then holds.")
    return notes


def _ended(outcome: AgentOutcome, message: str, details: tuple[str, ...]) -> str:
    judged = "" if outcome == "verified" else " The agent was let go; its work is not verified."
    also = f" ({', '.join(details)})" if details else ""
    return f"endstop gate: {outcome}{also}.{judged} {message}"


def _released(outcome: AgentOutcome) -> Answer:
    return Answer(
        "stop",
        f"endstop gate: this session ended as {outcome}; its work is not verified. No stop is judged until "
        "the next start: a prompt of yours, where that hook is set up, or `endstop gate start`.",
        outcome,
    )


def _key(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def summary(session: Session) -> dict[str, Any]:
    """What there is to say of a session, for people and programs."""
    state = GateState.from_dict(session.gate)
    bounds = Task.model_validate(session.task).bounds
    notes = []
    if not session.protected_from_start:
        notes.append("There was no start: protection begins at the first stop, and nothing can be verified.")
    if session.checking_since is not None:
        notes.append("A check is under way, or was killed.")
    last = state.findings.get(state.last_tree)
    return {
        "session": session.session,
        "outcome": state.outcome,
        "round": session.round,
        "refusals": f"{state.refusals} of {bounds.refusals}",
        "gate_runs": state.gate_runs,
        "gate_seconds": round(state.gate_seconds, 2),
        "baseline": session.baseline,
        "best_verified_tree": state.best_verified_tree,
        "last": None if last is None else last.line,
        "codes": state.codes,
        "history": session.history,
        "notes": notes,
    }
