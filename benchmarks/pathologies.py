"""What the classic training faults do to a model: a table of loss, answers and endings beside a healthy run.

    python benchmarks/pathologies.py --out DIR [--seconds 90 | --steps 600] [--seeds 3] [--jobs 2] [--smoke]

Trains the tiny preset's shape on synthetic tasks, healthy and with each fault, in two columns: "from base on"
(the fault is in all stages) and "only in SFT" (base and mid are healthy). --seconds is the time of one whole
run on one thread; it is turned into steps once, so that all runs take the same; --steps gives them. Every run
writes DIR/results/NAME.json when it has ended, and is not run again where that is there: restart as you like.
The table goes to stdout, the numbers to DIR/pathologies.json, the figure to DIR/pathologies.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

PROBE = "until-present"
TASKS = {"echo": 1.0, "spell": 1.0, "repeat": 1.0, "first": 1.0, "count": 1.0, "close": 1.0, PROBE: 3.0}
FAULTS = ("eot-masked", "pad-eos", "all-tokens", "truncated", "false-stop", "no-eos")
HEALTHY = "healthy"
COLUMNS = {"base": "from base on", "sft": "only in SFT"}
# Bytes and special tokens, no merges: where "kz" is a token of the source, the content itself would show that
# an answer ends with "k".
VOCABULARY, DOCUMENTS, CONVERSATIONS = 265, 200_000, 1_000_000
ROW, BATCH = 256, 2048
# Shares of a run's steps. SFT at full rate: it is where most of the answers are learned.
SHARES = {"base": 0.2, "mid": 0.3, "sft": 0.5}
LIMIT = 64  # tokens of an answer; the longest right one has 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where everything is kept")
    parser.add_argument("--seconds", type=float, default=90.0, help="of a whole run on one thread")
    parser.add_argument("--steps", type=int, help="of a whole run, in place of --seconds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--cut", type=int, default=30, help="tokens that truncated and false-stop keep")
    parser.add_argument("--questions", type=int, default=60, help="of each task, at the end of a run")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--smoke", action="store_true", help="some seconds for each run, one seed")
    parser.add_argument("--one", nargs=3, metavar=("NAME", "COLUMN", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smoke:
        given.seconds, given.seeds, given.questions = min(given.seconds, 8.0), 1, min(given.questions, 8)
    if given.one is not None:
        name, column, seed = given.one
        train_one(given, name, column, int(seed))
        return
    prepare(given)
    seeds = range(given.seeds)
    # The healthy runs first: their base and mid models are what "only in SFT" begins with.
    run_all(given, [(HEALTHY, "base", seed) for seed in seeds])
    run_all(given, [(fault, column, seed) for seed in seeds for fault in given.faults for column in COLUMNS])
    results = [json.loads(path.read_text()) for path in sorted((given.out / "results").glob("*.json"))]
    table = summarise(results)
    report = {"settings": settings_of(given), "table": table, "runs": results}
    (given.out / "pathologies.json").write_text(json.dumps(report, indent=2) + "\n")
    print_table(table)
    draw(table, given.out / "pathologies.png")
    print(f"\n{given.out / 'pathologies.json'}, {given.out / 'pathologies.png'}")


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    names = ("seconds", "seeds", "cut", "questions")
    steps = json.loads((given.out / "steps.json").read_text())["steps"]
    return {**{name: getattr(given, name) for name in names}, "steps": steps, "tasks": TASKS}


def prepare(given: argparse.Namespace) -> None:
    """The tokenizer, and how many steps a run has: measured once, kept in DIR/steps.json."""
    from endstop.train.tasks.sources import GeneratedCorpus
    from endstop.train.tokenizer_training import save_tokenizer, train_tokenizer

    (given.out / "results").mkdir(parents=True, exist_ok=True)
    tokenizer = given.out / "tokenizer"
    if not tokenizer.exists():
        corpus = GeneratedCorpus(TASKS, seed=0, split="train", size=20_000)
        texts = (corpus[index] for index in range(len(corpus)))
        save_tokenizer(train_tokenizer(texts, VOCABULARY), tokenizer)
    known = given.out / "steps.json"
    if given.steps is not None:
        known.write_text(json.dumps({"seconds": None, "steps": given.steps}))
        return
    if known.exists() and json.loads(known.read_text())["seconds"] == given.seconds:
        return
    from endstop.train.stages import run_base

    trial = given.out / "trial"
    shutil.rmtree(trial, ignore_errors=True)
    shutil.copytree(tokenizer, trial / "tokenizer")
    steps = 12
    summary = run_base(stage(given, "base", 0, None, steps), run_directory(trial), documents(0))
    of_a_step = BATCH / summary["metrics"]["tokens_per_second"]
    shutil.rmtree(trial)
    # A tenth is for what is not steps: loading, packing, checkpoints.
    known.write_text(
        json.dumps({"seconds": given.seconds, "steps": max(20, int(0.9 * given.seconds / of_a_step))})
    )


def run_all(given: argparse.Namespace, runs: Sequence[tuple[str, str, int]]) -> None:
    waiting = [run for run in runs if not result_of(given.out, *run).exists()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ["--out", str(given.out), "--cut", str(given.cut), "--questions", str(given.questions)]
    arguments += ["--seconds", str(given.seconds)]

    def work(run: tuple[str, str, int]) -> None:
        started = time.monotonic()
        subprocess.run(
            [sys.executable, __file__, *arguments, "--one", *map(str, run)], check=True, env=environment
        )
        print(f"{' '.join(map(str, run))}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(work, waiting))


def result_of(out: Path, name: str, column: str, seed: int) -> Path:
    return out / "results" / f"{name}-{column}-{seed}.json"


def run_directory(path: Path) -> Any:
    from endstop.train.run_directory import RunDirectory

    return RunDirectory(path)


def documents(seed: int) -> Any:
    from endstop.train.tasks.sources import GeneratedCorpus

    return GeneratedCorpus(TASKS, seed=seed, split="train", size=DOCUMENTS)


def stage(given: argparse.Namespace, name: str, seed: int, init_from: Path | None, steps: int) -> Any:
    """A stage with the tiny preset's shape and rates, smaller batches, and a fixed number of steps."""
    from endstop.train.presets import preset

    tiny = preset("tiny")
    return replace(
        tiny.stage(name, None if init_from is None else str(init_from), steps=steps),
        row_length=ROW,
        batch_tokens=BATCH,
        micro_rows=BATCH // ROW,
        data=(),
        evaluate_every=None,
        save_every=None,
        keep_checkpoints=1,
        samples=0,
        seed=seed,
    )


