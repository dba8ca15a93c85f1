"""@tool, checking of arguments, call_tool."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from endstop.agent.tool import CheckedCall, Tool, ToolResult, call_tool, check_call, tool
from endstop.protocol.errors import EndstopError
from endstop.protocol.toolcalls import ToolCall


class Point(BaseModel):
    x: int
    title: str = "p"


class Tree(BaseModel):
    value: int
    below: list[Tree] = []


@tool
def resize(
    path: Annotated[str, "Which image."],
    width: Annotated[int, Field(ge=1, description="Pixels.")],
    mode: Literal["fit", "crop"] = "fit",
    tags: list[str] | None = None,
    points: list[Point] = [],  # noqa: B006
) -> str:
    """Resize an image.

    In place.
    """
    return f"{path} {width} {mode} {tags} {points}"


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments), "")


def test_schema_and_description_come_from_the_function() -> None:
    assert resize.name == "resize"
    assert resize.description == "Resize an image.\n\nIn place."
    assert resize.parameters == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "path": {"type": "string", "description": "Which image."},
            "width": {"type": "integer", "minimum": 1, "description": "Pixels."},
            "mode": {"type": "string", "enum": ["fit", "crop"], "default": "fit"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "points": {
                "type": "array",
                "default": [],
                "items": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}, "title": {"type": "string", "default": "p"}},
                    "required": ["x"],
                },
            },
        },
        "required": ["path", "width"],
    }
    assert resize.definition["function"]["name"] == "resize"


def test_arguments_reach_the_function_as_its_types() -> None:
    result = call_tool([resize], call("resize", path="a", width="3", points=[{"x": 1}], tags=["t"]))
    assert result == ToolResult("a 3 fit ['t'] [Point(x=1, title='p')]")


def test_every_fault_of_the_arguments_is_one_line() -> None:
    result = call_tool(
        [resize], call("resize", width=0, mode="big", points=[{"x": "no", "z": 1}], colour="red")
    )
    assert (result.ok, result.code) == (False, "BAD_CALL")
    head, *lines = result.text.split("\n")
    assert head == "BAD_CALL: resize did not run; its arguments are wrong:"
    assert lines == [
        "- path: missing",
        "- width: input should be greater than or equal to 1, got 0",
        "- mode: input should be 'fit' or 'crop', got 'big'",
        "- points[0].x: input should be a valid integer, unable to parse string as an integer, got 'no'",
        "- colour: no such argument; known are path, width, mode, tags, points",
    ]


def test_long_wrong_values_are_cut() -> None:
    result = call_tool([resize], call("resize", path="a", width="x" * 10_000))
    assert len(result.text) < 300


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ("[1]", "they must be one JSON object, got a list"),
        ("3", "they must be one JSON object, got a number"),
        ("null", "they must be one JSON object, got null"),
        ('{"path": "a", "path": "b"}', "not valid JSON: path is given twice"),
        ('{"width": NaN}', "not valid JSON: NaN is not JSON"),
        ('{"path": "\\ud800"}', "half a surrogate pair"),
        ('{"path": "a', "not valid JSON: Unterminated string"),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
    ],
)
def test_arguments_that_are_no_object(arguments: str, fault: str) -> None:
    result = call_tool([resize], ToolCall("resize", arguments, ""))
    assert result.code == "BAD_CALL"
    assert fault in result.text


def test_unknown_tool_names_the_known_ones() -> None:
    result = call_tool([resize], call("rezise"))
    assert result.text == "BAD_CALL: there is no tool 'rezise'. Known tools: resize."
    assert call_tool([], call("x")).text.endswith("Known tools: none.")


def test_empty_arguments_are_an_empty_object() -> None:
    @tool
    def now() -> str:
        """The time."""
        return "noon"

    assert call_tool([now], ToolCall("now", "", "")).text == "noon"
    assert now.parameters["properties"] == {}
    assert "now takes none" not in call_tool([now], call("now", zone=1)).text
    assert call_tool([now], call("now", zone=1)).text.endswith("- zone: it takes none")


def test_check_call_runs_nothing_and_fills_in_defaults() -> None:
    ran = []

    @tool(ends=True)
    def stop(note: str = "bye") -> None:
        """Stop."""
        ran.append(note)

    checked = check_call([stop], call("stop"))
    assert isinstance(checked, CheckedCall)
    assert checked.arguments == {"note": "bye"}
    assert ran == []
    with pytest.raises(ValueError, match="stop is not run"):
        call_tool([stop], call("stop"))


def test_names_that_pydantic_keeps_for_itself() -> None:
    @tool
    def odd(schema: str, copy: int, model_config: bool, json: str = "j") -> str:
        """Odd names."""
        return f"{schema} {copy} {model_config} {json}"

    assert list(odd.parameters["properties"]) == ["schema", "copy", "model_config", "json"]
    assert call_tool([odd], call("odd", schema="s", copy=2, model_config=True)).text == "s 2 True j"


def test_a_model_inside_itself_keeps_its_definition() -> None:
    @tool
    def grow(tree: Tree) -> int:
        """Sum."""
        return tree.value + sum(grow.run(tree=below).text == "" or below.value for below in tree.below)

    assert set(grow.parameters["$defs"]) == {"Tree"}
    assert grow.parameters["properties"]["tree"]["properties"]["below"]["items"] == {"$ref": "#/$defs/Tree"}
    made = call_tool([grow], call("grow", tree={"value": 1, "below": [{"value": 2}]}))
    assert made.text == "3"


def test_what_a_function_gives() -> None:
    @tool
    def give(what: str) -> Any:
        """Give."""
        loop: list[Any] = []
        loop.append(loop)
        return {
            "loop": loop,
            "half": "\ud800",
            "none": None,
            "data": {"a": [1, 2.5], "b": "é"},
            "result": ToolResult("r", ok=False),
        }[what]

    assert call_tool([give], call("give", what="none")).text == "(done, no output)"
    assert call_tool([give], call("give", what="data")).text == '{"a":[1,2.5],"b":"é"}'
    assert call_tool([give], call("give", what="result")) == ToolResult("r", ok=False)
    assert not call_tool([give], call("give", what="loop")).ok
    assert call_tool([give], call("give", what="half")).text == "\\ud800"
    assert call_tool([give], call("give", what="x")) == ToolResult("KeyError: 'x'", ok=False)


def test_what_a_function_raises_is_told_in_one_line() -> None:
    @tool
    def fail() -> str:
        """Fail."""
        raise EndstopError("the disk is full.")

    assert call_tool([fail], call("fail")) == ToolResult("the disk is full.", ok=False)


def test_output_is_bounded() -> None:
    @tool(output_bytes=100)
    def long() -> str:
        """Long."""
        return "é" * 1000

    text = call_tool([long], call("long")).text
    assert text == "é" * 25 + "\n[1900 bytes left out]\n" + "é" * 25


async def later() -> None:
    """Later."""


def unnamed(*args: int) -> None:
    """Unnamed."""


def untyped(x) -> None:  # type: ignore[no-untyped-def]
    """Untyped."""


def undescribed(x: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (later, TypeError, "later is async"),
        (unnamed, ValueError, r"\*args: .*has no name"),
        (untyped, ValueError, "the parameter x needs a type"),
        (undescribed, ValueError, "needs a docstring"),
    ],
)
def test_functions_that_are_no_tools(function: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tool(function)


@pytest.mark.parametrize("name", ["", "a b", "a.b", "x" * 65])
def test_names_that_servers_refuse(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 64 letters"):
        Tool(name, "d", {}, lambda: ToolResult(""))


def test_a_tool_made_by_hand_has_its_names_checked() -> None:
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
    made = Tool("hand", "By hand.", schema, lambda a: ToolResult(str(a)))
    assert call_tool([made], call("hand", a=1)).text == "1"
    assert call_tool([made], call("hand", b=1)).text.endswith(
        "- a: missing\n- b: no such argument; known are a"
    )
