"""`endstop tokenize`: the ids of a text as the model gets them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.options import SOURCE, ModelArgument
from endstop.cli.verb import verb

app = verb_app()


@app.command("tokenize")
@verb(source=SOURCE)
def tokenize(
    model: ModelArgument,
    source: dict[str, Any],
    text: Annotated[str | None, typer.Argument(help="The text; without it, or as -, stdin is read.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Nothing added, and no control token can come out of the text.")
    ] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="The other way: TEXT is ids, show their text.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Ids, pieces and their bytes as JSON.")] = False,
) -> None:
    """Show a text's token ids, with BOS and EOS exactly as the model's own tokenizer adds them.

    Example: endstop tokenize smollm2-135m-instruct "How do you say thank you in Chinese?"
    """
    from endstop.cli.inputs import read_stdin
    from endstop.cli.output import counted, note, write_answer, write_json, write_line
    from endstop.cli.settings import resolve
    from endstop.protocol.resolve import resolve_model
    from endstop.protocol.tokenbytes import TokenBytes
    from endstop.protocol.tokenizer import Tokenizer
    from endstop.view.marks import visible

    path = resolve_model(model, weights=False, **resolve(source, SOURCE.annotations)).path
    tokenizer = Tokenizer.from_pretrained(path)
    given = read_stdin() if text is None or text == "-" else text
    if decode:
        ids = token_ids(given)
        unknown = [token_id for token_id in ids if not 0 <= token_id < tokenizer.vocab_size]
        if unknown:
            raise ValueError(
                f"{model} has no token {unknown[0]}: its ids are 0 to {tokenizer.vocab_size - 1}"
            )
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        if as_json:
            write_json({"ids": ids, "text": decoded})
        else:
            write_answer(decoded)
            write_line()
        return
    ids = tokenizer.encode_text(given) if plain else tokenizer.encode(given)
    pieces = TokenBytes.from_tokenizer_json(tokenizer.json)
    if as_json:
        tokens = [
            {
                "id": token_id,
                "text": pieces[token_id].decode("utf-8", "replace"),
                "bytes": pieces[token_id].hex(),
                "special": token_id in pieces.special,
            }
            for token_id in ids
        ]
        write_json({"model": model, "count": len(ids), "ids": ids, "tokens": tokens})
        return
    for token_id in ids:
        special = "  special" if token_id in pieces.special else ""
        write_line(f"{token_id:>7}  {visible(pieces[token_id].decode('utf-8', 'replace'))}{special}")
    note(f"{counted(len(ids), 'token')}: {ids}")


def token_ids(text: str) -> list[int]:
    """Ids out of `1, 2, 3`, `[1,2,3]` or `1 2 3`."""
    words = text.strip().strip("[]").replace(",", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError:
        raise ValueError(f"--decode takes token ids such as 1,2,3, got {text.strip()!r}") from None
