"""The texts that the harness says, as Jinja templates; a settings file may name others in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from endstop.protocol.errors import EndstopError

PromptName = Literal["system", "task", "compaction"]


def render(name: PromptName, own: Path | None = None, **variables: Any) -> str:
    """The prompt `name`, or the template in the file `own`, with its variables filled in.

    Raises EndstopError for a file that cannot be read and for a template that names what is not there.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    path = own or Path(__file__).with_name(f"{name}.jinja")
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False
    )
    try:
        text = path.read_text(encoding="utf-8")
        return environment.from_string(text).render(**variables).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EndstopError(f"the prompt template {path} cannot be read: {error}.") from error
    except jinja2.TemplateError as error:
        known = ", ".join(sorted(variables))
        raise EndstopError(f"the prompt template {path}: {error}; it may use {known}.") from error
