"""A model for an agent, by name: our engine, an OpenAI-compatible endpoint, or turns written down."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from endstop.agent.context import Count, Estimate
from endstop.agent.scripts import read_script
from endstop.agent.settings import SCRIPTED, ModelSettings, Price
from endstop.agent.text_tools import TextTools, as_text
from endstop.agent.turns import Turn, read_turn
from endstop.protocol.errors import EndstopError, RequestRefused
from endstop.protocol.params import SamplingParams
from endstop.protocol.toolcalls import ToolSyntax
from endstop.runtime.generator import Generator

if TYPE_CHECKING:
    from endstop.runtime.engine import Engine

logger = logging.getLogger(__name__)

ModelKind = Literal["engine", "endpoint", "scripted"]
# How servers say that a prompt is longer than the window.
_TOO_LONG = re.compile(
    r"context (length|window|size)|maximum context|too many tokens|prompt is too long", re.I
)
# How long their window is, and the prompt without the answer.
_WINDOW = re.compile(r"maximum context length (?:is|of) (\d{2,9})\b", re.I)
_PROMPT = re.compile(r"\b(\d{1,9}) (?:input tokens|in the messages|in your prompt)", re.I)


class ModelFailed(EndstopError):
    """The model gave no answer, twice."""


class WindowFull(EndstopError):
    """The server says that the prompt, with the tokens for its answer, is longer than its window.

    `window`: how long that is, where the server says so.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        found = _WINDOW.search(text)
        self.window = int(found[1]) if found else None


