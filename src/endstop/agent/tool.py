"""A tool: a function with a name, a description and a schema. `@tool` makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is shown of a call. `ok` False marks an error that the model may repair."""

    text: str
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a model may call.

    Attributes:
        parameters: JSON schema of its arguments.
        run: takes the arguments by name; checks them against the schema itself and answers a call that does
            not fit with a ToolResult that says what is wrong. Never raises for what a model did.
        ends: the call asks for the end of the run or of the turn, so it must stand alone and the loop decides
            (submit, give_up, ask_user, checkpoint); its `run` is never called.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[..., ToolResult]
    ends: bool = False

    @property
    def definition(self) -> dict[str, Any]:
        """In OpenAI's form, which chat templates take."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }
