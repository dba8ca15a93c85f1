"""Results as JSON: the names are those of `CompletionOutput`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from endstop.cli.session import Answer, Session
    from endstop.runtime.results import CompletionOutput, RequestOutput, TokenLogprobs


def output_dict(output: CompletionOutput) -> dict[str, Any]:
    """One choice. Fields that were not asked for are left out."""
    found: dict[str, Any] = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_kind": output.stop_kind,
        "stop_reason": output.stop_reason,
        "token_ids": output.token_ids,
        "generated_token_ids": output.generated_token_ids,
        "generated_mask": output.generated_mask,
    }
    if output.content is not None:
        found["content"] = output.content
        found["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in output.tool_calls]
    for name in ("reasoning", "open_call", "broken_calls", "error", "stop_logprob", "cumulative_logprob"):
        value = getattr(output, name)
        if value is not None and value != "" and value != ():
            found[name] = value
    if output.logprobs is not None:
        found["logprobs"] = [_logprobs(entry) for entry in output.logprobs]
    if output.trace is not None:
        found["trace"] = output.trace.to_dict()
    return found


def result_dict(index: int, result: RequestOutput) -> dict[str, Any]:
    """One line of `endstop generate`."""
    line: dict[str, Any] = {
        "index": index,
        "prompt": result.prompt,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
    }
    if result.prompt_logprobs is not None:
        line["prompt_logprobs"] = [_logprobs(entry) for entry in result.prompt_logprobs]
    if len(result.outputs) == 1:
        return line | output_dict(result.outputs[0])
    return line | {"outputs": [{"choice": o.index, **output_dict(o)} for o in result.outputs]}


def answer_dict(session: Session, answer: Answer) -> dict[str, Any]:
    """The result of `endstop chat -p --json`."""
    return {
        "model": session.name,
        "prompt": answer.prompt_text,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.output.generated_token_ids),
        "seconds": round(answer.seconds, 4),
        **output_dict(answer.output),
    }


def _logprobs(entry: TokenLogprobs | None) -> list[dict[str, Any]] | None:
    if entry is None:
        return None
    return [
        {"id": token_id, "token": one.decoded_token, "logprob": one.logprob, "rank": one.rank}
        for token_id, one in entry.items()
    ]
