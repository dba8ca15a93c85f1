"""The context window: what fills it, when the task's state is repeated, what is left out when it is full.

The state (task, checklist with status, last raw verification, tree) belongs to the harness: the gate makes it
anew whenever it is shown, and no model summarises it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from endstop.agent.prompts import render
from endstop.agent.settings import ContextSettings
from endstop.agent.trajectory import Message, Trajectory

Count = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], int]

# Bytes of a token where nothing is known yet: on the safe side for code.
_BYTES_PER_TOKEN = 3.0
_DIGEST_LINES = 60


class Estimate:
    """Tokens of a prompt whose tokenizer is elsewhere: bytes over a ratio, learned from the usage that the
    server reports."""

    def __init__(self) -> None:
        self.bytes_per_token = _BYTES_PER_TOKEN

    def __call__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
        return int(_bytes(messages, tools) / self.bytes_per_token) + 1

    def learn(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tokens: int
    ) -> None:
        """Take what a prompt really had. Servers that report nothing say 0."""
        if tokens > 0:
            self.bytes_per_token = min(8.0, max(1.0, _bytes(messages, tools) / tokens))


class ContextBudget:
    """Keeps a trajectory's prompt inside the window.

    Args:
        window: tokens; None where it is not known, and then nothing is left out.
        count: tokens of messages and tool definitions.
        max_tokens: of an answer.
        template: of the note that compaction leaves, in place of the built-in one.
    """

    def __init__(
        self,
        window: int | None,
        count: Count,
        max_tokens: int,
        settings: ContextSettings,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Path | None = None,
    ) -> None:
        self.window = window
        self.count = count
        self.max_tokens = max_tokens
        self.settings = settings
        self.tools = tools
        self.template = template

    @property
    def output_bytes(self) -> int:
        """What one tool result may have: in a small window it takes an eighth of it at most."""
        if self.window is None:
            return self.settings.output_bytes
        return min(self.settings.output_bytes, max(500, int(self.window * _BYTES_PER_TOKEN / 8)))

    def make_room(self, trajectory: Trajectory, state: Callable[[], str]) -> int | None:
        """Fit the prompt into the window: tokens that the next answer may have, None if no room is left.

        `state` gives the block that is repeated after a compaction, and once when the window is nearly full.
        """
        if self.window is None:
            return self.max_tokens
        used = self._used(trajectory)
        wanted = min(self.max_tokens, max(self.settings.answer, self.window // 4))
        if used + wanted > self.window:
            self._compact(trajectory, state())
            used = self._used(trajectory)
        elif used > self.settings.remind_at * self.window and not _reminded(trajectory):
            trajectory.say("user", state(), "state")
            used = self._used(trajectory)
        left = self.window - used
        return min(self.max_tokens, left) if left >= min(self.settings.answer, self.max_tokens) else None

    def _used(self, trajectory: Trajectory) -> int:
        return self.count(trajectory.prompt(), self.tools)

    def _compact(self, trajectory: Trajectory, state: str) -> None:
        """Leave out the oldest turns, as few as make room, whole turns with their results only."""
        assert self.window is not None
        head, groups = _turn_groups(trajectory)
        room = self.settings.keep * self.window

        def fits(dropped: int) -> bool:
            kept = [message for group in groups[dropped:] for message in group]
            note = {"role": "user", "content": self._note(trajectory, groups[:dropped], state)}
            prompt = [*_plain(head), note, *_plain(kept)]
            return self.count(prompt, self.tools) <= room

        low, high = 1, len(groups)
        while low < high:  # the smallest number of dropped groups that fits, or all of them
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        dropped = [message for group in groups[:low] for message in group]
        trajectory.leave_out(dropped, self._note(trajectory, groups[:low], state))

    def _note(self, trajectory: Trajectory, dropped: Sequence[Sequence[Message]], state: str) -> str:
        assert self.window is not None
        gone = {id(message) for group in dropped for message in group}
        lines = [
            line
            for message in trajectory.messages
            if id(message) in gone or "left_out" in message["meta"]
            for line in _digest(message)
        ]
        budget = int(self.window * _BYTES_PER_TOKEN / 10)
        kept: list[str] = []
        for line in reversed(lines[-_DIGEST_LINES:]):
            budget -= len(line)
            if budget < 0:
                break
            kept.insert(0, line)
        if len(kept) < len(lines):
            kept.insert(0, f"({len(lines) - len(kept)} earlier ones are not listed)")
        return render("compaction", self.template, done=kept, state=state)


def shorten(text: str, limit: int) -> str:
    """`text` within `limit` bytes: its beginning and, twice as long, its end, where results stand."""
    data = text.encode("utf-8")
    if len(data) <= limit:
        return text
    head, tail = limit // 3, limit - limit // 3
    first = data[:head].decode("utf-8", "ignore")
    last = data[-tail:].decode("utf-8", "ignore")
    return f"{first}\n[... {len(data) - head - tail} bytes left out ...]\n{last}"


def _turn_groups(trajectory: Trajectory) -> tuple[list[Message], list[list[Message]]]:
    """What is sent: the head (system, task) and the turns with what answers them. Earlier notes of the
    harness form a group with the turn before them, so that they go with it."""
    head: list[Message] = []
    groups: list[list[Message]] = []
    for message in trajectory.messages:
        meta = message["meta"]
        if "left_out" in meta:
            continue
        if not groups and message["role"] != "assistant" and meta.get("kind") in ("system", "task"):
            head.append(message)
        elif message["role"] == "assistant" or not groups:
            groups.append([message])
        else:
            groups[-1].append(message)
    return head, groups


def _reminded(trajectory: Trajectory) -> bool:
    """Whether the state was repeated since the last compaction."""
    kinds = (
        message["meta"].get("kind")
        for message in reversed(trajectory.messages)
        if "left_out" not in message["meta"]
    )
    return next((kind == "state" for kind in kinds if kind in ("state", "compaction")), False)


def _digest(message: Message) -> list[str]:
    """One line for each thing that was done."""
    step = message["meta"].get("step", 0)
    if message["role"] == "tool":
        how = "ok" if message["meta"].get("ok") else "failed"
        decision = message["meta"].get("decision")
        if decision:
            how = f"{decision['code']}"
        return [f"{step}. {message['name']}: {how}; {_line(message['content'])}"]
    if message["role"] == "assistant":
        calls = message.get("tool_calls") or ()
        shown = [
            f"{step}. called {call['function']['name']} {_line(call['function']['arguments'])}"
            for call in calls
        ]
        return shown or [f"{step}. said: {_line(message['content'])}"]
    return []


def _line(text: str) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= 120 else f"{shown[:80]} ... {shown[-40:]}"


def _plain(messages: Sequence[Message]) -> list[Message]:
    return [{key: value for key, value in message.items() if key != "meta"} for message in messages]


def _bytes(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
    return len(json.dumps([list(messages), list(tools)], ensure_ascii=False).encode("utf-8", "replace"))
