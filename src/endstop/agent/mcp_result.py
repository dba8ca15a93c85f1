"""What an MCP server says, as endstop's tools have it: schemas, checks of arguments, results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from endstop.agent.signature import bounded
from endstop.agent.tool import BadArguments, ToolResult, missing, unknown

_SHOWN_FAULTS = 10


def input_schema(spec: Any) -> dict[str, Any]:
    """The schema of a tool's arguments; some servers leave out what is the same everywhere."""
    schema = dict(spec.input_schema)
    return {"type": "object", "properties": {}} | schema


def arguments_check(schema: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Compares arguments with a JSON schema. A schema that is none lets everything through: the server is
    the one who knows."""

    def check(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        import jsonschema
        import referencing.exceptions

        newest = jsonschema.Draft202012Validator
        dialect = schema if isinstance(schema.get("$schema", ""), str) else {}
        try:
            kind = jsonschema.validators.validator_for(dialect, default=newest)
            kind.check_schema(schema)
            # An empty registry: nothing is fetched for a reference.
            validator = kind(schema, registry=referencing.Registry())
            errors = sorted(
                validator.iter_errors(dict(arguments)), key=lambda error: list(map(str, error.path))
            )
        except (
            jsonschema.SchemaError,
            referencing.exceptions.Unresolvable,
            RecursionError,  # a reference to itself
            OverflowError,  # a number that its arithmetic cannot hold
            re.error,
        ):
            return arguments
        if errors:
            raise BadArguments([line for error in errors[:_SHOWN_FAULTS] for line in _faults(error, schema)])
        return arguments

    return check


def result_of(result: Any, limit: int) -> ToolResult:
    """A CallToolResult for the model: its texts, and a line for what is no text."""
    parts = [_shown(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(part for part in parts if part) or "(no output)"
    return ToolResult(bounded(text, limit), ok=not result.is_error)


def _shown(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type in ("image", "audio"):
        return f"[{block.type}, {block.mime_type}, {_size(block.data)} bytes: not shown, only text is]"
    if block.type == "resource_link":
        return f"[link to {block.uri}: {block.description or block.title or block.name}]"
    resource = block.resource
    if hasattr(resource, "text"):
        return f"[{resource.uri}]\n{resource.text}"
    return f"[{resource.uri}, {resource.mime_type}, {_size(resource.blob)} bytes: not shown, only text is]"


def _size(base64: str) -> int:
    return len(base64) * 3 // 4 - base64[-2:].count("=")


def _faults(error: Any, schema: Mapping[str, Any]) -> list[str]:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.path).lstrip(".")
    inside = f"{place}." if place else ""
    if error.validator == "required":
        absent = [name for name in error.validator_value if name not in error.instance]
        # The validator reports each one of them with an error of its own.
        return [missing(f"{inside}{name}") for name in absent if f"'{name}'" in error.message][:1]
    if error.validator == "additionalProperties" and not place:
        known = list(schema.get("properties", {}))
        return [unknown(name, known) for name in error.instance if name not in known]
    text = error.message if len(error.message) <= 200 else f"{error.message[:200]}…"
    return [f"{place}: {text}" if place else text]
