"""How an agent runs, as settings: a YAML or TOML file, then `key=value` overrides, every key checked.

Precedence, from strong to weak: flags, `-c key=value`, the task file, the settings file, defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator

from endstop.agent.reading import nearest, read_yaml, validation_sentence
from endstop.agent.task import Seconds, Strict, Task
from endstop.agent.virtualenv import find_virtualenv
from endstop.protocol.errors import EndstopError
from endstop.protocol.params import FIELD_NAMES

SCRIPTED = "scripted:"
ToolCalls = Literal["auto", "native", "text"]


class Price(Strict):
    """In any one currency, for a million tokens. `cached` None: like `input`."""

    input: Annotated[float, Field(ge=0)] = 0.0
    output: Annotated[float, Field(ge=0)] = 0.0
    cached: Annotated[float, Field(ge=0)] | None = None


class ModelSettings(Strict):
    """Which model, and how it is asked.

    Attributes:
        name: a directory, a .gguf file, a Hub id or a registry name for our own engine; the server's name of
            the model where `base_url` is given; `scripted:FILE` for turns that are written down.
        base_url: of an OpenAI-compatible endpoint, up to and including `/v1`.
        api_key_env: name of the environment variable that holds its key.
        tool_calls: `native` leaves calls to the chat template or the server; `text` describes the tools in
            the system message and reads calls from the text; `auto` is `text` for templates without tools.
        window: tokens of the context window; None: the model's own, unknown for an endpoint.
        max_tokens: of one answer.
        sampling: further fields of SamplingParams.
        reports_cuts: whether the backend is known to say `length` when it cut an answer. None: yes for our
            engine and scripted turns, no for an endpoint; then an answer of exactly `max_tokens` is a cut.
        keep_reasoning: send the reasoning of earlier turns again. None: yes for our engine.
        trace: record P(stop) where the model is ours.
        accepts, extra_body, timeout: of the endpoint; see OpenAIBackend.
    """

    name: str = ""
    base_url: str | None = None
    api_key_env: str | None = None
    tool_calls: ToolCalls = "auto"
    window: Annotated[int, Field(ge=256)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    sampling: Mapping[str, Any] = Field(default_factory=dict)
    price: Price = Price()
    reports_cuts: bool | None = None
    keep_reasoning: bool | None = None
    trace: bool = True
    dtype: str = "auto"
    device: str = "auto"
    backend: Literal["native", "transformers"] = "native"
    revision: str | None = None
    offline: bool | None = None
    accepts: tuple[str, ...] = ()
    extra_body: Mapping[str, Any] = Field(default_factory=dict)
    timeout: Seconds = 600.0

    @field_validator("base_url")
    @classmethod
    def _an_address(cls, url: str | None) -> str | None:
        try:
            whole = url is None or (urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname)
        except ValueError:
            whole = False
        if not whole:
            raise ValueError("has to be an address such as http://localhost:8000/v1")
        return url

    @field_validator("sampling")
    @classmethod
    def _known_sampling(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {"n", "max_tokens", "max_time", "trace"}
        for name in values:
            if name in own or name not in FIELD_NAMES:
                raise ValueError(f"has no {name!r}; the nearest is {nearest(name, FIELD_NAMES - own)!r}")
        return values


class SandboxSection(Strict):
    """Where commands run.

    Attributes:
        mode: `auto` takes the strongest that this machine allows.
        network: whether commands reach it.
        read_only: host paths that commands may read. path: entries put before PATH.
        virtualenv: `auto` is the activated one; a path; or `none`.
        also_at: host paths that lead to the workspace in the sandbox, besides its own: where packages of the
            virtualenv were installed from as editable, if the workspace is another copy.
        environment: variables of the commands. pass_env: names that are taken over from the own environment.
        allow_secrets: names of secrets that may be passed all the same.
        seconds, memory_bytes, processes, file_bytes, tmp_bytes: of one command; None: see CommandLimits.
    """

    mode: Literal["auto", "bubblewrap", "namespaces", "process"] = "auto"
    network: bool = False
    read_only: tuple[Path, ...] = ()
    path: tuple[str, ...] = ()
    virtualenv: str = "auto"
    also_at: tuple[Path, ...] = ()
    environment: Mapping[str, str] = Field(default_factory=dict)
    pass_env: tuple[str, ...] = ()
    allow_secrets: tuple[str, ...] = ()
    seconds: Seconds | None = None
    memory_bytes: Annotated[int, Field(gt=0)] | None = None
    processes: Annotated[int, Field(gt=0)] | None = None
    file_bytes: Annotated[int, Field(gt=0)] | None = None
    tmp_bytes: Annotated[int, Field(gt=0)] | None = None


class ContextSettings(Strict):
    """How the window is used.

    Attributes:
        output_bytes: of one tool result, half of it fewer where the window is small.
        remind_at: share of the window from which on the harness repeats the task's state.
        keep: share of the window that compaction leaves filled.
        answer: tokens kept free for the next answer; less than this left ends the run.
    """

    output_bytes: Annotated[int, Field(ge=500)] = 16_000
    remind_at: Annotated[float, Field(gt=0, lt=1)] = 0.7
    keep: Annotated[float, Field(gt=0, lt=1)] = 0.5
    answer: Annotated[int, Field(ge=16)] = 256


class PromptSettings(Strict):
    """Jinja templates in place of the built-in ones; paths."""

    system: Path | None = None
    task: Path | None = None
    compaction: Path | None = None


class ToolSettings(Strict):
    """Which tools the model has.

    Attributes:
        leave_out: names of standard tools.
        modules: Python files whose `@tool` functions are added. They run outside the sandbox.
        mcp: MCP servers by name: `command` and `args`, or `url`.
        oracle: a second model that may be asked, read-only. oracle_calls: how often.
    """

    leave_out: tuple[str, ...] = ()
    modules: tuple[Path, ...] = ()
    mcp: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    oracle: ModelSettings | None = None
    oracle_calls: Annotated[int, Field(ge=0)] = 5


class AgentSettings(Strict):
    """Everything about a run but the workspace.

    Attributes:
        unverified: run without a check, even if the project has one; the run can only end as `unverified`.
        secrets: names of environment variables that never enter the sandbox, and whose values never enter the
            trajectory. The key of the model's endpoint is always one.
        interactive: a person can be asked.
        state: the directory of the run; None: a new one below the user's state directory.
    """

    task: Task
    model: ModelSettings = ModelSettings()
    sandbox: SandboxSection = SandboxSection()
    context: ContextSettings = ContextSettings()
    prompts: PromptSettings = PromptSettings()
    tools: ToolSettings = ToolSettings()
    unverified: bool = False
    secrets: tuple[str, ...] = ()
    interactive: bool = False
    state: Path | None = None


def anchored(settings: AgentSettings, directory: Path) -> AgentSettings:
    """The settings with every path made absolute, so that a run can be resumed from anywhere."""

    def place(path: Path | None) -> Path | None:
        return None if path is None else directory / path

    def model(given: ModelSettings) -> ModelSettings:
        name = given.name
        if name.startswith(SCRIPTED):
            name = f"{SCRIPTED}{directory / name.removeprefix(SCRIPTED)}"
        elif name and given.base_url is None and (directory / name).exists():
            name = str(directory / name)
        return given.model_copy(update={"name": name})

    prompts, tools, sandbox = settings.prompts, settings.tools, settings.sandbox
    virtualenv = find_virtualenv(sandbox.virtualenv, directory)
    oracle = None if tools.oracle is None else model(tools.oracle)
    return settings.model_copy(
        update={
            "model": model(settings.model),
            "sandbox": sandbox.model_copy(
                update={
                    "read_only": tuple(directory / path.expanduser() for path in sandbox.read_only),
                    "path": tuple(os.path.expanduser(entry) for entry in sandbox.path),
                    "also_at": tuple(directory / path.expanduser() for path in sandbox.also_at),
                    "virtualenv": "none" if virtualenv is None else str(virtualenv),
                }
            ),
            "prompts": PromptSettings(
                system=place(prompts.system), task=place(prompts.task), compaction=place(prompts.compaction)
            ),
            "tools": tools.model_copy(
                update={"modules": tuple(directory / path for path in tools.modules), "oracle": oracle}
            ),
        }
    )


def anchored_part(data: Mapping[str, Any], directory: Path, source: str) -> dict[str, Any]:
    """A part of the settings, with its paths made absolute. Raises EndstopError as `make_settings` does."""
    task = {"task": "any", **(data.get("task") or {})}
    whole = anchored(make_settings({**data, "task": task}, source), directory)
    return _only(whole.model_dump(mode="json"), data)


def _only(whole: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Of a mapping the keys that another has, all the way down."""
    return {
        key: _only(whole[key], value)
        if isinstance(value, Mapping) and isinstance(whole[key], Mapping)
        else whole[key]
        for key, value in wanted.items()
    }


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings key by key; anything else of `over` replaces what `base` has.

    Raises EndstopError where `base` has something else in the place of a mapping.
    """
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and below is not None:
            if not isinstance(below, Mapping):
                raise EndstopError(f"{key} must be a mapping, got {below!r}.")
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def overrides(entries: Sequence[str]) -> dict[str, Any]:
    """`a.b=value` entries as one mapping; a value is read as YAML, so `true`, `3` and `[a, b]` are what
    they look like. Unknown keys are found when the settings are made."""
    result: dict[str, Any] = {}
    for entry in entries:
        key, separator, value = entry.partition("=")
        if not separator or not all(key.split(".")):
            raise EndstopError(f"-c takes key=value such as task.bounds.steps=20, got {entry!r}.")
        try:
            nested: Any = read_yaml(value)
        except ValueError as error:
            raise EndstopError(
                f"-c {key}: the value cannot be read: {' '.join(str(error).split())}."
            ) from error
        for name in reversed(key.split(".")):
            nested = {name: nested}
        result = merged(result, nested)
    return result


def make_settings(data: Mapping[str, Any], source: str = "the settings") -> AgentSettings:
    """Raises EndstopError with one sentence for what does not fit, unknown keys with the nearest name."""
    try:
        return AgentSettings.model_validate(dict(data))
    except ValidationError as error:
        raise EndstopError(f"{source}: {validation_sentence(error, AgentSettings)}") from error
