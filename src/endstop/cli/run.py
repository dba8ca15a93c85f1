"""The process around the verbs: streams, interrupts and pipes from the first import to the last flush."""

from __future__ import annotations

import os
import sys

from endstop.cli.exits import INTERRUPTED, PIPE_CLOSED, remember_interrupts, silence


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        remember_interrupts()
        _open_closed_streams()
        for stream in (sys.stdout, sys.stderr):
            # A model may make what the terminal's encoding cannot write, and half of a surrogate pair.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        from endstop.cli.app import app

        try:
            app(arguments, prog_name="endstop")
            code: str | int | None = 0
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        return code if isinstance(code, int) else 0 if code is None else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        silence(sys.stdout)
        return PIPE_CLOSED


def _open_closed_streams() -> None:
    """A caller may have closed a stream (`>&-`); Python has None there, and this puts the null device."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
