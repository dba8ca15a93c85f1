"""The command line: one thin file for each verb, loaded when that verb is used."""

from __future__ import annotations


def main() -> None:
    """The entry point `endstop`."""
    from endstop.cli.run import run

    raise SystemExit(run())