@dataclass(slots=True)
class AgentModel:
    """A model that is open, with what the loop must know of it.

    Attributes:
        window: tokens, None where it is not known. count: tokens of messages and definitions.
        tool_calls: `native` or `text`. reports_cuts, keep_reasoning: see ModelSettings.
        secrets: values that must not be written anywhere.
    """

    generator: Generator
    name: str
    kind: ModelKind
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 4096
    window: int | None = None
    count: Count = field(default_factory=Estimate)
    tool_calls: Literal["native", "text"] = "native"
    reports_cuts: bool = True
    keep_reasoning: bool = True
    price: Price = field(default_factory=Price)
    secrets: tuple[str, ...] = ()

    def messages(self, prompt: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The prompt in the form that this model's side takes."""
        sent = []
        for message in prompt:
            message = dict(message)
            if not self.keep_reasoning:
                message.pop("reasoning_content", None)
            if self.kind == "engine" and self.tool_calls == "native" and message.get("tool_calls"):
                # Chat templates write arguments themselves, so they get them as objects.
                message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
            sent.append(message)
        return sent

    def ask(
        self,
        prompt: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        max_time: float | None,
        step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> Turn:
        """The next answer. An error is tried once more; a cut answer is an answer, and never tried again.

        `step`: how many answers came before; with a seed it makes the draws of each answer its own.
        Raises ModelFailed, or WindowFull where a server whose window is not known refuses the prompt.
        """
        seed = None if self.params.seed is None else self.params.seed + step
        params = self.params.replace(max_tokens=max_tokens, max_time=max_time, seed=seed)
        problem = ""
        for _ in range(2):
            started = clock()
            try:
                result = self.generator.chat([self.messages(prompt)], params, tools=tools)[0]
            except ModelFailed:
                raise
            except EndstopError as error:
                problem = str(error)
                if isinstance(error, RequestRefused) and _TOO_LONG.search(problem):
                    counted = _PROMPT.search(problem)
                    if counted and isinstance(self.count, Estimate):
                        self.count.learn(prompt, tools, int(counted[1]))
                    raise WindowFull(problem) from error
                continue
            output = result.outputs[0]
            # Where a server has named a reason of its own (content_filter), it has answered.
            if output.finish_reason == "error" and output.stop_reason is None:
                problem = output.error or "the model reported an error and no reason"
                continue
            if isinstance(self.count, Estimate):
                self.count.learn(prompt, tools, result.usage.prompt_tokens)
            return read_turn(
                output,
                result.usage,
                seconds=clock() - started,
                max_tokens=max_tokens,
                reports_cuts=self.reports_cuts,
                price=self.price,
            )
        raise ModelFailed(f"the model failed twice: {problem}")

    def describe(self) -> dict[str, Any]:
        """For the record."""
        return {
            "name": self.name,
            "kind": self.kind,
            "window": self.window,
            "max_tokens": self.max_tokens,
            "tool_calls": self.tool_calls,
        }


def open_model(settings: ModelSettings, *, answered: int = 0) -> AgentModel:
    """Open the model that the settings name.

    `answered`: how many answers it has given in this run, for a script that goes on where it stopped.
    Raises EndstopError where there is no such model or no key.
    """
    if settings.name.startswith(SCRIPTED):
        return _scripted(settings, Path(settings.name.removeprefix(SCRIPTED)), answered)
    if settings.base_url is not None:
        return _endpoint(settings)
    if not settings.name:
        raise EndstopError(
            "no model is named: give --model with a directory, a Hub id or scripted:FILE, "
            "or --base-url with the name that the server knows."
        )
    return _engine(settings)


def api_key(name: str | None) -> str | None:
    """The value of the environment variable `name`. Raises EndstopError where it is not set, or is no key."""
    if name is None:
        return None
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        # Not shown: perhaps it is the key.
        raise EndstopError("model.api_key_env takes the name of a variable, not the key itself.")
    value = os.environ.get(name, "").strip()
    if not value:
        raise EndstopError(f"the environment variable {name}, which should hold the key, is not set.")
    if not value.isascii() or not value.isprintable():
        raise EndstopError(f"the key in {name} holds characters that no header can: only printable ASCII.")
    return value


def _endpoint(settings: ModelSettings) -> AgentModel:
    from endstop.runtime.openai_backend import OpenAIBackend

    if not settings.name:
        raise EndstopError("--base-url needs --model with the name that the server knows the model by.")
    key = api_key(settings.api_key_env)
    assert settings.base_url is not None
    backend: Generator = OpenAIBackend(
        settings.base_url,
        settings.name,
        api_key=key,
        accepts=settings.accepts,
        extra_body=settings.extra_body,
        timeout=settings.timeout,
    )
    text = settings.tool_calls == "text"
    return AgentModel(
        TextTools(backend) if text else backend,
        settings.name,
        "endpoint",
        _params(settings, {}),
        settings.max_tokens,
        settings.window,
        tool_calls="text" if text else "native",
        reports_cuts=bool(settings.reports_cuts),
        keep_reasoning=bool(settings.keep_reasoning),
        price=settings.price,
        secrets=(key,) if key else (),
    )


def _engine(settings: ModelSettings) -> AgentModel:
    from endstop.models.gguf import ensure_directory
    from endstop.protocol.params import recommended_sampling
    from endstop.protocol.resolve import resolve_model
    from endstop.runtime.llm import load_engine

    resolved = resolve_model(settings.name, revision=settings.revision, offline=settings.offline)
    directory = ensure_directory(resolved)
    engine = load_engine(
        directory,
        dtype=settings.dtype,
        device=settings.device,
        backend=settings.backend,
        max_rows=1,
        make_tool=None,
    )
    return engine_model(engine, settings, recommended_sampling(Path(directory)))


def engine_model(
    engine: Engine, settings: ModelSettings, recommended: Mapping[str, Any] | None = None
) -> AgentModel:
    """An engine that is open already, as a model for an agent."""
    if engine.chat_format is None:
        engine.close()
        raise EndstopError(f"{settings.name} has no chat template, so no agent can be run on it.")
    text = settings.tool_calls == "text" or (settings.tool_calls == "auto" and not _knows_tools(engine))
    renderer = engine.chat_format.renderer

    def count(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
        if text:
            rendered = renderer.render(as_text(messages, tools), add_generation_prompt=True)
        else:
            prompt = model.messages(messages)
            rendered = renderer.render(prompt, tools=list(tools) or None, add_generation_prompt=True)
        return len(rendered.ids)

    window = engine.context_len
    if settings.window is not None:
        window = settings.window if window is None else min(window, settings.window)
    model = AgentModel(
        TextTools(engine) if text else engine,
        settings.name,
        "engine",
        _params(settings, recommended or {}, trace=settings.trace),
        settings.max_tokens,
        window,
        count,
        "text" if text else "native",
        settings.reports_cuts is not False,
        settings.keep_reasoning is not False,
        settings.price,
    )
    return model


def _knows_tools(engine: Engine) -> bool:
    """Whether the chat template writes calls in a syntax that endstop reads. endstop's own `python` syntax is
    the calculator's, not one of tools with names."""
    assert engine.chat_format is not None
    source = engine.chat_format.renderer.template_for([{"type": "function"}])
    added = [token.content for token in engine.chat_format.tokenizer.added_tokens.values()]
    syntax = ToolSyntax.from_template(source, added)
    return syntax is not None and syntax.name != "python"


def _params(settings: ModelSettings, recommended: Mapping[str, Any], **fixed: Any) -> SamplingParams:
    try:
        return SamplingParams(**{**recommended, **settings.sampling, **fixed})
    except (ValueError, TypeError) as error:
        raise EndstopError(f"model.sampling: {error}.") from error


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _scripted(settings: ModelSettings, path: Path, answered: int) -> AgentModel:
    from endstop.testing import ScriptedChat

    turns, repeat = read_script(path)
    remaining: list[Any] = list(turns[answered:])
    if repeat and turns:
        remaining += [turns[-1]] * 10_000
    else:
        remaining.append(_Exhausted(path, len(turns)))
    return AgentModel(
        ScriptedChat(remaining),
        settings.name,
        "scripted",
        _params(settings, {}),
        settings.max_tokens,
        settings.window,
        reports_cuts=settings.reports_cuts is not False,
        price=settings.price,
    )


class _Exhausted:
    """The answer of a script that has none left."""

    def __init__(self, path: Path, turns: int) -> None:
        self.text = f"the script {path} has {turns} turns, and the run asked for another one."

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> str:
        raise ModelFailed(self.text)
