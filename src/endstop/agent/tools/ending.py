"""The tools with which a model asks for an end, or yields: the loop and the gate decide, nothing runs here.

What the gate refuses by itself (no reason, no evidence) is not refused as a wrong call before it: the schema
asks for it, the check lets its absence through.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from endstop.agent.tool import Tool, tool


def ending_tools() -> list[Tool]:
    """submit, give_up, ask_user and checkpoint."""
    return [
        _asking_for(submit, "summary"),
        _asking_for(give_up, "reason", "evidence"),
        ask_user,
        checkpoint,
    ]


@tool(ends=True)
def submit(
    summary: Annotated[str, "What was done, in a few sentences."] = "",
    evidence: Annotated[
        dict[str, str],
        "For each checklist id what shows it: the id of a test that passes, or the path of a file.",
    ] = {},  # noqa: B006 (never changed; shown to the model as the default)
    assumptions: Annotated[list[str], "What was assumed because nobody could be asked."] = [],  # noqa: B006
) -> None:
    """Say that the task is done. The project's own checks are then run on the files as they are; what you ran
    yourself does not count. Call it alone. If it is refused, the reason says what would be accepted."""


@tool(ends=True)
def give_up(
    reason: Annotated[str, "Why it cannot be done."] = "",
    evidence: Annotated[str, "The fact that shows it: an output, an error, two tests that contradict."] = "",
    hard: Annotated[
        bool,
        "No further try can help: a credential or hardware is missing, or two named tests contradict.",
    ] = False,
) -> None:
    """Say that the task cannot be done: an honest end. It needs a reason and the fact that shows it, and is
    taken after one more try. Call it alone."""


@tool(ends=True)
def ask_user(question: Annotated[str, "One question."]) -> None:
    """Ask the user something that only they can decide. Where there is no user, assume something sensible,
    name it in submit's assumptions, and go on. Call it alone."""


@tool(ends=True)
def checkpoint(note: Annotated[str, "What is done and what comes next."]) -> None:
    """Note where the work stands and go on. It is no end and proves nothing. Call it alone."""


def _asking_for(made: Tool, *names: str) -> Tool:
    """The tool with `names` as required arguments in what the model is shown."""
    properties = {
        name: {key: value for key, value in schema.items() if not (name in names and key == "default")}
        for name, schema in made.parameters["properties"].items()
    }
    return replace(made, parameters={**made.parameters, "properties": properties, "required": list(names)})
