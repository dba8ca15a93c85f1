"""Progress of long work, on stderr and only where a person looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Report = Callable[[int, "int | None", str], None]


@contextmanager
def downloading() -> Iterator[Report]:
    """Gives a function that is told `(bytes done, bytes in all or None, what)` as files arrive."""
    if not sys.stderr.isatty():
        yield lambda done, total, name: None
        return
    bars: dict[str, TaskID] = {}
    progress: Progress | None = None

    def report(done: int, total: int | None, name: str) -> None:
        nonlocal progress
        if progress is None:
            progress = _download_bars()
            progress.start()
        if name not in bars:
            bars[name] = progress.add_task(name, total=total)
        progress.update(bars[name], completed=done, total=total)

    try:
        yield report
    finally:
        if progress is not None:
            progress.stop()


def _download_bars() -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from endstop.cli.output import console

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
    )


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that is told `(done, in all)`, with an estimate of the time that is left."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with bars(transient=False) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def bars(*, transient: bool) -> Progress:
    """Bars with what is done of how many and the time left; `transient`: they vanish at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from endstop.cli.output import console

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=transient)


def spinner(what: str) -> Progress:
    """One line with what is being waited for and for how long, which vanishes at the end."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from endstop.cli.output import console

    said = TextColumn("{task.description}", "dim", markup=False)
    progress = Progress(
        SpinnerColumn(), said, TimeElapsedColumn(), console=console(stderr=True), transient=True
    )
    progress.add_task(what, total=None)
    return progress


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says for how long something has been waited for, where a person looks at it."""
    if not sys.stderr.isatty():
        yield
        return
    with spinner(what):
        yield
