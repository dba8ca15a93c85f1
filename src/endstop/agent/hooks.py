"""The hook formats of other agents: what they send when their model wants to stop, and what they read.

| format | "go on" | "it may stop" |
|---|---|---|
| `claude-code`, `codex` | `{"decision": "block", "reason": ...}` | `{"systemMessage": ...}` |
| `cursor` | `{"followup_message": ...}` | `{}` |
| `plain` | exit 2, the reason on stderr | the outcome's exit code, a line on stdout |

All but `plain` send JSON on stdin and get exit code 0. An error of the hook itself exits 1: no harness reads
that as "go on", so a broken set-up never holds an agent in a loop. docs/gate.md has the formats' sources.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from endstop.outcomes import EXIT_CODES, AgentOutcome
from endstop.protocol.errors import EndstopError

HookFormat = Literal["claude-code", "codex", "cursor", "plain"]
HOOK_FORMATS: tuple[HookFormat, ...] = get_args(HookFormat)
# `prompt`: a person said something, so a run that has ended may begin anew.
EventKind = Literal["start", "prompt", "stop", "other"]
GO_ON = 2
# Claude Code shows its model no more than 10,000 characters of a hook's text.
TEXT_LIMIT = 9000
INPUT_LIMIT = 8 << 20

_KINDS: dict[str, EventKind] = {
    "sessionstart": "start",
    "userpromptsubmit": "prompt",
    "beforesubmitprompt": "prompt",
    "stop": "stop",
}


@dataclass(frozen=True, slots=True)
class HookEvent:
    """What a harness reported.

    Attributes:
        name: as the harness spells it. session: whose it is.
        workspace: where it says that it works, if it does.
        not_judged: why this stop is none that claims an end; empty where it is one.
        compacted: a `start` in the middle of a session, after its history was shortened.
    """

    kind: EventKind
    name: str = ""
    session: str = "default"
    workspace: Path | None = None
    not_judged: str = ""
    compacted: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What the hook says: `go_on` sends the model back with the message, `stop` lets it stop with the
    outcome, `silent` has nothing to say."""

    kind: Literal["go_on", "stop", "silent"]
    message: str = ""
    outcome: AgentOutcome | None = None


@dataclass(frozen=True, slots=True)
class HookOutput:
    """What the process writes and exits with."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


def read_event(form: HookFormat, text: str, environment: Mapping[str, str]) -> HookEvent:
    """The event that a harness wrote to stdin. Raises EndstopError for what is no such event."""
    if form == "plain":
        return HookEvent("stop")
    if not text.strip():
        raise EndstopError(f"stdin is no JSON of a {form} hook: it is empty (by hand: --format plain)")
    # Cursor on Windows begins with a byte-order mark.
    try:
        data = json.loads(text.lstrip("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise EndstopError(f"stdin is no JSON of a {form} hook: {error}") from None
    if not isinstance(data, dict):
        raise EndstopError(f"stdin is no JSON object of a {form} hook")
    name = _text(data, "hook_event_name")
    session = _text(data, "conversation_id" if form == "cursor" else "session_id")
    if not session and form == "cursor":
        session = _text(data, "session_id")
    if not name or not session:
        wanted = "conversation_id" if form == "cursor" else "session_id"
        raise EndstopError(f"stdin is no event of a {form} hook: hook_event_name or {wanted} is missing")
    roots = data.get("workspace_roots")
    place = environment.get("CURSOR_PROJECT_DIR" if form == "cursor" else "CLAUDE_PROJECT_DIR", "")
    if not place and isinstance(roots, list) and roots and isinstance(roots[0], str):
        place = roots[0]
    place = place or _text(data, "cwd")
    if "\0" in place:
        raise EndstopError(f"stdin is no event of a {form} hook: its directory holds a NUL character")
    return HookEvent(
        kind=_KINDS.get(name.lower(), "other"),
        name=name,
        session=session,
        workspace=Path(place) if place else None,
        not_judged=_not_judged(data),
        compacted=data.get("source") == "compact",
    )


def _not_judged(data: Mapping[str, Any]) -> str:
    status = data.get("status")
    if isinstance(status, str) and status != "completed":
        return f"the turn was {status}"
    if data.get("permission_mode") == "plan":
        return "the agent is planning and may not edit"
    return ""


def write_answer(form: HookFormat, event: HookEvent, answer: Answer) -> HookOutput:
    """An answer in the harness's own form."""
    text = bounded(answer.message)
    if form == "plain":
        return _plain(answer)
    if event.kind in ("start", "prompt"):
        return _for_start(form, event, text)
    if answer.kind == "go_on":
        told = {"followup_message": text} if form == "cursor" else {"decision": "block", "reason": text}
        return HookOutput(json.dumps(told))
    if form == "cursor":
        return HookOutput("{}", f"{text}\n" if text else "")
    return HookOutput(json.dumps({"systemMessage": text}) if text else "")


def _for_start(form: HookFormat, event: HookEvent, text: str) -> HookOutput:
    told: dict[str, Any]
    if form == "cursor":
        # Its prompt hook may only let the prompt through.
        told = {"continue": True} if event.kind == "prompt" else {"additional_context": text}
        return HookOutput(json.dumps(told))
    told = {"hookSpecificOutput": {"hookEventName": event.name, "additionalContext": text}}
    return HookOutput(json.dumps(told) if text else "")


def _plain(answer: Answer) -> HookOutput:
    line = f"{answer.message}\n" if answer.message else ""
    if answer.kind == "go_on":
        return HookOutput(stderr=line, exit_code=GO_ON)
    return HookOutput(line, exit_code=EXIT_CODES[answer.outcome] if answer.outcome else 0)


def bounded(text: str) -> str:
    """A text within what every harness passes on whole: its middle goes, its ends stay."""
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2 - 40
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    return value if isinstance(value, str) else ""
