"""The tools of a run, from its settings: the standard ones, MCP servers', an oracle, and the user's own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from endstop.agent.models import open_model
from endstop.agent.settings import AgentSettings, ModelSettings
from endstop.agent.tool import Tool
from endstop.agent.turns import cost_of
from endstop.agent.workplace import Workplace
from endstop.protocol.errors import EndstopError
from endstop.runtime.results import Usage

if TYPE_CHECKING:
    from endstop.agent.tools import ToolContext

logger = logging.getLogger(__name__)

# Without these no run can end well.
_NEEDED = frozenset({"submit", "give_up"})


@contextlib.contextmanager
def open_tools(
    settings: AgentSettings, place: Workplace, extra: Sequence[Tool] = (), *, asked: int = 0
) -> Iterator[list[Tool]]:
    """Open what the settings name, and close it behind the run.

    `asked`: how often the oracle was, in a run that goes on. Raises EndstopError for a server or a file that
    cannot be opened, and for two tools of one name.
    """
    from endstop.agent.tools import ToolContext, standard_tools
    from endstop.agent.tools.own import load_tools
    from endstop.sandbox.files import WorkspaceFiles

    wanted = settings.tools
    context = ToolContext(
        place.root,
        WorkspaceFiles(place.root),
        place.sandbox,
        place.working,
        place.bind,
        settings.context.output_bytes,
    )
    tools = standard_tools(context)
    unknown = sorted(set(wanted.leave_out) - {tool.name for tool in tools})
    if unknown or _NEEDED & set(wanted.leave_out):
        name = unknown[0] if unknown else min(_NEEDED & set(wanted.leave_out))
        raise EndstopError(f"tools.leave_out cannot leave out {name}.")
    tools = [tool for tool in tools if tool.name not in wanted.leave_out]
    with contextlib.ExitStack() as stack:
        if wanted.oracle is not None:
            tools.append(_oracle(settings, place, context, stack, asked))
        for path in wanted.modules:
            tools += load_tools(path)
        tools += extra
        if wanted.mcp:
            from endstop.agent.mcp import McpTools, read_servers

            taken = [tool.name for tool in tools]
            servers = read_servers(wanted.mcp)
            limit = settings.context.output_bytes
            opened = stack.enter_context(McpTools(servers, taken=taken, output_bytes=limit))
            logger.warning("MCP servers: %s", _cost(opened.tools, settings.model))
            tools += opened.tools
        names = [tool.name for tool in tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise EndstopError(f"two tools are named {twice[0]}; rename one or leave it out.")
        yield tools


def _cost(tools: Sequence[Tool], model: ModelSettings) -> str:
    """What the definitions of strangers cost: the person who starts the run should know."""
    from endstop.agent.cost import definition_costs, open_counter

    elsewhere = model.base_url is not None or not model.name or model.name.startswith("scripted:")
    name = None if elsewhere else model.name
    counter = open_counter(name, revision=model.revision, offline=model.offline)
    return definition_costs(tools, counter).warning


def _oracle(
    settings: AgentSettings, place: Workplace, context: ToolContext, stack: contextlib.ExitStack, asked: int
) -> Tool:
    from endstop.agent.tools.oracle import Situation, oracle_tool

    assert settings.tools.oracle is not None
    model = open_model(settings.tools.oracle, answered=asked)
    stack.callback(model.generator.close)

    def situation() -> Situation:
        gate = place.gate
        if gate is None:
            return Situation(settings.task.task)
        items = "\n".join(item.line for item in gate.items(place.trees.snapshot()))
        diff = place.trees.diff(place.baseline, place.trees.snapshot())
        return Situation(settings.task.task, diff, items, gate.state_block())

    def pay(usage: Usage) -> None:
        if place.spend is not None:
            place.spend(cost_of(usage, model.price))

    return oracle_tool(
        model.generator,
        situation,
        context,
        max_calls=settings.tools.oracle_calls,
        asked=asked,
        params=model.params.replace(max_tokens=min(2048, model.max_tokens), trace=False),
        on_usage=pay,
    )
