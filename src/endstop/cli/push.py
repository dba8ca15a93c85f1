"""`endstop push`: a trained model to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import verb

app = verb_app()


@app.command("push")
@verb()
def push_model(
    directory: Annotated[Path, typer.Argument(help="The model's directory, as RUN/sft/model.")],
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the files and the model card; send nothing.")
    ] = False,
    message: Annotated[str | None, typer.Option("--message", help="The commit's message.")] = None,
    licence: Annotated[
        str | None, typer.Option("--licence", "--license", help="Licence of the weights, as apache-2.0.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The files, the card, the address as JSON.")
    ] = False,
) -> None:
    """Push a model directory with a model card written from its run: data, metrics, and how it stops.

    The token is HF_TOKEN's or that of `hf auth login`; HF_ENDPOINT names another Hub. A README.md in the
    directory is taken as the card. Checkpoints with training state, and pickles, are refused.

    Example: endstop push runs/tiny/sft/model me/tiny-stops --dry-run
    """
    from endstop.cli.output import counted, note, write_json, write_line
    from endstop.train.push import as_json as json_of
    from endstop.train.push import push, pushable

    found = pushable(directory, repository, licence=licence)
    for name in found.left_out:
        note(f"{name} stays here: it is no part of a model.")
    if not as_json:
        for file in found.files:
            write_line(f"{file.size:>14,}  {file.name}")
        write_line(f"{found.size:>14,}  bytes in {counted(len(found.files), 'file')} for {repository}")
    if dry_run:
        if as_json:
            write_json(json_of(found, repository))
        else:
            write_line()
            write_line(found.card)
        return
    _bars_only_for_people()
    address = push(found, repository, private=private, message=message)
    if as_json:
        write_json({**json_of(found, repository), "address": address})
    else:
        write_line(address)


def _bars_only_for_people() -> None:
    import sys

    if not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
