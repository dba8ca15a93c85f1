"""`endstop agent tools`: what a model may call, and what the definitions cost in every prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.options import SOURCE
from endstop.cli.verb import verb

if TYPE_CHECKING:
    from endstop.agent.cost import DefinitionCosts
    from endstop.agent.tool import Tool

app = verb_app()


@app.command("tools")
@verb(source=SOURCE)
def tools(
    source: dict[str, Any],
    cost: Annotated[bool, typer.Option("--cost", help="The tokens of each definition.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Count as this model's template and tokenizer do; no weights are read."
        ),
    ] = None,
    template: Annotated[
        Path | None, typer.Option("--template", help="A Jinja chat template in place of the model's own.")
    ] = None,
    mcp: Annotated[
        list[str] | None,
        typer.Option(
            "--mcp",
            help="An MCP server: its URL, its command in quotes, or a JSON, YAML or TOML file of servers. "
            "May be repeated. Commands are started.",
        ),
    ] = None,
    own: Annotated[
        list[str] | None,
        typer.Option(
            "--tools", help="A Python file or module with @tool functions, which is run. May be repeated."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The definitions, with their tokens, as JSON.")
    ] = False,
) -> None:
    """List the tools of an agent's run; with --cost, what each definition adds to every prompt.

    Example: endstop agent tools --cost --model smollm2-135m-instruct --mcp "python my_server.py"
    """
    from contextlib import ExitStack

    from endstop.agent.cost import definition_costs, open_counter
    from endstop.agent.mcp import McpTools
    from endstop.agent.tools.own import load_tools
    from endstop.cli.inputs import read_file
    from endstop.cli.output import note
    from endstop.cli.settings import resolve

    text = None if template is None else read_file(template)
    options = resolve(source, SOURCE.annotations)
    counter = open_counter(model, template=text, **options) if cost else None
    servers = [server for given in mcp or () for server in _servers(given)]
    with ExitStack() as stack:
        rows: list[tuple[str, Tool]] = [("standard", tool) for tool in _standard(stack)]
        for place in own or ():
            rows += [(place, tool) for tool in load_tools(place)]
        if servers:
            opened = stack.enter_context(McpTools(servers, taken=[tool.name for _, tool in rows]))
            rows += [("mcp", tool) for tool in opened.tools]
            note(definition_costs(opened.tools, counter or open_counter(None)).warning)
        costs = None if counter is None else definition_costs([tool for _, tool in rows], counter)
        _show(rows, costs, as_json)


def _standard(stack: Any) -> list[Tool]:
    """The standard tools, on a workspace that is empty."""
    import tempfile

    from endstop.agent.tools import ToolContext, standard_tools
    from endstop.agent.tools.oracle import oracle_definition
    from endstop.sandbox.files import WorkspaceFiles

    root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="endstop-tools-")))
    return [*standard_tools(ToolContext(root, WorkspaceFiles(root))), oracle_definition()]


def _servers(given: str) -> list[Any]:
    """One --mcp: an address, a file of servers, or a command."""
    import shlex

    from endstop.agent.mcp import read_servers
    from endstop.protocol.errors import EndstopError

    if given.startswith(("http://", "https://")):
        return read_servers({_name(given.partition("//")[2]): {"url": given}})
    if Path(given).suffix in (".json", ".yaml", ".yml", ".toml"):
        from endstop.agent.reading import read_mapping

        return read_servers(read_mapping(Path(given)))
    try:
        command, *args = shlex.split(given)
    except ValueError as error:
        raise EndstopError(f"--mcp {given!r} is no command: {error}.") from None
    last = next((word for word in reversed([command, *args]) if not word.startswith("-")), command)
    return read_servers({_name(Path(last).stem): {"command": command, "args": args}})


def _name(text: str) -> str:
    import re

    return re.sub(r"[^a-zA-Z0-9]+", "_", text).strip("_")[:20] or "server"


def _show(rows: list[tuple[str, Tool]], costs: DefinitionCosts | None, as_json: bool) -> None:
    from endstop.cli.output import console, for_terminal, note, write_json, write_line

    tokens = [None] * len(rows) if costs is None else [row.tokens for row in costs.rows]
    if as_json:
        listed: list[dict[str, Any]] = []
        for (place, tool), count in zip(rows, tokens, strict=True):
            entry = {"name": tool.name, "source": place, "definition": tool.definition}
            listed.append(entry if count is None else entry | {"tokens": count})
        result: dict[str, Any] = {"tools": listed}
        if costs is not None:
            result["cost"] = {
                "total": costs.total, "around": costs.around, "basis": costs.basis, "why": costs.why,
            }  # fmt: skip
        write_json(result)
        return
    width = max(len(tool.name) for _, tool in rows)
    sources = max(len(place) for place, _ in rows)
    room = max(20, console().width - width - sources - (4 if costs is None else 12))
    for (place, tool), count in zip(rows, tokens, strict=True):
        shown = "" if count is None else f"{count:>6}  "
        # A server's description is a stranger's text: one line of it.
        what = " ".join(tool.description.split())
        what = what if len(what) <= room else f"{what[: room - 1]}…"
        line = f"{shown}{tool.name:<{width}}  {place:<{sources}}  {what}"
        write_line(for_terminal(line))
    if costs is not None:
        if costs.around:
            write_line(f"{costs.around:>6}  {'(around them)':<{width}}")
        write_line(f"{costs.total:>6}  {'in every prompt':<{width}}")
        kind = {
            "template": "tokens, as the model's chat template writes the definitions",
            "json": "tokens of the definitions as JSON",
            "estimate": "an ESTIMATE, by length",
        }[costs.basis]
        note(f"Counted: {kind}{f' ({costs.why})' if costs.why else ''}.")
    note("A run has oracle only where tools.oracle names a model for it.")
