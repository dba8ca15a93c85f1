"""`endstop train sft`: a model that answers and stops."""

from __future__ import annotations

from typing import Any

from endstop.cli.app import verb_app
from endstop.cli.train_options import SHARED, JsonOption, ResumeOption, RunOption
from endstop.cli.verb import verb

app = verb_app()


@app.command("sft")
@verb(shared=SHARED)
def train_sft(
    run: RunOption,
    shared: dict[str, Any],
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a model on conversations: what the assistant says, and where it stops.

    It begins with the run's mid or base model, or with any model that endstop loads (--init-from).

    Example: endstop train sft --run runs/first --data chats.jsonl --steps 300
    """
    from endstop.cli.train_options import run_and_report, stage_settings
    from endstop.train.data_arguments import open_data
    from endstop.train.run_directory import RunDirectory
    from endstop.train.stages import run_chat

    place = RunDirectory(run)
    settings = stage_settings("sft", place, shared, resume=resume)
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
