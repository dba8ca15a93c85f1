"""A tool: a function with a name, a description and a schema. `@tool` makes one of a typed function."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from endstop.protocol.tool_syntax import ToolCall

# Bytes of a result that the model is shown; the middle of more is left out.
OUTPUT_BYTES = 32_768
# Of what is said about a call that does not fit.
_LONGEST_FAULT = 4000
# What OpenAI-compatible servers take as a name.
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is shown of a call. `ok` False marks an error that the model may repair.

    Attributes:
        code: `BAD_CALL` where nothing ran, because the call itself is wrong.
        details: for the record, never shown to the model: exit code, seconds, tokens and the like.
    """

    text: str
    ok: bool = True
    code: Literal["BAD_CALL"] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class BadArguments(Exception):
    """Arguments do not fit a tool. `faults`: one line each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a model may call.

    Attributes:
        parameters: JSON schema of its arguments.
        run: takes the arguments by name; checks them against the schema itself and answers a call that does
            not fit with a ToolResult that says what is wrong. Never raises for what a model did.
        ends: the call asks for the end of the run or of the turn, so it must stand alone and the loop decides
            (submit, give_up, ask_user, checkpoint); its `run` is never called.
        check: gives the arguments as the function gets them, defaults filled in, without running anything;
            raises BadArguments. Without it only the names are compared with the schema.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[..., ToolResult]
    ends: bool = False
    check: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"a tool's name has 1 to 64 letters, digits, _ and -, and nothing else; got {self.name!r}"
            )

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

    def checked(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments as the function gets them. Raises BadArguments."""
        if self.check is not None:
            return self.check(arguments)
        known = list(self.parameters.get("properties", {}))
        faults = [missing(name) for name in self.parameters.get("required", ()) if name not in arguments]
        if self.parameters.get("additionalProperties") is False:
            faults += [unknown(name, known) for name in arguments if name not in known]
        if faults:
            raise BadArguments(faults)
        return arguments


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    ends: bool = False,
    output_bytes: int = OUTPUT_BYTES,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    ends: bool = False,
    output_bytes: int = OUTPUT_BYTES,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function, as `@tool` or `@tool(name=...)`.

    Every parameter has a type that pydantic knows; `Annotated[int, "how many"]` describes it. The docstring
    is the tool's description, the function's name its name. The function gives text, a ToolResult, None, or
    anything that becomes JSON; what it raises is told to the model in one line.

    Raises ValueError or TypeError for a function that cannot be a tool: no docstring, a parameter without a
    type, `*args`, async.
    """

    def make(function: Callable[..., Any]) -> Tool:
        from endstop.agent.signature import Signature, shown

        signature = Signature.of(function)
        text = description if description is not None else signature.description

        def run(**arguments: Any) -> ToolResult:
            try:
                values = signature.check(arguments)
            except BadArguments as error:
                return bad_arguments(made.name, error)
            return shown(function, values, output_bytes)

        made = Tool(
            name if name is not None else function.__name__,
            text,
            signature.schema,
            run,
            ends,
            signature.check,
        )
        return made

    return make if function is None else make(function)


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call that fits its tool. `arguments` are those of the function, with defaults filled in."""

    tool: Tool
    arguments: Mapping[str, Any]
    given: Mapping[str, Any]

    def run(self) -> ToolResult:
        if self.tool.ends:
            raise ValueError(f"{self.tool.name} is not run; whoever runs the loop decides on it")
        return self.tool.run(**self.given)


def check_call(tools: Sequence[Tool], call: ToolCall) -> CheckedCall | ToolResult:
    """Find the call's tool and check its arguments; nothing runs. A ToolResult says what is wrong."""
    found = next((tool for tool in tools if tool.name == call.name), None)
    if found is None:
        known = ", ".join(tool.name for tool in tools) or "none"
        return bad_call(f"there is no tool {call.name!r}. Known tools: {known}.")
    try:
        given = _read_arguments(call.arguments)
        return CheckedCall(found, found.checked(given), given)
    except BadArguments as error:
        return bad_arguments(found.name, error)


def call_tool(tools: Sequence[Tool], call: ToolCall) -> ToolResult:
    """Run a call, or say what is wrong with it. Raises ValueError for a tool that ends the turn."""
    checked = check_call(tools, call)
    return checked if isinstance(checked, ToolResult) else checked.run()


def bad_call(text: str) -> ToolResult:
    """`text` may quote the model, and is bounded for that."""
    from endstop.agent.signature import bounded

    return ToolResult(bounded(f"BAD_CALL: {text}", _LONGEST_FAULT), ok=False, code="BAD_CALL")


def bad_arguments(name: str, error: BadArguments) -> ToolResult:
    lines = "".join(f"\n- {fault}" for fault in error.faults)
    return bad_call(f"{name} did not run; its arguments are wrong:{lines}")


def missing(name: str) -> str:
    return f"{name}: missing"


def unknown(name: str, known: Sequence[str]) -> str:
    return f"{name}: no such argument; known are {', '.join(known)}" if known else f"{name}: it takes none"


def _read_arguments(text: str) -> dict[str, Any]:
    """The JSON object that a model wrote. Raises BadArguments."""
    try:
        value = json.loads(text or "{}", parse_constant=_refuse_constant, object_pairs_hook=_once)
        # JSON escapes can spell half of a surrogate pair, which no file or command can hold.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadArguments(["half a surrogate pair (\\ud800 to \\udfff) is not a character"]) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadArguments([f"not valid JSON: {reason}"]) from None
    if not isinstance(value, dict):
        names = {list: "a list", str: "text", bool: "true or false", type(None): "null"}
        raise BadArguments([f"they must be one JSON object, got {names.get(type(value), 'a number')}"])
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"{key} is given twice")
        members[key] = value
    return members


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
