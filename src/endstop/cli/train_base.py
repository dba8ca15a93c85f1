"""`endstop train base`: a model from documents."""

from __future__ import annotations

from typing import Any

from endstop.cli.app import verb_app
from endstop.cli.train_options import BASE, SHARED, JsonOption, ResumeOption, RunOption
from endstop.cli.verb import verb

app = verb_app()


@app.command("base")
@verb(shared=SHARED, base=BASE)
def train_base(
    run: RunOption,
    shared: dict[str, Any],
    base: dict[str, Any],
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model on documents, every end of a document included.

    Example: endstop train base --run runs/first --depth 6 --data corpus.jsonl --steps 1000

    On more GPUs: torchrun --nproc-per-node 8 -m endstop -- train base ... --data-shards 8
    """
    from endstop.cli.train_options import run_and_report, stage_settings
    from endstop.train.data_arguments import open_data
    from endstop.train.run_directory import RunDirectory
    from endstop.train.stages import run_base

    place = RunDirectory(run)
    settings = stage_settings("base", place, {**shared, **base}, resume=resume)
    data = open_data(settings.data, "texts", seed=settings.seed, validation=settings.validation)
    run_and_report(
        run,
        settings,
        lambda process, report: run_base(
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
