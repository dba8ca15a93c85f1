"""The options that the training stages share, and the settings that come out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.verb import OptionGroup

if TYPE_CHECKING:
    from endstop.train.run_directory import RunDirectory
    from endstop.train.settings import Stage, StageSettings
    from endstop.train.training_loop import Report


def _option(*names: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def _data(*names: str, text: str, **more: Any) -> Any:
    return _option(*names, text=text, panel="Data", **more)


def _length(*names: str, text: str) -> Any:
    return _option(*names, text=text, panel="Length")


def _learning(*names: str, text: str, **more: Any) -> Any:
    return _option(*names, text=text, panel="Learning", **more)


def _machine(*names: str, text: str) -> Any:
    return _option(*names, text=text, panel="Machine")


def _model(*names: str, text: str) -> Any:
    return _option(*names, text=text, panel="Model")


RunOption = Annotated[Path, typer.Option("--run", help="The directory of the run.", show_default=False)]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The summary as JSON on stdout.")]

SHARED = OptionGroup(
    preset=Annotated[
        str | None, _model("--preset", text="Begin with the settings of tiny, d12, d20 or d32.")
    ],
    init_from=Annotated[
        str | None,
        _model("--init-from", text="A model to begin with: a directory, a Hub id, any that endstop loads."),
    ],
    context=Annotated[int | None, _model("--context", text="The model's window in tokens.")],
    rope_scaling=Annotated[
        str | None,
        _model("--rope-scaling", text="linear, dynamic or yarn, with its factor: yarn:4."),
    ],
    data=Annotated[
        list[str] | None,
        _data(
            "--data",
            text="A file, a folder, a task, tasks, a data set (gsm8k, fineweb-edu ...), or hub:OWNER/NAME; "
            "may be repeated.",
            metavar="PLACE[@COUNT][*WEIGHT]",
        ),
    ],
    validation=Annotated[
        list[str] | None, _data("--validation", text="The same, to evaluate on.", metavar="PLACE[@COUNT]")
    ],
    row_length=Annotated[int | None, _data("--row-length", text="Tokens of a row.")],
    batch_tokens=Annotated[int | None, _data("--batch-tokens", text="Tokens of an optimiser step.")],
    data_shards=Annotated[
        int | None, _data("--data-shards", text="Parts of the data; the number of processes divides it.")
    ],
    isolate=Annotated[
        bool | None, _data("--isolate/--no-isolate", text="Attention stays within a document.")
    ],
    skip_bad=Annotated[
        bool | None,
        _data("--skip-bad/--no-skip-bad", text="Leave out, and count, documents that cannot be read."),
    ],
    steps=Annotated[int | None, _length("--steps", text="Optimiser steps.")],
    tokens=Annotated[float | None, _length("--tokens", text="Tokens, such as 11.2e9.")],
    seconds=Annotated[float | None, _length("--seconds", text="Time; the number of steps follows from it.")],
    evaluate_every=Annotated[int | None, _length("--evaluate-every", text="Steps between evaluations.")],
    save_every=Annotated[int | None, _length("--save-every", text="Steps between checkpoints.")],
    keep_checkpoints=Annotated[int | None, _length("--keep", text="Checkpoints that are kept (2).")],
    samples=Annotated[int | None, _length("--samples", text="Samples at each evaluation; 0 is none.")],
    matrix_lr=Annotated[float | None, _learning("--matrix-lr", text="Muon's rate (0.02).")],
    embedding_lr=Annotated[float | None, _learning("--embedding-lr", text="The embedding's rate (0.2).")],
    head_lr=Annotated[float | None, _learning("--head-lr", text="The output matrix's rate (0.004).")],
    lr_scale=Annotated[float | None, _learning("--lr-scale", text="All rates times this.")],
    warmup_steps=Annotated[int | None, _learning("--warmup", text="Steps in which the rates rise.")],
    warmdown_fraction=Annotated[
        float | None, _learning("--warmdown", text="Share of the run in which they fall.")
    ],
    event_weights=Annotated[
        list[str] | None,
        _learning(
            "--event-weight",
            text="Weight in the loss of content, document_end, turn_end, tool_end or thinking_end.",
            metavar="EVENT=WEIGHT",
        ),
    ],
    warm_optimizer=Annotated[
        bool | None,
        _learning("--warm-optimizer/--cold-optimizer", text="Take over the momenta of the stage before."),
    ],
    pathology=Annotated[
        str | None,
        _learning(
            "--pathology",
            text="Train a fault on purpose, to see what it does: "
            "eot-masked, pad-eos, all-tokens, truncated, false-stop or no-eos.",
        ),
    ],
    seed=Annotated[int | None, _learning("--seed", text="Of new weights and of the order of the data.")],
    micro_rows=Annotated[int | None, _machine("--micro-rows", text="Rows computed at a time.")],
    dtype=Annotated[str | None, _machine("--dtype", text="auto, float32 or bfloat16.")],
    device=Annotated[str | None, _machine("--device", text="auto, cpu or cuda.")],
    prepare_ahead=Annotated[
        bool | None,
        _machine("--prepare-ahead/--no-prepare-ahead", text="Make batches in a thread while a GPU computes."),
    ],
    compile=Annotated[bool | None, _machine("--compile/--no-compile", text="torch.compile the model.")],
    strategy=Annotated[
        str | None, _machine("--strategy", text="auto, ddp or fsdp, where torchrun starts several processes.")
    ],
)

BASE = OptionGroup(
    depth=Annotated[int | None, _model("--depth", text="Layers; the width follows.")],
    shape=Annotated[str | None, _model("--shape", text="nanochat or llama.")],
    hidden_size=Annotated[int | None, _model("--width", text="64 * depth by default.")],
    head_dim=Annotated[int | None, _model("--head-dim", text="Of an attention head (128).")],
    packing=Annotated[
        str | None, _data("--packing", text="crop, or keep-ends: long documents are split, every end kept.")
    ],
)

_LENGTHS = ("steps", "tokens", "seconds")
_MODEL = ("depth", "shape", "hidden_size", "head_dim", "context", "rope_scaling")
_OPTIMIZER = ("matrix_lr", "embedding_lr", "head_lr")
_SCHEDULE = {
    "lr_scale": "initial_fraction",
    "warmup_steps": "warmup_steps",
    "warmdown_fraction": "warmdown_fraction",
}


def stage_settings(
    stage: Stage, run: RunDirectory, given: Mapping[str, Any], *, resume: bool
) -> StageSettings:
    """The settings of a stage from its options.

    A resumed stage has those it was begun with, a new one those of its preset or the defaults; then come the
    options. Raises ValueError or EndstopError for options that do not go together.
    """
    import math
    from dataclasses import replace

    from endstop.train.settings import ModelSettings, StageSettings, default_settings

    changes = {name: value for name, value in given.items() if value is not None}
    preset = changes.pop("preset", None)
    init_from = changes.pop("init_from", None)
    if changes.get("pathology") is not None:
        from endstop.train.pathologies import Pathology

        Pathology.parse(changes["pathology"])
    if "rope_scaling" in changes:
        changes["rope_scaling"] = rope_scaling(changes["rope_scaling"])
    if "event_weights" in changes:
        changes["event_weights"] = event_weights(changes["event_weights"])
    if "tokens" in changes:
        if not math.isfinite(changes["tokens"]):
            raise ValueError(f"--tokens takes a number of tokens such as 11.2e9, got {changes['tokens']}")
        changes["tokens"] = round(changes["tokens"])
    for name in ("data", "validation"):
        if name in changes:
            changes[name] = tuple(changes[name])
    if resume:
        if preset is not None:
            raise ValueError("--preset is for a new stage; a resumed one has the settings it was begun with")
        settings = StageSettings.from_json(run.stage(stage).read_settings())
        init_from = init_from or settings.init_from
    else:
        foreign = init_from is not None
        if stage != "base" and init_from is None:
            init_from = str(run.predecessor(stage))
        if preset is not None:
            from endstop.train.presets import preset as preset_named

            settings = preset_named(preset).stage(stage, init_from)
        else:
            if not any(name in changes for name in _LENGTHS):
                raise ValueError("say how long to train: --steps, --tokens or --seconds, or a --preset")
            settings = default_settings(stage, init_from, steps=1, foreign=foreign)
    if any(name in changes for name in _LENGTHS):
        changes = {**dict.fromkeys(_LENGTHS), **changes}
    optimizer = {name: changes.pop(name) for name in _OPTIMIZER if name in changes}
    schedule = {_SCHEDULE[name]: changes.pop(name) for name in _SCHEDULE if name in changes}
    model = settings.model
    if init_from is not None:
        changes |= {"init_from": init_from, "model": None}
    else:
        shape = {name: changes.pop(name) for name in _MODEL if name in changes}
        model = replace(model or ModelSettings(), **shape)
        changes["model"] = model
        if "row_length" not in changes and "context" in shape:
            changes["row_length"] = shape["context"]
    if wrong := [name for name in _MODEL[:4] if name in changes]:
        raise ValueError(f"--{wrong[0].replace('_', '-')} is for new models, and {init_from} is one already")
    return replace(
        settings,
        **changes,
        optimizer=replace(settings.optimizer, **optimizer),
        schedule=replace(settings.schedule, **schedule),
    )


def rope_scaling(text: str) -> dict[str, Any]:
    """`yarn:4` as a config.json has it."""
    import math

    kind, _, written = text.partition(":")
    try:
        factor = float(written)
    except ValueError:
        factor = math.nan
    if not math.isfinite(factor):
        raise ValueError(f"--rope-scaling takes TYPE:FACTOR such as yarn:4, got {text!r}")
    return {"rope_type": kind, "factor": factor}


def event_weights(entries: list[str]) -> dict[str, float]:
    """`turn_end=2` and the like."""
    weights = {}
    for entry in entries:
        event, _, weight = entry.partition("=")
        try:
            weights[event] = float(weight)
        except ValueError:
            raise ValueError(f"--event-weight takes EVENT=WEIGHT such as turn_end=2, got {entry!r}") from None
    return weights


@contextmanager
def training_bar(what: str, *, shown: bool = True) -> Iterator[Report]:
    """A function to report progress to: a bar with loss, tokens/s and time left where a person looks."""
    import sys

    if not shown or not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from endstop.cli.output import console

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  {task.fields[rate]} tokens/s  {task.fields[left]} left"),
        console=console(stderr=True),
    ) as bars:
        bar = bars.add_task(what, total=None, loss="-", rate="-", left="-")

        def report(progress: Any) -> None:
            bars.update(
                bar,
                completed=progress.step,
                total=progress.steps,
                loss=f"{progress.loss:.4f}",
                rate=f"{progress.tokens_per_second:,.0f}",
                left="?" if progress.seconds_left is None else time_of(progress.seconds_left),
            )

        yield report


def time_of(seconds: float) -> str:
    """`1:02:03`, `2:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def run_and_report(
    run: Path,
    settings: StageSettings,
    begin: Callable[[Any, Report], dict[str, Any]],
    as_json: bool,
) -> None:
    """Train in this process and those beside it, and say what came of it."""
    from endstop.cli.output import counted, note, write_json
    from endstop.train.distributed import joined_processes
    from endstop.train.plan import memory_explained

    with (
        joined_processes(settings.device) as process,
        training_bar(settings.stage, shown=process.main) as report,
        memory_explained(settings, run, process.device.type, process.world),
    ):
        summary = begin(process, report)
        main = process.main
    if not main:
        return
    stage = run / settings.stage
    if not summary["finished"]:
        note(f"endstop: told to end after step {summary['steps']}; go on with --resume.")
    else:
        metrics = summary["metrics"]
        told = [f"{summary['steps']} steps in {time_of(summary['seconds'])}"]
        if "loss" in metrics:
            told.append(f"loss {metrics['loss']:.4f}")
        if "validation_bits_per_byte" in metrics:
            told.append(f"{metrics['validation_bits_per_byte']:.4f} bits per byte")
        if "validation_natural_stop_rate" in metrics:
            told.append(f"{metrics['validation_natural_stop_rate']:.1%} of samples stop by themselves")
        note(f"{stage / 'model'}: {', '.join(told)}")
    statistics = summary["data"]["statistics"]
    if skipped := statistics.get("skipped_documents", statistics.get("skipped", 0)):
        note(f"endstop: left out {counted(skipped, 'document')} that cannot be read.")
    if unsupervised := statistics.get("unsupervised", 0):
        note(f"endstop: left out {counted(unsupervised, 'conversation')} with nothing to learn.")
    if refusals := statistics.get("refusals"):
        first = next(iter(refusals))
        note(f"endstop: left out {counted(statistics['refused'], 'conversation')}; most because: {first}")
    if as_json:
        write_json(summary)
