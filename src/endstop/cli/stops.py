"""`endstop stops`: which token ids end a turn of a model, and who says so."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.options import SOURCE, ModelArgument
from endstop.cli.verb import verb

app = verb_app()


@app.command("stops")
@verb(source=SOURCE)
def stops(
    model: ModelArgument,
    source: dict[str, Any],
    template: Annotated[
        Path | None, typer.Option("--template", help="A Jinja chat template in place of the model's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The stop set as one JSON object.")] = False,
) -> None:
    """Show the token ids that end a turn, with their roles, sources and conflicts. Reads no weights.

    Example: endstop stops smollm2-135m-instruct --json
    """
    from endstop.cli.inputs import read_file
    from endstop.cli.output import note, write_json, write_line
    from endstop.cli.settings import resolve
    from endstop.protocol.stopset import StopSet

    options = resolve(source, SOURCE.annotations)
    text = None if template is None else read_file(template)
    stop_set = StopSet.from_pretrained(model, chat_template=text, **options)
    if as_json:
        write_json(as_dict(model, stop_set))
        return
    from endstop.view.marks import visible

    if not stop_set.roles:
        note(f"{model} declares no stop token.")
    width = max((len(visible(stop_set.texts.get(i, ""))) for i in stop_set.roles), default=0)
    for token_id, role in sorted(stop_set.roles.items()):
        name = visible(stop_set.texts.get(token_id, ""))
        mark = "  (terminator)" if token_id == stop_set.terminator else ""
        write_line(f"{token_id:>7}  {name:<{width}}  {role}{mark}")
        for place in stop_set.sources.get(token_id, ()):
            write_line(f"{'':>7}  {'':<{width}}    {place}")
    for conflict in stop_set.conflicts:
        write_line(f"{conflict.severity}: {conflict.code}: {conflict.message}")


def as_dict(model: str, stop_set: Any) -> dict[str, Any]:
    return {
        "model": model,
        "terminator": stop_set.terminator,
        "vocab_size": stop_set.vocab_size,
        "stops": [
            {
                "id": token_id,
                "text": stop_set.texts.get(token_id),
                "role": role,
                "sources": [{"file": s.file, "key": s.key} for s in stop_set.sources.get(token_id, ())],
            }
            for token_id, role in sorted(stop_set.roles.items())
        ],
        "conflicts": [
            {"code": c.code, "severity": c.severity, "token_id": c.token_id, "message": c.message}
            for c in stop_set.conflicts
        ],
    }
