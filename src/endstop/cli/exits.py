"""What the exit codes mean; docs/cli.md says the same to people."""

from __future__ import annotations

import os
from typing import TextIO

OK = 0
# Something a person or a model caused: the sentence on stderr says what.
FAILED = 1
# An unknown option, a missing argument.
USAGE = 2
# Ctrl-C, as a shell reports SIGINT.
INTERRUPTED = 130
# The reader went away, as a shell reports SIGPIPE.
PIPE_CLOSED = 141


def silence(stream: TextIO) -> None:
    """Python flushes stdout once more at its exit, when nobody reads it any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
