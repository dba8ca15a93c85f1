"""Request and Sequence: what was asked, and one row of tokens that answers it.

A request with n > 1 has n sequences ("choices"), each with its own machine, cache row and draws. Three
counts of a sequence are never mixed up: visible (prompt + committed), computed (keys and values are in
the cache) and pending (committed, not computed yet).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from typing import Any, Protocol

from endstop.protocol.machine import StopMachine
from endstop.protocol.params import SamplingParams
from endstop.runtime.results import Delta, RequestOutput, TokenLogprobs
from endstop.runtime.trace import Trace


class StreamTool(Protocol):
    """A tool that works inside the token stream of one row, such as a calculator.

    It sees every sampled token. When a call is complete `push` gives back a job: the engine runs it
    beside its steps and injects the ids that it returns as forced tokens. Both may be called from
    different threads, never at once.
    """

    def push(self, token_id: int) -> Callable[[], Items[int]] | None: ...

    def close(self) -> None:
        """The row has ended: end a running job too."""
        ...


class Request:
    """One prompt with its parameters, from arrival to its one terminal result."""

    def __init__(
        self,
        request_id: str,
        number: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        arrived: float,
    ) -> None:
        self.id = request_id
        self.number = number  # order of arrival
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.seed = seed
        self.arrived = arrived
        self.first_token: float | None = None
        self.cached_tokens = 0
        self.is_chat = False
        self.choices: list[Sequence] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.cancelled = False  # may be set by any thread, read by the step
        self.on_delta: Callable[[Delta], None] | None = None
        self.on_output: Callable[[RequestOutput], None] | None = None
        self.output: RequestOutput | None = None


class Sequence:
    """One choice of a request."""

    def __init__(
        self,
        request: Request,
        index: int,
        machine: StopMachine,
        stop_ids: Items[int],
        bad_words: Items[Items[int]],
        tool: StreamTool | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.machine = machine
        self.params = params
        self.prompt_token_ids = request.prompt_token_ids
        self.stop_ids = stop_ids
        self.bad_words = bad_words
        self.seed = request.seed
        self.token_ids = list(request.prompt_token_ids)  # the visible tokens
        self.generated_token_ids: list[int] = []
        self.computed = 0
        self.row: int | None = None  # handle of the model's cache row, while there is one
        self.sampled = 0
        self.sampler_state: Any = None
        self.logprobs: list[TokenLogprobs | None] | None = [] if params.logprobs is not None else None
        self.trace = Trace(len(self.prompt_token_ids), list(stop_ids)) if params.trace else None
        self.streamed = 0  # generated tokens that went out with a delta
        self.tool = tool
        self.job: Future[Items[int]] | None = None  # state `waiting`: the tool runs, the row does not
        self.error: str | None = None
        self.order = (request.number, index)

    @property
    def visible(self) -> int:
        return len(self.token_ids)

    @property
    def pending(self) -> int:
        return len(self.token_ids) - self.computed

    @property
    def finished(self) -> bool:
        return self.machine.finished

    @property
    def waiting(self) -> bool:
        return self.job is not None

    def banned_ids(self) -> frozenset[int]:
        return self.machine.banned_ids()

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.generated_token_ids.append(token_id)
