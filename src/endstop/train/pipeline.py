"""The whole way of a preset: tokenizer, base, mid, SFT, RL, evaluations, report, in one run directory.

Every part leaves its files; what has left them all is not done again when the run is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from endstop.protocol.errors import EndstopError
from endstop.train.hardware import machine
from endstop.train.plan import memory_explained, plan
from endstop.train.presets import Preset
from endstop.train.run_directory import TOKENIZER_EVALUATION, RunDirectory, read_object, write_object
from endstop.train.run_results import read_run
from endstop.train.settings import Stage, StageSettings

PARTS = ("tokenizer", "base", "mid", "sft", "rl", "evaluation", "report")
_EVALUATION_SHARE = 0.12
"""Assumed time of the evaluations at the end, as a share of the stages'."""

Report = Callable[[str, float, str], None]
"""Told the part that runs, the share of the whole that is done (0 to 1), and what there is to say of it."""


class Unfinished(EndstopError):
    """The run was told to end (Ctrl-C, SIGTERM) and can be resumed."""


@dataclass(frozen=True)
class Pipeline:
    """What is to be trained.

    Attributes:
        scale: multiplies the length of every stage. examples: questions of each task in the evaluations.
        rl: with the RL stage. device: "auto", "cpu" or "cuda". seed: added to every stage's own.
    """

    preset: Preset
    run: Path
    scale: float = 1.0
    examples: int = 100
    rl: bool = True
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.scale < float("inf"):
            raise ValueError(f"the scale of a run is above 0, got {self.scale}")
        if self.examples < 1:
            raise ValueError(f"each task is asked at least 1 question, got {self.examples}")

    @property
    def facts(self) -> dict[str, Any]:
        """What all parts of a run must have in common, for its pipeline.json."""
        return {
            "preset": self.preset.name,
            "shape": self.preset.model.shape,
            "digits": self.preset.digits,
            "scale": self.scale,
            "seed": self.seed,
        }

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(part for part in PARTS if part != "rl" or self.rl)


