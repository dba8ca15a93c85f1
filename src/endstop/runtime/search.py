"""Running a beam search inside an engine: admission as a group, other requests in between, one result."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from endstop.protocol.errors import RequestRefused
from endstop.protocol.params import SamplingParams
from endstop.runtime.beam import BeamParams, BeamSearch
from endstop.runtime.deliver import completion_of
from endstop.runtime.requests import Prompt, RequestOptions
from endstop.runtime.results import RequestOutput, Timing, Usage
from endstop.runtime.sequence import Request, Sequence

if TYPE_CHECKING:
    from endstop.runtime.engine import Engine

logger = logging.getLogger(__name__)


def run_search(
    engine: Engine, prompt: Prompt, params: SamplingParams, beam: BeamParams, options: RequestOptions
) -> RequestOutput:
    """Search for one prompt. Raises RequestRefused for what a search cannot do or memory cannot hold."""
    if options.on_delta is not None:
        raise RequestRefused("beam search cannot stream: its best result is known at the end only")
    if options.tools or options.reasoning or options.make_tool or engine.make_tool:
        raise RequestRefused("beam search cannot use tools or split a message")
    request = engine.maker.make(prompt, params, options)
    search = BeamSearch(engine.model, request, beam, engine.scheduler.max_batch_tokens, engine.context_len)
    if beam.width > engine.scheduler.max_rows or not engine.model.fits(search.room):
        raise RequestRefused(
            f"{beam.width} beams of {search.room[0]} tokens do not fit into the cache; "
            "lower the width or max_tokens"
        )
    error: str | None = None
    with engine.search_registered(request):
        try:
            while not search.done:
                with engine.between_steps():
                    admitted = request.number in engine.scheduler.reserved or engine.scheduler.reserve(
                        request.number, search.room
                    )
                    if request.cancelled:
                        search.end("cancelled")
                    elif _overdue(request, engine.clock()) and search.length == 0:
                        search.end("deadline")
                    elif admitted:
                        ended = sum(beam.machine.finished for beam in search.running)
                        engine.count_search(ended, search.step())
                if engine.has_unfinished():
                    engine.step_for_one()
        except RequestRefused:
            raise
        except Exception as failure:
            logger.exception("the model failed in a beam search")
            error = f"{type(failure).__name__}: {failure}"
            search.end("error")
        finally:
            with engine.between_steps():
                search.close()
                engine.scheduler.release(request.number)
    return _output(search, request, engine.clock(), error)


def _overdue(request: Request, now: float) -> bool:
    limit = request.params.max_time
    return limit is not None and now - request.arrived >= limit


def _output(search: BeamSearch, request: Request, now: float, error: str | None) -> RequestOutput:
    outputs = []
    for index, beam in enumerate(search.finished[: request.params.n]):
        sequence = Sequence(request, index, beam.machine, beam.stop_ids, beam.bad_words)
        sequence.error = error
        output = completion_of(sequence)
        output.cumulative_logprob = beam.score
        outputs.append(output)
    return RequestOutput(
        request.id,
        request.prompt,
        request.prompt_token_ids,
        outputs,
        Usage(
            len(request.prompt_token_ids),
            sum(len(output.generated_token_ids) for output in outputs),
        ),
        Timing(request.arrived, None, now),
    )
