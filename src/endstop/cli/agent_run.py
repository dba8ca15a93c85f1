"""`endstop agent run`: do a task, and end only on evidence."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.output import note
from endstop.cli.verb import verb

if TYPE_CHECKING:
    from endstop.agent.result import AgentResult

app = verb_app()

_MODEL, _CHECK, _LIMITS = "Model", "Check", "Limits"


@app.command("run")
@verb()
def run(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="What is to be done; - reads stdin.")
    ] = None,
    workspace: Annotated[
        Path | None,
        typer.Option(
            "--workspace",
            "-w",
            help="The project; files outside it cannot be changed.",
            show_default="the present directory",
        ),
    ] = None,
    task_file: Annotated[
        Path | None, typer.Option("--task", help="task.yaml: the task with its check, checklist and bounds.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings of the run, YAML or TOML.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("-c", metavar="KEY=VALUE", help="Override a setting, e.g. -c task.bounds.steps=20."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="A directory, .gguf, Hub id or name; scripted:FILE.", rich_help_panel=_MODEL
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", help="An OpenAI-compatible endpoint, up to /v1.", rich_help_panel=_MODEL),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env",
            metavar="NAME",
            help="The environment variable with its key.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            "--verify",
            help="The project's check, e.g. 'pytest -q'; else it is found.",
            rich_help_panel=_CHECK,
        ),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="No check: ends at best unverified.", rich_help_panel=_CHECK)
    ] = False,
    checklist: Annotated[
        Path | None,
        typer.Option(
            "--checklist", help="Items that need evidence: YAML, or `- [ ]` lines.", rich_help_panel=_CHECK
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="Open protected files of this pattern.", rich_help_panel=_CHECK),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Answers of the model.", rich_help_panel=_LIMITS)
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--time", help="Seconds of the whole run.", rich_help_panel=_LIMITS)
    ] = None,
    cost: Annotated[
        float | None, typer.Option("--cost", help="In the currency of model.price.", rich_help_panel=_LIMITS)
    ] = None,
    interactive: Annotated[
        bool | None,
        typer.Option("--interactive/--headless", help="Whether you answer questions (default: headless)."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="Directory of the run's record; must not lie in the workspace."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="STATE", help="Go on with a run that was stopped.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option("--answer", help="With --resume: the answer to the run's question.")
    ] = None,
    replayed: Annotated[
        Path | None,
        typer.Option(
            "--replay", metavar="STATE", help="Run the recorded answers again, on a copy: same decisions?"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show the steps.")] = False,
) -> None:
    """Run a task until the project's own check proves it done, or the run ends otherwise.

    Exit codes: 0 verified, 1 error, 10 unverified, 11 blocked, 12 needs_user, 13 stopped_without_submit,
    14 refused_no_progress, 15 refusal_budget, 16 repeated_format_error, 17 stuck, 20 to 23 limits of steps,
    time, cost and context, 130 interrupted (--resume goes on).

    Example: endstop agent "make the tests pass" --model qwen3-4b --base-url http://localhost:8000/v1
    --verify "pytest -q"
    """
    from endstop.cli.agent_view import LiveView

    flags: dict[str, Any] = {
        "task": {
            "task": task,
            "verify": {"command": verify},
            "allow": allow,
            "bounds": {"steps": steps, "seconds": seconds, "cost": cost},
            "checklist": None if checklist is None else read_checklist(checklist),
        },
        "model": {"name": model, "base_url": base_url, "api_key_env": api_key_env},
        "unverified": no_verify or None,
        "interactive": interactive,
        "state": None if state is None else str(state),
    }
    if replayed is not None:
        _replay(replayed, override or [])
        return
    if task == "-":
        from endstop.cli.inputs import read_stdin

        flags["task"]["task"] = read_stdin()
    view = LiveView(quiet)
    with _terminated_like_interrupted():
        try:
            result = _run(_given(flags), config, task_file, override or [], workspace, resume, answer, view)
        finally:
            view.close()
    _show(result, as_json)
    raise typer.Exit(result.exit_code)


def _run(
    flags: dict[str, Any],
    config: Path | None,
    task_file: Path | None,
    entries: list[str],
    workspace: Path | None,
    resume: Path | None,
    answer: str | None,
    view: Any,
) -> AgentResult:
    from endstop.agent.reading import read_mapping
    from endstop.agent.run import resume_agent, run_agent
    from endstop.agent.settings import make_settings, merged, overrides
    from endstop.protocol.errors import EndstopError

    over = merged(overrides(entries), flags)
    if resume is not None:
        given = (config, task_file, workspace, flags.get("state"), (flags.get("task") or {}).get("task"))
        if any(value is not None for value in given):
            raise typer.BadParameter(
                "--resume has the task, workspace and settings of its run; change settings with -c"
            )
        return resume_agent(resume, changes=over, answer=answer, person=_ask, watch=view)
    if answer is not None:
        raise typer.BadParameter("--answer needs --resume")
    data: dict[str, Any] = {} if config is None else read_mapping(config)
    if task_file is not None:
        data = merged(data, {"task": read_mapping(task_file)})
    data = merged(data, over)
    if not (data.get("task") or {}).get("task"):
        if task_file is not None:
            raise EndstopError(f"{task_file} holds no task: it must be a mapping with a key task.")
        raise typer.BadParameter("no task: give it as an argument, or a file with --task")
    sources = [str(path) for path in (config, task_file) if path is not None]
    sources += ["-c"] if sources and entries else []
    settings = make_settings(data, " and ".join(sources) or "the settings")
    return run_agent(settings, workspace or Path(), person=_ask, watch=view)


def _replay(state: Path, entries: list[str]) -> None:
    """Print whether the decisions are the same; exit code 1 where they are not."""
    from endstop.agent.replay import replay
    from endstop.agent.settings import overrides
    from endstop.cli.output import counted, write_line

    again = replay(state, changes=overrides(entries))
    if again.same:
        write_line(f"the same: {counted(len(again.replayed), 'decision')}, {again.outcomes[1]}")
        return
    write_line(f"not the same: {again.difference}")
    raise typer.Exit(1)


def read_checklist(path: Path) -> list[dict[str, str]]:
    """Items as a YAML list of texts or of `{id, text}`, a mapping of ids to texts, or `- [ ]` lines."""
    import re

    from endstop.agent.reading import read_yaml
    from endstop.cli.inputs import read_file
    from endstop.protocol.errors import EndstopError

    text = read_file(path)
    marked = re.findall(r"^\s*[-*] \[[ xX]\] (.+?)\s*$", text, re.MULTILINE)
    try:
        items: Any = marked or read_yaml(text)
    except ValueError as error:
        raise EndstopError(f"{path} is no checklist: {' '.join(str(error).split())}.") from error
    if isinstance(items, Mapping):
        items = [{"id": str(name), "text": str(said or "")} for name, said in items.items()]
    if not isinstance(items, list) or not items:
        raise EndstopError(f"{path} is no checklist: a YAML list, a mapping, or `- [ ]` lines.")
    made: list[dict[str, str]] = []
    for item in items:
        made.append(_item(item, made))
    return made


def _item(item: Any, before: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """`docs: write a README` has the id `docs`; a text without one gets its words as the id."""
    import itertools
    import re

    if isinstance(item, Mapping):
        # YAML reads `- docs: write a README` as a mapping of one entry.
        alone = len(item) == 1 and "id" not in item
        if alone:
            [(name, said)] = item.items()
            return {"id": str(name), "text": str(said or "")}
        return {str(key): str(value) for key, value in item.items()}
    text = str(item)
    name, colon, rest = text.partition(":")
    if colon and re.fullmatch(r"[\w.-]+", name.strip()):
        return {"id": name.strip(), "text": rest.strip()}
    words = "-".join(re.findall(r"[\w.-]+", text.lower()))[:60] or "item"
    # Other texts may have the same words. The same text a second time is refused with the task.
    taken = {other.get("id") for other in before if other.get("text") != text}
    numbered = (f"{words}-{number}" for number in itertools.count(2))
    return {"id": next(id for id in itertools.chain([words], numbered) if id not in taken), "text": text}


def _given(flags: Any) -> Any:
    """Only what was given: None is not a value here."""
    if not isinstance(flags, dict):
        return flags
    kept = {name: _given(value) for name, value in flags.items() if value is not None}
    return {name: value for name, value in kept.items() if value != {}}


def _ask(question: str) -> str | None:
    """Ask the person at the terminal; None where there is none, or they do not answer."""
    from endstop.cli.output import for_terminal

    if not sys.stdin.isatty():
        return None
    note(for_terminal(f"The model asks: {question}"))
    try:
        return input("> ").strip() or None
    except EOFError:
        return None


def _show(result: AgentResult, as_json: bool) -> None:
    if as_json:
        from endstop.cli.output import write_json

        write_json(result.to_dict())
        return
    from endstop.agent.run import RESUMABLE
    from endstop.cli.agent_view import write_summary

    write_summary(result)
    if result.outcome in RESUMABLE:
        more = _TO_GO_ON.get(result.outcome, "")
        note(f"endstop: go on with: endstop agent run --resume {result.trajectory.parent}{more}")


_TO_GO_ON = {
    "needs_user": " --answer TEXT",
    "limit:steps": " --steps N",
    "limit:time": " --time SECONDS",
    "limit:cost": " --cost N",
}


class _terminated_like_interrupted:
    """SIGTERM ends a run as Ctrl-C does: saved, its commands dead, resumable."""

    def __enter__(self) -> None:
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    @staticmethod
    def _interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt
