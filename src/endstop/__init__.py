"""endstop makes language models stop at the right place."""

__version__ = "0.1.0"
