"""`endstop export`: a model directory as a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import verb

app = verb_app()


@app.command("export")
@verb()
def export(
    directory: Annotated[Path, typer.Argument(help="The model's directory, as RUN/sft/model.")],
    gguf: Annotated[Path, typer.Option("--gguf", help="The GGUF file to write, for llama.cpp.")],
    dtype: Annotated[
        str, typer.Option("--dtype", help="f32, f16, bf16 or q8_0: how matrices are stored.")
    ] = "f16",
    pre: Annotated[
        str | None,
        typer.Option(
            "--pre", help="Name the pre-tokenizer, where none splits text exactly as the model does."
        ),
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--licence", "--license", help="Licence of the weights.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was written, as JSON.")] = False,
) -> None:
    """Write a model as GGUF: Llama, Mistral, Qwen2, Qwen3 and Gemma shapes with a byte-level tokenizer.

    Tokens, chat template and every stop token go along. A network, or a splitting of text, that llama.cpp
    would compute differently is refused.

    Example: endstop export runs/tiny/sft/model --gguf tiny.gguf --dtype f32
    """
    from endstop.cli.output import note, write_json, write_line
    from endstop.cli.progress import counting
    from endstop.models.gguf_export import DTYPES, export_gguf

    wanted = next((name for name in DTYPES if name == dtype), None)
    if wanted is None:
        raise typer.BadParameter(f"one of {', '.join(DTYPES)}, not {dtype}", param_hint="--dtype")
    with counting("tensors") as progress:
        done = export_gguf(directory, gguf, dtype=wanted, pre=pre, licence=licence, progress=progress)
    if done.left_out:
        ids = ", ".join(map(str, done.left_out))
        note(f"GGUF has no key for the stop tokens {ids}: other programs will not stop there.")
    if pre is not None:
        note(f"The pre-tokenizer {pre} was taken as told; texts it splits otherwise become other tokens.")
    if as_json:
        write_json(
            {
                "path": str(done.path),
                "size": done.size,
                "architecture": done.architecture,
                "pre": done.pre,
                "types": done.types,
                "left_out": list(done.left_out),
            }
        )
        return
    types = ", ".join(f"{count} {name}" for name, count in done.types.items())
    write_line(
        f"{done.path}: {done.size:,} bytes, {done.architecture}, pre-tokenizer {done.pre}, tensors {types}"
    )
