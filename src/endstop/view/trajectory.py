"""A run of an agent for people: the trajectory's JSON put into steps, and those as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from endstop.runtime.trace import Trace
from endstop.view.document import TraceDocument
from endstop.view.marks import readable

if TYPE_CHECKING:
    from rich.text import Text

FORMAT = "endstop.trajectory"
VERSION = 1
_SUCCESS, _HONEST = ("verified",), ("blocked", "needs_user", "unverified")
_LINES = 12

Message = Mapping[str, Any]


@dataclass(slots=True)
class CallView:
    """A call and what came back; `result` is None where nothing did."""

    name: str
    arguments: str
    result: Message | None = None

    @property
    def decision(self) -> Mapping[str, Any] | None:
        return None if self.result is None else self.result["meta"].get("decision")

    @property
    def code(self) -> str:
        """What the harness called the result: a decision's code, or an error's."""
        if self.result is None:
            return ""
        return str((self.decision or {}).get("code") or self.result["meta"].get("code") or "")


@dataclass(slots=True)
class StepView:
    """One answer of the model with its calls, and what the harness said behind it.

    `answer` is None for what was said before the first one.
    """

    number: int
    answer: Message | None
    calls: list[CallView] = field(default_factory=list)
    notes: list[Message] = field(default_factory=list)

    @property
    def meta(self) -> Mapping[str, Any]:
        return {} if self.answer is None else self.answer["meta"]

    @property
    def decisions(self) -> list[Mapping[str, Any]]:
        said = [call.decision for call in self.calls] + [note["meta"].get("decision") for note in self.notes]
        return [decision for decision in said if decision]

    @property
    def kind(self) -> str:
        """`end`, `accepted`, `refused`, `cut`, `failed`, `said` or `worked`: what readers look for first."""
        codes = [decision["code"] for decision in self.decisions]
        if self.meta.get("cut") or self.meta.get("bad"):
            return "cut"
        if any(decision["type"] == "end" for decision in self.decisions):
            return "accepted" if codes[-1] == "verified" else "end"
        if codes:
            return "refused"
        if not self.calls:
            return "said"
        bad = any(call.result is not None and not call.result["meta"].get("ok", True) for call in self.calls)
        return "failed" if bad else "worked"


@dataclass(slots=True)
class TrajectoryView:
    """A run. `data` is the trajectory as it was read."""

    data: Mapping[str, Any]
    steps: list[StepView]

    @property
    def outcome(self) -> str:
        return str((self.data.get("outcome") or {}).get("outcome") or "not ended")

    @property
    def tone(self) -> str:
        """`good`, `honest` or `bad`: how the outcome is coloured."""
        return "good" if self.outcome in _SUCCESS else "honest" if self.outcome in _HONEST else "bad"

    @property
    def task(self) -> str:
        return str((self.data.get("task") or {}).get("task") or "")

    def facts(self) -> list[tuple[str, str]]:
        """What stands above the steps; empty values are unknown."""
        data, outcome = self.data, self.data.get("outcome") or {}
        gate = data.get("gate") or {}
        turns = [step for step in self.steps if step.answer is not None]
        usages = [step.meta.get("usage") or {} for step in turns]
        return [
            ("outcome", self.outcome),
            ("model", str((data.get("model") or {}).get("name") or "")),
            ("workspace", str(data.get("workspace") or "")),
            ("verify", str(outcome.get("verify") or _verify_command(data))),
            ("sandbox", _sandbox(data.get("sandbox"))),
            ("steps", str(len(turns))),
            ("refusals", _count(gate.get("refusals"))),
            ("gate runs", _count(gate.get("gate_runs"))),
            ("gate seconds", _seconds(gate.get("gate_seconds"))),
            ("tokens written", str(sum(int(usage.get("completion_tokens", 0)) for usage in usages))),
            ("seconds", _seconds(data.get("seconds"))),
            ("cost", f"{data['cost']:.4g}" if data.get("cost") else ""),
            (
                "best verified tree",
                str(outcome.get("best_verified_tree") or gate.get("best_verified_tree") or "")[:12],
            ),
            ("opened", ", ".join(map(str, outcome.get("opened") or ()))),
            ("unprotected inputs", ", ".join(map(str, outcome.get("unprotected") or ()))),
            ("resumed", str(len(data.get("resumed") or ())) if data.get("resumed") else ""),
        ]


def view_of(data: Any) -> TrajectoryView:
    """Put a trajectory's JSON into steps. Raises ValueError for anything else."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError(f"this is no trajectory: it does not say format {FORMAT!r}")
    if data.get("version") != VERSION:
        raise ValueError(
            f"version {data.get('version')!r} of a trajectory is unknown, this endstop reads {VERSION}"
        )
    steps = [StepView(0, None)]
    calls: dict[str, CallView] = {}
    try:
        for message in data["messages"]:
            role = message["role"]
            message["meta"]  # every message has it
            if role == "assistant":
                steps.append(StepView(len(steps), message))
                for call in message.get("tool_calls") or ():
                    shown = CallView(call["function"]["name"], call["function"]["arguments"])
                    calls[call["id"]] = shown
                    steps[-1].calls.append(shown)
            elif role == "tool":
                calls[message["tool_call_id"]].result = message
            else:
                steps[-1].notes.append(message)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this trajectory is broken: {error!r}") from error
    return TrajectoryView(data, steps if steps[0].notes else steps[1:])


