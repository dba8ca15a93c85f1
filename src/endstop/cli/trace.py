"""`endstop trace`: the probability of stopping at every token of an answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.exits import INTERRUPTED
from endstop.cli.options import MODEL, SAMPLING, sampling_params
from endstop.cli.verb import verb
from endstop.protocol.errors import EndstopError

if TYPE_CHECKING:
    from endstop.view.document import TraceDocument

app = verb_app()


@app.command("trace")
@verb(model_flags=MODEL, sampling=SAMPLING)
def trace(
    model_flags: dict[str, Any],
    sampling: dict[str, Any],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A directory, a .gguf file, a Hub id or a name.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The question; - reads stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    template: Annotated[
        Path | None, typer.Option("--template", help="A Jinja chat template in place of the model's own.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")
    ] = False,
    teaching: Annotated[
        bool, typer.Option("--teaching", help="Walk through a model of 7 tokens and width 4 instead.")
    ] = False,
    load: Annotated[
        Path | None, typer.Option("--load", help="Show a trace that --json wrote instead of making one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The trace as JSON on stdout.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one HTML page, readable offline.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Write a picture (needs endstop[plot]).")] = None,
    linear: Annotated[bool, typer.Option("--linear", help="A linear scale in the picture.")] = False,
) -> None:
    """Show P(stop) of the raw distribution at every token: the stop set's total probability, its likeliest
    token and that token's rank, entropy, the chosen token, and the counts visible/computed/pending.

    Example: endstop trace smollm2-135m-instruct "How do you say thank you in Chinese?" --html trace.html
    """
    from endstop.cli.output import check_place, console, note, whole_file

    check_place(html)
    check_place(png)
    interrupted = False
    if load is not None:
        document = _loaded(load)
    elif teaching:
        from endstop.cli.teaching import teaching_document

        document = teaching_document()
    elif model is None or prompt is None:
        raise typer.BadParameter("a trace needs MODEL and PROMPT, or --teaching, or --load FILE")
    else:
        from endstop.cli.inputs import read_stdin
        from endstop.cli.session import open_model, require_template, stream_answer, trace_document

        if raw and (system is not None or template is not None):
            raise typer.BadParameter(
                "--raw sends no template, so --system and --template have no place in it"
            )
        text = read_stdin() if prompt == "-" else prompt
        with open_model(model, model_flags, sampling, template) as session:
            params = sampling_params(sampling, session.directory, trace=True)
            if params.n != 1:
                raise ValueError("a trace follows one answer; leave --n at 1")
            if not raw:
                require_template(session, "send the prompt as it is with --raw")
            before = [{"role": "system", "content": system}] if system is not None else []
            answer = stream_answer(
                session, text if raw else [*before, {"role": "user", "content": text}], params
            )
            document = trace_document(session, answer, params)
            interrupted = answer.interrupted
    if html is not None:
        from endstop.view.html import trace_html

        with whole_file(html) as place:
            place.write_text(trace_html(document), encoding="utf-8")
        note(f"wrote {html}")
    if png is not None:
        from endstop.view.picture import save_png

        with whole_file(png) as place:
            save_png(document, place, linear=linear)
        note(f"wrote {png}")
    if as_json:
        from endstop.cli.output import write_line

        write_line(document.to_json(indent=2))
    elif html is None and png is None:
        from endstop.view.sparkline import captioned_sparkline
        from endstop.view.table import trace_table

        table, out = trace_table(document), console()
        # No number is cut off: a narrow terminal breaks lines, a file has no width.
        wide = out.options.update(width=1000)
        out.width = max(out.width, out.measure(table, options=wide).maximum)
        out.print(table, crop=False)
        note("counts: visible/computed/pending tokens of the sequence; entropy in nats")
        note(captioned_sparkline(document.p_stops(), 60, sys.stderr.encoding or "ascii"))
        note(f"ended: {document.ending()}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _loaded(path: Path) -> TraceDocument:
    from endstop.cli.inputs import read_file
    from endstop.view.document import TraceDocument

    text = read_file(path)
    try:
        return TraceDocument.from_dict(json.loads(text))
    except ValueError as error:
        raise EndstopError(f"{path} cannot be read as a trace: {error}.") from error
