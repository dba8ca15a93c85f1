"""What the exit codes mean; docs/cli.md says the same to people."""

from __future__ import annotations

OK = 0
# Something a person or a model caused: the sentence on stderr says what.
FAILED = 1
# An unknown option, a missing argument.
USAGE = 2
# Ctrl-C, as a shell reports SIGINT.
INTERRUPTED = 130
# The reader went away, as a shell reports SIGPIPE.
PIPE_CLOSED = 141
