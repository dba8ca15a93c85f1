"""From a conversation to a request: the rendered prompt, and how the answer is to be read."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from endstop.protocol.errors import RequestRefused
from endstop.runtime.requests import RequestOptions

if TYPE_CHECKING:
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.tokenizer import Tokenizer

Conversation = Items[Mapping[str, Any]]


class ChatFormat:
    """A model's chat template, ready to make requests.

    `template` replaces the model's own, `stops` is its stop set. Raises MissingTemplate where there is no
    template.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | None = None, stops: StopSet | None = None
    ) -> None:
        from endstop.protocol.render import ChatRenderer

        self.tokenizer = tokenizer
        self.renderer = ChatRenderer(tokenizer, template, stops=stops)

    def request(
        self,
        messages: Conversation,
        *,
        tools: Items[Any] | None,
        parallel_tool_calls: bool,
        continue_final_message: bool,
        template_variables: Mapping[str, Any] | None,
        options: RequestOptions,
    ) -> tuple[list[int], RequestOptions]:
        """The prompt's ids and the options that let the machine split the answer.

        Raises RequestRefused for tools in a syntax that endstop cannot read, RenderRefused for a
        conversation that the template does not take.
        """
        from endstop.protocol.toolcalls import Reasoning, ToolSyntax

        rendered = self.renderer.render(
            messages,
            tools=tools or None,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
            **(template_variables or {}),
        )
        source = self.renderer.template_for(tools or None)
        syntax = None
        if tools:
            added = [token.content for token in self.tokenizer.added_tokens.values()]
            syntax = ToolSyntax.from_template(source, added, parallel=parallel_tool_calls)
            if syntax is None:
                raise RequestRefused(
                    "tools were given, but the chat template writes calls in no syntax that endstop reads"
                )
        given = replace(
            options,
            prompt_text=rendered.text,
            chat=True,
            tools=options.tools or syntax,
            reasoning=options.reasoning or Reasoning.from_template(source, rendered.text),
        )
        return list(rendered.ids), given


def conversations_of(messages: Conversation | Items[Conversation]) -> list[Conversation]:
    """One conversation or several, as a list."""
    items: list[Any] = list(messages)
    if items and all(isinstance(item, Mapping) for item in items):
        return [items]
    return items
