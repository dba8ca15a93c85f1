"""Tool calls and reasoning in a message: the public names of this part of the protocol.

`ToolSyntax` and `Reasoning` say how a model writes them, `MessageParser` takes a message apart while it
is being generated. docs/tools.md has the rules.
"""

from endstop.protocol.message_event import EventKind, MessageEvent, Region
from endstop.protocol.message_parser import MessageParser
from endstop.protocol.tool_syntax import (
    TOOL_SYNTAX_NAMES,
    Reasoning,
    ToolCall,
    ToolSyntax,
    ToolSyntaxName,
    read_arguments_call,
    read_builtin_call,
    read_json_call,
    read_python_call,
)

__all__ = [
    "TOOL_SYNTAX_NAMES",
    "EventKind",
    "MessageEvent",
    "MessageParser",
    "Reasoning",
    "Region",
    "ToolCall",
    "ToolSyntax",
    "ToolSyntaxName",
    "read_arguments_call",
    "read_builtin_call",
    "read_json_call",
    "read_python_call",
]
