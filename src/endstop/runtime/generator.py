"""Generator: prompts or conversations in, finished messages out. What agents and servers need of a backend.

The Engine is one; an HTTP endpoint is another. What a backend cannot promise it refuses with RequestRefused,
it never ignores it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from endstop.protocol.params import SamplingParams
from endstop.runtime.chat import Conversation
from endstop.runtime.requests import Prompt
from endstop.runtime.results import Delta, RequestOutput


@runtime_checkable
class Generator(Protocol):
    """A backend that stops by the rules of endstop."""

    def add(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> str:
        """Queue a prompt and return its request id; `on_output` gets the result, `on_delta` the deltas."""
        ...

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Delta]:
        """Deltas of one prompt; closing the iterator cancels it."""
        ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """The next message of each conversation."""
        ...

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """The next message of one conversation, as deltas."""
        ...

    def abort(self, request_id: str) -> bool:
        """Cancel a request; it gets its terminal result with the text so far."""
        ...

    def close(self) -> None: ...
