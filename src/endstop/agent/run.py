"""A whole run: the workspace made safe to work in, the baseline verified, the loop, and what came of it.

A run lives in a state directory outside the workspace. `trajectory.json` there decides everything; the shadow
trees, the working copy and the baseline of the verification lie beside it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets as random_bytes
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from endstop.agent.context import ContextBudget
from endstop.agent.decisions import End
from endstop.agent.gate import Gate, GateState
from endstop.agent.loop import ANSWERED, Agent
from endstop.agent.models import AgentModel, open_model
from endstop.agent.prompts import render
from endstop.agent.result import AgentResult, make_result
from endstop.agent.settings import AgentSettings, anchored, make_settings, merged
from endstop.agent.tool import Tool
from endstop.agent.toolbox import open_tools
from endstop.agent.trajectory import REDACTED, Trajectory, now
from endstop.agent.workplace import Workplace, open_workplace, secret_values
from endstop.outcomes import AgentOutcome
from endstop.protocol.errors import EndstopError

Person = Callable[[str], str | None]
Watch = Callable[[str, Any], None]

# After these a run may go on: nothing was decided about the task.
RESUMABLE: frozenset[AgentOutcome] = frozenset(
    {"interrupted", "needs_user", "error", "limit:steps", "limit:time", "limit:cost", "limit:context"}
)


def run_agent(
    settings: AgentSettings,
    workspace: Path,
    *,
    model: AgentModel | None = None,
    extra_tools: Sequence[Tool] = (),
    person: Person | None = None,
    watch: Watch | None = None,
) -> AgentResult:
    """Run a task to its end.

    Args:
        model: in place of the one that the settings name; it is not closed.
        extra_tools: tools of one's own, beside the standard ones.
        person: answers the model's questions; only asked where the settings say `interactive`.
        watch: is told what happens, see Trajectory.

    Raises EndstopError where the run cannot start: no model, no workspace, a baseline that runs no test.
    """
    settings, workspace = anchored(settings, Path.cwd()), workspace.resolve()
    if not workspace.is_dir():
        raise EndstopError(f"the workspace {workspace} is not a directory.")
    identity = f"{datetime.now():%Y%m%d-%H%M%S}-{random_bytes.token_hex(2)}"
    state = _state_directory(settings.state, identity, workspace)
    if (state / "trajectory.json").exists():
        raise EndstopError(f"{state} already holds a run; resume it, or name another directory.")
    with _locked(state), _alone_in(workspace), _model(settings, model, 0) as opened:
        values = (*secret_values(settings), *opened.secrets)
        trajectory = Trajectory(
            state / "trajectory.json",
            identity,
            str(workspace),
            now(),
            settings.task.model_dump(mode="json"),
            opened.describe(),
            settings=settings.model_dump(mode="json", exclude={"task", "state"}),
            secrets=values,
        )
        trajectory.watch = watch or trajectory.watch
        trajectory.watch("record", state)
        with (
            open_workplace(settings, workspace, state, None, trajectory.watch) as place,
            open_tools(settings, place, extra_tools) as tools,
        ):
            _begin(trajectory, settings, place, tools)
            return _go_on(trajectory, settings, place, opened, tools, person)


def resume_agent(
    state: Path,
    *,
    changes: Mapping[str, Any] | None = None,
    answer: str | None = None,
    model: AgentModel | None = None,
    extra_tools: Sequence[Tool] = (),
    person: Person | None = None,
    watch: Watch | None = None,
) -> AgentResult:
    """Go on with a run that was killed, interrupted, met a limit, failed, or waits for a person.

    Args:
        state: its directory, or the trajectory in it.
        changes: settings that replace those of the run, e.g. a higher limit of steps.
        answer: what the person says to the question that the run waits with.

    Raises EndstopError for a run whose end is final.
    """
    trajectory = Trajectory.load(state)
    state = trajectory.path.parent
    with _locked(state):
        trajectory = Trajectory.load(state)  # it may have gone on before the lock was ours
        data = merged({**trajectory.settings, "task": trajectory.task}, changes or {})
        _must_be_whole(data)
        settings = anchored(make_settings(data, "the settings of the resumed run"), Path.cwd())
        before = (trajectory.outcome or {}).get("outcome")
        if before is not None and before not in RESUMABLE:
            raise EndstopError(f"the run {trajectory.id} has ended as {before}, and that is final.")
        workspace = Path(trajectory.workspace)
        with _alone_in(workspace), _model(settings, model, trajectory.steps) as opened:
            trajectory.secrets = (*secret_values(settings), *opened.secrets)
            trajectory.watch = watch or trajectory.watch
            trajectory.task = settings.task.model_dump(mode="json")
            trajectory.settings = settings.model_dump(mode="json", exclude={"task", "state"})
            trajectory.model = opened.describe()
            with (
                open_workplace(settings, workspace, state, trajectory, trajectory.watch) as place,
                open_tools(settings, place, extra_tools, asked=_asked_of_the_oracle(trajectory)) as tools,
            ):
                _take_up(trajectory, place, before, answer, person)
                return _go_on(trajectory, settings, place, opened, tools, person)


def _begin(trajectory: Trajectory, settings: AgentSettings, place: Workplace, tools: Sequence[Tool]) -> None:
    """The first two messages, and the first save."""
    task = place.task
    trajectory.task = task.model_dump(mode="json")
    trajectory.sandbox = {"mode": place.sandbox_mode, "description": place.sandbox_description}
    trajectory.baseline = place.baseline
    trajectory.tools = [tool.definition for tool in tools]
    trajectory.verification = place.verification.to_dict() if place.verification is not None else None
    trajectory.gate = GateState().to_dict()
    system = render(
        "system",
        settings.prompts.system,
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        shell="bash",
        directory=place.directory,
        network=settings.sandbox.network,
        sandbox=place.sandbox_mode,
        tools=[{"name": tool.name, "summary": _first_sentence(tool.description)} for tool in tools],
        verify=place.verify_command,
        protected=place.protected.matching(place.trees.paths(place.baseline)),
        allowed=task.allow,
        bounds=task.bounds,
        interactive=settings.interactive,
    )
    trajectory.say("system", system, "system")
    text = render("task", settings.prompts.task, task=task.task.strip(), checklist=list(task.checklist))
    trajectory.say("user", text, "task")
    # A fault of this one would be found in the middle of the run.
    render("compaction", settings.prompts.compaction, done=[], state="the state")
    trajectory.save()


def _take_up(
    trajectory: Trajectory, place: Workplace, before: str | None, answer: str | None, person: Person | None
) -> None:
    """Compare the files with what the trajectory last saw, and answer what was left open."""
    tree, seen = place.trees.snapshot(), trajectory.tree
    changed = [] if tree == seen else place.trees.changed(seen, tree)
    calls = trajectory.open_calls()
    waits = before == "needs_user" and len(calls) == 1 and calls[0]["function"]["name"] == "ask_user"
    if waits and answer is None:
        question = (trajectory.outcome or {}).get("message", "")
        answer = person(question) if person is not None else None
        if not answer:
            raise EndstopError(f"the run waits for an answer, give it with --answer: {question}")
    if answer is not None and not waits:
        raise EndstopError(f"the run {trajectory.id} waits for no answer.")
    record = {"at": now(), "after": before, "tree_before": seen, "tree": tree, "changed": changed[:200]}
    trajectory.resumed.append({**record, "open_calls": [] if waits else [call["id"] for call in calls]})
    trajectory.outcome = None
    trajectory.gate["outcome"] = None
    listed = ", ".join(changed[:20]) + (f" and {len(changed) - 20} more" if len(changed) > 20 else "")
    if waits:
        trajectory.answer(calls[0], f"{ANSWERED}{answer}", True, tree=tree)
    elif calls:
        trajectory.turns[-1]["meta"]["interrupted"] = record
        what = f"these files differ from the state before it: {listed}" if changed else "no file has changed"
        for call in calls:
            text = (
                "INTERRUPTED: the run was stopped before this call's result was known. It may have run in "
                f"part or not at all; {what}. Look before you call it again."
            )
            trajectory.answer(call, text, False, tree=tree, interrupted=True)
    if changed and not calls:
        text = f"The run was resumed. Meanwhile these files were changed: {listed}."
        trajectory.say("user", text, "resumed", tree=tree)
    trajectory.save()


def _go_on(
    trajectory: Trajectory,
    settings: AgentSettings,
    place: Workplace,
    model: AgentModel,
    tools: Sequence[Tool],
    person: Person | None,
) -> AgentResult:
    """The loop, from where the trajectory stands, and the result."""
    gate = Gate(
        place.task,
        place.trees,
        place.verification,
        GateState.from_dict(trajectory.gate),
        trajectory.baseline,
        settings.interactive,
    )
    place.gate, place.spend = gate, trajectory.spend
    trajectory.tools = [tool.definition for tool in tools]
    budget = ContextBudget(
        model.window,
        model.count,
        model.max_tokens,
        settings.context,
        trajectory.tools,
        settings.prompts.compaction,
    )
    agent = Agent(
        model,
        tools,
        gate,
        trajectory,
        budget,
        settings.task.bounds,
        tree=place.trees.snapshot,
        person=person if settings.interactive else None,
    )
    try:
        end = _ended(trajectory) or agent.run()
        place.bring_back()
    except Exception as error:
        # Whatever happens next: the record says that this run has failed, and can be resumed.
        gate.state.outcome = "error"
        trajectory.outcome = {
            "outcome": "error",
            "message": f"{type(error).__name__}: {error}",
            "details": [],
        }
        agent.save()
        if not isinstance(error, EndstopError):
            raise
        end = End("error", str(error))
        with contextlib.suppress(EndstopError):
            place.bring_back()
    return make_result(trajectory, place, gate, end)


def _asked_of_the_oracle(trajectory: Trajectory) -> int:
    """Calls that it was asked in, or may have been when the run was killed."""
    metas = [message["meta"] for message in trajectory.messages if message.get("name") == "oracle"]
    told = [meta for meta in metas if "oracle_call" in meta.get("details", {}) or meta.get("interrupted")]
    begun = [call for call in trajectory.open_calls() if call["function"]["name"] == "oracle"]
    return len(told) + len(begun)


def _must_be_whole(data: Any, name: str = "") -> None:
    """A secret that stood in the settings themselves is not in the record."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            _must_be_whole(value, f"{name}.{key}".lstrip("."))
    elif isinstance(data, str) and REDACTED in data:
        raise EndstopError(f"{name} held a secret, which no record keeps; give it again with -c {name}=...")


