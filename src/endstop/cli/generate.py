"""`endstop generate`: many prompts, one JSON line for each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.exits import FAILED, INTERRUPTED
from endstop.cli.options import MODEL, SAMPLING, ModelArgument, sampling_params
from endstop.cli.verb import verb

if TYPE_CHECKING:
    from endstop.cli.session import Session

app = verb_app()


@app.command("generate")
@verb(model_flags=MODEL, sampling=SAMPLING)
def generate(
    model: ModelArgument,
    model_flags: dict[str, Any],
    sampling: dict[str, Any],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Prompts; without any, stdin is read.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="A prompt a line; in .jsonl a string, or an object with prompt or messages.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write there instead of to stdout.")] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Read stdin, or any file, as .jsonl.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Ask each prompt as a user's message.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="With --chat: the system message.")] = None,
    template: Annotated[
        Path | None, typer.Option("--template", help="A Jinja chat template in place of the model's own.")
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Record P(stop) for every token.")] = False,
) -> None:
    """Complete prompts in one continuous batch: a JSON line for each, in their order, as they get ready.

    A prompt that is refused gets a line with `error`, the others go on, and the exit code is 1.

    Example: endstop generate smollm2-135m-instruct --file questions.txt --chat --out answers.jsonl
    """
    from endstop.cli.batch import read_prompts, run_batch
    from endstop.cli.output import check_place
    from endstop.cli.session import open_model, require_template

    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    if prompts and file is not None:
        raise typer.BadParameter("prompts come either as arguments or from --file")
    check_place(out)
    items = read_prompts(prompts, file, jsonl, sys.stdin, chat=chat, system=system)
    with open_model(model, model_flags, sampling, template) as session:
        params = sampling_params(sampling, session.directory, trace=trace)
        if not all(isinstance(item, str) for item in items):
            require_template(session, "give plain prompts without --chat")
        if out is None:
            report = run_batch(session, items, params, sys.stdout)
        else:
            report = _to_file(session, items, params, out)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(FAILED)


def _to_file(session: Session, items: list[Any], params: Any, out: Path) -> Any:
    from endstop.cli.batch import run_batch
    from endstop.cli.output import whole_file

    with whole_file(out) as place, place.open("w", encoding="utf-8") as stream:
        return run_batch(session, items, params, stream)
