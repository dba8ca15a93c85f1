"""What a chat template writes at the end of an assistant turn, found by rendering.

Conversations whose assistant message is a sentinel are rendered, and what stands behind the sentinel
is read: the last message gives the terminator, a tool call gives the token that hands over, a message
with a user turn behind it shows what closes turns only in history. No list of token names is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from endstop.protocol.errors import EndstopError
from endstop.protocol.template import render_template

# Plain words that no template changes and that do not contain one another.
QUESTION = "endstopquestion"
ANSWER = "endstopanswer"
FOLLOW_UP = "endstopfollowup"
ARGUMENT = "endstopargument"
RESULT = "endstopresult"
FUNCTION = "endstop_lookup"
# Mistral's templates insist on ids of nine letters and digits.
CALL_ID = "endstop01"
OTHER_CALL_ID = "endstop02"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": FUNCTION,
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What to look up."}},
                "required": ["query"],
            },
        },
    }
]


@dataclass(frozen=True)
class TemplateEnds:
    """How a template ends turns, as texts of tokens.

    Attributes:
        terminator: what ends a plain assistant turn; None where no token does.
        turn_ends: the terminator, and terminators of plain turns in a conversation with tools.
        tool_ends: what ends a turn with a tool call and no plain turn.
        written: every token seen behind an assistant's text.
        closing_text: the ordinary text that ends turns where no token does.
        history_closer: a token that closes assistant turns in history but not at the end.
        next_header: a declared token that ends turns only because the next turn's header begins with it.
        sentinel_dropped: the template does not write the assistant's last message.
        ignores_generation_prompt: `add_generation_prompt` changes nothing, and something is missing.
        refusal: why no conversation could be rendered at all.
    """

    terminator: str | None = None
    turn_ends: tuple[str, ...] = ()
    tool_ends: tuple[str, ...] = ()
    written: frozenset[str] = frozenset()
    closing_text: str | None = None
    history_closer: str | None = None
    next_header: str | None = None
    sentinel_dropped: bool = False
    ignores_generation_prompt: bool = False
    refusal: str | None = None


def find_ends(
    templates: Mapping[str, str],
    tokens: Mapping[str, bool],
    declared: Iterable[str],
    special_tokens: Mapping[str, str],
) -> TemplateEnds:
    """How the templates of a model end turns.

    Args:
        templates: name -> template; `tool_use`, where there is one, renders conversations with tools.
        tokens: text of every added token -> whether it is special.
        declared: texts of the tokens that the model's files declare as stops.
        special_tokens: `bos_token`, `eos_token`, ... for the template.
    """
    template = templates.get("default") or next(iter(templates.values()))
    probe = _Probe(template, tokens, declared, special_tokens)
    with_tools = _Probe(templates.get("tool_use", template), tokens, declared, special_tokens)
    plain = probe.plain_turn()
    if plain is None:
        dropped = probe.rendered_something
        return TemplateEnds(sentinel_dropped=dropped, refusal=None if dropped else probe.refusal)
    messages, text = plain
    tail = text.rpartition(ANSWER)[2]
    run = probe.run_at(tail) or probe.trailing_run(tail)
    terminator = probe.pick(run)
    turn_ends = [terminator] if terminator else []
    probe.declared.update(turn_ends)
    with_tools.declared.update(turn_ends)
    for end in with_tools.plain_turn_ends():
        if end not in turn_ends:
            turn_ends.append(end)
    tool_ends = [end for end in with_tools.tool_turn_ends() if end not in turn_ends]
    closer, header = probe.history(messages, run)
    closing_text = tail.strip() if not run and tail.strip() else None
    if closing_text is not None and _between(text, QUESTION, ANSWER).strip().endswith(closing_text):
        # The header of the next answer, written although no one asked for it.
        closing_text = None
    return TemplateEnds(
        terminator=terminator,
        turn_ends=tuple(turn_ends),
        tool_ends=tuple(dict.fromkeys(tool_ends)),
        written=frozenset(probe.written | with_tools.written),
        closing_text=closing_text,
        history_closer=closer,
        next_header=header if not run else None,
        ignores_generation_prompt=probe.ignores_generation_prompt(messages, text),
    )


class _Probe:
    """Renders of one template, with the tokens that may stand in them."""

    def __init__(
        self,
        template: str,
        tokens: Mapping[str, bool],
        declared: Iterable[str],
        special_tokens: Mapping[str, str],
    ) -> None:
        self.template = template
        self.tokens = tokens
        self.declared = set(declared)
        self.special_tokens = special_tokens
        self.written: set[str] = set()
        self.refusal: str | None = None
        self.rendered_something = False
        # Longest first: the tokenizer takes the longest token at a position.
        ordered = sorted((text for text in tokens if text), key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str | None:
        """The text, or None where the template raises for this conversation."""
        everything: dict[str, Any] = {**self.special_tokens, **variables}
        try:
            text = render_template(self.template, messages, **everything)
        except EndstopError as error:
            self.refusal = self.refusal or str(error)
            return None
        self.rendered_something = True
        return text

    def run_at(self, tail: str) -> list[str]:
        """The tokens directly behind the assistant's sentinel, blanks before the first aside."""
        run = self._run(tail)
        self.written.update(run)
        return run

    def _run(self, tail: str) -> list[str]:
        at = len(tail) - len(tail.lstrip())
        run = []
        while match := self._token.match(tail, at):
            run.append(match[0])
            at = match.end()
        return run

    def trailing_run(self, tail: str) -> list[str]:
        """The tokens at the very end, blanks behind the last aside."""
        end = len(tail.rstrip())
        run: list[str] = []
        previous = 0
        for match in self._token.finditer(tail):
            if match.start() != previous:
                run = []
            run.append(match[0])
            previous = match.end()
        run = run if previous >= end else []
        self.written.update(run)
        return run

    def pick(self, run: Sequence[str], only_special: bool = False) -> str | None:
        """Of a run of tokens the first that is declared, else the first (special before not special)."""
        for text in run:
            if text in self.declared:
                return text
        special = [text for text in run if self.tokens[text]]
        if special:
            return special[0]
        return run[0] if run and not only_special else None

    def plain_turn(self, **variables: Any) -> tuple[list[dict[str, Any]], str] | None:
        """A conversation that ends with the assistant's sentinel, and its text; None if there is none."""
        for parts in (False, True):
            for system in (False, True):
                messages = [_message("user", QUESTION, parts), _message("assistant", ANSWER, parts)]
                if system:
                    messages.insert(0, _message("system", "endstopsystem", parts))
                text = self.render(messages, **variables)
                # A template that prints the list of parts as Python shows it does not know parts.
                if text is not None and ANSWER in text and "'type': 'text'" not in text:
                    return messages, text
        return None

    def plain_turn_ends(self) -> list[str]:
        """Terminators of a plain turn where tools were offered."""
        ends = []
        for variables in _TOOL_VARIABLES:
            plain = self.plain_turn(**variables)
            if plain is not None:
                end = self.pick(self.run_at(plain[1].rpartition(ANSWER)[2]))
                if end is not None:
                    ends.append(end)
        return ends

    def tool_turn_ends(self) -> list[str]:
        """What ends a turn that calls a tool, in every way to offer tools that the template takes."""
        ends = []
        for variables in _TOOL_VARIABLES:
            for call in _tool_calls():
                messages = [_message("user", QUESTION), call]
                text = self.render(messages, **variables)
                if text is None or ARGUMENT not in text:
                    continue
                run = self.trailing_run(text.rpartition(ARGUMENT)[2])
                closing_a_call = self._tokens_between_calls(call, variables) - self.declared
                end = self.pick([token for token in run if token not in closing_a_call], only_special=True)
                if end is None:
                    end = self._hand_over(messages, variables)
                if end is not None:
                    ends.append(end)
                break
        return ends

    def _tokens_between_calls(self, call: Mapping[str, Any], variables: Mapping[str, Any]) -> set[str]:
        """Tokens that stand between two calls of one turn: they close a call, and the turn goes on."""
        two = {**call, "tool_calls": [call["tool_calls"][0], {**call["tool_calls"][0], "id": OTHER_CALL_ID}]}
        text = self.render([_message("user", QUESTION), two], **variables) or ""
        return set(self._token.findall(_between(text, ARGUMENT, ARGUMENT)))

    def _hand_over(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str | None:
        """A declared token between a tool call without terminator and the tool's result."""
        result = {"role": "tool", "name": FUNCTION, "tool_call_id": CALL_ID, "content": RESULT}
        text = self.render([*messages, result], **variables)
        if text is None or RESULT not in text or ARGUMENT not in text:
            return None
        found: list[str] = self._token.findall(_between(text, ARGUMENT, RESULT))
        return next((token for token in found if token in self.declared), None)

    def history(
        self, messages: list[dict[str, Any]], last_run: Sequence[str]
    ) -> tuple[str | None, str | None]:
        """(what closes the turn only when another follows, the next header's token if it is declared)."""
        parts = isinstance(messages[-1]["content"], list)
        text = self.render([*messages, _message("user", FOLLOW_UP, parts)])
        if text is None or ANSWER not in text or FOLLOW_UP not in text.partition(ANSWER)[2]:
            return None, None
        run = self.run_at(_between(text, ANSWER, FOLLOW_UP))
        first = next((token for token in run if self.tokens[token]), None)
        if first is None or first in last_run:
            return None, None
        # What closes turns stands behind the last message too; what begins them stands only before others.
        closes = self._run(text.rpartition(FOLLOW_UP)[2])[:1] == [first]
        if not closes and first in self._token.findall(text.partition(QUESTION)[0]):
            return None, first if first in self.declared else None
        return first, None

    def ignores_generation_prompt(self, messages: list[dict[str, Any]], text: str) -> bool:
        """Whether the header of an answer is missing although a generation prompt was asked for."""
        question = messages[:-1]
        without = self.render(question)
        prompted = self.render(question, add_generation_prompt=True)
        if without is None or without != prompted or QUESTION not in without:
            return False
        # Equal renders are fine where the user's turn itself opens the answer, as `[/INST]` does.
        return _between(text, QUESTION, ANSWER).strip() != without.rpartition(QUESTION)[2].strip()


_TOOL_VARIABLES: tuple[dict[str, Any], ...] = (
    {"tools": TOOLS},
    {"builtin_tools": [FUNCTION]},
    {"tools": TOOLS, "builtin_tools": [FUNCTION]},
)


def _message(role: str, text: str, parts: bool = False) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}


def _tool_calls() -> Iterable[dict[str, Any]]:
    """An assistant message with one tool call, in the spellings that templates know."""
    arguments = {"query": ARGUMENT}
    for content in ({}, {"content": ""}):
        for spelled in (arguments, json.dumps(arguments)):
            function = {"name": FUNCTION, "arguments": spelled}
            call = {"type": "function", "id": CALL_ID, "function": function}
            yield {"role": "assistant", **content, "tool_calls": [call]}


def _between(text: str, left: str, right: str) -> str:
    """The text before the last `right`, behind the last `left` before it; "" without such a pair."""
    head = text.rpartition(right)[0]
    return head.rpartition(left)[2] if left in head else ""
