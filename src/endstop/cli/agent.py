"""`endstop agent`: a task done with evidence, and what belongs to it. Without a verb it is `run`."""

from __future__ import annotations

import difflib
from typing import Any

import typer

from endstop.cli.app import VerbGroup, group_of

# In the order in which --help shows them.
VERBS = {
    "run": "endstop.cli.agent_run",
    "show": "endstop.cli.agent_show",
    "eval": "endstop.cli.agent_eval",
    "bench": "endstop.cli.agent_bench",
    "tools": "endstop.cli.agent_tools",
}
_HELP = ("-h", "--help")


class AgentGroup(VerbGroup):
    """`endstop agent "task"` is `endstop agent run "task"`."""

    modules = VERBS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in VERBS and args[0] not in _HELP:
            _refuse_misspelled(args[0])
            args = ["run", *args]
        rest: list[str] = super().parse_args(ctx, args)
        return rest


def _refuse_misspelled(word: str) -> None:
    """A verb with a wrong letter must not start a run with that word as its task."""
    near = [] if " " in word else difflib.get_close_matches(word, VERBS, n=1, cutoff=0.7)
    if near:
        raise typer.BadParameter(
            f"there is no verb {word!r}; did you mean {near[0]}? "
            f"For a task of that one word: endstop agent run {word}"
        )


app = group_of(
    VERBS,
    'Do a task and end only on evidence: `endstop agent "task"` runs it, the verbs below look at runs.\n\n'
    'Example: endstop agent "make the tests pass" --model qwen3-4b --base-url http://localhost:8000/v1 '
    '--verify "pytest -q"',
    AgentGroup,
)
