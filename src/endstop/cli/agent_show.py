"""`endstop agent show`: a run that was saved, step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import verb
from endstop.protocol.errors import EndstopError

if TYPE_CHECKING:
    from endstop.view.trajectory import TrajectoryView

app = verb_app()


@app.command("show")
@verb()
def show(
    trajectory: Annotated[
        Path, typer.Argument(metavar="TRAJECTORY", help="A trajectory.json, or the directory of a run.")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one HTML page, readable offline.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Results in full instead of their beginnings and ends.")
    ] = False,
) -> None:
    """Show a run: every answer, call and result, every decision of the gate, and how it ended. Where the
    model ran on endstop's own engine, P(stop) along its answers is shown too.

    Example: endstop agent show runs/fix-add --html run.html
    """
    from endstop.cli.output import check_place, console, note, whole_file

    check_place(html)
    path = trajectory / "trajectory.json" if trajectory.is_dir() else trajectory
    view = _loaded(path)
    try:
        if html is None:
            from endstop.view.trajectory import trajectory_lines

            out = console()
            for line in trajectory_lines(view, whole=whole):
                # Without colours rich would do nothing to a line, and take long for it.
                if out.color_system is None:
                    out.file.write(f"{line.plain}\n")
                else:
                    out.print(line, soft_wrap=True)
            return
        from endstop.view.trajectory_html import trajectory_html

        page = trajectory_html(view)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # A record holds what its writer put there; one that was edited by hand may hold anything.
        raise EndstopError(f"{path} cannot be shown, a part of it is not of its form: {error!r}.") from error
    with whole_file(html) as place:
        place.write_text(page, encoding="utf-8")
    note(f"wrote {html}")


def _loaded(path: Path) -> TrajectoryView:
    from endstop.cli.inputs import read_file
    from endstop.view.trajectory import view_of

    try:
        return view_of(json.loads(read_file(path)))
    except (ValueError, RecursionError) as error:
        raise EndstopError(f"{path} cannot be read as a run: {error}.") from error
