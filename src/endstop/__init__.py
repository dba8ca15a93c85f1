"""endstop makes language models stop at the right place.

The names for anyone's own loop (StopMachine, StopSet, SamplingParams, TokenBytes, StopStrings) load
in milliseconds and need no torch; the engine's names load what they need when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives. They are loaded on first use, so that one name does not cost them all.
_HOMES = {
    "AsyncLLM": "endstop.runtime.async_llm",
    "Engine": "endstop.runtime.engine",
    "LLM": "endstop.runtime.llm",
    "RepetitionDetection": "endstop.protocol.params",
    "SamplingParams": "endstop.protocol.params",
    "StopMachine": "endstop.protocol.machine",
    "StopSet": "endstop.protocol.stopset",
    "StopStep": "endstop.protocol.step",
    "StopStrings": "endstop.protocol.stopstrings",
    "TokenBytes": "endstop.protocol.tokenbytes",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Engine",
    "RepetitionDetection",
    "SamplingParams",
    "StopMachine",
    "StopSet",
    "StopStep",
    "StopStrings",
    "TokenBytes",
    "__version__",
]

if TYPE_CHECKING:
    from endstop.protocol.machine import StopMachine
    from endstop.protocol.params import RepetitionDetection, SamplingParams
    from endstop.protocol.step import StopStep
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.stopstrings import StopStrings
    from endstop.protocol.tokenbytes import TokenBytes
    from endstop.runtime.async_llm import AsyncLLM
    from endstop.runtime.engine import Engine
    from endstop.runtime.llm import LLM


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'endstop' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
