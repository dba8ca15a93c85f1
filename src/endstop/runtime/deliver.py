"""From a sequence and its machine to what the user gets: deltas and results."""

from __future__ import annotations

from dataclasses import replace

from endstop.protocol.machine import StopMachine
from endstop.protocol.step import StopStep
from endstop.protocol.tokenbytes import TokenBytes
from endstop.runtime.results import (
    CompletionOutput,
    Delta,
    RequestOutput,
    Timing,
    TokenLogprobs,
    Usage,
)
from endstop.runtime.sequence import Request, Sequence


def delta_of(sequence: Sequence, step: StopStep) -> Delta | None:
    """What is new since the last delta, None if nothing is."""
    machine, request = sequence.machine, sequence.request
    start, stop = sequence.streamed, machine.released
    news = step.text or stop > start or step.content or step.reasoning or step.tool_calls
    if not news and not step.finished:
        return None
    sequence.streamed = max(start, stop)
    delta = Delta(
        request.id,
        sequence.index,
        step.text,
        sequence.generated_token_ids[start:stop],
        sequence.logprobs[start:stop] if sequence.logprobs is not None else None,
    )
    if request.is_chat:
        delta.content, delta.reasoning, delta.tool_calls = step.content, step.reasoning, step.tool_calls
    if step.finished:
        delta.finish_reason, delta.stop_kind = step.finish_reason, step.stop_kind
        delta.stop_reason = step.stop_reason
        delta.output = completion_of(sequence)
    return delta


def completion_of_machine(machine: StopMachine, index: int, *, chat: bool) -> CompletionOutput:
    """What a machine that has ended knows of its row; `chat`: with the fields of a message."""
    assert machine.finish_reason is not None
    assert machine.stop_kind is not None
    completion = CompletionOutput(
        index,
        machine.text,
        machine.token_ids,
        machine.finish_reason,
        machine.stop_kind,
        machine.stop_reason,
        generated_token_ids=machine.generated_token_ids,
        generated_mask=machine.generated_mask,
    )
    if chat:
        completion.content, completion.reasoning = machine.content, machine.reasoning
        completion.tool_calls, completion.open_call = machine.tool_calls, machine.open_call
        completion.broken_calls = machine.broken_calls
    return completion


def completion_of(sequence: Sequence) -> CompletionOutput:
    """The result of a finished sequence."""
    machine = sequence.machine
    completion = completion_of_machine(machine, sequence.index, chat=sequence.request.is_chat)
    completion.trace, completion.error = sequence.trace, sequence.error
    if sequence.logprobs is not None:
        completion.generated_logprobs = sequence.logprobs
        completion.logprobs = sequence.logprobs[: machine.kept]
        completion.cumulative_logprob = sum(chosen_logprob(entry) for entry in completion.logprobs)
        if machine.ending_token_dropped:
            completion.stop_logprob = chosen_logprob(sequence.logprobs[-1])
    return completion


def output_of(request: Request, now: float) -> RequestOutput:
    """The terminal result of a request whose choices are all finished."""
    return RequestOutput(
        request.id,
        request.prompt,
        request.prompt_token_ids,
        [completion_of(choice) for choice in request.choices],
        Usage(
            len(request.prompt_token_ids),
            sum(len(choice.generated_token_ids) for choice in request.choices),
            request.cached_tokens,
        ),
        Timing(request.arrived, request.first_token, now),
        request.prompt_logprobs,
    )


def chosen_logprob(entry: TokenLogprobs | None) -> float:
    """The chosen token's logprob; a forced token counts as certain."""
    return next(iter(entry.values())).logprob if entry else 0.0


def with_text(entry: TokenLogprobs | None, pieces: TokenBytes) -> TokenLogprobs | None:
    """The same entry with the tokens' texts."""
    if entry is None:
        return None
    return {
        token_id: replace(logprob, decoded_token=text_of(pieces, token_id))
        for token_id, logprob in entry.items()
    }


def text_of(pieces: TokenBytes, token_id: int) -> str:
    """A token's own bytes as text."""
    return pieces[token_id].decode("utf-8", errors="replace")
