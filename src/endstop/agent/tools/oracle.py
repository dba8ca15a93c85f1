"""oracle: a second model reads and gives its opinion. It runs nothing, and its words prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from endstop.agent.signature import bounded
from endstop.agent.tool import Tool, ToolResult, tool
from endstop.agent.tools.context import ToolContext
from endstop.protocol.errors import EndstopError
from endstop.protocol.params import SamplingParams
from endstop.runtime.generator import Generator
from endstop.runtime.results import Usage

_SYSTEM = (
    "You advise a programmer. You see a task, the change so far, a checklist, what the project's own check "
    "said, and files. You cannot run or change anything. Answer the question; name files, lines and reasons. "
    "Say what you doubt and how it could be tested. Never say that the work is done: only the project's own "
    "check decides that."
)
_MARK = "[The oracle's opinion. It is no evidence: only what the gate runs itself counts.]"
# Bytes of each named file and of the diff that the second model is shown.
_SHOWN_BYTES = 24_000
_MOST_FILES = 8


@dataclass(frozen=True, slots=True)
class Situation:
    """What the second model is told of the run, as the harness knows it."""

    task: str
    diff: str = ""
    checklist: str = ""
    gate_result: str = ""


def oracle_tool(
    generator: Generator,
    situation: Callable[[], Situation],
    context: ToolContext,
    *,
    max_calls: int = 3,
    asked: int = 0,
    params: SamplingParams | None = None,
    on_usage: Callable[[Usage], None] | None = None,
) -> Tool:
    """The tool `oracle`, which asks `generator`.

    Args:
        situation: asked at every call. max_calls: further calls are answered without the model.
        asked: how many there were before, in a run that goes on.
        on_usage: gets the tokens of every call, so that they count in the run's budget; they are in the
            result's `details` as well.
    """
    calls = asked

    @tool(output_bytes=context.output_bytes)
    def oracle(
        question: Annotated[str, "One question, with what you already know."],
        files: Annotated[list[str], "Paths of files that it should read."] = [],  # noqa: B006 (not changed)
    ) -> ToolResult:
        """Ask a second model to think about a plan, a bug or a review. It reads the task, your change, the
        last result of the gate and the files you name. It runs nothing, and its words are no evidence."""
        nonlocal calls
        if calls >= max_calls:
            return ToolResult(f"The oracle was asked {max_calls} times, and no more is allowed.", ok=False)
        if len(files) > _MOST_FILES:
            return ToolResult(f"The oracle reads at most {_MOST_FILES} files; name those.", ok=False)
        texts = [(path, _file(context, path)) for path in files]
        calls += 1
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _prompt(situation(), question, texts)},
        ]
        try:
            answer = generator.chat(messages, params or SamplingParams(max_tokens=2048))[0]
        except EndstopError as error:
            return ToolResult(f"The oracle cannot answer: {error}", ok=False, details={"oracle_call": calls})
        output, usage = answer.outputs[0], answer.usage
        if on_usage is not None:
            on_usage(usage)
        details = {
            "oracle_call": calls,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reason": output.finish_reason,
        }
        text = (output.text if output.content is None else output.content).strip()
        if output.finish_reason == "error":
            return ToolResult(f"The oracle cannot answer: {output.error}", ok=False, details=details)
        if output.finish_reason != "stop":
            text += f"\n[The answer was cut: {output.finish_reason}.]"
        text = text or "(no answer)"
        left = max_calls - calls
        # Marked at both ends: the middle of a long answer may be left out.
        said = f"{_MARK}\n{bounded(text, context.output_bytes - 2 * len(_MARK) - 200)}\n{_MARK}"
        return ToolResult(
            f"{said}\n[{left} more {'call' if left == 1 else 'calls'} allowed.]", details=details
        )

    return oracle


def oracle_definition() -> Tool:
    """The tool without a model behind it: for what its definition costs."""
    from pathlib import Path

    from endstop.sandbox.files import WorkspaceFiles
    from endstop.testing import ScriptedChat

    return oracle_tool(ScriptedChat([]), lambda: Situation(""), ToolContext(Path(), WorkspaceFiles(Path())))


def _file(context: ToolContext, path: str) -> str:
    """A file for the second model, or one line on why it cannot be shown."""
    try:
        data, size = context.files.read(path, _SHOWN_BYTES)
    except (EndstopError, OSError) as error:
        return f"({error})"
    if b"\0" in data:
        return f"(binary, {size} bytes)"
    more = "" if len(data) == size else f"\n[the first {len(data)} of {size} bytes]"
    return data.decode("utf-8", "backslashreplace") + more


def _prompt(now: Situation, question: str, files: list[tuple[str, str]]) -> str:
    parts = [
        ("task", now.task),
        ("checklist", now.checklist),
        ("change so far", bounded(now.diff, _SHOWN_BYTES)),
        ("last result of the gate", bounded(now.gate_result, _SHOWN_BYTES)),
        *[(f"file {path}", text) for path, text in files],
        ("question", question),
    ]
    return "\n\n".join(f"## {name}\n{text.strip() or '(none)'}" for name, text in parts)
