"""What every verb has in common: `-v`, logging, shared groups of options, and errors as one sentence."""

from __future__ import annotations

import errno
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from endstop.cli.exits import FAILED, INTERRUPTED, PIPE_CLOSED, silence
from endstop.protocol.errors import EndstopError

Verbose = Annotated[
    int,
    typer.Option(
        "-v", "--verbose", count=True, help="Log more: -v what is done, -vv details and tracebacks."
    ),
]


class OptionGroup:
    """Options that several verbs share. A verb takes them as one dict of those that were given."""

    def __init__(self, **annotations: Any) -> None:
        self.annotations = annotations


def verb(**groups: OptionGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a verb.

    `groups` names parameters of the function; each is replaced by the group's options on the command line,
    and the function gets a dict of those that were given.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True)
        parameters = [p for p in own.parameters.values() if p.name not in groups]
        for group in groups.values():
            parameters += [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
                for name, annotation in group.annotations.items()
            ]
        parameters.append(
            inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=Verbose)
        )

        @functools.wraps(function)
        def command(**given: Any) -> None:
            verbose: int = given.pop("verbose")
            start_logging(verbose)
            for name, group in groups.items():
                values = {option: given.pop(option) for option in group.annotations}
                given[name] = {option: value for option, value in values.items() if value is not None}
            try:
                function(**given)
            except (typer.Exit, typer.Abort, typer.BadParameter):
                raise
            except KeyboardInterrupt:
                raise interrupted("Interrupted.") from None
            except BrokenPipeError as error:
                silence(sys.stdout)
                raise typer.Exit(PIPE_CLOSED) from error
            except Exception as error:
                if verbose > 1:
                    import traceback

                    traceback.print_exception(error)
                print(f"endstop: {sentence(error)}", file=sys.stderr)
                raise typer.Exit(FAILED) from error

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def interrupted(said: str) -> typer.Exit:
    """Say what Ctrl-C left behind, and how to leave."""
    print(f"endstop: {said}", file=sys.stderr)
    return typer.Exit(INTERRUPTED)


def sentence(error: BaseException) -> str:
    """An error as one sentence for the person at the terminal."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        place = f" while writing {error.filename}" if error.filename else ""
        return f"the disk is full{place}; free some space."
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}."
    if isinstance(error, EndstopError | ValueError):
        return text if text.endswith((".", "!", "?", "`")) else f"{text}."
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if package in ("torch", "transformers", "safetensors", "numpy", "gguf"):
            return f"This verb runs a model and needs {package}: pip install 'endstop[torch]'."
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "The memory is not enough for this model and these rows; try --dtype bfloat16 or fewer rows."
    return (
        f"Unexpected {type(error).__name__}: {text or 'no message'}. "
        "Run it again with -vv for the traceback, and report it with the output of `endstop env`."
    )


def start_logging(verbose: int) -> None:
    """Log to stderr: ENDSTOP_LOG names a level, each -v goes one further down from warnings."""
    named = os.environ.get("ENDSTOP_LOG", "").strip().upper()
    level = logging.getLevelNamesMapping().get(named, logging.WARNING)
    level = min(level, (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("endstop").setLevel(level)
