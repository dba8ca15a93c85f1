"""The texts that the harness says, as Jinja templates; a settings file may name others in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from endstop.agent.reading import read_text
from endstop.protocol.errors import EndstopError

PromptName = Literal["system", "task", "compaction"]
# A template's own expressions may divide by zero, add a text to a number, or name an item that is not there.
_FAULTS_OF_EXPRESSIONS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def render(name: PromptName, own: Path | None = None, **variables: Any) -> str:
    """The prompt `name`, or the template in the file `own`, with its variables filled in.

    Raises EndstopError for a file that cannot be read, a template that names what is not there or cannot be
    filled in, and one that says nothing.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    path = own or Path(__file__).with_name(f"{name}.jinja")
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False
    )
    text = read_text(path, "the prompt template")
    try:
        said = environment.from_string(text).render(**variables).strip()
    except jinja2.TemplateError as error:
        known = ", ".join(sorted(variables))
        raise EndstopError(
            f"the prompt template {path}: {str(error).rstrip('.')}; it may use {known}."
        ) from error
    except _FAULTS_OF_EXPRESSIONS as error:
        raise EndstopError(
            f"the prompt template {path}: {type(error).__name__}: {str(error).rstrip('.')}."
        ) from error
    if not said:
        raise EndstopError(f"the prompt template {path} says nothing.")
    return said
