"""Turns of a model, written down in a YAML or JSON file: for demonstrations and tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from endstop.agent.reading import read_mapping
from endstop.outcomes import StopKind
from endstop.protocol.errors import EndstopError
from endstop.protocol.toolcalls import ToolCall
from endstop.testing import Reply


def read_script(path: Path) -> tuple[list[Reply], bool]:
    """The turns of a script, and whether its last one is repeated for ever. docs/agent.md has the format.

    Raises EndstopError for a file that is no script, with the number of the turn.
    """
    data = read_mapping(path)
    turns, then = data.get("turns"), data.get("then", "end")
    if not isinstance(turns, list) or data.keys() - {"turns", "then"} or then not in ("end", "repeat"):
        raise EndstopError(
            f"{path}: a script is a mapping with `turns`, a list, and `then`: end or repeat (the last turn)."
        )
    return [
        reply_of(turn, f"{path}, turn {number}") for number, turn in enumerate(turns, 1)
    ], then == "repeat"


_TURN_KEYS = frozenset({"text", "calls", "reasoning", "stop_kind", "open_call", "tokens"})


def reply_of(turn: Any, place: str = "turn") -> Reply:
    """A turn of a script: a text, or a mapping with `text`, `calls`, `reasoning`, `stop_kind`, `open_call`
    and `tokens`. A call is `{name: arguments}`, arguments a mapping or the JSON text as it is written."""
    if isinstance(turn, str):
        return Reply(turn)
    if not isinstance(turn, Mapping):
        raise EndstopError(f"{place} is neither a text nor a mapping.")
    unknown = sorted(turn.keys() - _TURN_KEYS)
    if unknown:
        raise EndstopError(f"{place}: unknown key {unknown[0]!r}; known are {', '.join(sorted(_TURN_KEYS))}.")
    calls = []
    for call in turn.get("calls") or ():
        if not isinstance(call, Mapping) or len(call) != 1:
            raise EndstopError(f"{place}: a call is one mapping of a tool's name to its arguments.")
        [(name, arguments)] = call.items()
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        calls.append(ToolCall(str(name), text, text))
    kind = turn.get("stop_kind", "turn_end")
    if kind not in get_args(StopKind):
        raise EndstopError(f"{place}: stop_kind {kind!r} is none of {', '.join(get_args(StopKind))}.")
    return Reply(
        str(turn.get("text") or ""),
        tuple(calls),
        str(turn.get("reasoning") or ""),
        kind,
        open_call=turn.get("open_call"),
        tokens=turn.get("tokens"),
    )
