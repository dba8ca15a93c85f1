"""The tools that every run has."""

from __future__ import annotations

from endstop.agent.tool import Tool
from endstop.agent.tools.context import ToolContext
from endstop.agent.tools.ending import ending_tools
from endstop.agent.tools.files import file_tools
from endstop.agent.tools.search import code_search_tool
from endstop.agent.tools.shell import bash_tool

__all__ = ["ToolContext", "standard_tools"]


def standard_tools(context: ToolContext) -> list[Tool]:
    """read_file, list_files, edit_file, bash, code_search, submit, give_up, ask_user, checkpoint."""
    return [*file_tools(context), bash_tool(context), code_search_tool(context), *ending_tools()]
