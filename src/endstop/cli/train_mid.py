"""`endstop train mid`: conversations of many kinds, behind base."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.train_options import SHARED, JsonOption, ResumeOption, RunOption
from endstop.cli.verb import verb

app = verb_app()


@app.command("mid")
@verb(shared=SHARED)
def train_mid(
    run: RunOption,
    shared: dict[str, Any],
    unmasked: Annotated[
        bool, typer.Option("--unmasked", help="Train on every position, not only on the assistant's.")
    ] = False,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a base model on conversations of many kinds; what the assistant says is in the loss.

    Example: endstop train mid --run runs/first --data chats.jsonl --data tasks --steps 500
    """
    from endstop.cli.train_options import run_and_report, stage_settings
    from endstop.train.data_arguments import open_data
    from endstop.train.run_directory import RunDirectory
    from endstop.train.stages import run_chat

    place = RunDirectory(run)
    given = {**shared, "masked": False} if unmasked else shared
    settings = stage_settings("mid", place, given, resume=resume)
    data = open_data(settings.data, "conversations", seed=settings.seed, validation=settings.validation)
    run_and_report(
        run,
        settings,
        lambda process, report: run_chat(
            settings,
            place,
            data.train,
            validation=data.validation,
            process=process,
            resume=resume,
            report=report,
        ),
        as_json,
    )
