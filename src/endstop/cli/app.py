"""The verbs and where they live; a verb's module is imported when it is used, or for the list in --help."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

# In the order in which --help shows them.
VERBS = {
    "chat": "endstop.cli.chat",
    "generate": "endstop.cli.generate",
    "trace": "endstop.cli.trace",
    "stops": "endstop.cli.stops",
    "render": "endstop.cli.render",
    "tokenize": "endstop.cli.tokenize",
    "train": "endstop.cli.train",
    "eval": "endstop.cli.eval",
    "export": "endstop.cli.export",
    "push": "endstop.cli.push",
    "agent": "endstop.cli.agent",
    "gate": "endstop.cli.gate",
    "pull": "endstop.cli.pull",
    "cache": "endstop.cli.cache",
    "env": "endstop.cli.env",
}


class VerbGroup(TyperGroup):
    """Finds verbs by name without importing the others."""

    modules: Mapping[str, str] = VERBS

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.modules:
            return None
        command = get_command(import_module(self.modules[cmd_name]).app)
        command.name = cmd_name
        return command


def group_of(verbs: Mapping[str, str], help_text: str, base: type[VerbGroup] = VerbGroup) -> typer.Typer:
    """The Typer app of a verb with verbs of its own, each in a module that is imported when it is used."""
    group = type("VerbsBelow", (base,), {"modules": verbs})
    below = typer.Typer(
        cls=group,
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    below.callback()(_nothing)
    return below


def _nothing() -> None:
    """Typer makes a group only of an app with a callback."""


def verb_app(help_text: str | None = None) -> typer.Typer:
    """The Typer app of one verb's module."""
    return typer.Typer(
        help=help_text,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = typer.Typer(
    cls=VerbGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from endstop import __version__

        print(f"endstop {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Makes language models stop at the right place.

    Options come from flags, then ENDSTOP_* variables, then endstop.toml or `[tool.endstop]` of
    pyproject.toml, then defaults. Exit codes: 0 ok, 1 an error that the sentence on stderr
    explains, 2 wrong usage, 130 Ctrl-C.

    Example: endstop chat smollm2-135m-instruct -p "How do you say thank you in Chinese?"
    """
