"""What tool definitions cost: every one of them is in the prompt of every step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from endstop.agent.tool import Tool
from endstop.protocol.errors import EndstopError, MissingTemplate

if TYPE_CHECKING:
    from endstop.protocol.render import ChatRenderer

# How the tokens were counted: as the model's template writes the definitions, as JSON with the model's
# tokenizer (the template writes none, or there is none), or by length alone.
Basis = Literal["template", "json", "estimate"]

# Bytes of a token, roughly, of English and JSON in present tokenizers.
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class DefinitionCounter:
    """Counts what definitions add to a prompt. `why`: one line where the basis is not `template`."""

    basis: Basis
    count: Callable[[Sequence[Mapping[str, Any]]], int]
    why: str = ""


@dataclass(frozen=True, slots=True)
class DefinitionCost:
    """What one tool's definition adds to the prompt beside the others."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class DefinitionCosts:
    """What a list of definitions costs. `around`: what the template writes once, before and after all."""

    rows: tuple[DefinitionCost, ...]
    around: int
    total: int
    basis: Basis
    why: str = ""

    @property
    def warning(self) -> str:
        """One paragraph for the person who starts a run, the dearest first."""
        rows = sorted(self.rows, key=lambda row: -row.tokens)
        each = ", ".join(f"{row.name} {row.tokens}" for row in rows)
        about = "about " if self.basis == "estimate" else ""
        return (
            f"{len(rows)} tool definition{'s' * (len(rows) != 1)} cost {about}{self.total} tokens in every "
            f"prompt{f': {each}' if each else ''}."
        )


def definition_costs(tools: Sequence[Tool], counter: DefinitionCounter) -> DefinitionCosts:
    """What each definition adds to a prompt that has all the others, and what all cost together."""
    definitions = [tool.definition for tool in tools]
    total = counter.count(definitions)
    rows = []
    for place, tool in enumerate(tools):
        without = definitions[:place] + definitions[place + 1 :]
        # The last one standing takes the template's frame with it, which is no cost of its own.
        alone = counter.count(definitions + definitions) - total if not without else None
        rows.append(DefinitionCost(tool.name, total - counter.count(without) if alone is None else alone))
    around = total - sum(row.tokens for row in rows)
    return DefinitionCosts(tuple(rows), around, total, counter.basis, counter.why)


def open_counter(
    model: str | None,
    *,
    template: str | None = None,
    revision: str | None = None,
    offline: bool | None = None,
) -> DefinitionCounter:
    """A counter for a model: a directory, a .gguf file, a Hub id or a name. No weights are read.

    Without a model, or for the address of a server, whose tokenizer nobody here has, it is an estimate.
    """
    if model is None:
        return _estimate("no model is named")
    if model.startswith(("http://", "https://")):
        return _estimate("the tokenizer of a server is not known here")
    from endstop.protocol.render import ChatRenderer
    from endstop.protocol.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(model, revision=revision, offline=offline)

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    try:
        renderer = ChatRenderer(tokenizer, template)
    except MissingTemplate:
        return as_json(count, "the model has no chat template")
    return counter_of(renderer, count)


def counter_of(renderer: ChatRenderer, count: Callable[[str], int]) -> DefinitionCounter:
    """By the model's template, or as JSON where the template writes no tools."""
    messages = [{"role": "user", "content": "x"}]

    def length(definitions: Sequence[Mapping[str, Any]]) -> int:
        tools = list(definitions) or None
        return len(renderer.render(messages, tools=tools, add_generation_prompt=True).ids)

    probe = {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
    try:
        bare = length([])
        writes_tools = length([probe]) != bare
    except EndstopError as error:
        return as_json(count, f"the model's chat template does not take tools: {error}")
    if not writes_tools:
        return as_json(count, "the model's chat template writes no tools")
    return DefinitionCounter("template", lambda definitions: length(definitions) - bare)


def as_json(count: Callable[[str], int], why: str) -> DefinitionCounter:
    """The tokens of the definitions as JSON, one a line."""

    def tokens(definitions: Sequence[Mapping[str, Any]]) -> int:
        return count(_lines(definitions)) if definitions else 0

    return DefinitionCounter("json", tokens, why)


def _estimate(why: str) -> DefinitionCounter:
    def tokens(definitions: Sequence[Mapping[str, Any]]) -> int:
        return sum(-(-len(_lines([one]).encode()) // _BYTES_PER_TOKEN) for one in definitions)

    return DefinitionCounter("estimate", tokens, why)


def _lines(definitions: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(definition, ensure_ascii=False) + "\n" for definition in definitions)
