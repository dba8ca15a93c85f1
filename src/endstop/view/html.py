"""A trace as one HTML file: no network, no markup out of model text, light and dark, usable by keyboard."""

from __future__ import annotations

from html import escape

from endstop.runtime.trace import TraceStep
from endstop.view.chart import chart_svg
from endstop.view.document import TraceDocument
from endstop.view.marks import visible
from endstop.view.page import facts_html, page_html, safe
from endstop.view.scale import percent, strength

_COLUMNS = (
    "#",
    "token",
    "id",
    "P(token)",
    "P(stop)",
    "best stop",
    "rank",
    "entropy",
    "visible",
    "computed",
    "pending",
)
_TEXT_COLUMNS = ("token", "best stop")


def trace_html(document: TraceDocument) -> str:
    """The page. Model text only ever becomes escaped text: the script holds none of it, and the page's
    content policy allows that script alone."""
    title = f"P(stop) along the answer{' of ' + document.model if document.model else ''}"
    body = (
        f"<header><h1>P(stop) along the answer</h1>{_facts(document)}</header>\n<main>\n"
        f"{_prompt(document)}{_answer(document)}{_chart(document)}{_table(document)}</main>\n"
        "<footer>P(stop) is the probability of the whole stop set in the model's raw distribution, before "
        "temperature and every other processor.</footer>\n"
    )
    return page_html(title, body, styles=["page.css"], script="page.js")


def _facts(document: TraceDocument) -> str:
    forced = sum(step.forced for step in document.trace.steps)
    facts = [
        ("model", document.model),
        ("finish_reason", document.finish_reason),
        ("stop_kind", document.stop_kind),
        ("stop_reason", "" if document.stop_reason is None else _reason(document)),
        ("prompt tokens", str(document.trace.prompt_tokens)),
        ("generated tokens", f"{len(document.trace.steps)}{f' ({forced} forced)' if forced else ''}"),
        (
            "tokens per second",
            "" if document.tokens_per_second is None else f"{document.tokens_per_second:.1f}",
        ),
        *((name, str(value)) for name, value in document.params.items()),
    ]
    return facts_html(facts)


def _reason(document: TraceDocument) -> str:
    reason = document.stop_reason
    if isinstance(reason, int):
        text = document.stop_texts.get(reason)
        return f"{reason} {visible(text)}" if text else str(reason)
    return visible(str(reason))


def _prompt(document: TraceDocument) -> str:
    if not document.prompt:
        return ""
    lines = document.prompt.count("\n")
    return (
        f"<section><details{' open' if lines < 12 else ''}><summary>Prompt</summary>"
        f"<pre>{safe(document.prompt)}</pre></details></section>\n"
    )


def _answer(document: TraceDocument) -> str:
    return (
        f"<section><h2>Answer, coloured by P(stop) before each token</h2>{coloured_answer(document)}"
        "</section>\n"
    )


def coloured_answer(document: TraceDocument) -> str:
    """The tokens, each coloured by P(stop) before it, with the legend."""
    stops = set(document.trace.stop_ids)
    spans = []
    for index, (step, text) in enumerate(zip(document.trace.steps, document.texts, strict=True)):
        spans.append(_token(index, step, text, step.token_id in stops))
    return (
        f'<div class="answer">{"".join(spans)}</div><div class="legend"><span>1e-4 and below</span>'
        '<span class="ramp"></span><span>1</span>'
        "<span>· dashed: ends a turn, not shown to the reader · dotted: forced</span></div>"
    )


def _token(index: int, step: TraceStep, text: str, stops: bool) -> str:
    classes = [name for name, here in (("hidden-token", stops), ("forced", step.forced)) if here]
    kind = f' class="{" ".join(classes)}"' if classes else ""
    title = f"P(stop) {percent(step.p_stop)}, {visible(text or step.token)} ({step.token_id})"
    return (
        f'<span{kind} data-step="{index}" style="--strength:{strength(step.p_stop) * 0.85:.3f}" '
        f'title="{escape(title)}">{safe(text)}</span>'
    )


def _chart(document: TraceDocument) -> str:
    hint = "Point at a token, or focus the chart and use the arrow keys."
    return (
        '<section><div class="head"><h2>P(stop) at each step</h2><fieldset><legend>scale</legend>'
        '<label><input type="radio" name="scale" value="log" checked> log</label>'
        '<label><input type="radio" name="scale" value="linear"> linear</label></fieldset></div>'
        '<div class="chart" tabindex="0" role="group" '
        'aria-label="Chart of P(stop); arrow keys move from token to token">'
        f"{chart_svg(document, 'log')}{chart_svg(document, 'linear', hidden=True)}</div>"
        '<div class="legend"><span>A filled point: a stop token was the likeliest token of all.</span></div>'
        f'<p class="readout" role="status" data-hint="{hint}"></p></section>\n'
    )


def _table(document: TraceDocument) -> str:
    kind = {name: ' class="text"' if name in _TEXT_COLUMNS else "" for name in _COLUMNS}
    head = "".join(f'<th scope="col"{kind[name]}>{name}</th>' for name in _COLUMNS)
    rows = "".join(
        _row(document, index, step, document.texts[index]) for index, step in enumerate(document.trace.steps)
    )
    return (
        "<section><details><summary>All numbers</summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        "</details></section>\n"
    )


def _row(document: TraceDocument, index: int, step: TraceStep, text: str) -> str:
    cells = [
        str(index + 1),
        visible(text or step.token),
        str(step.token_id),
        "forced" if step.forced else percent(step.probability),
        percent(step.p_stop),
        visible(document.stop_text(step.best_stop)),
        "" if step.best_stop_rank is None else str(step.best_stop_rank),
        "" if step.entropy is None else f"{step.entropy:.2f}",
        str(step.visible),
        str(step.computed),
        str(step.pending),
    ]
    body = "".join(
        f'<td class="text">{escape(cell)}</td>' if name in _TEXT_COLUMNS else f"<td>{escape(cell)}</td>"
        for name, cell in zip(_COLUMNS, cells, strict=True)
    )
    return f'<tr data-step="{index}">{body}</tr>'
