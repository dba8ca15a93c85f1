"""A trace as a table in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from endstop.view.document import TraceDocument
from endstop.view.marks import visible
from endstop.view.scale import percent, strength

if TYPE_CHECKING:
    from rich.table import Table


def trace_table(document: TraceDocument) -> Table:
    """One row for each step. Texts are literal: neither the terminal nor rich obeys what is in them."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("#", justify="right", style="dim")
    table.add_column("token", overflow="fold", min_width=10, max_width=18)
    table.add_column("id", justify="right")
    for name in ("P(token)", "P(stop)"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best stop", overflow="fold", min_width=9, max_width=14)
    for name in ("rank", "entropy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("counts", justify="right", no_wrap=True)
    for number, (step, text) in enumerate(zip(document.trace.steps, document.texts, strict=True), start=1):
        strong = strength(step.p_stop)
        color = "bold red" if strong > 0.9 else "yellow" if strong > 0.4 else ""
        token = visible(text) if text else visible(step.token)
        table.add_row(
            str(number),
            Text(token, style="italic dim" if step.forced else ""),
            str(step.token_id),
            "forced" if step.forced else percent(step.probability),
            Text(percent(step.p_stop), style=color),
            Text(visible(document.stop_text(step.best_stop))),
            "" if step.best_stop_rank is None else str(step.best_stop_rank),
            "" if step.entropy is None else f"{step.entropy:.2f}",
            f"{step.visible}/{step.computed}/{step.pending}",
        )
    return table
