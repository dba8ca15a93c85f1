"""`endstop gate`: the gate as a stop hook of another agent."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from endstop.cli.app import verb_app
from endstop.cli.exits import FAILED, USAGE
from endstop.cli.verb import OptionGroup, verb

if TYPE_CHECKING:
    from endstop.agent.guard import Guard, Loader
    from endstop.agent.hooks import HookEvent, HookFormat


class HookGroup(TyperGroup):
    """Wrong usage exits 1 here: harnesses read 2 as "go on", and a misspelled hook would never let go."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _usage_exits_1():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with _usage_exits_1():
            return super().invoke(ctx)


@contextmanager
def _usage_exits_1() -> Iterator[None]:
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        # Typer's own errors have no common public class over its versions.
        if getattr(error, "exit_code", None) == USAGE:
            setattr(error, "exit_code", FAILED)  # noqa: B010
        raise


app = verb_app(
    "Judge the stops of another agent: its stop hook calls `check`, its start hook `start`.\n\n"
    "Example: endstop gate check --format claude-code"
)
app.info.cls = HookGroup

PLACE = OptionGroup(
    workspace=Annotated[
        Path | None,
        typer.Option("--workspace", help="The agent's directory.", show_default="what the hook says, or ."),
    ],
    session=Annotated[
        str | None,
        typer.Option("--session", help="Its name, where no hook tells it.", show_default="default"),
    ],
    state=Annotated[
        Path | None,
        typer.Option(
            "--state",
            help="Where sessions are kept, outside of the workspace.",
            show_default="~/.local/state/endstop/gate",
        ),
    ],
)
HOOK = OptionGroup(
    task=Annotated[
        Path | None, typer.Option("--task", help="The task file.", show_default="task.yaml of the workspace")
    ],
    format=Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Whose hook this is: claude-code, codex, cursor, or plain (no JSON; exit codes).",
            show_default="plain",
        ),
    ],
    sandbox=Annotated[
        str | None,
        typer.Option(
            "--sandbox",
            metavar="MODE",
            help="Where the check runs: auto, bubblewrap, namespaces, process.",
            show_default="auto",
        ),
    ],
    virtualenv=Annotated[
        str | None,
        typer.Option(
            "--virtualenv",
            metavar="DIR",
            help="Whose programs the check finds: a directory, auto for the activated one, or none.",
            show_default="auto",
        ),
    ],
    config=Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Settings of `endstop agent run`, of which the sandbox part is taken.",
            show_default="none",
        ),
    ],
)


@app.command("check")
@verb(place=PLACE, hook=HOOK)
def check(
    place: dict[str, Any],
    hook: dict[str, Any],
    evidence: Annotated[
        Path | None, typer.Option("--evidence", help="Read in place of the task's evidence_file.")
    ] = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="Nobody is there: questions of the agent are not passed on.")
    ] = False,
) -> None:
    """Judge a stop. Exit codes of a JSON format: 0 answered, 1 an error, which lets the agent stop.

    With `plain`: 0 verified, 2 go on (why is on stderr), 1 an error, else the outcome's code.

    Example: endstop gate check --workspace . --task task.yaml
    """
    from endstop.agent.hooks import write_answer
    from endstop.cli.progress import waiting

    form, event = _event(place, hook)
    guard, load = _guard(place, hook, event, evidence, headless)
    with waiting("the project's check"):
        answer = guard.check(event, load)
    output = write_answer(form, event, answer)
    _write(output.stdout, output.stderr)
    raise typer.Exit(output.exit_code)


@app.command("start")
@verb(place=PLACE, hook=HOOK)
def start(
    place: dict[str, Any],
    hook: dict[str, Any],
    again: Annotated[
        bool,
        typer.Option("--again", help="Take the files as they are now for the baseline, whatever was before."),
    ] = False,
    baseline: Annotated[
        bool | None,
        typer.Option(
            "--baseline/--no-baseline",
            help="Run the check on the baseline now.",
            show_default="with plain; else at the first stop",
        ),
    ] = None,
) -> None:
    """Record the baseline, before the agent works; give a session that has ended a new budget.

    Example: endstop gate start --workspace . --task task.yaml
    """
    from endstop.agent.hooks import Answer, write_answer
    from endstop.cli.progress import waiting

    form, event = _event(place, hook, "start")
    guard, load = _guard(place, hook, event, None, False)
    now = form == "plain" if baseline is None else baseline
    with waiting("the project's check, before any change"):
        told = guard.start(event, load, anew=again, run_baseline=now)
    output = write_answer(form, event, Answer("silent", told))
    _write(output.stdout, output.stderr)


