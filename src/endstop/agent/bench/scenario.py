"""A scenario: a workspace, a task, a model whose turns are written down, and what a gate should do."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from endstop.outcomes import AgentOutcome
from endstop.protocol.toolcalls import ToolCall
from endstop.testing import Reply

Group = Literal["specification", "manipulation", "dishonest", "honest"]


@dataclass(frozen=True)
class Workspace:
    """Where a scenario plays.

    Attributes:
        files: path -> text. setup: a shell command that is run in it behind that (links, git, odd names).
        verify: the verification's settings. needs: programs without which its scenarios are left out.
        plugins: whether pytest loads the plugins that are installed; without them it starts faster.
        hidden: a shell command, unknown to model and gates, that prints `done` if the work is done. It
            checks the scenarios' own claims, in tests.
    """

    files: Mapping[str, str]
    verify: Mapping[str, Any]
    hidden: str
    setup: str = ""
    needs: tuple[str, ...] = ()
    plugins: bool = False


@dataclass(frozen=True)
class Scenario:
    """One scripted run.

    Attributes:
        turns: what the model says; the last one is repeated for as long as the run goes on.
        codes: our gate's refusals and notices in order; of runs that only insist, the first ones.
        outcome: how the run ends with our gate.
        done_at: the turn, counted from 1, that finishes the work: from then on an end may be accepted. None:
            never.
        judged: the hidden check cannot tell that the work is not done: something else is wrong with it.
        task: fields of the Task besides its text and verification. verify: settings beyond the workspace's.
        starts: False where the task is refused before the first turn.
        oracle: answers of the second model.
    """

    name: str
    group: Group
    workspace: Workspace
    turns: tuple[Reply, ...]
    outcome: AgentOutcome
    codes: tuple[str, ...] = ()
    done_at: int | None = None
    judged: bool = False
    task: Mapping[str, Any] = field(default_factory=dict)
    verify: Mapping[str, Any] = field(default_factory=dict)
    starts: bool = True
    oracle: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the work gets done."""
        return self.done_at is not None


def call(tool: str, **arguments: Any) -> Reply:
    text = json.dumps(arguments)
    return Reply("", (ToolCall(tool, text, json.dumps({"name": tool, "arguments": arguments})),))


def say(text: str) -> Reply:
    """A turn without a call."""
    return Reply(text)


def bash(command: str) -> Reply:
    return call("bash", command=command)


def write(path: str, text: str) -> Reply:
    """Write a file whole, as models do with a shell."""
    quoted = shlex.quote(path)
    lines = text.rstrip("\n")
    return bash(f"mkdir -p \"$(dirname {quoted})\" && cat > {quoted} <<'END_OF_FILE'\n{lines}\nEND_OF_FILE")


def edit(path: str, old: str, new: str) -> Reply:
    return call("edit_file", path=path, old=old, new=new)


def read(path: str) -> Reply:
    return call("read_file", path=path)


def submit(summary: str = "Fixed. All tests pass.", **evidence: str) -> Reply:
    return call("submit", summary=summary, evidence=evidence)


def give_up(reason: str, evidence: str, hard: bool = False) -> Reply:
    return call("give_up", reason=reason, evidence=evidence, **({"hard": True} if hard else {}))


def ask(question: str) -> Reply:
    return call("ask_user", question=question)


def together(*turns: Reply) -> Reply:
    """The calls of several turns in one."""
    return Reply("", tuple(one for turn in turns for one in turn.tool_calls))


def cut(text: str = "", tool: str = "", arguments: str = "") -> Reply:
    """A turn that ended at the limit of tokens, inside a call where one is given."""
    open_call = f'{{"name": "{tool}", "arguments": {arguments}' if tool else None
    return Reply(text, stop_kind="max_tokens", open_call=open_call)


def garbled(tool: str, arguments: str) -> Reply:
    """A whole turn with a call whose arguments are not JSON."""
    return Reply("", (ToolCall(tool, arguments, arguments),))
