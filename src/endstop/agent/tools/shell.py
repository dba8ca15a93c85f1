"""bash: a command in the sandbox. Whatever it started has ended when its result is there."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from endstop.agent.tool import Tool, ToolResult, tool
from endstop.agent.tools.context import ToolContext
from endstop.sandbox.command import CommandResult, run_command

_CAUSES = {
    "timeout": "killed at its time limit of {limit:g} seconds",
    "cpu": "killed at its limit of CPU time",
    "memory": "killed at its limit of memory",
    "processes": "killed at its limit of processes",
    "disk": "killed because the disk is nearly full",
    "killed": "killed by a signal",
    "start": "could not be started",
}


def bash_tool(context: ToolContext) -> Tool:
    limit = context.sandbox.limits.seconds

    @tool(output_bytes=context.output_bytes + 1024)
    def bash(
        command: Annotated[str, Field(min_length=1, description="Run by bash in the workspace.")],
        timeout: Annotated[float | None, Field(gt=0, description="Seconds, if fewer than usual.")] = None,
    ) -> ToolResult:
        """Run a shell command in the workspace, without network. Each call is a shell of its own, in which no
        directory or variable of the last one is set. Everything it started is ended with it, so nothing can
        run in the background. Of long output the beginning and the end are shown."""
        if "\0" in command:
            return ToolResult("A command cannot hold a NUL character.", ok=False)
        seconds = limit if timeout is None else min(timeout, limit)
        try:
            result = run_command(
                ["bash", "-c", command],
                context.root,
                context.sandbox,
                bind=context.bind,
                seconds=seconds,
                output_bytes=context.output_bytes,
            )
        finally:
            lost = context.bring_back()
        return shown(result, seconds, lost)

    return bash


def shown(result: CommandResult, limit: float, lost: str = "") -> ToolResult:
    """A command's result for the model: its output, how it ended, and what was not brought back."""
    if result.cause == "exit":
        ended = f"exit code {result.exit_code}"
    else:
        ended = _CAUSES[result.cause].format(limit=limit)
    if result.cause == "timeout":
        ended += ", the output so far is above"
    text = result.output
    if text and not text.endswith("\n"):
        text += "\n"
    details = {
        "exit_code": result.exit_code,
        "cause": result.cause,
        "seconds": round(result.seconds, 3),
        "omitted_bytes": result.omitted_bytes,
        "mode": result.mode,
        "net_attempt": result.net_attempt,
    }
    # How long it took is for the record only: the same command with the same result reads the same.
    return ToolResult(f"{text}[{ended}]{lost}", ok=result.exit_code == 0, details=details)
