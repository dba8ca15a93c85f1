"""`endstop train all`: a preset from its tokenizer to its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import verb

app = verb_app()


@app.command("all")
@verb()
def train_all(
    run: Annotated[Path, typer.Option("--run", help="The directory of the run.", show_default=False)],
    preset: Annotated[str, typer.Option("--preset", help="tiny, d12, d20 or d32.")] = "tiny",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run: what is done is not done again.")
    ] = False,
    scale: Annotated[
        float, typer.Option("--scale", "--seconds-scale", help="Make every stage so many times as long.")
    ] = 1.0,
    shape: Annotated[str, typer.Option("--shape", help="nanochat or llama.")] = "nanochat",
    digits: Annotated[
        int | None,
        typer.Option(
            "--digits",
            help="Digits that may stand together in a token: 2, or 1 (a Llama's, for GGUF).",
            min=1,
            max=2,
            show_default=False,
        ),
    ] = None,
    examples: Annotated[
        int, typer.Option("--examples", help="Questions of each task in the evaluations.")
    ] = 100,
    with_rl: Annotated[bool, typer.Option("--rl/--no-rl", help="With the RL stage.")] = True,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Of data, weights and draws.")] = 0,
) -> None:
    """Train a preset: tokenizer, base, mid, SFT, RL; then evaluate it and write the report.

    The tiny preset takes less than 20 minutes on two CPU cores. Ctrl-C saves a checkpoint and ends;
    --resume goes on. What a preset takes is shown by `endstop train plan`.

    Example: endstop train all --preset tiny --run runs/tiny
    """
    from dataclasses import replace

    from endstop.cli.env import environment_facts
    from endstop.cli.output import note, write_line
    from endstop.train.pipeline import Pipeline, run_pipeline
    from endstop.train.presets import preset as preset_of
    from endstop.train.report import REPORT_FILE, REPORT_FOLDER

    if shape not in ("nanochat", "llama"):
        raise typer.BadParameter(f"a shape is nanochat or llama, not {shape}", param_hint="--shape")
    wanted = preset_of(preset).with_shape("llama" if shape == "llama" else "nanochat")
    if digits is not None:
        wanted = replace(wanted, digits=digits)
    pipeline = Pipeline(wanted, run, scale=scale, examples=examples, rl=with_rl, device=device, seed=seed)
    with _bar() as report:
        model = run_pipeline(pipeline, resume=resume, report=report, facts=environment_facts())
    if model is None:
        return
    note(f"The report is {run / REPORT_FOLDER / REPORT_FILE}. Talk to the model:")
    write_line(f"endstop chat {model}")


@contextmanager
def _bar() -> Iterator[Callable[[str, float, str], None]]:
    """One bar for the whole run; where nobody looks, a line for each part."""
    import sys

    from endstop.cli.output import note

    if not sys.stderr.isatty():
        last = ""

        def say(part: str, share: float, words: str) -> None:
            nonlocal last
            if part not in (last, "done"):
                last = part
                note(f"{part} ...")

        yield say
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from endstop.cli.output import console

    columns = (
        TextColumn("{task.description:<10}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with Progress(*columns, console=console(stderr=True)) as bars:
        bar = bars.add_task("tokenizer", total=1.0, words="")

        def show(part: str, share: float, words: str) -> None:
            bars.update(bar, completed=share, description=part, words=words)

        yield show
