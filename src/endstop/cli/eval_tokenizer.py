"""`endstop eval tokenizer`: bytes for each token, beside the vocabularies of GPT-2 and GPT-4."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import verb
from endstop.protocol.errors import EndstopError

if TYPE_CHECKING:
    from rich.table import Table

    from endstop.train.tokenizer_evaluation import TokenizerEvaluation

app = verb_app()


@app.command("tokenizer")
@verb()
def tokenizer(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory with a tokenizer.json.")],
    train: Annotated[
        Path | None, typer.Option("--train", help="Text that it was trained on: .txt, .jsonl or .parquet.")
    ] = None,
    validation: Annotated[
        Path | None, typer.Option("--validation", help="Text of the same kind that it has not seen.")
    ] = None,
    text_key: Annotated[
        str, typer.Option("--text-key", help="The key of JSON lines and the column of Parquet files.")
    ] = "text",
    max_chars: Annotated[
        int, typer.Option("--max-chars", help="Of --train and --validation, so many characters.", min=1)
    ] = 1_000_000,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep it in DIR, a run's, for `endstop train report`.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All counts as one JSON object.")] = False,
) -> None:
    """Compare a tokenizer's compression with GPT-2's and GPT-4's on news, Korean, code, maths and science.

    Their vocabularies come through tiktoken: from TIKTOKEN_CACHE_DIR, or fetched at the first use.

    Example: endstop eval tokenizer run/tokenizer --validation held_out.txt
    """
    from endstop.cli.output import console, counted, note, write_json
    from endstop.train.data.sources import open_text_source
    from endstop.train.run_directory import TOKENIZER_EVALUATION, write_object
    from endstop.train.tokenizer_evaluation import evaluate_tokenizer, first_characters
    from endstop.train.tokenizer_training import interleaved

    unreadable: list[EndstopError] = []
    samples = {}
    for name, path in (("train", train), ("validation", validation)):
        if path is None:
            continue
        texts = interleaved([open_text_source(path, text_key=text_key)], unreadable.append)
        samples[name] = first_characters(texts, max_chars)
        if not any(samples[name]):
            raise unreadable[0] if unreadable else EndstopError(f"{path} has no text to compare on.")
    found = evaluate_tokenizer(directory, samples)
    if keep:
        write_object(directory / TOKENIZER_EVALUATION, found.to_json())
    if as_json:
        write_json(found.to_json())
        return
    console().print(_table(found))
    if unreadable:
        note(f"endstop: left out {counted(len(unreadable), 'document')}: {unreadable[0]}")
    for name, reason in found.unavailable.items():
        note(f"no comparison with {name}: {reason}")
    if not found.lossless:
        note("endstop: some text is not what it was after encoding and decoding.")


def _table(found: TokenizerEvaluation) -> Table:
    from rich import box
    from rich.table import Table

    sizes = ", ".join(f"{name} {size:,}" for name, size in found.vocab_sizes.items())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=f"vocabulary: {sizes}", caption_justify="left")
    table.add_column("sample")
    for name in ("bytes", "tokens", "bytes/token"):
        table.add_column(name, justify="right")
    others = [name for name in found.vocab_sizes if name != "ours"]
    for name in [*others, *found.unavailable]:
        table.add_column(name, justify="right")
        table.add_column("ratio", justify="right")
    for sample in found.samples:
        row = [
            sample.name,
            f"{sample.size:,}",
            f"{sample.tokens['ours']:,}",
            f"{sample.bytes_per_token():.2f}",
        ]
        for name in others:
            row += [f"{sample.bytes_per_token(name):.2f}", f"{sample.ratio(name):.2f}"]
        table.add_row(*row, *["not had", ""] * len(found.unavailable))
    return table
