"""AsyncLLM: the engine in a thread of its own, for asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Items
from pathlib import Path
from types import TracebackType
from typing import Any

from endstop.protocol.params import SamplingParams
from endstop.runtime.chat import Conversation
from endstop.runtime.engine import Engine
from endstop.runtime.llm import is_conversation, load_engine
from endstop.runtime.requests import Prompt
from endstop.runtime.results import Delta, RequestOutput

logger = logging.getLogger(__name__)

_IDLE = 0.5  # seconds between looks at an engine that has nothing to do


class AsyncLLM:
    """Generate and chat from coroutines; all requests share one batch.

    `model` is what LLM takes, or an Engine. A coroutine that is cancelled, and a stream that is left, cancel
    their request in the engine. Use it as `async with AsyncLLM(...) as llm`, or call `close`.
    """

    def __init__(self, model: str | Path | Engine, **options: Any) -> None:
        self.engine = model if isinstance(model, Engine) else load_engine(model, **options)
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="endstop-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Complete one prompt, a text or token ids."""
        return await self._result(self.engine.add, prompt, params, options)

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Items[Any] | None = None,
        **options: Any,
    ) -> RequestOutput:
        """The assistant's next message. Options as for Engine.chat."""
        return await self._result(self.engine.add_chat, messages, params, {"tools": tools, **options})

    async def stream(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Items[Any] | None = None,
        **options: Any,
    ) -> AsyncIterator[Delta]:
        """Deltas of one prompt, or of the next message where `prompt` is a conversation.

        With n > 1 the choices come interleaved; the stream ends when all have ended.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Delta | None] = asyncio.Queue()

        def hand_over(item: Delta | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        options = {**options, "on_delta": hand_over, "on_output": lambda _: hand_over(None)}
        add: Callable[..., str] = self.engine.add
        if is_conversation(prompt):
            add, options["tools"] = self.engine.add_chat, tools
        request_id = add(prompt, params, **options)
        ended = False
        try:
            while (delta := await queue.get()) is not None:
                yield delta
            ended = True
        finally:
            if not ended:  # a finished request's id may be another one's by now
                self.engine.abort(request_id)

    def abort(self, request_id: str) -> bool:
        """Cancel a request by its id; it gets its result with the text so far. From any thread."""
        return self.engine.abort(request_id)

    async def close(self) -> None:
        """Cancel what is unfinished, end the thread, free the cache."""
        self._closing = True
        self.engine.wake()
        await asyncio.to_thread(self._stop)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _result(
        self, add: Callable[..., str], prompt: Any, params: SamplingParams | None, options: dict[str, Any]
    ) -> RequestOutput:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[RequestOutput] = loop.create_future()

        def settle(output: RequestOutput) -> None:
            if not future.done():
                future.set_result(output)

        request_id = add(
            prompt, params, **options, on_output=lambda output: loop.call_soon_threadsafe(settle, output)
        )
        try:
            return await future
        except BaseException:  # the coroutine was cancelled
            self.engine.abort(request_id)
            raise

    def _work(self) -> None:
        while not self._closing:
            if not self.engine.has_unfinished():
                self.engine.wait_for_work(_IDLE)
                continue
            try:
                self.engine.step()
            except Exception as error:  # nobody must wait for ever
                logger.exception("the engine's step failed; all requests end with an error")
                self.engine.fail(error)

    def _stop(self) -> None:
        self._thread.join()
        self.engine.close()
