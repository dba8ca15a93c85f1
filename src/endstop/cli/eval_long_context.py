"""`endstop eval long-context`: whether a model still stops rightly beyond the window of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import verb

app = verb_app()


@app.command("long-context")
@verb()
def eval_long_context(
    directory: Annotated[Path, typer.Argument(help="The model's directory, as RUN/sft/model.")],
    length: Annotated[
        int | None,
        typer.Option("--length", help="Tokens of a row; by default 4 times the trained window.", min=2),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", help="How many rows.", min=1)] = 16,
    scaling: Annotated[
        list[str] | None,
        typer.Option("--scaling", help="Try none, linear, dynamic or yarn on it as well; may be repeated."),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option("--before", help="The model before it was trained on longer rows, for comparison."),
    ] = None,
    tasks: Annotated[
        str, typer.Option("--tasks", help="Tasks that the conversations are made of, with commas.")
    ] = "turns",
    data: Annotated[
        Path | None, typer.Option("--data", help="Conversations from a file (JSONL, Parquet) instead.")
    ] = None,
    width: Annotated[
        int | None, typer.Option("--width", help="Tokens of a stretch in the table.", min=1)
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON.")] = False,
) -> None:
    """Measure P(stop) at true ends, and before them, by position in conversations that go on and on.

    Beside a model of a run the figures are kept as long_context.json, for `endstop train report`.

    Example: endstop eval long-context runs/tiny/sft/model --scaling linear --scaling yarn
    """
    from endstop.cli.output import note, write_json
    from endstop.models.load import read_config
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.tokenizer import Tokenizer
    from endstop.train.long_context import (
        SCALINGS,
        compare_scalings,
        conversation_rows,
        long_rows,
        measured_length,
        write_results,
    )
    from endstop.train.run_results import run_of

    wanted = [kind for kind in SCALINGS if kind in (scaling or ())]
    for name in scaling or ():
        if name not in SCALINGS:
            raise typer.BadParameter(f"one of {', '.join(SCALINGS)}, not {name}", param_hint="--scaling")
    size = length or measured_length(read_config(directory))
    stops = StopSet.from_pretrained(directory).ids
    border = Tokenizer.from_pretrained(directory).bos_token_id
    made = long_rows(conversation_rows(directory, _source(tasks, data)), size, rows, border)
    options: dict[str, Any] = {"width": width, "device": device}
    found = compare_scalings(directory, made, stops, scalings=() if before else wanted, **options)
    if before is not None:
        options["width"] = found["width"]
        other = compare_scalings(before, made, stops, scalings=wanted, label="before", **options)
        found = {**other, "series": {**other["series"], "after": found["series"]["as it is"]}}
    run, stage = run_of(directory)
    if run is not None and stage is not None:
        note(f"kept in {write_results(run.path / stage, found)}")
    if as_json:
        write_json(found)
    else:
        _show(found)


def _source(tasks: str, data: Path | None) -> Any:
    """Conversations of a file, or of tasks named with commas."""
    from endstop.train.data.sources import open_chat_source
    from endstop.train.tasks.sources import TaskSource

    if data is not None:
        return open_chat_source(data)
    names = dict.fromkeys((name.strip() for name in tasks.split(",")), 1.0)
    return TaskSource(names, seed=0, split="test", size=100_000)


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    from endstop.cli.output import console

    table = Table(box=None, pad_edge=False)
    table.add_column("tokens", justify="right")
    for name in found["series"]:
        table.add_column(name, justify="right")
    for stretches in zip(*found["series"].values(), strict=True):
        first = stretches[0]
        beyond = " *" if first["begin"] >= found["trained"] else "  "
        table.add_row(
            f"{first['begin']}-{first['end']}{beyond}",
            *(
                "-" if each["ends"] == 0 else f"{each['p_at_end']:.3f} / {each['p_before'] or 0:.4f}"
                for each in stretches
            ),
        )
    out = console()
    out.print(table)
    out.print(
        f"P(stop) at true ends / before them; * is beyond the {found['trained']} tokens of the training."
    )
