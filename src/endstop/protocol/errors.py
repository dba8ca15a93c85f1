"""Errors that a person, not a programmer, may cause: each is one sentence of what, where and what to do.

The command line prints `str(error)` and exits with 1. Parameters out of range are plain ValueError.
"""

from __future__ import annotations


class EndstopError(Exception):
    """Base of all errors whose message is meant to be read by the person who caused it."""


class ModelNotFound(EndstopError):
    """No source has the model: a wrong name, no network, or offline mode."""


class BrokenModel(EndstopError):
    """The model's files are there but cannot be used: broken JSON, a truncated file, a missing tokenizer."""


class UnsupportedModel(EndstopError):
    """The model is whole, but of a kind that endstop does not run or read."""


class MissingTemplate(EndstopError):
    """Chat was asked of a model that has no chat template."""


class RenderRefused(EndstopError):
    """A conversation cannot be rendered as asked; the message is the reason."""


class RequestRefused(EndstopError, ValueError):
    """A request asks for something that this backend or model cannot do."""