def run_pipeline(
    pipeline: Pipeline,
    *,
    resume: bool = False,
    report: Report | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path | None:
    """Do all parts that are not done yet; returns the directory of the model that answers best.

    Under torchrun every process must call it, and all but the main one get None.
    facts: of the machine, for the report.
    Raises EndstopError where the run exists and is not to be resumed, Unfinished where it was told to end,
    and whatever a part raises.
    """
    from endstop.train.distributed import barrier, done_by_main, joined_processes
    from endstop.train.exclusive import exclusive

    run = RunDirectory(pipeline.run)
    begun = [part for part in ("tokenizer", "base", "mid", "sft", "rl") if (run.path / part).exists()]
    if begun and not resume:
        raise EndstopError(
            f"{run.path} holds a run already ({', '.join(begun)}): go on with --resume, or choose another "
            "--run."
        )
    shares = _shares(pipeline)
    tell = report or (lambda part, share, words: None)
    with joined_processes(pipeline.device) as process, exclusive(run.path, process):
        if not process.main:
            tell = _nothing
        done_by_main(lambda: _check_same(pipeline, run, begun=bool(begun)), process)
        done_by_main(lambda: open_everything(pipeline), process)
        done_by_main(lambda: write_object(run.pipeline, pipeline.facts), process)
        for part in pipeline.parts:
            before = sum(shares[each] for each in pipeline.parts[: pipeline.parts.index(part)])
            told = _within(tell, part, before, shares[part])
            if part == "tokenizer":
                if process.main:
                    _train_tokenizer(pipeline, run, told)
            elif part in ("base", "mid", "sft"):
                _train_stage(pipeline, run, part, process, told)  # type: ignore[arg-type]
            elif part == "rl":
                _train_rl(pipeline, run, process, told)
            elif part == "evaluation":
                if process.main:
                    from endstop.train.pipeline_evaluation import ask_questions, measure_long_rows

                    ask_questions(pipeline, run, told)
                    measure_long_rows(pipeline, run, told)
            elif process.main:
                from endstop.train.report import write_report

                told(0.0, "")
                write_report(run.path, machine=facts)
            barrier(process)
    if tell is _nothing:
        return None
    tell("done", 1.0, "")
    best = read_run(run.path).best
    assert best is not None
    return best.path / "model"


def _check_same(pipeline: Pipeline, run: RunDirectory, *, begun: bool) -> None:
    """EndstopError where a run goes on with another preset, scale or seed than it was begun with: what is
    done already would not change, and the rest would."""
    if not begun or not run.pipeline.exists():
        return
    before = read_object(run.pipeline, "")
    differing = [
        f"{name} ({before[name]!r} before, {now!r} now)"
        for name, now in pipeline.facts.items()
        if name in before and before[name] != now
    ]
    if differing:
        raise EndstopError(
            f"{run.path} was begun with other settings: {'; '.join(differing)}. Resume with the same ones, "
            "or begin another run."
        )


def open_everything(pipeline: Pipeline) -> None:
    """Open all data that the parts still to be done will read, so that nothing is missing after hours.

    Data sets of the Hub are in its cache then. Raises EndstopError for the first that cannot be had.
    """
    from endstop.train.data_arguments import local_folder, open_data
    from endstop.train.evaluation.task_names import tasks_named
    from endstop.train.questions import task_names, tasks_of

    run, wanted = RunDirectory(pipeline.run), pipeline.preset
    for stage in (wanted.base, wanted.mid, wanted.sft):
        if not _is_finished(run, stage.stage):
            open_data(stage.data, "texts" if stage.stage == "base" else "conversations")
    if pipeline.rl and not _is_finished(run, "rl"):
        tasks_of(task_names(wanted.rl.tasks), local_folder())
    tasks_named(wanted.evaluation, examples=1, place=local_folder())


def tokenizer_texts(preset: Preset, seed: int = 0) -> Iterator[str]:
    """The documents of the base stage in their order, once."""
    from endstop.train.data_arguments import open_data
    from endstop.train.pipeline_evaluation import in_order

    return in_order(open_data(preset.base.data, "texts", seed=seed).train, seed)


def stage_settings(
    pipeline: Pipeline, run: RunDirectory, stage: Stage, world: int = 1
) -> tuple[StageSettings, bool]:
    """The settings of a stage, and whether it has been begun: then they are those it was begun with.

    A preset whose data shards cannot be dealt to `world` processes gets one shard for each.
    """
    directory = run.stage(stage)
    if directory.settings.exists() or directory.begun:
        return StageSettings.from_json(directory.read_settings()), True
    init_from = None if stage == "base" else str(run.predecessor(stage))
    settings = pipeline.preset.stage(stage, init_from)
    settings = replace(settings, device=pipeline.device, seed=settings.seed + pipeline.seed)
    if settings.data_shards % world:
        settings = replace(settings, data_shards=world)
    return scaled(settings, pipeline.scale), False


def scaled(settings: StageSettings, scale: float) -> StageSettings:
    """The same stage, `scale` times as long; never less than one step."""
    if settings.seconds is not None:
        return replace(settings, seconds=settings.seconds * scale)
    if settings.tokens is not None:
        return replace(settings, tokens=max(settings.batch_tokens, round(settings.tokens * scale)))
    assert settings.steps is not None
    return replace(settings, steps=max(1, round(settings.steps * scale)))


def _train_tokenizer(pipeline: Pipeline, run: RunDirectory, tell: Callable[[float, str], None]) -> None:
    from endstop.train.pipeline_evaluation import evaluate_vocabulary
    from endstop.train.tokenizer_training import save_tokenizer, train_tokenizer

    limit = pipeline.preset.tokenizer_characters
    if not (run.tokenizer / "tokenizer.json").exists():
        content = train_tokenizer(
            tokenizer_texts(pipeline.preset, pipeline.seed),
            pipeline.preset.vocab_size,
            digits=pipeline.preset.digits,
            max_chars=limit,
            progress=lambda read: tell(min(1.0, read.characters / limit), f"{read.characters:,} characters"),
        )
        save_tokenizer(content, run.tokenizer, replace=True)
    if not (run.tokenizer / TOKENIZER_EVALUATION).exists():
        evaluate_vocabulary(pipeline, run)


def _train_stage(
    pipeline: Pipeline, run: RunDirectory, stage: Stage, process: Any, tell: Callable[[float, str], None]
) -> None:
    from endstop.train.data_arguments import Kind, open_data
    from endstop.train.stages import run_base, run_chat

    if _is_finished(run, stage):
        return
    settings, begun = stage_settings(pipeline, run, stage, process.world)
    kind: Kind = "texts" if stage == "base" else "conversations"
    data = open_data(settings.data, kind, seed=settings.seed, validation=settings.validation)

    def progress(found: Any) -> None:
        share = found.step / found.steps if found.steps else 0.0
        tell(share, f"loss {found.loss:.4f}, {found.tokens_per_second:,.0f} tokens/s")

    begin = run_base if stage == "base" else run_chat
    with memory_explained(settings, run.path, process.device.type, process.world):
        summary = begin(
            settings,
            run,
            data.train,
            validation=data.validation,
            process=process,
            resume=begun,
            report=progress,
        )
    _go_on(summary)


def _train_rl(
    pipeline: Pipeline, run: RunDirectory, process: Any, tell: Callable[[float, str], None]
) -> None:
    from endstop.train.data_arguments import local_folder
    from endstop.train.questions import task_names
    from endstop.train.rl import train_rl
    from endstop.train.rl_settings import RLSettings

    if _is_finished(run, "rl"):
        return
    directory, numbers, folder = run.stage("rl"), pipeline.preset.rl, local_folder()
    begun = directory.settings.exists() or directory.begun
    if begun:
        settings = RLSettings.from_json(directory.read_settings())
    else:
        settings = RLSettings(
            str(run.predecessor("rl")),
            task_names(numbers.tasks),
            dataset_place=None if folder is None else str(folder),
            steps=max(1, round(numbers.steps * pipeline.scale)),
            questions=numbers.questions,
            samples=numbers.samples,
            max_tokens=numbers.max_tokens,
            evaluation_questions=numbers.evaluation_questions,
            lr_fraction=numbers.rate,
            optimizer=pipeline.preset.sft.optimizer,
            save_every=max(1, round(numbers.steps * pipeline.scale) // 4),
            device=pipeline.device,
            seed=pipeline.seed,
        )

    def progress(found: Any) -> None:
        tell(found.step / found.steps, f"reward {found.reward:+.3f}, {found.accuracy:.1%} right")

    _go_on(train_rl(run, settings, process=process, resume=begun, report=progress))


def _is_finished(run: RunDirectory, stage: str) -> bool:
    directory = run.stage(stage)
    return directory.summary.exists() and (directory.model / "config.json").exists()


def _go_on(summary: Mapping[str, Any]) -> None:
    if not summary["finished"]:
        raise Unfinished(
            f"the run was told to end in its {summary['stage']} stage, after step {summary['steps']}; go on "
            "with --resume."
        )


def _shares(pipeline: Pipeline) -> dict[str, float]:
    """The share of the whole time that each part takes, as planned for two cores: for the progress bar."""
    planned = plan(pipeline.preset, machine("2xcpu"), rl=pipeline.rl)
    seconds = {stage.stage: stage.seconds for stage in planned.stages}
    seconds["evaluation"] = _EVALUATION_SHARE * sum(seconds.values())
    seconds["report"] = 3.0
    total = sum(seconds[part] for part in pipeline.parts)
    return {part: seconds[part] / total for part in pipeline.parts}


def _within(tell: Report, part: str, before: float, share: float) -> Callable[[float, str], None]:
    return lambda done, words: tell(part, before + share * done, words)


def _nothing(part: str, share: float, words: str) -> None:
    """Processes beside the main one are silent."""
