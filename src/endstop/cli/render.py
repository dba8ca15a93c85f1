"""`endstop render`: what a chat template makes of a conversation: text, ids, spans and mask."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.exits import FAILED
from endstop.cli.options import SOURCE, ModelArgument
from endstop.cli.verb import verb
from endstop.protocol.errors import EndstopError

if TYPE_CHECKING:
    from endstop.protocol.render import ChatRenderer

app = verb_app()


@app.command("render")
@verb(source=SOURCE)
def render(
    model: ModelArgument,
    source: dict[str, Any],
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="Messages as JSON, or a conversation a line as JSONL; - reads stdin.",
        ),
    ] = None,
    message: Annotated[
        list[str] | None,
        typer.Option("-m", "--message", metavar="ROLE:TEXT", help="A message; may be repeated."),
    ] = None,
    generation_prompt: Annotated[
        bool, typer.Option("-g", "--generation-prompt", help="Open the assistant's next turn at the end.")
    ] = False,
    continue_final: Annotated[
        bool, typer.Option("--continue-final", help="Leave the last message open, to be gone on with.")
    ] = False,
    tools: Annotated[
        Path | None, typer.Option("--tools", help="JSON schemas of functions, as a list.")
    ] = None,
    variable: Annotated[
        list[str] | None,
        typer.Option("--var", metavar="NAME=JSON", help="A variable of the template; may be repeated."),
    ] = None,
    template: Annotated[
        Path | None, typer.Option("--template", help="A Jinja chat template in place of the model's own.")
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Store the renders in this file.")] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="Render what is stored in this file again and compare bytes and ids."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Text, ids, spans and mask as JSON.")] = False,
) -> None:
    """Render conversations with a model's chat template. In colour: what the model is trained to say.

    Example: endstop render smollm2-135m-instruct -m user:Hi -m "assistant:Hello!" --save renders.json
    """
    from endstop.cli.inputs import read_file
    from endstop.cli.output import console, counted, note, write_json
    from endstop.cli.settings import resolve
    from endstop.protocol.render import ChatRenderer
    from endstop.protocol.resolve import resolve_model
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.tokenizer import Tokenizer

    if check is not None and (file is not None or message):
        raise typer.BadParameter("--check takes its conversations from the file it checks")
    path = resolve_model(model, weights=False, **resolve(source, SOURCE.annotations)).path
    given = None if template is None else read_file(template)
    stops = StopSet.from_pretrained(path, chat_template=given)
    renderer = ChatRenderer(Tokenizer.from_pretrained(path), given, stops=stops)
    if check is not None:
        _check(renderer, check)
        return
    from endstop.cli.conversations import Job, read_conversations, template_variables
    from endstop.view.conversation import rendered_dict, rendered_text

    options: dict[str, Any] = {}
    if generation_prompt:
        options["add_generation_prompt"] = True
    if continue_final:
        options["continue_final_message"] = True
    if tools is not None:
        options["tools"] = _tools(tools)
    variables = template_variables(variable or [])
    jobs = [Job(messages, options, variables) for messages in read_conversations(file, message, sys.stdin)]
    renders = [job.render(renderer) for job in jobs]
    if save is not None:
        from endstop.cli.conversations import save_renders

        save_renders(save, model, renderer, jobs, renders)
        note(f"stored {counted(len(renders), 'render')} in {save}")
    elif as_json:
        found = [rendered_dict(rendered) for rendered in renders]
        write_json(found[0] if len(found) == 1 else found)
    else:
        for rendered in renders:
            console().print(rendered_text(rendered), soft_wrap=True, end="\n")
            note(_summary(rendered))


def _tools(path: Path) -> Any:
    from endstop.cli.inputs import read_file

    try:
        return json.loads(read_file(path))
    except json.JSONDecodeError as error:
        raise EndstopError(f"{path} is not valid JSON: {error}.") from error


def _check(renderer: ChatRenderer, path: Path) -> None:
    from endstop.cli.conversations import check_renders
    from endstop.cli.output import note, write_line

    differences, count = check_renders(path, renderer)
    for difference in differences:
        write_line(difference)
    note(f"{count - len(differences)} of {count} renders are equal, byte for byte and id for id")
    if differences:
        raise typer.Exit(FAILED)


def _summary(rendered: Any) -> str:
    if rendered.mask is None:
        told = f"no mask: {rendered.refusal}"
    else:
        told = f"{sum(rendered.mask)} of them the model's"
    escaped = f", {len(rendered.escaped)} control tokens in messages kept as text" if rendered.escaped else ""
    return f"{len(rendered.ids)} tokens, {told}{escaped}"
