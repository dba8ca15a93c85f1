"""A run of an agent as one HTML file: every step and decision, and P(stop) where the model was ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from endstop.view.chart import chart_svg
from endstop.view.html import coloured_answer
from endstop.view.page import facts_html, page_html, safe
from endstop.view.trajectory import CallView, StepView, TrajectoryView, trace_of

_FOLDED = 25  # lines from which on a result is folded


def trajectory_html(view: TrajectoryView) -> str:
    """The page. What model, tools and files said only ever becomes escaped text."""
    body = (
        f'<header><h1>A run, and how it ended: <span class="outcome {view.tone}">{safe(view.outcome)}'
        "</span></h1>"
        f'<p class="task">{safe(view.task)}</p>{facts_html(view.facts()[1:])}</header>\n'
        f"{_map(view)}<main>\n{''.join(map(_step, view.steps))}{_end(view)}</main>\n"
        "<footer>Only <b>verified</b> is a success: the gate ran the project's own check in a clean export "
        "of the files. Keys: j and k go from step to step.</footer>\n"
    )
    title = f"{view.outcome}: {' '.join(view.task.split())[:80]}"
    return page_html(title, body, styles=["page.css", "trajectory.css"], script="trajectory.js")


def _map(view: TrajectoryView) -> str:
    """One mark for each step, with what came of it in its colour and its title."""
    marks = "".join(
        f'<a class="{step.kind}" href="#step-{step.number}" title="{safe(_gist(step))}">{step.number}</a>'
        for step in view.steps
        if step.answer is not None
    )
    return (
        f'<nav class="steps" aria-label="Steps">{marks}<span class="choices">'
        '<button type="button" data-do="decisions" aria-pressed="false">decisions only</button>'
        '<button type="button" data-do="unfold">unfold all</button></span></nav>\n'
    )


def _gist(step: StepView) -> str:
    names = ", ".join(call.name for call in step.calls) or "text only"
    codes = ", ".join(str(decision["code"]) for decision in step.decisions)
    return f"{names}: {codes}" if codes else names


def _step(step: StepView) -> str:
    decided = "yes" if step.decisions or step.kind == "cut" else "no"
    inside = [_head(step)]
    if step.answer is not None:
        meta = step.meta
        for problem in (meta.get("cut"), meta.get("bad"), meta.get("error")):
            inside += [f'<p class="problem">{safe(str(problem))}</p>'] if problem else []
        inside.append(_pre(str(step.answer.get("reasoning_content") or ""), "reasoning", "Reasoning"))
        inside.append(_pre(str(step.answer.get("content") or ""), "said"))
        inside.append(_pre(str(meta.get("open_call") or ""), "result bad-result", "The call that was cut"))
        inside.append(_trace(meta))
    inside += [_call(call) for call in step.calls]
    inside += [_note(note) for note in step.notes]
    return (
        f'<article id="step-{step.number}" class="{step.kind}" tabindex="-1" data-decided="{decided}">'
        f"{''.join(inside)}</article>\n"
    )


def _head(step: StepView) -> str:
    if step.answer is None:
        return "<h3>Before the first step</h3>"
    meta = step.meta
    usage = meta.get("usage") or {}
    facts = [
        str(meta.get("finish_reason") or ""),
        str(meta.get("stop_kind") or ""),
        f"{usage['completion_tokens']} tokens" if "completion_tokens" in usage else "",
        f"{meta['seconds']:.1f} s" if meta.get("seconds") else "",
        "left out of the prompt by a compaction" if meta.get("left_out") else "",
    ]
    return f"<h3>Step {step.number} <small>{safe(' · '.join(filter(None, facts)))}</small></h3>"


def _call(call: CallView) -> str:
    head = f'<p><code class="name">{safe(call.name)}</code> {_code(call.code, call.decision)}</p>'
    if call.result is None:
        return f'<div class="call">{head}{_arguments(call)}<p class="problem">no result</p></div>'
    meta = call.result["meta"]
    style = "result" if meta.get("ok", True) or call.decision else "result bad-result"
    facts = [
        f"{meta['seconds']:.2f} s" if meta.get("seconds") is not None else "",
        f"tree {str(meta['tree'])[:12]}" if meta.get("tree") else "",
    ]
    said = " · ".join(filter(None, facts))
    text = str(call.result["content"])
    fold = (
        f"Result, {text.count(chr(10)) + 1} lines"
        if text.count("\n") >= _FOLDED and not call.decision
        else ""
    )
    return (
        f'<div class="call">{head}{_arguments(call)}{_pre(text, style, fold)}'
        f"{f'<p class=note>{safe(said)}</p>' if said else ''}</div>"
    )


def _arguments(call: CallView) -> str:
    """Arguments as people read them: one block for each that has several lines, the others in a row."""
    try:
        values = json.loads(call.arguments)
    except ValueError:
        values = None
    if not isinstance(values, Mapping):
        return _pre(call.arguments, "result")
    blocks = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if "\n" in text:
            blocks.append(f"<p><code>{safe(str(name))}</code></p>{_pre(text, 'result')}")
        else:
            blocks.append(f"<p><code>{safe(str(name))}</code> {safe(text)}</p>")
    return "".join(blocks)


def _note(note: Mapping[str, Any]) -> str:
    decision = note["meta"].get("decision")
    code = str((decision or {}).get("code") or "")
    name = str(note["meta"].get("kind") or note["role"])
    fold = "" if decision else f"The harness said: {name}"
    return f'<div class="call">{_code(code, decision)}{_pre(str(note["content"]), "result note", fold)}</div>'


def _code(code: str, decision: Mapping[str, Any] | None) -> str:
    if not code:
        return ""
    kind = (
        "refused"
        if decision is None or decision["type"] != "end"
        else "accepted"
        if code == "verified"
        else "end"
    )
    return f'<span class="code {kind}">{safe(code)}</span>'


def _trace(meta: Mapping[str, Any]) -> str:
    document = trace_of(meta)
    if document is None or not document.trace.steps:
        return ""
    return (
        "<details><summary>P(stop) along this answer</summary>"
        f'{coloured_answer(document)}<div class="chart">{chart_svg(document, "log")}</div></details>'
    )


def _pre(text: str, style: str, fold: str = "") -> str:
    if not text.strip():
        return ""
    block = f'<pre class="{style}">{safe(text)}</pre>'
    return f"<details><summary>{safe(fold)}</summary>{block}</details>" if fold else block


def _end(view: TrajectoryView) -> str:
    outcome = view.data.get("outcome") or {}
    parts = [_pre(str(outcome.get("message") or ""), "said")]
    parts += [f'<p class="problem">{safe(str(warning))}</p>' for warning in outcome.get("warnings") or ()]
    parts.append(_diff("The changes", str(outcome.get("diff") or "")))
    parts.append(_diff("The best verified tree", str(outcome.get("best_diff") or "")))
    return f"<section><h2>The end: {safe(view.outcome)}</h2>{''.join(parts)}</section>\n"


def _diff(name: str, text: str) -> str:
    if not text.strip():
        return ""
    lines = []
    in_head = True
    for line in text.rstrip("\n").split("\n"):
        # A file's head ends with the line that names what it is now; a line of its content begins with a
        # mark, so `diff` stands in heads only.
        in_head = in_head or line.startswith("diff ")
        tag = "" if in_head else "ins" if line.startswith("+") else "del" if line.startswith("-") else ""
        in_head = in_head and not line.startswith("+++ ")
        lines.append(f"<{tag}>{safe(line)}</{tag}>" if tag else safe(line))
    joined = "\n".join(lines)
    return f'<details open><summary>{safe(name)}</summary><pre class="result diff">{joined}</pre></details>'
