"""What the evaluations have in common: a bar while they run, and a report as a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from endstop.cli.progress import bars


@contextmanager
def evaluating() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function that is told what is measured, how much of it is done and how much there is (0 where
    that is not known). The bar is on stderr and only where a person looks at it."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    with bars(transient=True) as progress:
        bar = progress.add_task("", total=None)
        current = ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal current
            if what != current:
                current = what
                progress.reset(bar, description=what, total=total or None)
            progress.update(bar, completed=done, total=total or None)

        yield show


def kept_place(model: str, keep: bool, name: str) -> Path | None:
    """Where the report on a run's model (RUN/sft/model) is kept, None unless it is to be.

    Raises EndstopError for a model that is of no run.
    """
    from endstop.protocol.errors import EndstopError
    from endstop.train.run_results import run_of

    if not keep:
        return None
    run, stage = run_of(Path(model))
    if run is None or stage is None:
        raise EndstopError(f"--keep is for the model of a run (RUN/sft/model), which {model} is not.")
    return run.path / stage / name


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """A report as JSON; the file appears whole."""
    from endstop.cli.output import whole_file

    with whole_file(path) as place:
        place.write_text(json.dumps(report, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
