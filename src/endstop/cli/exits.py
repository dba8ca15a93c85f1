"""What the exit codes mean; docs/cli.md says the same to people."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, TextIO

OK = 0
# Something a person or a model caused: the sentence on stderr says what.
FAILED = 1
# An unknown option, a missing argument.
USAGE = 2
# Ctrl-C, as a shell reports SIGINT.
INTERRUPTED = 130
# The reader went away, as a shell reports SIGPIPE.
PIPE_CLOSED = 141


_interrupted = threading.Event()


def remember_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt as ever, and leave a mark for `check_interrupted`."""

    def interrupt(number: int, frame: Any) -> None:
        _interrupted.set()
        raise KeyboardInterrupt

    # A process that was started with SIGINT ignored keeps that.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def check_interrupted() -> None:
    """Raise KeyboardInterrupt for a Ctrl-C that was lost: imports of compiled modules can swallow one."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


def silence(stream: TextIO) -> None:
    """Python flushes stdout once more at its exit, when nobody reads it any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
