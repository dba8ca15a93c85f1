"""`endstop train report`: one page about a run, with figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import verb

app = verb_app()


@app.command("report")
@verb()
def train_report(
    run: Annotated[Path, typer.Argument(help="The run's directory.")],
    price: Annotated[
        float | None,
        typer.Option("--price", help="Dollars for an hour of the machine, for the costs.", min=0.0),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the page as well.")] = False,
) -> None:
    """Write RUN/report/report.md and its figures from what the run has left so far.

    Stages that are missing or not finished are no obstacle. The page is written anew each time.

    Example: endstop train report runs/tiny
    """
    from endstop.cli.env import environment_facts
    from endstop.cli.output import write_line
    from endstop.train.report import write_report

    page = write_report(run, machine=environment_facts(), price=price)
    write_line(page.read_text(encoding="utf-8") if show else str(page))
