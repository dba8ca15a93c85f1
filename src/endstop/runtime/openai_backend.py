"""Generator over any HTTP endpoint that speaks OpenAI's API: chat completions and completions.

    backend = OpenAIBackend("http://localhost:8000/v1", "qwen3")
    backend.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=64))[0].outputs[0].text

What such an endpoint cannot promise is refused by name (RequestRefused), never ignored: `min_tokens`,
`ignore_eos`, `stop_token_ids` and others are sent only if the caller says that this server honours them
(`accepts`). Stop strings are sent (`stop="server"`) and matched here as well, so a server that ignores them
is cut all the same; with `stop="client"` they are not sent, there may be any number of them, and
`include_stop_str_in_output` works.

The answer is read as a stream, which ends at the first stop here, at a deadline, at `abort`, and when the
iterator is closed: the connection is dropped, so that the server stops too. A stream that ends without a
finish_reason is an error, with the text so far. Token ids and logprobs are not known (their lists are empty).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import httpx

from endstop.protocol.errors import EndstopError, RequestRefused
from endstop.protocol.params import SamplingParams
from endstop.protocol.toolcalls import Reasoning, ToolSyntax
from endstop.runtime.openai_message import WireChoice
from endstop.runtime.openai_wire import Ended, Endpoint, WireRequest, usage_of
from endstop.runtime.results import Delta, RequestOutput, Timing, Usage

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

# Fields of SamplingParams that OpenAI's API does not have, and their neutral values. Some servers have
# them under the same name.
_BEYOND_OPENAI: dict[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "stop_token_ids": (),
    "bad_words": (),
    "min_tokens": 0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
}
# Fields that no server can be told, and what they would need.
_NEVER: dict[str, str] = {
    "ban_eos": "it needs the logits",
    "repetition_detection": "it needs the token ids",
    "logprobs": "the API reports no token ids",
    "prompt_logprobs": "the API reports no token ids",
    "trace": "it needs the logits",
}

_USAGE_WAIT = 5.0


class OpenAIBackend:
    """A Generator whose model is behind an HTTP endpoint.

    Args:
        base_url: up to and including `/v1`.
        model: the name that the server knows it by.
        api_key: sent as a bearer token; nothing is read from the environment.
        stop: "server" sends stop strings, "client" matches them only here.
        max_stop: how many stop strings the server takes (OpenAI: 4).
        accepts: SamplingParams fields beyond OpenAI's that this server honours under the same name, and
            `continue_final_message` and `chat_template_kwargs` where it has these (vLLM and SGLang do).
        tool_syntax, reasoning: where the server leaves calls or reasoning inside the content, how they are
            written there; they are then split here.
        streaming: False asks for whole answers.
        max_tokens_field: `max_tokens`, or `max_completion_tokens` for OpenAI's newer models.
        extra_body: further fields of every request body.
        timeout: seconds without anything of an answer after which it counts as broken; bytes that only keep
            the connection open are nothing. connect_timeout: seconds.
        retries: how often a request is sent again of which nothing has come back (connection refused,
            408, 429, 5xx); backoff: seconds before the first time, doubled each time, Retry-After first.

    Thread-safe. Usage is what the server reports, and 0 where it was cut before it could.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        stop: Literal["server", "client"] = "server",
        max_stop: int = 4,
        accepts: Collection[str] = (),
        tool_syntax: ToolSyntax | None = None,
        reasoning: Reasoning | None = None,
        streaming: bool = True,
        max_tokens_field: str = "max_tokens",
        extra_body: Mapping[str, Any] | None = None,
        timeout: float = 120.0,
        connect_timeout: float = 10.0,
        retries: int = 2,
        backoff: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        known = {*_BEYOND_OPENAI, "continue_final_message", "chat_template_kwargs"}
        unknown = sorted(set(accepts) - known)
        if unknown:
            raise ValueError(f"accepts has {unknown[0]!r}, which is none of {', '.join(sorted(known))}")
        if stop not in ("server", "client"):
            raise ValueError(f"stop must be 'server' or 'client', got {stop!r}")
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.stop = stop
        self.max_stop = max_stop
        self.accepts = frozenset(accepts)
        self.tool_syntax = tool_syntax
        self.reasoning = reasoning
        self.streaming = streaming
        self.max_tokens_field = max_tokens_field
        self.extra_body = dict(extra_body or {})
        self.retries = retries
        self.backoff = backoff
        self.clock = clock
        self.timeout = timeout
        self._key = api_key or ""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(timeout=httpx.Timeout(timeout, connect=connect_timeout))
        self._numbers = itertools.count()
        self._running: dict[str, _Job] = {}
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids), one after the other."""
        items = _prompts(prompts)
        jobs = [
            self._completion(prompt, own, dict(options))
            for prompt, own in zip(items, _each(params, len(items)), strict=True)
        ]
        return [self._whole(job) for job in jobs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Delta]:
        """Deltas of one prompt; closing the iterator drops the connection."""
        return self._follow(self._completion(prompt, params, options))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """The next message of each conversation, one after the other. Options as for `stream_chat`."""
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        jobs = [
            self._chat(conversation, own, tools, dict(options))
            for conversation, own in zip(conversations, _each(params, len(conversations)), strict=True)
        ]
        return [self._whole(job) for job in jobs]

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """The next message of one conversation, as deltas.

        Options: `request_id`, `parallel_tool_calls`, `continue_final_message`, `template_variables`. Complete
        tool calls come with the last delta.
        """
        return self._follow(self._chat(messages, params, tools, options))

    def add(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> str:
        """Start a prompt in a thread and return its request id.

        `on_delta` gets the deltas, `on_output` the one terminal result, also if the request fails.
        """
        on_delta, on_output = options.pop("on_delta", None), options.pop("on_output", None)
        job = self._completion(prompt, params, options)
        with self._lock:
            self._running[job.request_id] = job

        def run() -> None:
            try:
                for delta in self._follow(job):
                    if on_delta is not None:
                        on_delta(delta)
            except EndstopError:
                pass  # the job has it
            except Exception:
                logger.exception(
                    "the consumer of request %s failed, so the request is cancelled", job.request_id
                )
            if on_output is not None:
                on_output(job.output())

        threading.Thread(target=run, name="endstop-openai", daemon=True).start()
        return job.request_id

    def abort(self, request_id: str) -> bool:
        """Cancel a request by its exact id; it ends with what it has. False if there is none."""
        with self._lock:
            job = self._running.get(request_id)
        if job is None:
            return False
        job.cancel()
        return True

    def close(self) -> None:
        """Cancel what is unfinished and close the connections."""
        with self._lock:
            jobs = list(self._running.values())
        for job in jobs:
            job.cancel()
        self._client.close()

    def __enter__(self) -> OpenAIBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Making requests.

    def _completion(self, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any]) -> _Job:
        request_id = self._request_id(options)
        _no_more(options)
        params = params or SamplingParams()
        text = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
        body = {"prompt": text, **self._body(params)}
        return _Job(self, request_id, params, "/completions", body, chat=False, prompt=prompt)

    def _chat(
        self,
        messages: Conversation,
        params: SamplingParams | None,
        tools: Sequence[Any] | None,
        options: dict[str, Any],
    ) -> _Job:
        request_id = self._request_id(options)
        parallel = options.pop("parallel_tool_calls", True)
        open_turn = options.pop("continue_final_message", False)
        variables = options.pop("template_variables", None)
        _no_more(options)
        params = params or SamplingParams()
        if params.stop and params.stop_scope == "all":
            raise RequestRefused(
                "stop_scope='all' cannot be promised for chat: only the content can be searched here, and "
                "whether the server searches reasoning and tool calls is its own rule"
            )
        body: dict[str, Any] = {"messages": [dict(message) for message in messages], **self._body(params)}
        if tools:
            body["tools"] = list(tools)
            if not parallel:
                body["parallel_tool_calls"] = False
        if open_turn:
            self._must_accept("continue_final_message", open_turn)
            body.update(continue_final_message=True, add_generation_prompt=False)
        if variables:
            self._must_accept("chat_template_kwargs", variables)
            body["chat_template_kwargs"] = dict(variables)
        return _Job(self, request_id, params, "/chat/completions", body, chat=True, parallel=parallel)

    def _body(self, params: SamplingParams) -> dict[str, Any]:
        """The request body's part that comes from the parameters; refuses what it cannot express."""
        for name, why in _NEVER.items():
            value = getattr(params, name)
            if value is not None and value is not False:  # 0 logprobs are a wish too
                raise RequestRefused(f"{name} cannot be had from an HTTP endpoint: {why}")
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream": self.streaming,
        }
        if self.streaming:
            body["stream_options"] = {"include_usage": True}
        for name, neutral in (
            ("n", 1),
            ("presence_penalty", 0.0),
            ("frequency_penalty", 0.0),
            ("seed", None),
        ):
            value = getattr(params, name)
            if value != neutral:
                body[name] = value
        if params.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if params.max_tokens is not None:
            body[self.max_tokens_field] = params.max_tokens
        for name, neutral in _BEYOND_OPENAI.items():
            value = getattr(params, name)
            if value == neutral:
                continue
            if name == "include_stop_str_in_output" and self.stop == "client" and not params.stop_token_ids:
                continue
            self._must_accept(name, value)
            body[name] = list(value) if isinstance(value, tuple) else value
        if params.stop and self.stop == "server":
            if len(params.stop) > self.max_stop:
                raise RequestRefused(
                    f"{len(params.stop)} stop strings, but this server takes {self.max_stop} "
                    "(max_stop); with stop='client' they are matched here and have no limit"
                )
            body["stop"] = list(params.stop)
        return {**body, **self.extra_body}

    def _must_accept(self, name: str, value: Any) -> None:
        if name not in self.accepts:
            raise RequestRefused(
                f"{name}={value!r} cannot be promised by an OpenAI-compatible endpoint; "
                f"if this server honours it, say so with accepts={{{name!r}}}"
            )

    def _request_id(self, options: dict[str, Any]) -> str:
        given = options.pop("request_id", None)
        return str(given) if given is not None else f"openai-{next(self._numbers)}"

    # Following them.

    def _whole(self, job: _Job) -> RequestOutput:
        for _ in self._follow(job):
            pass
        return job.output()

    def _follow(self, job: _Job) -> Iterator[Delta]:
        """Send the request and give its deltas until every choice has ended.

        Raises EndstopError if nothing has come back: the server cannot be reached or refuses. What breaks
        later ends the choices with finish_reason `error`.
        """
        with self._lock:
            self._running[job.request_id] = job
        url = self.base_url + job.path
        endpoint = Endpoint(url, self._headers, self.retries, self.backoff, self.timeout, self._key)
        wire = WireRequest(self._client, endpoint, job.body)
        job.wire = wire
        started = False
        try:
            while not job.finished:
                # Tested here too: the request may have been cancelled before it was sent.
                item = None if job.cancelled.is_set() else wire.get(job.time_left())
                if job.cancelled.is_set():
                    yield from job.end(kind="cancelled")
                elif isinstance(item, Ended):
                    job.nothing_follows = True
                    deltas = job.end(error=str(item.error) if item.error is not None else None)
                    if item.error is not None and not started:
                        raise item.error
                    yield from deltas
                elif item is not None:
                    started = True
                    yield from job.take(item)
                if job.time_left() == 0.0:
                    yield from job.end(kind="deadline")
            if not job.nothing_follows:
                job.take_usage()
        finally:
            wire.close()
            with self._lock:
                self._running.pop(job.request_id, None)
            job.end(kind="cancelled")


