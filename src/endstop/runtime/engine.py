"""Engine: the core with what drives its steps: generate, stream, chat.

Whoever waits for a result drives the steps, for everybody: several threads may do so at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any, Literal

from endstop.protocol.errors import MissingTemplate
from endstop.protocol.params import SamplingParams
from endstop.runtime.chat import ChatFormat, Conversation, conversations_of
from endstop.runtime.core import EngineCore
from endstop.runtime.requests import Prompt, RequestOptions, params_list, prompt_list
from endstop.runtime.results import Delta, RequestOutput
from endstop.runtime.sequence import Request, StreamTool


class Engine(EngineCore):
    """Continuous batching over a TokenModel; see EngineCore for its arguments.

    `chat_format` renders conversations; without it `chat` raises MissingTemplate. `make_tool` makes the
    in-stream tool of each row where a request does not bring its own.
    """

    def __init__(
        self,
        *args: Any,
        chat_format: ChatFormat | None = None,
        make_tool: Callable[[], StreamTool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.chat_format = chat_format
        self.make_tool = make_tool

    def submit(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        if options.make_tool is None and self.make_tool is not None:
            options = replace(options, make_tool=self.make_tool)
        return super().submit(prompt, params, options)

    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Run prompts (texts or token ids) to their ends; results in the order of the prompts.

        Where one is refused none runs. An interrupt cancels what is unfinished. `options` are the fields of
        RequestOptions.
        """
        items = prompt_list(prompts)
        given = RequestOptions(**options)
        jobs = [(item, own, given) for item, own in zip(items, params_list(params, len(items)), strict=True)]
        return self._run_all(jobs)

    def chat(
        self,
        messages: Conversation | Items[Conversation],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        tools: Items[Any] | None = None,
        parallel_tool_calls: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """The assistant's next message for one conversation or several; results in their order.

        Args:
            tools: JSON schemas of functions, declared to the model through its template.
            parallel_tool_calls: False ends the message with its first complete call.
            continue_final_message: go on with the last message instead of opening a new one.
            template_variables: further variables of the chat template.
        """
        jobs = []
        conversations = conversations_of(messages)
        for conversation, own in zip(conversations, params_list(params, len(conversations)), strict=True):
            ids, given = self._chat_request(
                conversation,
                tools=tools,
                parallel_tool_calls=parallel_tool_calls,
                continue_final_message=continue_final_message,
                template_variables=template_variables,
                options=RequestOptions(**options),
            )
            jobs.append((ids, own, given))
        return self._run_all(jobs)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Delta]:
        """Deltas of one request as they come. Refuses at once; closing the iterator cancels the request."""
        return self._stream(prompt, params, RequestOptions(**options))

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Items[Any] | None = None,
        parallel_tool_calls: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """`chat` for one conversation, as deltas."""
        ids, given = self._chat_request(
            messages,
            tools=tools,
            parallel_tool_calls=parallel_tool_calls,
            continue_final_message=continue_final_message,
            template_variables=template_variables,
            options=RequestOptions(**options),
        )
        return self._stream(ids, params, given)

    def beam_search(
        self,
        prompts: Prompt | Items[Prompt],
        params: SamplingParams | None = None,
        *,
        width: int,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """The `params.n` best of `width` beams for each prompt; see endstop.runtime.beam for the rules.

        A search is admitted as a group, with memory for all its rows to their longest, and runs beside the
        other requests. Streaming and tools are refused.
        """
        from endstop.runtime.beam import BeamParams
        from endstop.runtime.search import run_search

        beam = BeamParams(width, length_penalty, early_stopping)
        given = RequestOptions(**options)
        return [
            run_search(self, prompt, params or SamplingParams(), beam, given)
            for prompt in prompt_list(prompts)
        ]

    def add_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Items[Any] | None = None,
        parallel_tool_calls: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """Queue a conversation, like `add`."""
        ids, given = self._chat_request(
            messages,
            tools=tools,
            parallel_tool_calls=parallel_tool_calls,
            continue_final_message=continue_final_message,
            template_variables=template_variables,
            options=RequestOptions(**options),
        )
        return self.submit(ids, params or SamplingParams(), given).id

    def wait(self, request: Request) -> RequestOutput:
        """Drive steps until a request submitted with `on_output` has its result."""
        while request.output is None:
            self.step_for_one()
        return request.output

    def _chat_request(self, messages: Conversation, **arguments: Any) -> tuple[list[int], RequestOptions]:
        if self.chat_format is None:
            raise MissingTemplate("chat needs a chat template, and this engine was made without one")
        return self.chat_format.request(messages, **arguments)

    def _run_all(self, jobs: Items[tuple[Prompt, SamplingParams, RequestOptions]]) -> list[RequestOutput]:
        requests: list[Request] = []
        try:
            for prompt, params, options in jobs:
                consumer = options.on_output or _taken_from_request
                requests.append(self.submit(prompt, params, replace(options, on_output=consumer)))
            return [self.wait(request) for request in requests]
        finally:
            self.cancel(requests)

    def _stream(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions
    ) -> Iterator[Delta]:
        deltas: deque[Delta] = deque()
        options = replace(options, on_delta=deltas.append, on_output=options.on_output or _taken_from_request)
        return self._follow(self.submit(prompt, params or SamplingParams(), options), deltas)

    def _follow(self, request: Request, deltas: deque[Delta]) -> Iterator[Delta]:
        try:
            while True:
                while deltas:
                    yield deltas.popleft()
                if request.output is not None:
                    return
                self.step_for_one()
        finally:
            self.cancel([request])


def _taken_from_request(_: RequestOutput) -> None:
    """The result is read from the request itself, not from `step`."""