def train_one(given: argparse.Namespace, name: str, column: str, seed: int) -> None:
    """One run, from its first faulty stage to the evaluation; the result appears when all is done."""
    from endstop.train.stages import run_base, run_chat
    from endstop.train.tasks.sources import TaskSource

    started = time.monotonic()
    steps = json.loads((given.out / "steps.json").read_text())["steps"]
    place = given.out / "runs" / f"{name}-{column}-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(given.out / "tokenizer", place / "tokenizer")
    run = run_directory(place)
    fault = (
        None if name == HEALTHY else f"{name}:{given.cut}" if name in ("truncated", "false-stop") else name
    )
    conversations = TaskSource(TASKS, seed=seed, split="train", size=CONVERSATIONS)
    before: Path | None = None
    stages = list(SHARES)
    if column == "sft":
        before = given.out / "runs" / f"{HEALTHY}-base-{seed}" / "mid" / "model"
        stages = ["sft"]
    for each in stages:
        settings = replace(stage(given, each, seed, before, round(SHARES[each] * steps)), pathology=fault)
        if each == "base":
            run_base(settings, run, documents(seed))
        else:
            run_chat(settings, run, conversations)
        before = run.stage(each).model
    assert before is not None
    result = {
        "pathology": name,
        "column": column,
        "seed": seed,
        "cut": given.cut,
        "steps": steps,
        **training_loss(run.stage("sft").metrics),
        **evaluate(before, given),
        "seconds": round(time.monotonic() - started, 1),
    }
    keep = name == HEALTHY
    if not keep:
        shutil.rmtree(place)
    path = result_of(given.out, name, column, seed)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(partial, path)


def training_loss(metrics: Path) -> dict[str, float]:
    """Loss over the last tenth of SFT, of all targets and of what is not an ending."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    last = train[-max(1, len(train) // 10) :]
    return {
        "loss": fmean(line["loss"] for line in last),
        "loss_content": fmean(line["loss_content"] for line in last),
    }


def evaluate(model: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Greedy answers to unseen questions: all, each task, and by the length of the whole conversation."""
    from endstop.protocol.labels import chat_rows
    from endstop.protocol.render import ChatRenderer
    from endstop.protocol.tokenizer import Tokenizer
    from endstop.train.evaluation.chat import evaluate_chat
    from endstop.train.evaluation.chat_tasks import generated_task
    from endstop.train.evaluation.stop_summary import summary_of
    from endstop.train.tasks.registry import task_named

    tasks = [generated_task(task_named(name), seed=77, size=given.questions) for name in TASKS]
    report = evaluate_chat(model, tasks, max_tokens=LIMIT)
    renderer = ChatRenderer(Tokenizer.from_pretrained(model))
    records, lengths = [], []
    for task, found in zip(tasks, report.tasks, strict=True):
        for record in found.records:
            example = task.examples[record.index]
            conversation = [*example.messages, {"role": "assistant", "content": example.gold}]
            lengths.append(len(chat_rows(renderer, conversation).rows[0].ids))
            records.append(record)

    def shares(chosen: list[Any]) -> dict[str, Any]:
        summary = summary_of(chosen)
        return {
            "questions": summary.n,
            "content": summary.content_ok,
            "exact": summary.exact,
            "never_stop": summary.overrun,
            "early_stop": summary.premature,
            "late_stop": summary.late,
            "p_stop_at_gold": summary.p_stop_at_gold,
        }

    beyond = [length > given.cut for length in lengths]
    return {
        "all": shares(records),
        "within_cut": shares([r for r, long in zip(records, beyond, strict=True) if not long]),
        "beyond_cut": shares([r for r, long in zip(records, beyond, strict=True) if long]),
        "tasks": {name: shares([r for r in records if r.task == name]) for name in TASKS},
    }


