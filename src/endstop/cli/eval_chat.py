"""`endstop eval chat`: what a chat model gets right, and how its answers end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.options import MODEL, ModelArgument
from endstop.cli.verb import verb

if TYPE_CHECKING:
    from rich.table import Table

    from endstop.train.evaluation.chat import ChatReport

app = verb_app()


@app.command("chat")
@verb(model_flags=MODEL)
def chat(
    model: ModelArgument,
    model_flags: dict[str, Any],
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            help="With commas: synthetic, hard, chatcore (arc-easy, arc-challenge, mmlu, gsm8k, humaneval), "
            "or single ones such as calc, spelling_bee, gsm8k.",
        ),
    ] = "synthetic",
    examples: Annotated[
        int,
        typer.Option("--examples", help="Questions of each task; 0 for all that a data set has.", min=0),
    ] = 100,
    samples: Annotated[
        int, typer.Option("--samples", help="Answers to each question; several give pass@k.", min=1)
    ] = 1,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", help="Default: 0 for one sample, 1 for several.", min=0.0),
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", help="Keep this many tokens; 0 is off.", min=0)] = 0,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", help="Default: 512, or what the answer suggests.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Fixes the questions and every draw.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="A folder with data sets, such as gsm8k/test.jsonl; otherwise the Hub."),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Of the data sets.")] = "test",
    teacher_forced: Annotated[
        bool,
        typer.Option("--p-stop/--no-p-stop", help="Measure P(stop) along the right answers, too."),
    ] = True,
    by_length: Annotated[
        bool, typer.Option("--by-length", help="Show the ends by the length of the right answer.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the report there as JSON, every answer included."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep it beside the model of a run, for `endstop train report`.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report as one JSON object.")] = False,
) -> None:
    """Ask a chat model questions with known answers: accuracy, and beside it how each answer ended.

    exact: right, and ended by the model itself. early, late: it stopped with too few or too many tokens,
    where the length of the right answer is known. overrun: it never stopped. Runs in float32 unless --dtype
    says otherwise, so that answers do not depend on their neighbours.

    Example: endstop eval chat run/sft/model --tasks synthetic,spelling_bee --examples 50
    """
    from endstop.cli.eval_report import evaluating, kept_place, write_report
    from endstop.cli.options import model_options
    from endstop.cli.output import check_place, console, counted, note, write_json
    from endstop.cli.session import open_model, require_template
    from endstop.train.evaluation.chat import evaluate_chat
    from endstop.train.evaluation.task_names import tasks_named
    from endstop.train.run_directory import CHAT_EVALUATION

    check_place(out)
    kept = kept_place(model, keep, CHAT_EVALUATION)
    options = model_options(model_flags)
    options.setdefault("dtype", "float32")
    questions = tasks_named(
        [name for name in tasks.split(",") if name.strip()],
        examples=examples or 100,
        seed=seed,
        split=split,
        place=data,
        offline=options.get("offline"),
    )
    with open_model(model, options, {}) as session, evaluating() as show:
        require_template(session, "measure it with `endstop eval base`")
        report = evaluate_chat(
            session.llm.engine,
            questions,
            examples or None,
            seed,
            samples=samples,
            temperature=temperature,
            top_k=top_k,
            max_tokens=max_tokens,
            teacher_forced=teacher_forced,
            progress=show,
        )
    for place in (out, kept):
        if place is not None:
            write_report(place, {"model": model, **report.as_dict()})
    if as_json:
        write_json({"model": model, **report.as_dict(records=False)})
        return
    console().print(_table(report))
    if by_length:
        console().print(_length_table(report))
    skipped = sum(task.skipped for task in report.tasks)
    if skipped:
        note(f"endstop: not asked, longer than the model's window: {counted(skipped, 'question')}.")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _ends(stop: Any) -> list[str]:
    """The columns about endings."""
    if stop is None:
        return ["-"] * 7
    return [
        _percent(stop.exact),
        _percent(stop.natural_stop),
        _percent(stop.premature),
        _percent(stop.late),
        _percent(stop.overrun),
        "-" if stop.stop_error is None else f"{stop.stop_error:+.2f}",
        "-" if stop.p_stop_at_gold is None else f"{stop.p_stop_at_gold:.4f}",
    ]


_ENDS = ("exact", "stops", "early", "late", "overrun", "tokens off", "P(stop) at end")


def _table(report: ChatReport) -> Table:
    from rich import box
    from rich.table import Table

    false_stop = "" if report.false_stop is None else f"; false stops {_percent(report.false_stop)} %"
    core = "-" if report.chat_core is None else f"{report.chat_core:.4f}"
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_footer=True,
        caption=f"shares in percent; mean of centred accuracies {core}{false_stop}",
        caption_justify="left",
    )
    summary = _ends(report.stop if report.stop.n else None)
    table.add_column("task", footer="all")
    table.add_column("asked", justify="right", footer=f"{sum(task.examples for task in report.tasks):,}")
    table.add_column("right", justify="right", footer=_percent(report.stop.correct))
    for name, value in zip(_ENDS, summary, strict=True):
        table.add_column(name, justify="right", footer=value)
    for task in report.tasks:
        name = (
            task.name
            if task.false_stop is None
            else f"{task.name} (no end: {_percent(task.false_stop)} stop)"
        )
        table.add_row(name, f"{task.examples:,}", _percent(task.accuracy), *_ends(task.stop))
        for k, chance in task.pass_at.items():
            if k > 1:
                table.add_row(f"  pass@{k}", "", _percent(chance), *[""] * len(_ENDS))
    return table


def _length_table(report: ChatReport) -> Table:
    from rich import box
    from rich.table import Table

    from endstop.train.evaluation.stop_summary import AnswerRecord, by_gold_length

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("right length", "answers", *_ENDS):
        table.add_column(name, justify="left" if name == "right length" else "right")
    answers = [record for task in report.tasks for record in task.records if isinstance(record, AnswerRecord)]
    for length, summary in by_gold_length(answers).items():
        table.add_row(length, f"{summary.n:,}", *_ends(summary))
    return table
