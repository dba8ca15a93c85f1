"""`endstop pull`: fetch a model and show where it came from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.options import SOURCE, ModelArgument
from endstop.cli.verb import interrupted, verb

app = verb_app()


@app.command("pull")
@verb(source=SOURCE)
def pull(
    model: ModelArgument,
    source: dict[str, Any],
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare the checksums of all files; fetch anew what has changed."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The facts as one JSON object.")] = False,
) -> None:
    """Fetch a model into the cache; show its source, revision, licence and checksums.

    Without effect on a model that is there already. Ctrl-C leaves no half file.

    Example: endstop pull smollm2-135m-instruct
    """
    from endstop.cli.output import write_json, write_line
    from endstop.cli.progress import downloading
    from endstop.cli.settings import resolve
    from endstop.protocol.resolve import resolve_model

    options = resolve(source, SOURCE.annotations)
    try:
        with downloading() as progress:
            found = resolve_model(model, progress=progress, verify=verify, **options)
    except KeyboardInterrupt:
        raise interrupted("Interrupted; nothing half-made is left, and the next pull starts over.") from None
    if as_json:
        write_json(
            {
                "model": model,
                "path": str(found.path),
                "kind": found.kind,
                "source": found.source,
                "revision": found.revision,
                "licence": found.licence,
                "checksums": dict(found.checksums),
            }
        )
        return
    facts = {
        "path": str(found.path),
        "source": found.source,
        "revision": found.revision or "none",
        "licence": found.licence or "not stated",
    }
    for name, value in facts.items():
        write_line(f"{name:<9} {value}")
    for name, digest in found.checksums.items():
        write_line(f"{'sha256':<9} {digest}  {name}")
