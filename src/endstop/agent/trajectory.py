"""The record of a run, which is also its prompt: one JSON file, saved whole after every step.

`messages` is the linear history. What the model is sent are exactly these messages, without their `meta` and
without those that a compaction marked `left_out`. Everything that decides how a run goes on stands in this
file (the gate's state, the verification's baseline, time and cost so far), so a run that was killed goes on
from it. docs/agent.md describes the format, trajectory.schema.json checks it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from endstop.agent.decisions import Decision, End
from endstop.agent.turns import Turn
from endstop.protocol.errors import EndstopError

FORMAT = "endstop.trajectory"
VERSION = 1
# What stands in the place of a secret.
REDACTED = "[redacted]"
_UNSAVED = frozenset({"path", "secrets", "watch"})

Message = dict[str, Any]


def _nobody(kind: str, data: Any) -> None:
    """Nobody watches."""


@dataclass(slots=True)
class Trajectory:
    """One run.

    Attributes:
        path: where it is saved. id: of the run.
        workspace, task, model, sandbox, tools, settings: what the run was started with, as plain data.
        baseline: id of the tree at the start.
        verification, gate: their states; None where there is none yet.
        messages: see the module. Each has `meta`: `step`, `kind` of what the harness said, for an answer how
            it ended and what it cost, for a result `ok`, `seconds`, `tree` and the `decision` it carries.
        seconds, cost: so far, over all resumptions.
        resumed: what was found at each resumption.
        outcome: how it ended, None while it has not.
        secrets: values that are never written.
        watch: is told what happens: `message` with each new one, and `asking`, `running` and `deciding`, with
            the call, before what takes time. Neither is part of the file.
    """

    path: Path
    id: str
    workspace: str = ""
    created: str = ""
    task: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    sandbox: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    baseline: str = ""
    verification: dict[str, Any] | None = None
    gate: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    seconds: float = 0.0
    cost: float = 0.0
    resumed: list[dict[str, Any]] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    secrets: tuple[str, ...] = ()
    watch: Callable[[str, Any], None] = _nobody

    # What is asked of it.

    def prompt(self) -> list[Message]:
        """The messages as a model gets them."""
        return [
            {key: value for key, value in message.items() if key != "meta"}
            for message in self.messages
            if "left_out" not in message["meta"]
        ]

    @property
    def turns(self) -> list[Message]:
        """The model's answers, in order."""
        return [message for message in self.messages if message["role"] == "assistant"]

    @property
    def steps(self) -> int:
        """How many answers the model has given."""
        return len(self.turns)

    @property
    def tree(self) -> str:
        """The tree that was seen last."""
        trees = (message["meta"].get("tree") for message in reversed(self.messages))
        return next((cast(str, tree) for tree in trees if tree), self.baseline)

    def open_calls(self) -> list[dict[str, Any]]:
        """Calls of the last answer that nothing has answered yet."""
        for place in range(len(self.messages) - 1, -1, -1):
            if self.messages[place]["role"] == "assistant":
                answered = {message.get("tool_call_id") for message in self.messages[place + 1 :]}
                calls = self.messages[place].get("tool_calls") or []
                return [call for call in calls if call["id"] not in answered]
        return []

    def decisions(self) -> list[tuple[int, str]]:
        """Step and code of everything that the gate decided."""
        found = []
        for message in self.messages:
            decision = message["meta"].get("decision")
            if decision:
                found.append((message["meta"]["step"], decision["code"]))
        return found

    # What happens to it.

    def spend(self, cost: float) -> None:
        self.cost += cost

    def say(self, role: str, content: str, kind: str, **meta: Any) -> Message:
        """Add what the harness says."""
        message = {"role": role, "content": content, "meta": {"kind": kind, "step": self.steps, **meta}}
        return self._add(message)

    def add_turn(self, turn: Turn, **meta: Any) -> Message:
        """Add an answer of the model. Its calls get ids that every chat template takes."""
        step = self.steps + 1
        message: Message = {"role": "assistant", "content": turn.content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": f"c{step:05d}{index:03d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(turn.calls)
            ]
        message["meta"] = {"step": step, **turn.meta(), **meta}
        return self._add(message)

    def answer(self, call: Mapping[str, Any], content: str, ok: bool, **meta: Any) -> Message:
        """Add the result of a call."""
        name = call["function"]["name"]
        return self._add(
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": name,
                "content": content,
                "meta": {"step": self.steps, "ok": ok, **meta},
            }
        )

    def leave_out(self, messages: Sequence[Message], note: str) -> None:
        """Compaction: these messages are no longer sent, `note` stands where they were."""
        if not messages:
            return
        gone = {id(message) for message in messages}
        last = max(place for place, message in enumerate(self.messages) if id(message) in gone)
        for message in messages:
            message["meta"]["left_out"] = self.steps
        meta = {"kind": "compaction", "step": self.steps}
        message = self._clean({"role": "user", "content": note, "meta": meta})
        self.messages.insert(last + 1, message)
        self.watch("message", message)

    def _add(self, message: Message) -> Message:
        message = self._clean(message)
        self.messages.append(message)
        self.watch("message", message)
        return message

    def _clean(self, value: Any) -> Any:
        return storable(value, self.secrets)

    # The file.

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for item in fields(self):
            if item.name not in _UNSAVED:
                data[item.name] = getattr(self, item.name)
        return cast(dict[str, Any], self._clean(data))

    def save(self) -> None:
        """Write the file whole: after this it survives kill -9 and a power cut. Raises EndstopError where it
        cannot be written; what was saved before is as it was."""
        text = json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=1)
        part = self.path.with_name(f"{self.path.name}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with open(os.open(part, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path)
            with _opened_directory(self.path.parent) as directory:
                os.fsync(directory)
        except OSError as error:
            raise EndstopError(f"the record {self.path} cannot be written: {error.strerror}.") from error

    @classmethod
    def load(cls, path: Path, secrets: Sequence[str] = ()) -> Trajectory:
        """Raises EndstopError for what is no trajectory of a version known here."""
        path = path.resolve()  # what runs beside it runs in other directories
        path = path / "trajectory.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise EndstopError(f"there is no run at {path}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise EndstopError(f"{path} cannot be read as a trajectory: {error}.") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise EndstopError(f"{path} is not a trajectory: it does not say format {FORMAT!r}.")
        if data.get("version") != VERSION:
            raise EndstopError(
                f"{path} is a trajectory of version {data.get('version')!r}; this endstop reads {VERSION}."
            )
        names = {item.name for item in fields(cls)} - _UNSAVED
        missing = {"id", "messages", "task", "baseline"} - data.keys()
        if missing:
            raise EndstopError(f"{path} is a broken trajectory: it has no {min(missing)!r}.")
        values = {name: data[name] for name in names if name in data}
        wrong = _misshapen(values)
        if wrong:
            raise EndstopError(f"{path} is a broken trajectory, perhaps edited by hand: {wrong}.")
        return cls(path=path, secrets=tuple(secrets), **values)


_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "workspace", "created", "baseline"), (str,)),
    **dict.fromkeys(("task", "model", "sandbox", "settings", "gate"), (dict,)),
    **dict.fromkeys(("tools", "messages", "resumed"), (list,)),
    **dict.fromkeys(("verification", "outcome"), (dict, type(None))),
    **dict.fromkeys(("seconds", "cost"), (int, float)),
}