def trace_of(meta: Mapping[str, Any]) -> TraceDocument | None:
    """P(stop) along an answer, where the model was ours and it was kept."""
    trace = meta.get("trace")
    if not isinstance(trace, Mapping):
        return None
    if "trace" in trace:
        return TraceDocument.from_dict(trace)
    found = Trace.from_dict(dict(trace))
    return TraceDocument(
        found,
        [step.token for step in found.steps],
        finish_reason=str(meta.get("finish_reason") or ""),
        stop_kind=str(meta.get("stop_kind") or ""),
        stop_reason=meta.get("stop_reason"),
    )


def trajectory_lines(view: TrajectoryView, *, whole: bool = False) -> Iterator[Text]:
    """The run, line by line. Texts are literal and bounded, unless the `whole` of them is asked for."""
    from rich.text import Text

    for name, value in view.facts():
        if value:
            yield Text.assemble((f"{name:>19}  ", "dim"), _plain(value))
    for step in view.steps:
        yield Text()
        yield from _step_lines(step, whole)
    outcome = view.data.get("outcome") or {}
    yield Text()
    style = {"good": "bold green", "honest": "bold yellow", "bad": "bold red"}[view.tone]
    yield Text(f"ended: {view.outcome}", style=style)
    for text in [str(outcome.get("message") or ""), *map(str, outcome.get("warnings") or ())]:
        if text:
            yield Text(_plain(text))
    if outcome.get("diff"):
        yield Text("the changes:", style="bold")
        yield from _block(str(outcome["diff"]), "", whole)


def _step_lines(step: StepView, whole: bool) -> Iterator[Text]:
    from rich.text import Text

    if step.answer is not None:
        meta = step.meta
        how = [str(meta.get("finish_reason") or "")]
        tokens = (meta.get("usage") or {}).get("completion_tokens")
        how += [f"{tokens} tokens"] if tokens is not None else []
        how += [f"{meta['seconds']:.1f} s"] if meta.get("seconds") else []
        yield Text.assemble((f"step {step.number}", "bold"), ("  " + ", ".join(filter(None, how)), "dim"))
        for problem in (meta.get("cut"), meta.get("bad"), meta.get("error")):
            if problem:
                yield Text(f"  {_plain(str(problem))}", style="red")
        yield from _block(str(step.answer.get("reasoning_content") or ""), "dim italic", whole)
        yield from _block(str(step.answer.get("content") or ""), "", whole)
        document = trace_of(meta)
        if document is not None and document.trace.steps:
            from endstop.view.sparkline import captioned_sparkline

            yield Text(f"  {captioned_sparkline(document.p_stops())}", style="dim")
    for call in step.calls:
        yield Text.assemble(
            "  > ", (_plain(call.name), "cyan"), " ", _plain(_arguments(call.arguments, whole))
        )
        if call.result is None:
            yield Text("    no result", style="yellow")
            continue
        if call.code:
            yield Text(f"    {call.code}", style=_decision_style(call.decision))
        style = "" if call.result["meta"].get("ok", True) else "red"
        yield from _block(str(call.result["content"]), style, whole, "    ")
    for note in step.notes:
        decision = note["meta"].get("decision")
        name = (decision or {}).get("code") or note["meta"].get("kind") or note["role"]
        yield Text(f"  [{_plain(str(name))}]", style=_decision_style(decision))
        yield from _block(str(note["content"]), "dim", whole, "    ")


def _decision_style(decision: Mapping[str, Any] | None) -> str:
    if not decision:
        return "dim"
    return (
        "bold green"
        if decision["code"] == "verified"
        else "bold red"
        if decision["type"] == "end"
        else "bold yellow"
    )


def _block(text: str, style: str, whole: bool, indent: str = "  ") -> Iterator[Text]:
    """The lines of a text; of a long one the beginning and, since results stand there, more of the end."""
    from rich.text import Text

    lines = text.rstrip("\n").split("\n") if text.strip() else []
    if not whole and len(lines) > _LINES + 1:
        left_out = f"... {len(lines) - _LINES} lines left out, --whole shows them ..."
        lines = [*lines[: _LINES // 3], left_out, *lines[-(_LINES - _LINES // 3) :]]
    for line in lines:
        yield Text(indent + _plain(line), style=style)


def _arguments(arguments: str, whole: bool) -> str:
    text = " ".join(arguments.splitlines())
    return text if whole or len(text) <= 160 else f"{text[:120]} ... {text[-35:]}"


def _plain(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char in "\n\t" else readable(char) for char in text)


def _sandbox(sandbox: Any) -> str:
    """The mode, and why it is a weaker one."""
    if not isinstance(sandbox, Mapping):
        return str(sandbox or "")
    mode, description = (str(sandbox.get(name) or "") for name in ("mode", "description"))
    return description if description.startswith(mode) else ": ".join(filter(None, (mode, description)))


def _verify_command(data: Mapping[str, Any]) -> str:
    return str(((data.get("task") or {}).get("verify") or {}).get("command") or "")


def _count(value: Any) -> str:
    return "" if value is None else str(len(value) if isinstance(value, Sequence | Mapping) else value)


def _seconds(value: Any) -> str:
    return "" if value is None else f"{float(value):.1f}"