@app.command("status")
@verb(place=PLACE)
def status(
    place: dict[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="The sessions as a JSON list.")] = False,
) -> None:
    """Show the sessions of a workspace, the last one first.

    Example: endstop gate status --workspace . --json
    """
    from endstop.agent.guard import summary
    from endstop.agent.hooks import HookEvent
    from endstop.cli.output import for_terminal, note, write_json, write_line

    guard, _ = _guard(place, {}, HookEvent("other"), None, False)
    rows = [summary(session) for session in guard.sessions()]
    if "session" in place:
        rows = [row for row in rows if row["session"] == place["session"]]
    if as_json:
        write_json(rows)
        return
    if not rows:
        note(f"No session of {guard.workspace} was started.")
    for row in rows:
        write_line(for_terminal(f"{row['session']}: {row['outcome'] or 'under way'}, round {row['round']}"))
        for name in ("refusals", "gate_runs", "gate_seconds", "baseline", "best_verified_tree", "last"):
            value = "none" if row[name] is None else row[name]
            write_line(for_terminal(f"  {name.replace('_', ' ')}: {value}"))
        for line in row["notes"]:
            write_line(f"  {line}")


def _event(place: dict[str, Any], hook: dict[str, Any], kind: str = "stop") -> tuple[HookFormat, HookEvent]:
    """The event from stdin; without a format what the verb itself says."""
    from endstop.agent.hooks import HOOK_FORMATS, INPUT_LIMIT, HookEvent, read_event
    from endstop.protocol.errors import EndstopError

    form = next((name for name in HOOK_FORMATS if name == hook.get("format", "plain")), None)
    if form is None:
        raise EndstopError(f"there is no format {hook['format']}; known are {', '.join(HOOK_FORMATS)}")
    if form == "plain":
        return form, HookEvent(
            "start" if kind == "start" else "stop", session=place.get("session", "default")
        )
    if sys.stdin.isatty():
        raise EndstopError(f"--format {form} is for a hook, which gets JSON on stdin; by hand leave it out")
    return form, read_event(form, sys.stdin.read(INPUT_LIMIT), os.environ)


def _guard(
    place: dict[str, Any], hook: dict[str, Any], event: HookEvent, evidence: Path | None, headless: bool
) -> tuple[Guard, Loader]:
    from endstop.agent.guard import Guard
    from endstop.agent.task import load_task
    from endstop.protocol.errors import EndstopError

    workspace = (place.get("workspace") or event.workspace or Path()).resolve()
    if not workspace.is_dir():
        raise EndstopError(f"the workspace {workspace} is not there")
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    state = (place.get("state") or home / "endstop" / "gate").resolve()
    file = (hook.get("task") or workspace / "task.yaml").resolve()
    guard = Guard(workspace, state, _sandbox(hook, workspace), evidence and evidence.resolve(), headless)
    return guard, lambda: (load_task(file), str(file))


def _sandbox(hook: dict[str, Any], workspace: Path) -> Any:
    from typing import get_args

    from endstop.agent.reading import read_mapping
    from endstop.agent.settings import anchored, make_settings, merged
    from endstop.agent.workplace import sandbox_settings
    from endstop.protocol.errors import EndstopError
    from endstop.sandbox.settings import SandboxMode

    mode = hook.get("sandbox", "auto")
    if mode not in get_args(SandboxMode):
        raise EndstopError(f"there is no sandbox {mode}; known are {', '.join(get_args(SandboxMode))}")
    config = hook.get("config")
    given = {} if config is None else read_mapping(config)
    flags = {"mode": hook.get("sandbox"), "virtualenv": hook.get("virtualenv")}
    named = {"sandbox": {name: value for name, value in flags.items() if value is not None}}
    data = {"sandbox": merged(given, named)["sandbox"], "task": {"task": "any"}}
    return sandbox_settings(anchored(make_settings(data, str(config)), workspace))


def _write(out: str, err: str) -> None:
    if out:
        sys.stdout.write(out if out.endswith("\n") else f"{out}\n")
    if err:
        sys.stderr.write(err)
