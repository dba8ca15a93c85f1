"""A function's signature as JSON schema, and arguments checked against it, by pydantic."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from endstop.agent.tool import BadArguments, ToolResult, missing, unknown
from endstop.protocol.errors import EndstopError

# Characters of a wrong value that a fault repeats.
_SHOWN_OF_VALUE = 60


@dataclass(frozen=True, slots=True)
class Signature:
    """What a model is told of a function: its description and the schema of its arguments."""

    description: str
    schema: Mapping[str, Any]
    check: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Raises ValueError or TypeError for a function that cannot be a tool."""
        name = getattr(function, "__name__", repr(function))
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{name} is async; tools are plain functions: call asyncio.run inside one")
        if inspect.isgeneratorfunction(function):
            raise TypeError(f"{name} is a generator; a tool gives one result")
        description = inspect.getdoc(function) or ""
        if not description.strip():
            raise ValueError(f"{name} needs a docstring: it is what the model reads to choose a tool")
        try:
            hints = get_type_hints(function, include_extras=True)
        except NameError as error:
            raise ValueError(
                f"{name}: {error}; types of a tool's parameters stand at the top of a module"
            ) from None
        fields: dict[str, Any] = {}
        names: list[str] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ValueError(f"{name}: {parameter} has no name that a model could give; name each one")
            if parameter.name not in hints:
                raise ValueError(f"{name}: the parameter {parameter.name} needs a type")
            # Numbered, because pydantic keeps some names (schema, copy, model_*) for itself.
            fields[f"argument_{len(names)}"] = _field(parameter, hints[parameter.name])
            names.append(parameter.name)
        from pydantic import ConfigDict, create_model

        config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        model = create_model(name, __config__=config, **fields)
        schema = _plain_schema(model.model_json_schema(by_alias=True))
        schema.pop("description", None)
        schema.setdefault("properties", {})

        def check(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            from pydantic import ValidationError

            try:
                checked = model.model_validate(dict(arguments))
            except ValidationError as error:
                raise BadArguments([_fault(fault, names) for fault in error.errors()]) from None
            return {names[place]: getattr(checked, field) for place, field in enumerate(fields)}

        return cls(description, schema, check)


def shown(function: Callable[..., Any], values: Mapping[str, Any], output_bytes: int) -> ToolResult:
    """Call a function and make what it gives, or raises, into a result of bounded size."""
    try:
        value = function(**values)
        if isinstance(value, ToolResult):
            return ToolResult(bounded(value.text, output_bytes), value.ok, value.code, value.details)
        return ToolResult(bounded(_text(value), output_bytes))
    except EndstopError as error:
        return ToolResult(bounded(str(error), output_bytes), ok=False)
    except Exception as error:
        return ToolResult(bounded(f"{type(error).__name__}: {error}", output_bytes), ok=False)


def _text(value: Any) -> str:
    if value is None:
        return "(done, no output)"
    if isinstance(value, str):
        return value
    import pydantic_core

    return pydantic_core.to_json(value, fallback=str, inf_nan_mode="strings").decode()


def bounded(text: str, limit: int) -> str:
    """The beginning and the end of a text that is too long, with a line that says what is left out."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode()
    first, last = limit - limit // 2, limit // 2
    head = data[:first].decode("utf-8", "ignore")
    tail = data[len(data) - last :].decode("utf-8", "ignore")
    return f"{head}\n[{len(data) - first - last} bytes left out]\n{tail}"


def _field(parameter: inspect.Parameter, hint: Any) -> Any:
    """A pydantic field: the text in `Annotated[type, "text"]` describes it, as does Field(description=)."""
    from pydantic import Field

    described: dict[str, Any] = {"alias": parameter.name}
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        texts = [extra for extra in extras if isinstance(extra, str)]
        if texts:
            described["description"] = texts[0]
        for extra in extras:
            if not isinstance(extra, str):
                hint = Annotated[hint, extra]
    if parameter.default is not parameter.empty:
        described["default"] = parameter.default
        if parameter.default is None:
            described["json_schema_extra"] = _without_null
            if not _takes_none(hint):
                hint = hint | None
    return hint, Field(**described)


def _takes_none(hint: Any) -> bool:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return hint is Any or (get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint))


def _without_null(schema: dict[str, Any]) -> None:
    """What may be left out need not be null as well: fewer tokens, and fewer ways to write the same."""
    if "default" in schema and schema["default"] is None:
        del schema["default"]
    choices = [choice for choice in schema.get("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1:
        del schema["anyOf"]
        schema.update({key: value for key, value in choices[0].items() if key not in schema})
    elif choices:
        schema["anyOf"] = choices


def _plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Without the titles that pydantic makes of names, and with definitions written where they are used."""
    definitions = schema.get("$defs", {})
    recursive: set[str] = set()

    def plain(part: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(part, list):
            return [plain(item, inside) for item in part]
        if not isinstance(part, Mapping):
            return part
        reference = part.get("$ref")
        if isinstance(reference, str):
            name = reference.rpartition("/")[2]
            if name in inside:
                recursive.add(name)
                return dict(part)
            rest = {key: value for key, value in part.items() if key != "$ref"}
            return {**plain(definitions[name], (*inside, name)), **plain(rest, inside)}
        made: dict[str, Any] = {}
        for key, value in part.items():
            if key in ("title", "$defs", "discriminator"):
                continue
            if key in ("properties", "patternProperties"):
                made[key] = {name: plain(item, inside) for name, item in value.items()}
            elif key in ("default", "const", "enum", "examples", "required"):
                made[key] = value
            else:
                made[key] = plain(value, inside)
        return made

    made: dict[str, Any] = plain(schema, ())
    if recursive:
        # A model inside itself cannot be written out: what it refers to stays a definition.
        made["$defs"] = {name: plain(definitions[name], (name, *recursive)) for name in sorted(recursive)}
    return made


def _fault(fault: Mapping[str, Any], names: list[str]) -> str:
    """One of pydantic's errors as one line."""
    place = ""
    for part in fault["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    if fault["type"] == "missing":
        return missing(place)
    if fault["type"] == "extra_forbidden":
        if len(fault["loc"]) == 1:
            return unknown(place, names)
        return f"{place}: no such field"
    message = str(fault["msg"])
    value = repr(fault["input"])
    if len(value) > _SHOWN_OF_VALUE:
        value = value[:_SHOWN_OF_VALUE] + "…"
    return " ".join(f"{place}: {message[0].lower()}{message[1:]}, got {value}".split())