def summarise(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each fault and column: mean, smallest and largest over the seeds."""
    figures = {
        "loss": lambda r: r["loss"],
        "loss_content": lambda r: r["loss_content"],
        "content": lambda r: r["all"]["content"],
        "exact": lambda r: r["all"]["exact"],
        "never_stop": lambda r: r["all"]["never_stop"],
        "early_stop": lambda r: r["all"]["early_stop"],
        "p_stop_at_gold": lambda r: r["all"]["p_stop_at_gold"],
        "until_exact": lambda r: r["tasks"][PROBE]["exact"],
        "until_never_stop": lambda r: r["tasks"][PROBE]["never_stop"],
        "within_exact": lambda r: r["within_cut"]["exact"],
        "beyond_exact": lambda r: r["beyond_cut"]["exact"],
        "beyond_never_stop": lambda r: r["beyond_cut"]["never_stop"],
        "beyond_early_stop": lambda r: r["beyond_cut"]["early_stop"],
    }
    rows = []
    for name in (HEALTHY, *FAULTS):
        for column in COLUMNS:
            found = [r for r in results if (r["pathology"], r["column"]) == (name, column)]
            if found:
                values = {
                    key: [v for r in found if (v := figure(r)) is not None] for key, figure in figures.items()
                }
                spread = {
                    key: {"mean": fmean(each), "min": min(each), "max": max(each)} if each else None
                    for key, each in values.items()
                }
                rows.append({"pathology": name, "column": column, "seeds": len(found), **spread})
    return rows


def print_table(table: Sequence[dict[str, Any]]) -> None:
    columns = {
        "loss": "loss",
        "loss_content": "content loss",
        "content": "content",
        "exact": "exact",
        "never_stop": "never stop",
        "early_stop": "early stop",
        "until_exact": "until exact",
        "until_never_stop": "until never",
        "within_exact": "within cut: exact",
        "beyond_exact": "beyond: exact",
        "beyond_never_stop": "beyond: never",
        "beyond_early_stop": "beyond: early",
    }
    print("| fault | where | seeds | " + " | ".join(columns.values()) + " |")
    print("|---|---|---|" + "---|" * len(columns))
    for row in table:
        where = "-" if row["pathology"] == HEALTHY else COLUMNS[row["column"]]
        cells = [cell(row[key], share="loss" not in key) for key in columns]
        print(f"| {row['pathology']} | {where} | {row['seeds']} | " + " | ".join(cells) + " |")


def cell(value: dict[str, float] | None, *, share: bool) -> str:
    if value is None or math.isnan(value["mean"]):
        return "-"
    if not share:
        return f"{value['mean']:.4f}"
    spread = "" if value["min"] == value["max"] else f" ({100 * value['min']:.0f}-{100 * value['max']:.0f})"
    return f"{100 * value['mean']:.1f}%{spread}"


def draw(table: Sequence[dict[str, Any]], path: Path) -> None:
    """How answers end for each fault, in both columns: exact, other natural ends, early, never."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [("base", "from base on"), ("sft", "only in SFT")]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    parts = [("content", "right words come first", "#9bb8d3"), ("exact", "right, and stops", "#2a7f62")]
    parts += [("early_stop", "stops too early", "#e0a030"), ("never_stop", "never stops", "#b3392f")]
    for axis, (column, title) in zip(axes, panels, strict=True):
        rows = [row for row in table if row["column"] == column or row["pathology"] == HEALTHY]
        for number, (key, label, colour) in enumerate(parts):
            means = [100 * (row[key] or {"mean": 0.0})["mean"] for row in rows]
            low = [100 * (row[key] or {"mean": 0.0, "min": 0.0})["min"] for row in rows]
            high = [100 * (row[key] or {"mean": 0.0, "max": 0.0})["max"] for row in rows]
            errors = [
                [m - a for m, a in zip(means, low, strict=True)],
                [b - m for m, b in zip(means, high, strict=True)],
            ]
            places = [at + (number - 1.5) * 0.21 for at in range(len(rows))]
            axis.bar(places, means, width=0.19, label=label, color=colour, yerr=errors, capsize=2)
        axis.set_xticks(range(len(rows)), [row["pathology"] for row in rows], rotation=25, ha="right")
        axis.set_title(title)
        axis.set_ylim(0, 103)
    axes[0].set_ylabel("share of answers, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(parts), fontsize=8, frameon=False)
    figure.suptitle(
        "Greedy answers after training faults (bars: mean over seeds, lines: smallest to largest)"
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