class _Job:
    """One request: its body, its choices, its clock."""

    def __init__(
        self,
        backend: OpenAIBackend,
        request_id: str,
        params: SamplingParams,
        path: str,
        body: dict[str, Any],
        *,
        chat: bool,
        prompt: Prompt | None = None,
        parallel: bool = True,
    ) -> None:
        self.request_id = request_id
        self.path = path
        self.body = body
        self.prompt = prompt
        self.wire: WireRequest | None = None
        self.cancelled = threading.Event()
        self.nothing_follows = False
        self.usage = Usage(0, 0)
        self._clock = backend.clock
        self._arrived = self._clock()
        self._first: float | None = None
        self._finished: float | None = None
        self._deadline = None if params.max_time is None else self._arrived + params.max_time
        tools = backend.tool_syntax if chat and body.get("tools") else None
        reasoning = backend.reasoning if chat else None
        self.choices = [
            WireChoice(request_id, index, params, tools, reasoning, parallel, chat)
            for index in range(params.n)
        ]

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    def cancel(self) -> None:
        self.cancelled.set()
        if self.wire is not None:
            self.wire.wake()

    def time_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def take(self, chunk: dict[str, Any]) -> list[Delta]:
        """What a chunk brings to its choices; a choice ends with its finish_reason."""
        self._count(chunk)
        deltas = []
        for item in chunk.get("choices") or ():
            index = item.get("index", 0)
            if not isinstance(index, int) or not 0 <= index < len(self.choices):
                continue
            choice = self.choices[index]
            if self._first is None:
                self._first = self._clock()
            deltas.append(choice.take(item))
            if choice.finished:
                self.nothing_follows = True
            elif choice.ending_known:
                deltas.append(choice.end())
        return [delta for delta in deltas if delta is not None]

    def take_usage(self) -> None:
        """The usage comes behind the last choice; a server that keeps it back is not waited for."""
        assert self.wire is not None
        left = self.time_left()
        wait = _USAGE_WAIT if left is None else min(left, _USAGE_WAIT)
        while isinstance(item := self.wire.get(wait), dict):
            self._count(item)

    def end(self, error: str | None = None, kind: Any = None) -> list[Delta]:
        self.nothing_follows = self.nothing_follows or (kind is not None and not self.finished)
        deltas = [choice.end(error, kind) for choice in self.choices]
        return [delta for delta in deltas if delta is not None]

    def output(self) -> RequestOutput:
        if self._finished is None:
            self._finished = self._clock()
        ids = [] if self.prompt is None or isinstance(self.prompt, str) else list(self.prompt)
        text = self.prompt if isinstance(self.prompt, str) else None
        outputs = [choice.output for choice in self.choices if choice.output is not None]
        timing = Timing(self._arrived, self._first, self._finished)
        return RequestOutput(self.request_id, text, ids, outputs, self.usage, timing)

    def _count(self, chunk: dict[str, Any]) -> None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage_of(usage)


def _prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    return [items] if items and isinstance(items[0], int) else items


def _each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    """One set of parameters for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts were given and {len(params)} sets of parameters")
    return list(params)


def _no_more(options: Mapping[str, Any]) -> None:
    if options:
        raise RequestRefused(f"{next(iter(options))} is not known to the openai backend")
