"""AsyncLLM on scripted models: results, streams, cancellation, errors, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from endstop import AsyncLLM, Engine, SamplingParams, StopSet, TokenBytes
from endstop.protocol.errors import MissingTemplate, RequestRefused
from endstop.runtime.generator import Generator
from endstop.testing import ScriptedModel

LETTERS = TokenBytes([bytes([97 + i]) for i in range(26)], special={2})


def engine_of(script: Any, **options: Any) -> Engine:
    return Engine(ScriptedModel(script, vocab_size=26), StopSet.of({2: "eos"}), LETTERS, **options)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_the_engine_is_a_generator() -> None:
    assert isinstance(engine_of(lambda tokens: 5), Generator)


def test_requests_of_several_coroutines_share_the_batch() -> None:
    async def main() -> list[str]:
        async with AsyncLLM(engine_of({(3,): [5, 6, 2], (4,): [7, 2]})) as llm:
            results = await asyncio.gather(*(llm.generate([p]) for p in (3, 4, 3)))
            return [result.outputs[0].text for result in results]

    assert run(main()) == ["fg", "h", "fg"]


def test_a_stream_gives_deltas_and_ends() -> None:
    async def main() -> list[tuple[str, str | None]]:
        async with AsyncLLM(engine_of({(3,): [5, 6, 2]})) as llm:
            return [(delta.text, delta.finish_reason) async for delta in llm.stream([3])]

    assert run(main()) == [("f", None), ("g", None), ("", "stop")]


def test_a_cancelled_coroutine_cancels_its_request() -> None:
    running = threading.Event()

    def script(tokens: tuple[int, ...]) -> int:
        running.set()
        return 5

    async def main() -> Engine:
        async with AsyncLLM(engine_of(script)) as llm:
            task = asyncio.ensure_future(llm.generate([3]))
            await asyncio.to_thread(running.wait, 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while llm.engine.has_unfinished():
                await asyncio.sleep(0.01)
            assert llm.engine.stats.requests_finished == 1
            return llm.engine

    engine = run(main())
    assert engine.model.rows == {}
    assert engine.stats.rows_computed_after_stop == 0


def test_leaving_a_stream_cancels_its_request() -> None:
    async def main() -> int:
        async with AsyncLLM(engine_of(lambda tokens: 5)) as llm:
            stream = llm.stream([3])
            async for delta in stream:
                assert delta.text == "f"
                break
            await stream.aclose()  # type: ignore[attr-defined]
            while llm.engine.has_unfinished():
                await asyncio.sleep(0.01)
            return llm.engine.stats.requests_finished

    assert run(main()) == 1


def test_abort_by_id_gives_the_partial_result() -> None:
    async def main() -> tuple[str, str]:
        async with AsyncLLM(engine_of(lambda tokens: 5)) as llm:
            task = asyncio.ensure_future(llm.generate([3], request_id="mine"))
            while not llm.engine.stats.tokens_sampled:
                await asyncio.sleep(0.01)
            assert llm.abort("mine")
            output = (await task).outputs[0]
            return output.finish_reason, output.text[:1]

    assert run(main()) == ("abort", "f")


def test_refusals_are_raised_where_the_request_is_made() -> None:
    async def main() -> None:
        async with AsyncLLM(engine_of(lambda tokens: 5)) as llm:
            with pytest.raises(RequestRefused):
                await llm.generate([99])
            with pytest.raises(MissingTemplate):
                await llm.chat([{"role": "user", "content": "hi"}])
            with pytest.raises(RequestRefused):
                async for _ in llm.stream("text"):
                    pass

    run(main())


def test_a_step_that_fails_ends_the_requests_with_an_error() -> None:
    class Broken(ScriptedModel):
        def fits(self, lengths: Any) -> bool:
            if lengths != [1 << 30]:
                raise RuntimeError("broken cache")
            return True

    async def main() -> tuple[str, str | None]:
        async with AsyncLLM(Engine(Broken(lambda tokens: 5, vocab_size=26))) as llm:
            output = (await llm.generate([3])).outputs[0]
            return output.finish_reason, output.error

    assert run(main()) == ("error", "RuntimeError: broken cache")


def test_closing_ends_what_is_unfinished() -> None:
    async def main() -> str:
        llm = AsyncLLM(engine_of(lambda tokens: 5))
        task = asyncio.ensure_future(llm.generate([3], SamplingParams(max_tokens=10**6)))
        await asyncio.sleep(0.05)
        await llm.close()
        return str((await task).outputs[0].finish_reason)

    assert run(main()) == "abort"


def test_the_synchronous_engine_works_where_an_event_loop_runs() -> None:
    async def main() -> str:
        return engine_of({(3,): [5, 2]}).generate([3])[0].outputs[0].text

    assert run(main()) == "f"


def test_what_is_asked_of_a_closed_engine_is_refused() -> None:
    async def main() -> None:
        llm = AsyncLLM(engine_of({(3,): [5, 2]}))
        await llm.close()
        with pytest.raises(RequestRefused, match="closed"):
            await llm.generate([3])
        with pytest.raises(RequestRefused, match="closed"):
            async for _ in llm.stream([3]):
                pass

    run(main())


def test_a_finished_request_does_not_cancel_the_next_one_of_its_name() -> None:
    returned = threading.Event()

    def script(tokens: tuple[int, ...]) -> int:
        if tokens[0] == 4:
            returned.wait(5)
        return 2 if tokens[0] == 3 or len(tokens) == 6 else 5

    async def main() -> str | None:
        engine = engine_of(script)
        results: list[Any] = []
        engine_add = engine.add

        def again(_: Any) -> None:
            # In the thread that steps: the id is free, the first coroutine does not know yet.
            engine_add([4], request_id="x", on_output=results.append)

        async with AsyncLLM(engine) as llm:

            def add(*arguments: Any, **options: Any) -> str:
                hand_over = options["on_output"]
                options["on_output"] = lambda output: (again(output), hand_over(output))
                return engine_add(*arguments, **options)

            engine.add = add  # type: ignore[method-assign]
            await llm.generate([3], request_id="x")
            returned.set()
            while not results:
                await asyncio.sleep(0.001)
        return results[0].outputs[0].finish_reason  # type: ignore[no-any-return]

    assert run(main()) == "stop"
