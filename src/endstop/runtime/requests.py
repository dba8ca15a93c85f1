"""Making requests: what cannot be served is refused here, in one sentence, before anything is queued."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

from endstop.protocol.errors import RequestRefused
from endstop.protocol.machine import StopMachine, check_ids_in_vocabulary
from endstop.protocol.params import SamplingParams
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenbytes import TokenBytes
from endstop.runtime.results import Delta, RequestOutput
from endstop.runtime.sequence import Request, Sequence, StreamTool
from endstop.runtime.token_model import TokenModel

if TYPE_CHECKING:
    from endstop.protocol.toolcalls import Reasoning, ToolSyntax

Prompt = str | Items[int]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request may have besides prompt and sampling parameters.

    Attributes:
        request_id: None numbers the requests.
        prompt_text: shown in the result where the prompt is given as ids.
        chat: fill the message fields of the result. tools, reasoning: the syntax that splits the message;
            each of them means chat.
        make_tool: makes the in-stream tool of each choice.
        on_delta: gets what is new in each choice as it comes. on_output: gets the terminal result. Both
            run in the stepping thread and should only hand things on.
    """

    request_id: str | None = None
    prompt_text: str | None = None
    chat: bool = False
    tools: ToolSyntax | None = None
    reasoning: Reasoning | None = None
    make_tool: Callable[[], StreamTool] | None = None
    on_delta: Callable[[Delta], None] | None = None
    on_output: Callable[[RequestOutput], None] | None = None


class RequestMaker:
    """Turns prompts into requests with their machines."""

    def __init__(
        self,
        model: TokenModel,
        stops: StopSet,
        pieces: TokenBytes,
        encode: Callable[[str], list[int]] | None,
        encode_text: Callable[[str], list[int]] | None,
        clock: Callable[[], float],
    ) -> None:
        self.model = model
        self.stops = stops
        self.pieces = pieces
        self.encode = encode
        self.encode_text = encode_text
        self.clock = clock
        self.context_len = longest_row(model)
        self.stop_ids = sorted(token_id for token_id in stops.ids if token_id < model.vocab_size)
        self._numbers = itertools.count()

    def make(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """Raises RequestRefused or ValueError for what this model cannot serve."""
        token_ids = self.token_ids_of(prompt)
        check_ids_in_vocabulary(params, self.model.vocab_size)
        bad_words = self._bad_words(params)
        number = next(self._numbers)
        request = Request(
            f"request-{number}" if options.request_id is None else options.request_id,
            number,
            prompt if isinstance(prompt, str) else options.prompt_text,
            token_ids,
            params,
            secrets.randbits(64) if params.seed is None else params.seed,
            self.clock(),
        )
        # Who names a syntax wants the parts: a result with `tool_calls` as its reason has them.
        request.is_chat = options.chat or options.tools is not None or options.reasoning is not None
        request.on_delta, request.on_output = options.on_delta, options.on_output
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        for index in range(params.n):
            machine = StopMachine(
                self.stops,
                params,
                self.pieces,
                prompt_len=len(token_ids),
                context_len=self.context_len,
                clock=self.clock,
                started_at=request.arrived,
                tools=options.tools,
                reasoning=options.reasoning,
            )
            tool = options.make_tool() if options.make_tool is not None else None
            request.choices.append(Sequence(request, index, machine, self.stop_ids, bad_words, tool))
        return request

    def token_ids_of(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt, refused where the model cannot compute them."""
        if isinstance(prompt, str):
            if self.encode is None:
                raise RequestRefused("this engine has no tokenizer; give the prompt as token ids")
            token_ids = self.encode(prompt)
        else:
            try:
                token_ids = list(prompt)
            except TypeError:
                raise RequestRefused(f"a prompt is a text or a list of token ids, got {prompt!r}") from None
        if not token_ids:
            raise RequestRefused("the prompt has no tokens")
        size = self.model.vocab_size
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise RequestRefused(f"a prompt is a text or a list of token ids, got {token_id!r} in it")
            if not 0 <= token_id < size:
                raise RequestRefused(
                    f"the prompt holds token id {token_id}, the model has ids 0 to {size - 1}"
                )
        if self.context_len is not None and len(token_ids) >= self.context_len:
            raise RequestRefused(
                f"the prompt has {len(token_ids)} tokens, but the window holds {self.context_len} and "
                "at least one token must be generated; shorten the prompt"
            )
        return token_ids

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token sequences of bad_words: each word as at the beginning of a text, and as behind a space.

        vLLM's definition, which takes the second only where it has as many tokens as the first; here it is
        taken always, so that a word that is one token behind a space and several without is banned too.
        """
        if not params.bad_words:
            return []
        if self.encode_text is None:
            raise RequestRefused("bad_words needs a tokenizer, this engine has none")
        sequences: list[list[int]] = []
        for word in params.bad_words:
            for spelling in (word.lstrip(), " " + word.lstrip()):
                token_ids = self.encode_text(spelling)
                if token_ids and token_ids not in sequences:
                    sequences.append(token_ids)
        return sequences


def longest_row(model: TokenModel) -> int | None:
    """The longest row that the model's window and the memory of its cache allow, None for no limit."""
    limit = model.context_len
    if model.fits([limit if limit is not None else 1 << 30]):
        return limit
    low, high = 0, limit if limit is not None else 1 << 30
    while high - low > 1:  # a row of `low` fits, one of `high` does not
        middle = (low + high) // 2
        if model.fits([middle]):
            low = middle
        else:
            high = middle
    return low


def prompt_list(prompts: Prompt | Items[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        # Its keys would be taken for prompts.
        raise RequestRefused(f"a prompt is a text or a list of token ids, got {prompts!r}")
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def params_list(params: SamplingParams | Items[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"there are {count} prompts but {len(params)} SamplingParams")
    return list(params)