def _ended(trajectory: Trajectory) -> End | None:
    """The end that was decided and saved before the run was killed, if that is what happened."""
    last = trajectory.messages[-1]["meta"].get("decision") or {}
    if last.get("type") != "end":
        return None
    return End(last["code"], last["message"], tuple(last["details"]))


def _first_sentence(text: str) -> str:
    flat = " ".join(text.split())
    return flat.partition(". ")[0].rstrip(".") + "."


@contextlib.contextmanager
def _model(settings: AgentSettings, model: AgentModel | None, answered: int) -> Iterator[AgentModel]:
    if model is not None:
        yield model
        return
    opened = open_model(settings.model, answered=answered)
    try:
        yield opened
    finally:
        opened.generator.close()


def _state_directory(wanted: Path | None, identity: str, workspace: Path) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    state = (wanted or Path(base) / "endstop" / "agent" / identity).resolve()
    if state.is_relative_to(workspace):
        raise EndstopError(
            f"the state directory {state} must not lie in the workspace {workspace}; name another (--state)."
        )
    if workspace.is_relative_to(state):
        raise EndstopError(f"the workspace {workspace} must not lie in the state directory {state}.")
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What lies there under the names of a run would be written over, a copy of the workspace removed.
        if not (state / "lock").exists() and any(state.iterdir()):
            raise EndstopError(f"the state directory {state} holds other files; name a new or an empty one.")
    except OSError as error:
        raise EndstopError(f"the state directory {state} cannot be made: {error.strerror}.") from error
    return state


@contextlib.contextmanager
def _locked(state: Path) -> Iterator[None]:
    """One process at a time works on a run."""
    from filelock import FileLock, Timeout

    lock = FileLock(state / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise EndstopError(f"another process works on the run in {state}.") from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _alone_in(workspace: Path) -> Iterator[None]:
    """One run at a time works in a workspace: of two, each would be judged by what the other one writes."""
    import fcntl

    try:
        descriptor = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise EndstopError(f"the workspace {workspace} cannot be opened: {error.strerror}.") from error
    try:
        # Where a file system has no locks there is none.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EndstopError(
                    f"another run works in {workspace}; wait for its end, or give this one a copy."
                ) from None
        yield
    finally:
        os.close(descriptor)