def _misshapen(values: Mapping[str, Any]) -> str:
    """What in a record is not of the form that the loop relies on, "" where all is. Long records are read at
    every resumption, so this is no schema."""
    for name, value in values.items():
        if not isinstance(value, _KINDS[name]):
            return f"{name} is {_type_of(value)}"
    if not values["messages"]:
        return "it has no messages"
    for number, message in enumerate(values["messages"]):
        wrong = "it is no object" if not isinstance(message, dict) else _misshapen_message(message)
        if wrong:
            return f"message {number}: {wrong}"
    return ""


def _misshapen_message(message: Mapping[str, Any]) -> str:
    role, meta, calls = (message.get(name) for name in ("role", "meta", "tool_calls"))
    if role not in ("system", "user", "assistant", "tool") or not isinstance(message.get("content"), str):
        return "it has no role that is known, or no text"
    if not isinstance(meta, dict) or not isinstance(meta.get("step"), int):
        return "its meta has no step"
    decision = meta.get("decision")
    if decision is not None:
        parts = isinstance(decision, dict) and [decision.get(name) for name in ("type", "code", "message")]
        if not parts or not all(isinstance(part, str) for part in parts) or "details" not in decision:
            return "its decision is none"
    if role == "assistant" and not isinstance(meta.get("usage"), dict):
        return "its meta has no usage"
    if role == "tool" and not all(isinstance(message.get(name), str) for name in ("name", "tool_call_id")):
        return "it answers no call"
    for call in calls or ():
        function = call.get("function") if isinstance(call, dict) else None
        parts = isinstance(function, dict) and [
            call.get("id"),
            function.get("name"),
            function.get("arguments"),
        ]
        if not parts or not all(isinstance(part, str) for part in parts):
            return "a call in it has no id, name or arguments"
    return ""


def _type_of(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def storable(value: Any, secrets: Sequence[str] = ()) -> Any:
    """A copy without secrets, and without halves of characters, which no file and no terminal can hold."""
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode("utf-8")
        for secret in secrets:
            value = value.replace(secret, REDACTED)
        return value
    if isinstance(value, Mapping):
        return {storable(key, secrets): storable(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item, secrets) for item in value]
    return value


def decision_meta(decision: Decision) -> dict[str, Any]:
    """A decision as it stands in the record."""
    if isinstance(decision, End):
        return {"type": "end", "code": decision.outcome, **_rest(decision)}
    return {"type": "refusal", "code": decision.code, **_rest(decision)}


def _rest(decision: Decision) -> dict[str, Any]:
    values = asdict(decision)
    return {"message": values["message"], "details": list(values["details"])}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def _opened_directory(path: Path) -> Iterator[int]:
    directory = os.open(path, os.O_RDONLY)
    try:
        yield directory
    finally:
        os.close(directory)
