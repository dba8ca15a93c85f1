"""`endstop cache`: what was fetched and made, and removing it."""

from __future__ import annotations

from typing import Annotated

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import verb

app = verb_app("Show and empty the cache of models.\n\nExample: endstop cache ls")


@app.command("ls")
@verb()
def list_entries(
    as_json: Annotated[bool, typer.Option("--json", help="The entries as a JSON list.")] = False,
) -> None:
    """List what the cache holds: size, name, and what it is.

    Example: endstop cache ls
    """
    from endstop.cli.output import note, write_json, write_line
    from endstop.protocol.cache import cache_entries, cache_root

    entries = cache_entries()
    if as_json:
        write_json(
            [
                {
                    "name": entry.name,
                    "bytes": entry.size,
                    "model": entry.model,
                    "source": entry.source,
                    "revision": entry.revision,
                    "licence": entry.licence,
                    "path": str(entry.path),
                }
                for entry in entries
            ]
        )
        return
    count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        about = ", ".join(fact for fact in (entry.model, entry.source, entry.licence) if fact)
        write_line(f"{entry.size / 1e6:>9.1f} MB  {entry.name:<{width}}  {about}".rstrip())
    note(f"{count}, {sum(entry.size for entry in entries) / 1e6:.1f} MB in {cache_root()}")


@app.command("rm")
@verb()
def remove(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Names that `endstop cache ls` shows.")
    ],
) -> None:
    """Remove entries by their name, or all of a model by the model's name.

    Example: endstop cache rm smollm2-135m-instruct
    """
    from endstop.cli.output import note
    from endstop.protocol.cache import remove_cache_entry

    for name in names:
        freed = remove_cache_entry(name)
        note(f"removed {name}: {freed / 1e6:.1f} MB")
