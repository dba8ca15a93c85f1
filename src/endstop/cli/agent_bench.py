"""`endstop agent bench`: gates against scripted runs, dishonest and honest ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from endstop.cli.app import verb_app
from endstop.cli.exits import FAILED
from endstop.cli.verb import verb
from endstop.protocol.errors import EndstopError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from endstop.agent.bench.all import GateScore
    from endstop.agent.bench.play import Played
    from endstop.agent.bench.scenario import Scenario

app = verb_app()


@app.command("bench")
@verb()
def bench(
    only: Annotated[str, typer.Option("--only", help="Only scenarios whose name holds this.")] = "",
    group: Annotated[
        list[str] | None,
        typer.Option("--group", help="specification, manipulation, dishonest or honest; may be repeated."),
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            "--gate",
            help="endstop, canary, junit, exit-code, text; or hidden, the truth. Default: all but that one.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Plays at once.", min=1)] = 1,
    executor: Annotated[
        str, typer.Option("--executor", help="joblib, or ray to use other machines as well.")
    ] = "joblib",
    sandbox: Annotated[
        str, typer.Option("--sandbox", help="auto, bubblewrap, namespaces or process.")
    ] = "auto",
    keep: Annotated[
        Path | None, typer.Option("--keep", help="A folder for the trajectories of all plays.")
    ] = None,
    show_all: Annotated[
        bool,
        typer.Option("--each", help="A row for every scenario, not only for those that a gate got wrong."),
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name the scenarios and play none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON on stdout.")] = False,
) -> None:
    """Play scripted runs against gates: which work that is not done does each accept, which work that is done
    does it refuse?

    The exit code is 1 if endstop's own gate got one wrong. Ten of the runs are ordinary ways to make a red
    suite look green.

    Example: endstop agent bench --group manipulation --jobs 2
    """
    from rich.text import Text

    from endstop.agent.bench.all import chosen, play_all, scores
    from endstop.agent.bench.play import GATES, missing_programs
    from endstop.cli.output import console, note, write_json, write_line
    from endstop.cli.progress import counting

    gates = _known(gate or [name for name in GATES if name != "hidden"], list(GATES), "--gate")
    groups = _known(group or [], ["specification", "manipulation", "dishonest", "honest"], "--group")
    [executor] = _known([executor], ["joblib", "ray"], "--executor")
    [sandbox] = _known([sandbox], ["auto", "bubblewrap", "namespaces", "process"], "--sandbox")
    scenarios = chosen(only, groups)  # type: ignore[arg-type]
    if not scenarios:
        raise EndstopError(f"no scenario is named like {only!r}; endstop agent bench --list names them all.")
    if listing:
        for scenario in scenarios:
            write_line(
                f"{scenario.group:>13}  {'done    ' if scenario.done else 'not done'}  {scenario.name}"
            )
        return
    if find_spec("pytest") is None:
        raise EndstopError(
            "most scenarios are tested with pytest, beside endstop itself: pip install pytest."
        )
    left_out = {
        scenario.name: missing_programs(scenario) for scenario in scenarios if missing_programs(scenario)
    }
    with counting("plays") as progress:
        played = play_all(
            scenarios,
            gates,  # type: ignore[arg-type]
            executor=executor,  # type: ignore[arg-type]
            jobs=jobs,
            sandbox=sandbox,
            keep=keep,
            progress=progress,
        )
    found = list(scores(played))
    if as_json:
        write_json(
            {
                "gates": [score.to_dict() for score in found],
                "left_out": left_out,
                "plays": [one.to_dict() for one in played],
            }
        )
    else:
        out = console()
        wrong = {one.scenario for one in played if one.accepted_wrongly or one.refused_wrongly}
        rows = [scenario for scenario in scenarios if show_all or scenario.name in wrong]
        for table in _plays_tables(rows, played):
            out.print(table)
        out.print(_score_table(found))
        out.print(Text(_legend(found), "dim"), soft_wrap=True)
        for name, programs in left_out.items():
            note(f"left out, for want of {', '.join(programs)}: {name}")
        meant = {scenario.name for scenario in scenarios if not scenario.starts}
        for one in played:
            if one.problem and one.scenario not in meant:
                note(f"{one.scenario}, {one.gate}: {one.problem}")
    if any(score.gate == "endstop" and (score.accepted_wrongly or score.refused_wrongly) for score in found):
        raise typer.Exit(FAILED)


def _known(values: Sequence[str], known: Sequence[str], option: str) -> list[str]:
    for value in values:
        if value not in known:
            raise typer.BadParameter(f"{option} takes {', '.join(known)}; got {value!r}")
    return list(values)


def _score_table(found: Sequence[GateScore]) -> Table:
    table = _plain_table()
    table.add_column("gate")
    for name in ("accepted wrongly", "of the ten", "refused wrongly"):
        table.add_column(name, justify="right")
    for score in found:
        table.add_row(
            score.gate,
            f"{len(score.accepted_wrongly)} of {score.not_done + score.done}",
            str(score.manipulations_accepted),
            f"{len(score.refused_wrongly)} of {score.done}",
        )
    return table


def _legend(found: Sequence[GateScore]) -> str:
    from endstop.agent.bench.play import GATES

    rules = [f"  {score.gate:10} {GATES[score.gate]}" for score in found]
    lines = [
        "wrong: the gate took work for done that was not, or refused work that was done",
        "of the ten: ordinary ways to make a red suite look green",
        "A gate says done when",
    ]
    return "\n".join([*lines, *rules])


def _plays_tables(scenarios: Sequence[Scenario], played: Sequence[Played]) -> Iterator[Table]:
    """One row for each scenario, one column for each gate; work that is never done and other work apart."""
    from rich.text import Text

    gates = list(dict.fromkeys(one.gate for one in played))
    found = {(one.scenario, one.gate): one for one in played}
    for done, title in ((False, "never done"), (True, "gets done")):
        table = _plain_table()
        table.add_column(title, overflow="fold", ratio=1)
        for gate in gates:
            table.add_column(gate)
        for scenario in scenarios:
            cells = [found.get((scenario.name, gate)) for gate in gates]
            if scenario.done == done and any(cells):
                table.add_row(Text(scenario.name), *(_word(one) for one in cells))
        if table.row_count:
            yield table


def _plain_table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), expand=False)


def _word(one: Played | None) -> Text:
    from rich.text import Text

    if one is None:
        return Text()
    if one.accepted_wrongly or one.refused_wrongly:
        return Text("wrong", "bold red")
    return Text("right", "dim")
