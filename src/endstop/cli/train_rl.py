"""`endstop train rl`: a model that is rewarded for right answers that end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.train_options import JsonOption, ResumeOption, RunOption
from endstop.cli.verb import OptionGroup, verb

if TYPE_CHECKING:
    from endstop.train.rl import Report
    from endstop.train.rl_settings import RLSettings
    from endstop.train.run_directory import RunDirectory

app = verb_app()


def _option(panel: str, *names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


RL = OptionGroup(
    preset=Annotated[
        str | None, _option("Model", "--preset", text="Begin with the numbers of tiny, d12, d20 or d32.")
    ],
    init_from=Annotated[
        str | None,
        _option("Model", "--init-from", text="A model to begin with; by default the run's SFT model."),
    ],
    tasks=Annotated[
        list[str] | None,
        _option(
            "Questions",
            "--task",
            text="A task by name, gsm8k, or a group (hard, synthetic); may be repeated.",
            metavar="TASK",
        ),
    ],
    dataset_place=Annotated[
        str | None,
        _option("Questions", "--data", text="The files of gsm8k; by default the Hub's.", metavar="PLACE"),
    ],
    steps=Annotated[int | None, _option("Length", "--steps", text="Updates (100).")],
    questions=Annotated[int | None, _option("Questions", "--questions", text="Questions of a step (16).")],
    samples=Annotated[int | None, _option("Questions", "--samples", text="Answers to each question (16).")],
    max_tokens=Annotated[int | None, _option("Questions", "--max-tokens", text="Limit of an answer (256).")],
    reward=Annotated[
        str | None,
        _option(
            "Reward",
            "--reward",
            text="exact: 1 for a right answer. stop-shaped: ending with a wrong answer costs more than not "
            "ending, and that more than saying that there is no answer.",
        ),
    ],
    truncated=Annotated[
        str | None,
        _option(
            "Reward",
            "--truncated",
            text="Answers that ran into the limit: keep their reward, zero, or mask them from the loss.",
        ),
    ],
    give_up=Annotated[
        list[str] | None,
        _option(
            "Reward",
            "--give-up",
            text="A text that says that it is no answer; may be repeated.",
            metavar="TEXT",
        ),
    ],
    terminator_in_loss=Annotated[
        bool | None,
        _option(
            "Learning",
            "--terminator-in-loss/--no-terminator-in-loss",
            text="Whether the token that ends an answer is in the loss (it is).",
        ),
    ],
    lr_fraction=Annotated[
        float | None, _option("Learning", "--lr-fraction", text="Of the usual rates, falling to 0 (0.05).")
    ],
    seed=Annotated[int | None, _option("Learning", "--seed", text="Of questions and draws.")],
    evaluate_every=Annotated[
        int | None, _option("Length", "--evaluate-every", text="Steps between evaluations.")
    ],
    save_every=Annotated[int | None, _option("Length", "--save-every", text="Steps between checkpoints.")],
    keep_checkpoints=Annotated[
        int | None, _option("Length", "--keep", text="Checkpoints that are kept (2).")
    ],
    evaluation_questions=Annotated[
        int | None, _option("Questions", "--evaluation-questions", text="Held-out questions (128).")
    ],
    evaluation_samples=Annotated[
        int | None,
        _option("Questions", "--evaluation-samples", text="Draws of each, for pass@k (8); 0 is none."),
    ],
    micro_rows=Annotated[int | None, _option("Machine", "--micro-rows", text="Answers computed at a time.")],
    device=Annotated[str | None, _option("Machine", "--device", text="auto, cpu or cuda.")],
)


@app.command("rl")
@verb(rl=RL)
def train_rl_verb(
    run: RunOption, rl: dict[str, Any], resume: ResumeOption = False, as_json: JsonOption = False
) -> None:
    """Improve a model by its own answers, rewarded if they are right, and for how they end.

    Example: endstop train rl --run runs/first --task calc-hard --steps 100 --max-tokens 64
    """
    from endstop.cli.output import note, write_json
    from endstop.cli.train_options import time_of
    from endstop.train.distributed import joined_processes
    from endstop.train.rl import train_rl
    from endstop.train.run_directory import RunDirectory

    place = RunDirectory(run)
    settings = rl_settings(place, rl, resume=resume)
    with joined_processes(settings.device) as process, _bar(shown=process.main) as report:
        summary = train_rl(place, settings, process=process, resume=resume, report=report)
        main = process.main
    if not main:
        return
    if not summary["finished"]:
        note(f"endstop: told to end after step {summary['steps']}; go on with --resume.")
    else:
        metrics = summary["metrics"]
        told = ", ".join(
            f"{words} {metrics[f'{name}_before']:.1%} -> {metrics[name]:.1%}"
            for name, words in (
                ("accuracy", "right"),
                ("stop_rate", "stop by themselves"),
                ("false_completion_rate", "end wrong"),
            )
        )
        note(f"{place.stage('rl').model}: {summary['steps']} steps in {time_of(summary['seconds'])}, {told}")
    if as_json:
        write_json(summary)


def rl_settings(run: RunDirectory, given: dict[str, Any], *, resume: bool) -> RLSettings:
    """The settings from the options; a resumed stage has those it was begun with, then come the options.

    Raises EndstopError or ValueError for what does not go together.
    """
    from dataclasses import replace

    from endstop.train.presets import preset as preset_named
    from endstop.train.questions import task_names
    from endstop.train.rl_settings import RLSettings
    from endstop.train.settings import StageSettings

    changes = dict(given)
    preset = changes.pop("preset", None)
    if "tasks" in changes:
        changes["tasks"] = task_names(changes["tasks"])
    if "give_up" in changes:
        changes["give_up"] = tuple(changes["give_up"])
    if resume:
        if preset is not None:
            raise ValueError("--preset is for a new stage; a resumed one has the settings it was begun with")
        return replace(RLSettings.from_json(run.stage("rl").read_settings()), **changes)
    if "tasks" not in changes and preset is None:
        raise ValueError("name what is asked: --task calc-hard, say; `--task hard` is all the harder tasks")
    if "init_from" not in changes:
        changes["init_from"] = str(run.predecessor("rl"))
    defaults: dict[str, Any] = {}
    if preset is not None:
        numbers = preset_named(preset).rl
        defaults = {name: getattr(numbers, name) for name in ("steps", "questions", "samples", "max_tokens")}
        defaults["tasks"] = task_names(numbers.tasks)
        defaults |= {"lr_fraction": numbers.rate, "optimizer": preset_named(preset).sft.optimizer}
    elif run.stage("sft").settings.exists():
        # The rates that suit a model are those that it was trained with.
        defaults["optimizer"] = StageSettings.from_json(run.stage("sft").read_settings()).optimizer
    return RLSettings(**{**defaults, **changes})


@contextmanager
def _bar(*, shown: bool) -> Iterator[Report]:
    """A function to report progress to: a bar with reward and rates where a person looks."""
    import sys

    if not shown or not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from endstop.cli.output import console
    from endstop.cli.train_options import time_of

    with Progress(
        TextColumn("rl"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("reward {task.fields[reward]}  right {task.fields[right]}  stop {task.fields[stop]}"),
        TextColumn("{task.fields[left]} left"),
        console=console(stderr=True),
    ) as bars:
        bar = bars.add_task("rl", total=None, reward="-", right="-", stop="-", left="-")

        def report(progress: Any) -> None:
            bars.update(
                bar,
                completed=progress.step,
                total=progress.steps,
                reward=f"{progress.reward:+.3f}",
                right=f"{progress.accuracy:.1%}",
                stop=f"{progress.stop_rate:.1%}",
                left=time_of(progress.seconds_left),
            )

        yield report
