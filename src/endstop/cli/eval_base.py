"""`endstop eval base`: bits per byte of texts, the ends beside it, and in-context tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.options import SOURCE, ModelArgument
from endstop.cli.verb import verb
from endstop.protocol.errors import EndstopError

if TYPE_CHECKING:
    from rich.table import Table

    from endstop.train.data.sources import TextSource
    from endstop.train.evaluation.base import BaseReport
    from endstop.train.evaluation.in_context import CoreReport

app = verb_app()


@app.command("base")
@verb(source=SOURCE)
def base(
    model: ModelArgument,
    source: dict[str, Any],
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="A .txt, .jsonl or .parquet file, or a folder; may be repeated."),
    ] = None,
    text_key: Annotated[
        str, typer.Option("--text-key", help="The key of JSON lines and the column of Parquet files.")
    ] = "text",
    text_split: Annotated[
        str,
        typer.Option(
            "--text-split",
            help="Documents of a .txt: file, or the parts between lines: blank, %.",
        ),
    ] = "file",
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle", help="A folder of in-context tasks with core.yaml, as nanochat's eval_bundle."
        ),
    ] = None,
    examples: Annotated[
        int | None, typer.Option("--examples", help="Of each in-context task, at most so many.", min=1)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Of each text, about so many tokens.", min=1)
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16, or auto: as stored.")] = "float32",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")] = "auto",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the report there as JSON.")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep it beside the model of a run, for `endstop train report`.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report as one JSON object.")] = False,
) -> None:
    """Measure a base model on texts and in-context tasks: bits per byte, CORE, and how it sees documents end.

    Bits per byte leave special tokens out; so the end of a document is shown beside it: the nats of the end
    token, and the mean P(stop) at the true ends and everywhere else.

    Example: endstop eval base run/base/model --text held_out.jsonl --bundle eval_bundle --examples 500
    """
    from endstop.cli.eval_report import evaluating, kept_place, write_report
    from endstop.cli.output import check_place, console, counted, note, write_json
    from endstop.cli.progress import downloading
    from endstop.cli.settings import resolve
    from endstop.models.gguf import ensure_directory
    from endstop.protocol.resolve import resolve_model
    from endstop.runtime.llm import available_device
    from endstop.train.data.sources import open_text_source
    from endstop.train.evaluation.base import evaluate_base, load_base
    from endstop.train.evaluation.in_context import load_bundle
    from endstop.train.run_directory import BASE_EVALUATION

    if not text and bundle is None:
        raise typer.BadParameter("give --text FILE, --bundle FOLDER, or both")
    if text_split not in ("file", "blank", "%"):
        raise typer.BadParameter(f"--text-split must be file, blank or %, got {text_split!r}")
    check_place(out)
    kept = kept_place(model, keep, BASE_EVALUATION)
    tasks = [] if bundle is None else load_bundle(bundle)
    skipped: list[str] = []
    texts = {
        str(path): _documents(open_text_source(path, text_key=text_key, split=text_split), skipped)  # type: ignore[arg-type]
        for path in text or ()
    }
    with downloading() as progress:
        resolved = resolve_model(model, progress=progress, **resolve(source, SOURCE.annotations))
    decoder, text_format = load_base(ensure_directory(resolved), dtype=dtype, device=available_device(device))
    with evaluating() as show:
        report = evaluate_base(
            decoder,
            text_format,
            texts=texts,
            tasks=tasks,
            examples=examples,
            max_tokens=max_tokens,
            progress=show,
        )
    for name, scores in report.texts.items():
        if not scores.documents:
            because = f": {skipped[0]}" if skipped else "."
            raise EndstopError(f"{name} has no document that can be measured{because}")
    found = {"model": model, **report.as_dict()}
    for place in (out, kept):
        if place is not None:
            write_report(place, found)
    if skipped:
        note(f"endstop: {counted(len(skipped), 'document')} left out, the first because {skipped[0]}")
    if as_json:
        write_json(found)
        return
    if report.texts:
        console().print(_text_table(report))
    if report.core is not None:
        console().print(_core_table(report.core))


def _documents(texts: TextSource, skipped: list[str]) -> Iterator[str]:
    from endstop.train.data.sources import BadDocument

    for index in range(len(texts)):
        try:
            yield texts[index]
        except BadDocument as error:
            skipped.append(str(error))


def _text_table(report: BaseReport) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("text")
    for name in ("bits/byte", "bytes", "documents", "nats/end", "P(stop) at ends", "elsewhere"):
        table.add_column(name, justify="right")
    for name, scores in report.texts.items():
        table.add_row(
            name,
            f"{scores.bits_per_byte:.4f}" if math.isfinite(scores.bits_per_byte) else "-",
            f"{scores.bytes:,}",
            f"{scores.documents:,}",
            _number(scores.nats_per_end, 3),
            _number(scores.p_stop_at_ends, 4),
            _number(scores.p_stop_before, 6),
        )
    return table


def _core_table(core: CoreReport) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("in-context task", footer="CORE")
    for name in ("shots", "examples", "accuracy", "baseline"):
        table.add_column(name, justify="right")
    table.add_column("centred", justify="right", footer=f"{core.core:.4f}")
    for task in core.tasks:
        table.add_row(
            task.label,
            str(task.shots),
            f"{task.examples:,}",
            f"{task.accuracy:.4f}",
            f"{task.baseline:.4f}",
            f"{task.centred:.4f}",
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
