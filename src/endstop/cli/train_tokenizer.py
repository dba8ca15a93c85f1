"""`endstop train tokenizer`: learn a vocabulary from files of text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import verb

if TYPE_CHECKING:
    from endstop.train.tokenizer_training import TextsRead

app = verb_app()


@app.command("tokenizer")
@verb()
def tokenizer(
    out: Annotated[
        Path, typer.Option("--out", help="The directory to write, such as RUN/tokenizer.", show_default=False)
    ],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            help="A .txt, .jsonl or .parquet file, a folder of them, a task, tasks, fineweb-edu ..., or "
            "hub:OWNER/NAME@COUNT; may be repeated.",
            metavar="PLACE[@COUNT]",
        ),
    ],
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", help="Tokens in all, 256 bytes and 9 special tokens included.")
    ] = 32768,
    digits: Annotated[
        int,
        typer.Option(
            "--digits",
            help="Digits that may stand together in a token: 2, or 1 for export to GGUF.",
            min=1,
            max=2,
        ),
    ] = 2,
    max_chars: Annotated[
        int | None, typer.Option("--max-chars", help="Read so many characters, evenly from all files.")
    ] = None,
    document_chars: Annotated[
        int, typer.Option("--document-chars", help="Of each document, so many from its start; 0 for all.")
    ] = 10_000,
    text_key: Annotated[
        str, typer.Option("--text-key", help="The key of JSON lines and the column of Parquet files.")
    ] = "text",
    engine: Annotated[
        str,
        typer.Option("--engine", help="rustbpe, tokenizers (same merges), or auto: the fastest there is."),
    ] = "auto",
    smaller: Annotated[
        bool, typer.Option("--smaller", help="Take fewer tokens where the text does not give so many.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace --out if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:
    """Train a byte-level BPE tokenizer and write it with chat template and generation config.

    Example: endstop train tokenizer --out run/tokenizer --data corpus.txt --vocab-size 4096
    """
    import time

    from endstop.cli.output import counted, note, write_json, write_line
    from endstop.protocol.errors import EndstopError
    from endstop.train.data_arguments import open_texts
    from endstop.train.run_directory import TOKENIZER_EVALUATION, TOKENIZER_FILES
    from endstop.train.tokenizer_evaluation import first_characters
    from endstop.train.tokenizer_training import interleaved, save_tokenizer, train_tokenizer

    if out.exists() and not replace:
        raise EndstopError(f"{out} exists already; choose another --out or give --replace.")
    if out.exists() and not out.is_dir():
        raise EndstopError(f"{out} is a file, not a folder; choose another --out.")
    own = (*TOKENIZER_FILES, TOKENIZER_EVALUATION)
    if foreign := sorted(path.name for path in out.glob("*") if path.name not in own):
        raise EndstopError(
            f"{out} is not replaced: with {foreign[0]} it holds more than a tokenizer; choose another --out."
        )
    sources = [open_texts(argument, text_key=text_key) for argument in data]
    unreadable: list[EndstopError] = []
    started = time.monotonic()
    last: TextsRead | None = None
    with _reading(max_chars) as show:

        def report(read: TextsRead) -> None:
            nonlocal last
            last = read
            show(read)

        try:
            content = train_tokenizer(
                interleaved(sources, unreadable.append),
                vocab_size,
                engine=engine,  # type: ignore[arg-type]
                digits=digits,
                max_chars=max_chars,
                document_chars=document_chars or None,
                allow_smaller=smaller,
                progress=report,
            )
        except EndstopError as error:
            if not unreadable:
                raise
            left_out = (
                f"{counted(len(unreadable), 'document')} cannot be read, the first because: {unreadable[0]}"
            )
            raise EndstopError(f"{error} {left_out}") from error
    seconds = time.monotonic() - started
    save_tokenizer(content, out, replace=replace)
    size, tokens = _compression(content, first_characters(interleaved(sources), 1_000_000))
    assert last is not None
    result = {
        "directory": str(out),
        "vocab_size": len(content["model"]["vocab"]) + len(content["added_tokens"]),
        "documents": last.documents,
        "characters": last.characters,
        "skipped": last.skipped + len(unreadable),
        "bytes_per_token": size / tokens if tokens else 0.0,
        "seconds": seconds,
    }
    if unreadable:
        note(f"endstop: left out {counted(len(unreadable), 'document')}: {unreadable[0]}")
    if as_json:
        write_json(result)
        return
    write_line(f"{out}: {result['vocab_size']:,} tokens, {result['bytes_per_token']:.2f} bytes per token")
    note(f"{last.characters:,} characters of {counted(last.documents, 'document')} in {seconds:.1f} s")


def _compression(content: dict[str, Any], documents: list[str]) -> tuple[int, int]:
    """Bytes and tokens of the documents."""
    from endstop.train.document_encoding import encode_documents
    from endstop.train.tokenizer_training import is_unicode

    documents = [text for text in documents if is_unicode(text)]
    ids = encode_documents(content)(documents)
    return sum(len(text.encode("utf-8")) for text in documents), sum(map(len, ids))


@contextmanager
def _reading(max_chars: int | None) -> Iterator[Callable[[TextsRead], None]]:
    """A bar of the characters read, where a person looks at it."""
    if not sys.stderr.isatty():
        yield lambda read: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from endstop.cli.output import console

    columns = (
        TextColumn("reading"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} characters"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True)) as progress:
        task = progress.add_task("reading", total=max_chars)
        yield lambda read: progress.update(task, completed=read.characters)
