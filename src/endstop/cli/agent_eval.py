"""`endstop agent eval`: many tasks, and how their runs end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.exits import FAILED
from endstop.cli.verb import verb

if TYPE_CHECKING:
    from rich.table import Table

    from endstop.agent.measures import Measures
    from endstop.agent.suite import SuiteReport

app = verb_app()


@app.command("eval")
@verb()
def evaluate(
    suite: Annotated[Path, typer.Argument(metavar="SUITE", help="A suite file (YAML, JSON or TOML).")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder of the runs; finished ones in it are kept.")
    ] = Path("agent-eval"),
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="In place of the suite's: a directory, a Hub id, scripted:FILE."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "-c", "--config", help="key=value over the suite's settings, such as task.bounds.steps=20."
        ),
    ] = None,
    repeat: Annotated[
        int | None, typer.Option("--repeat", "-k", help="Runs of each task; default: the suite's.", min=1)
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", help="Runs at once; with ray 0 leaves it to the cluster.", min=0)
    ] = 1,
    executor: Annotated[
        str, typer.Option("--executor", help="joblib, or ray to use other machines as well.")
    ] = "joblib",
    as_json: Annotated[bool, typer.Option("--json", help="Runs and measures as JSON on stdout.")] = False,
) -> None:
    """Run every task of a suite and measure how the runs end: solved, claimed without being done (attempted,
    and shipped), stopped too early, never, or honestly.

    A run that is finished is never done again: start the same command once more to go on with the rest.

    Example: endstop agent eval suite.yaml --model scripted:fix.yaml --out runs --jobs 2
    """
    from endstop.agent.settings import merged, overrides
    from endstop.agent.suite import read_suite, run_suite
    from endstop.cli.output import console, note, write_json
    from endstop.cli.progress import counting

    if executor not in ("joblib", "ray"):
        raise typer.BadParameter(f"--executor takes joblib or ray; got {executor!r}")
    if jobs == 0 and executor == "joblib":
        raise typer.BadParameter("--jobs 0 is for --executor ray")
    over: dict[str, Any] = {} if model is None else {"model": {"name": model}}
    over = merged(over, overrides(config or []))
    read = read_suite(suite)
    with counting("runs") as progress:
        report = run_suite(
            read,
            out,
            over=over,
            repeat=repeat,
            executor=executor,  # type: ignore[arg-type]
            jobs=jobs,
            progress=progress,
        )
    if as_json:
        write_json(report.to_dict())
    else:
        screen = console()
        screen.print(_task_table(report))
        screen.print(_measure_table(report.measures))
        note("attempted, shipped: runs with a false completion; minutes: of the gate, per run.")
    problems = [run for run in report.runs if run.problem]
    for run in problems:
        note(f"{run.task}, run {run.number}: {run.problem}")
    if problems:
        raise typer.Exit(FAILED)


def _task_table(report: SuiteReport) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("task", overflow="fold")
    table.add_column("outcomes", overflow="fold")
    for name in ("solved", "attempted", "shipped", "refusals", "steps", "minutes"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, measures in report.by_task().items():
        outcomes = ", ".join(
            outcome if count == 1 else f"{outcome} ×{count}" for outcome, count in measures.outcomes.items()
        )
        table.add_row(
            name,
            outcomes,
            _percent(measures.solved),
            _percent(measures.attempted_false_completion),
            _percent(measures.shipped_false_completion),
            _number(measures.refusals),
            _number(measures.steps),
            _number(measures.gate_minutes, 2),
        )
    return table


def _measure_table(measures: Measures) -> Table:
    from rich import box
    from rich.table import Table

    rows = [
        ("runs", str(measures.runs)),
        ("outcomes", ", ".join(f"{name} {count}" for name, count in measures.outcomes.items())),
        ("solved", _percent(measures.solved)),
        ("attempted false completion, per run", _percent(measures.attempted_false_completion)),
        (f"false completion, per claim ({measures.claims} claims)", _percent(measures.false_claims)),
        ("shipped false completion, per run", _percent(measures.shipped_false_completion)),
        ("premature stop", _percent(measures.premature_stop)),
        ("never stop", _percent(measures.never_stop)),
        ("honest stop", _percent(measures.honest_stop)),
        ("over-abstention", _percent(measures.over_abstention)),
        ("refusals, per run", _number(measures.refusals)),
        ("steps, per run", _number(measures.steps)),
        ("steps after the first pass", _number(measures.steps_after_pass)),
        ("gate minutes, per run", _number(measures.gate_minutes, 2)),
        ("cost", _number(measures.cost, 4) if measures.cost else ""),
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(name, value)
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
