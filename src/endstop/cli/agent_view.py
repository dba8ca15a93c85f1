"""A run while it goes on: one line for each thing that happens, on stderr; the summary of its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from endstop.cli.output import console, counted, for_terminal, write_line

if TYPE_CHECKING:
    from rich.progress import Progress

    from endstop.agent.result import AgentResult
    from endstop.agent.verification import BaselineResult

_LINES = 6
_STYLES = {"refusal": "yellow", "end": "bold"}


class LiveView:
    """Takes what a trajectory's `watch` tells. Model text is shown as text, never obeyed as control codes."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = console(stderr=True)
        self._waiting: Progress | None = None
        self._steps = 0

    def __call__(self, kind: str, data: Any) -> None:
        if self.quiet:
            return
        if kind == "message":
            self._message(data)
        elif kind == "record":
            self._line(f"record: {data}", "dim")
        elif kind == "sandbox":
            self._line(f"sandbox: {data}", "dim")
        elif kind == "verify":
            self._line(_check(data), "dim")
        elif kind == "baseline" and data is not None:
            self.close()
            self._line(_baseline(data), "dim")
        elif kind in ("asking", "running", "deciding", "baseline"):
            self._wait(_WAITS[kind].format(_call(data) if data else ""))
        elif kind == "end":
            self.close()

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None

    def _wait(self, text: str) -> None:
        """What is being waited for, and how long; only terminals see it, and it goes away."""
        if not self.console.is_terminal:
            return
        self.close()
        from endstop.cli.progress import spinner

        self._waiting = spinner(_short(for_terminal(text), self.console.width - 12))
        self._waiting.start()

    def _message(self, message: Mapping[str, Any]) -> None:
        self.close()
        meta, role = message["meta"], message["role"]
        decision = meta.get("decision")
        if role == "assistant":
            self._turn(message, meta)
        elif decision:
            self._line(f"  {decision['code']}", _STYLES[decision["type"]])
            self._block(message["content"])
        elif role == "tool":
            self._block(message["content"], "" if meta["ok"] else "red")
        elif meta["kind"] == "compaction":
            self._line("  (earlier steps are left out of the window)", "dim")

    def _turn(self, message: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        usage = meta["usage"]
        tokens = f"{usage['prompt_tokens']}+{usage['completion_tokens']} tokens"
        self._line(f"step {meta['step']}  {tokens}, {meta['seconds']:.1f} s", "bold cyan")
        if message["content"].strip():
            self._block(message["content"], "italic")
        for call in message.get("tool_calls") or ():
            self._line(f"  > {_short(_call(call), 200)}", "green")
        if "cut" in meta or "bad" in meta:
            self._line(f"  {meta.get('cut') or meta.get('bad')}: nothing of it runs", "yellow")

    def _block(self, text: str, style: str = "") -> None:
        lines = text.strip("\n").rstrip().splitlines()
        shown = lines if len(lines) <= _LINES else [*lines[:2], "...", *lines[-(_LINES - 3) :]]
        for line in shown:
            self._line(f"    {line}", style or "dim")

    def _line(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self.console.print(Text(for_terminal(text), style), soft_wrap=True)


_WAITS = {
    "asking": "the model answers",
    "running": "{}",
    "deciding": "{}",
    "baseline": "the project's check runs on the baseline",
}


def write_summary(result: AgentResult) -> None:
    """How the run ended, for people, on stdout."""
    write_line(for_terminal(f"{result.outcome}: {result.message}"))
    rows = [
        ("changed", ", ".join(result.changed) or "nothing"),
        ("steps", f"{result.steps} in {result.seconds:.1f} s, {counted(result.refusals, 'refusal')}"),
        (
            "check",
            f"{result.verify or 'none'} ({counted(result.gate_runs, 'run')}, {result.gate_seconds:.1f} s)",
        ),
        ("cost", f"{result.cost:.4f}" if result.cost else ""),
        ("assumed", "; ".join(result.assumptions)),
        ("opened", ", ".join(result.opened)),
        ("given", ", ".join(result.unprotected) + _GIVEN if result.unprotected else ""),
        ("note", "; ".join(result.notes)),
        ("warning", _warning(result)),
        ("record", str(result.trajectory)),
    ]
    for name, value in rows:
        if value:
            write_line(for_terminal(f"  {name:9} {value}"))
    if result.best_diff:
        best = result.trajectory.with_name("best.diff")
        write_line(f"  best      an earlier state passed the check; its changes are in {best}")


_GIVEN = " (dependencies: used by the check, not judged)"


def _warning(result: AgentResult) -> str:
    if "EMPTY_DIFF" not in result.warnings:
        return ""
    passed = "; the check passed on the files as they were" if result.outcome == "verified" else ""
    return f"nothing was changed{passed}"


def _check(settings: Any) -> str:
    if settings is None:
        return "check: none; this run can only end as unverified"
    required = f", {len(settings.required)} required tests" if settings.required else ""
    return f"check: {settings.command} (read as {settings.verifier or 'told by the command'}{required})"


def _baseline(found: BaselineResult) -> str:
    if found.timed_out:
        return f"before any change: the check does not end within {found.seconds:.0f} s"
    tests = f"{counted(found.executed, 'test')}, {len(found.failed)} failed"
    told = tests if found.executed else f"exit code {found.exit_code}"
    return f"before any change: {told}, {found.seconds:.1f} s"


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return f"{function['name']} {' '.join(function['arguments'].splitlines())}"


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: max(1, length - 1)]}…"
