"""The report of a run: one Markdown page with figures, made of whatever the run has left so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from endstop.models.directory import whole_directory
from endstop.train.figures import draw_figures
from endstop.train.report_sections import base_section, tokenizer_section
from endstop.train.run_results import RunResults, StageResults, TaskResult, read_run
from endstop.train.tables import markdown_table, number, percent, short, spent

REPORT_FOLDER, REPORT_FILE = "report", "report.md"
_SAMPLES = 8
_TEXT = 240

# What the table of all stages shows: name, metric of the validation, how it is written.
_SUMMARY = (
    ("loss", "validation_loss", "number"),
    ("bits per byte", "validation_bits_per_byte", "number"),
    ("P(end of document) at the end", "validation_p_document_end_at_end", "number"),
    ("before it", "validation_p_document_end_before", "number"),
    ("P(end of turn) at the end", "validation_p_turn_end_at_end", "number"),
    ("before it", "validation_p_turn_end_before", "number"),
    ("AUROC of P(end of turn)", "validation_auroc_turn_end", "number"),
    ("samples that stop by themselves", "validation_natural_stop_rate", "percent"),
    ("too early", "validation_early_stop_rate", "percent"),
    ("too late", "validation_late_stop_rate", "percent"),
    ("questions of RL: right, and ended by itself", "accuracy", "percent"),
    ("ended by itself", "stop_rate", "percent"),
    ("ended, but wrong", "false_completion_rate", "percent"),
)
_RL = (
    ("right", "accuracy"),
    ("stop by themselves", "stop_rate"),
    ("end, but wrong", "false_completion_rate"),
    ("say that they gave up", "gave_up_rate"),
    ("P(stop) at true ends", "p_stop_at_end"),
    ("P(stop) before them", "p_stop_before"),
)
# Settings that say most about a stage; the rest are in settings.json.
_SETTINGS = (
    *(
        "init_from",
        "data",
        "row_length",
        "batch_tokens",
        "micro_rows",
        "packing",
        "isolate",
        "masked",
        "dtype",
    ),
    *("seed", "pathology", "event_weights", "rope_scaling", "tasks", "questions", "samples", "max_tokens"),
    *("reward", "truncated", "terminator_in_loss", "lr_fraction"),
)


def write_report(
    run: str | Path, *, machine: Mapping[str, Any] | None = None, price: float | None = None
) -> Path:
    """Write RUN/report: report.md and its figures, anew and whole. Returns the page.

    machine: what `endstop env` shows. price: dollars for an hour of the machine, for the costs.
    Raises EndstopError where there is no stage in the run, or the disk is full.
    """
    results = read_run(run)
    folder = results.path / REPORT_FOLDER
    with whole_directory(folder, replace=True) as partial:
        figures = draw_figures(results, partial)
        text = report_text(results, figures, machine=machine, price=price)
        (partial / REPORT_FILE).write_text(text, encoding="utf-8")
    return folder / REPORT_FILE


def report_text(
    run: RunResults,
    figures: Mapping[str, str],
    *,
    machine: Mapping[str, Any] | None = None,
    price: float | None = None,
) -> str:
    """The page, with links to figures that lie beside it."""
    parts = [
        _heading(run, price),
        _stages_table(run, price),
        _task_tables(run, figures),
        *(_stage(stage, figures, price) for stage in run.stages),
        tokenizer_section(run.tokenizer),
        _samples(run),
        _machine(machine),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


def _heading(run: RunResults, price: float | None) -> str:
    names = " -> ".join(stage.name for stage in run.stages)
    counts = next((s.summary["parameters"] for s in run.stages if "parameters" in s.summary), None)
    lines = [f"# {run.path.resolve().name}", "", f"Stages: {names}."]
    if isinstance(counts, Mapping) and "total" in counts:
        lines.append(
            f"Parameters: {short(counts['total'])} (embedding {short(counts['embedding'])}, layers "
            f"{short(counts['layers'])}, head {short(counts['head'])})."
        )
    cost = "" if price is None else f", ${run.seconds / 3600 * price:,.2f} at ${price:.2f} an hour"
    lines.append(f"Time of all stages: {spent(run.seconds)}{cost}.")
    unfinished = [stage.name for stage in run.stages if not stage.finished]
    if unfinished:
        lines.append(f"Not finished: {', '.join(unfinished)}.")
    if (best := run.best) is not None:
        lines += ["", f"Talk to the best of its models, that of {best.name}:"]
        lines += ["", f"    endstop chat {best.path / 'model'}"]
    return "\n".join(lines) + "\n"


def _stages_table(run: RunResults, price: float | None) -> str:
    """All stages side by side; rows without any figure are left out."""
    rows: list[list[str]] = [
        ["steps", *(number(stage.steps) for stage in run.stages)],
        ["tokens", *(short(stage.tokens) if stage.tokens else "" for stage in run.stages)],
        ["FLOPs", *(f"{stage.flops:.2e}" if stage.flops else "" for stage in run.stages)],
        ["time", *(spent(stage.seconds) for stage in run.stages)],
    ]
    if price is not None:
        rows.append(["cost", *(_cost(stage, price) for stage in run.stages)])
    rows += [
        ["tokens/s", *(stage.figure("tokens_per_second") for stage in run.stages)],
        ["MFU", *(stage.figure("mfu", "percent") for stage in run.stages)],
    ]
    rows += [[name, *(stage.figure(key, kind) for stage in run.stages)] for name, key, kind in _SUMMARY]
    rows += [
        [f"tasks: {name}", *(percent(stage.mean(key)) for stage in run.stages)]
        for name, key in (
            ("right", "correct"),
            ("right, and ended by itself", "exact"),
            ("ended by itself", "natural_stop"),
            ("too early", "premature"),
            ("too late", "late"),
            ("never ended", "overrun"),
        )
    ]
    rows.append(["tasks: mean of centred accuracies", *(number(_centred(stage)) for stage in run.stages)])
    rows = [row for row in rows if any(row[1:])]
    said = "## All stages\n\n" + markdown_table(["", *(stage.name.upper() for stage in run.stages)], rows)
    return said + (
        "\nLoss and P(stop) are measured on data held out from each stage's own; tasks are the mean of the "
        "tables below.\n"
    )


def _cost(stage: StageResults, price: float) -> str:
    return "" if stage.seconds is None else f"${stage.seconds / 3600 * price:,.2f}"


def _centred(stage: StageResults) -> float | None:
    found = [value["chat_core"] for value in stage.evaluations.values() if value.get("chat_core") is not None]
    return found[-1] if found else None


_TASK_COLUMNS = (
    ("right", "correct"),
    ("exact", "exact"),
    ("natural stop", "natural_stop"),
    ("early", "premature"),
    ("late", "late"),
    ("overrun", "overrun"),
    ("false stop", "false_stop"),
)
_TASK_HEADER = ("task", "n", *(name for name, _ in _TASK_COLUMNS))


def _task_tables(run: RunResults, figures: Mapping[str, str]) -> str:
    said = ""
    for stage in run.stages:
        if not stage.tasks:
            continue
        said += f"### {stage.name.upper()}\n\n"
        said += _figure(figures, f"tasks-{stage.name}", "Answers by task")
        said += markdown_table(_TASK_HEADER, _task_rows(stage.tasks)) + "\n"
    if not said:
        return ""
    said = (
        "## Tasks\n\nExact is right and ended by the model itself. Early and late are stops before and "
        f"behind the end of the only right answer, overrun is none within the limit.\n\n{said}"
    )
    probes = [(stage, task) for stage in run.stages for task in stage.tasks if task.name.startswith("until")]
    if probes:
        rows = [[stage.name, *row] for stage, task in probes for row in _task_rows([task])]
        said += (
            "### until\n\nThe answer ends where its content says so, not where the source runs out: the best "
            "single probe of whether a model knows where to stop. It is learned last.\n\n"
        )
        said += markdown_table(["stage", *_TASK_HEADER], rows)
    return said


def _task_rows(tasks: Sequence[TaskResult]) -> list[list[str]]:
    return [
        [task.name, number(task.count), *(percent(getattr(task, key)) for _, key in _TASK_COLUMNS)]
        for task in tasks
    ]


def _stage(stage: StageResults, figures: Mapping[str, str], price: float | None) -> str:
    said = f"## {stage.name.upper()}\n\n"
    facts = [f"{number(stage.steps)} steps"] if stage.steps is not None else []
    if stage.tokens:
        facts.append(f"{short(stage.tokens)} tokens")
    if stage.seconds is not None:
        facts.append(spent(stage.seconds))
    if price is not None and stage.seconds is not None:
        facts.append(_cost(stage, price))
    said += (", ".join(facts) or "Nothing is known about it yet") + (
        "" if stage.finished else "; not finished"
    )
    said += ".\n\n"
    for key, words in (
        ("loss", "Loss"),
        ("stops", "P(stop) and how samples end"),
        ("rl", "Reward and answers"),
        ("speed", "Tokens per second"),
    ):
        said += _figure(figures, f"{key}-{stage.name}", f"{stage.name}: {words}")
    said += _settings(stage) + _sources(stage) + _statistics(stage) + _reinforcement(stage)
    return said + base_section(stage) + _long_context(stage, figures)


def _figure(figures: Mapping[str, str], key: str, words: str) -> str:
    return f"![{words}]({figures[key]})\n\n" if key in figures else ""


def _settings(stage: StageResults) -> str:
    settings = {**stage.settings, **(stage.summary.get("settings") or {})}
    rows = [
        [name, _value(settings[name]).replace(f"{stage.path.parent}/", "")]
        for name in _SETTINGS
        if settings.get(name) not in (None, "", [], {}, ())
    ]
    return f"### Settings\n\n{markdown_table(['setting', 'value'], rows)}\n" if rows else ""


def _sources(stage: StageResults) -> str:
    rows = stage.grouped_sources()
    if not rows:
        return ""
    return f"### Data\n\n{markdown_table(['source (documents) x weight', 'licence', 'origin'], rows)}\n"


def _statistics(stage: StageResults) -> str:
    rows = []
    for group in ("statistics", "labels"):
        values = stage.data.get(group)
        if isinstance(values, Mapping):
            rows += [[name.replace("_", " "), _value(value)] for name, value in values.items()]
    return f"### Packing and labels\n\n{markdown_table(['', ''], rows)}\n" if rows else ""


def _reinforcement(stage: StageResults) -> str:
    metrics = stage.metrics
    rows = [
        [name, number(metrics.get(f"{key}_before")), number(metrics[key])]
        for name, key in (
            *_RL,
            *((k, k) for k in metrics if k.startswith("pass@") and not k.endswith("_before")),
        )
        if isinstance(metrics.get(key), int | float)
    ]
    if stage.name != "rl" or not rows:
        return ""
    return f"### Held-out questions\n\n{markdown_table(['', 'before', 'after'], rows)}\n"


def _long_context(stage: StageResults, figures: Mapping[str, str]) -> str:
    found = stage.long_context
    if not found:
        return ""
    trained = found.get("trained") or 0
    rows = []
    for name, stretches in found["series"].items():
        for words, inside in (("within", True), ("beyond", False)):
            own = [s for s in stretches if s.get("ends") and (s["end"] <= trained) == inside]
            count = sum(s["ends"] for s in own)
            if count:
                rows.append(
                    [
                        name,
                        f"{words} {trained}",
                        number(count),
                        number(sum(s["p_at_end"] * s["ends"] for s in own) / count),
                        percent(sum((s.get("greedy") or 0.0) * s["ends"] for s in own) / count),
                        number(_mean_before(own)),
                    ]
                )
    table = markdown_table(
        ["model", "tokens", "ends", "P(stop) at ends", "stop is likeliest", "P(stop) before"], rows
    )
    figure = _figure(figures, f"long-context-{stage.name}", "P(stop) by position")
    return f"### Beyond the trained window\n\n{figure}{table}"


def _mean_before(stretches: Sequence[Mapping[str, Any]]) -> float | None:
    values = [s["p_before"] for s in stretches if s.get("p_before") is not None]
    return sum(values) / len(values) if values else None


def _samples(run: RunResults) -> str:
    """Some answers of the last stage that has any, failures first: they say more."""
    for stage in reversed(run.stages):
        records = [
            record
            for found in stage.evaluations.values()
            for task in found.get("tasks") or ()
            if isinstance(task, Mapping)
            for record in task.get("records") or ()
            if isinstance(record, Mapping) and "output" in record
        ]
        lines = [line for line in stage.lines if line["kind"] == "sample"]
        if records:
            wrong = [record for record in records if not record.get("exact", record.get("correct"))]
            right = [record for record in records if record.get("exact", record.get("correct"))]
            step = max(1, len(right) // _SAMPLES)
            shown = wrong[: _SAMPLES // 2] + right[::step][: _SAMPLES - len(wrong[: _SAMPLES // 2])]
            rows = [
                [
                    str(record.get("task", "")),
                    _code(record.get("prompt")),
                    _code(record.get("output")),
                    _code(record.get("gold")),
                    str(record.get("stop_kind") or record.get("finish_reason") or ""),
                ]
                for record in shown
            ]
            return f"## Samples of {stage.name.upper()}\n\n" + markdown_table(
                ["task", "question", "answer", "right answer", "ended by"], rows
            )
        if lines:
            rows = [
                [
                    number(line["step"]),
                    _code(line.get("prompt")),
                    _code(line.get("text")),
                    str(line.get("stop_kind", "")),
                ]
                for line in lines
            ]
            return f"## Samples of {stage.name.upper()}\n\n" + markdown_table(
                ["step", "prompt", "text", "ended by"], rows[-_SAMPLES:]
            )
    return ""


def _code(text: Any) -> str:
    said = str(text or "").replace("`", "'")
    said = said if len(said) <= _TEXT else said[:_TEXT] + "…"
    return "`" + " ".join(said.split()) + "`" if said.strip() else ""


def _machine(machine: Mapping[str, Any] | None) -> str:
    if not machine:
        return ""
    rows = [[name, _value(value)] for name, value in machine.items() if name not in ("variables", "cache")]
    return "## Machine\n\n" + markdown_table(["", ""], rows)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return number(value) if isinstance(value, int | float | str) or value is None else str(value)
