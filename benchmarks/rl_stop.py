"""RL on a harder split: exact or stop-shaped reward, with or without the terminator in the loss.

    python benchmarks/rl_stop.py --out DIR [--from MODEL] [--steps 150] [--seeds 3] [--jobs 2] [--smoke]

The start is an early SFT checkpoint of the tiny preset's shape: it has seen the plain tasks and, less often,
their harder versions, where a part of the answers is "I do not know."; so there is room to improve, and a way
to be honest. What is asked is the harder split: the tasks of HARD, with longer answers than the plain tasks
ever have, evaluated on their test side. Four runs for each seed begin with the same model and ask the same
questions. Each writes DIR/results/NAME.json when it has ended and is not run again where that is there; one
that was killed goes on from its last checkpoint. The table goes to stdout, the numbers to DIR/rl_stop.json,
the curves to DIR/rl_stop.png. Figures are of greedy answers, and of samples at temperature 1 where they say
so; the latter are what is trained.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

HARD = ("echo-hard", "spell-hard", "repeat-hard", "first-hard", "count-hard", "close-hard", "until-hard")
PLAIN = tuple(name.removesuffix("-hard") for name in HARD)
REWARDS = ("exact", "stop-shaped")
LIMIT = 64  # tokens of an answer; the longest right one has about 40
VOCABULARY = 320
HARD_SHARE, GIVE_UP_SHARE = 0.35, 0.35
SAMPLED = ("pass@1", "pass@8", "sampled_stop_rate", "sampled_false_completion_rate")
FIGURES = ("accuracy", "stop_rate", "false_completion_rate", "gave_up_rate", "mean_length", "p_stop_at_end")


class Lessons:
    """Conversations for the start: plain tasks, and harder ones that are now and then not answered."""

    name, licence, origin = "lessons", "Apache-2.0", "generated"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        from endstop.train.questions import GIVE_UP
        from endstop.train.tasks.registry import task_named

        if not 0 <= index < len(self):
            raise IndexError(index)
        random = Random(f"{self.seed}/{index}")
        hard = random.random() < HARD_SHARE
        example = task_named(random.choice(HARD if hard else PLAIN)).example(self.seed, index, "train")
        if hard and random.random() < GIVE_UP_SHARE:
            return [*example.messages, {"role": "assistant", "content": GIVE_UP[0]}]
        return example.conversation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where everything is kept")
    parser.add_argument("--from", dest="start", type=Path, help="a model directory in place of an own start")
    parser.add_argument(
        "--start-steps", type=int, default=500, help="SFT steps of the own start, 2048 tokens each"
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--lr-fraction", type=float, default=0.1)
    parser.add_argument("--truncated", choices=("keep", "zero", "mask"), default="zero")
    parser.add_argument("--evaluation-questions", type=int, default=280)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--smoke", action="store_true", help="two steps and one seed: do the parts fit?")
    parser.add_argument("--one", nargs=3, metavar=("REWARD", "TERMINATOR", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smoke:
        given.start_steps, given.steps, given.seeds = 10, 2, 1
        given.questions, given.samples, given.evaluation_questions = 4, 4, 14
    if given.one is not None:
        reward, terminator, seed = given.one
        train_one(given, reward, terminator == "with", int(seed))
        return
    (given.out / "results").mkdir(parents=True, exist_ok=True)
    make_start(given)
    runs = [
        (reward, terminator, seed)
        for seed in range(given.seeds)
        for reward in REWARDS
        for terminator in ("with", "without")
    ]
    run_all(given, runs)
    results = [json.loads(path.read_text()) for path in sorted((given.out / "results").glob("*.json"))]
    table = summarise(results)
    names = (
        "steps",
        "questions",
        "samples",
        "lr_fraction",
        "truncated",
        "evaluation_questions",
        "start_steps",
    )
    settings = {
        **{name: getattr(given, name) for name in names},
        "split": list(HARD),
        "start": str(given.start),
    }
    report = {"settings": settings, "table": table, "runs": results}
    (given.out / "rl_stop.json").write_text(json.dumps(report, indent=2) + "\n")
    print_table(table)
    draw(results, given.out / "rl_stop.png")
    print(f"\n{given.out / 'rl_stop.json'}, {given.out / 'rl_stop.png'}")


def start_model(given: argparse.Namespace) -> Path:
    return given.start if given.start is not None else given.out / "start" / "sft" / "model"


def make_start(given: argparse.Namespace) -> None:
    """The early SFT checkpoint: the tiny preset's shape, `--start-steps` of training."""
    from endstop.train.presets import preset
    from endstop.train.run_directory import RunDirectory
    from endstop.train.stages import run_chat
    from endstop.train.tokenizer_training import save_tokenizer, train_tokenizer

    if start_model(given).exists():
        return
    place = given.out / "start"
    shutil.rmtree(place, ignore_errors=True)
    lessons = Lessons(0)
    texts = ("\n".join(str(message["content"]) for message in lessons[index]) for index in range(20_000))
    save_tokenizer(train_tokenizer(texts, VOCABULARY), place / "tokenizer")
    tiny = preset("tiny")
    settings = replace(
        tiny.stage("sft", steps=given.start_steps),
        init_from=None,
        model=tiny.model,
        batch_tokens=2048,
        micro_rows=8,
        data=(),
        evaluate_every=None,
        save_every=None,
        samples=0,
    )
    run_chat(settings, RunDirectory(place), lessons)


def run_all(given: argparse.Namespace, runs: Sequence[tuple[str, str, int]]) -> None:
    waiting = [run for run in runs if not result_of(given.out, *run).exists()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ["--out", str(given.out)]
    if given.start is not None:
        arguments += ["--from", str(given.start)]
    for name in ("steps", "questions", "samples", "lr_fraction", "truncated", "evaluation_questions"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(given, name))]

    def work(run: tuple[str, str, int]) -> None:
        started = time.monotonic()
        subprocess.run(
            [sys.executable, __file__, *arguments, "--one", *map(str, run)], check=True, env=environment
        )
        print(f"{' '.join(map(str, run))}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(work, waiting))


def result_of(out: Path, reward: str, terminator: str, seed: int) -> Path:
    return out / "results" / f"{reward}-{terminator}-{seed}.json"


def train_one(given: argparse.Namespace, reward: str, terminator: bool, seed: int) -> None:
    from endstop.train.metrics_log import read_metrics
    from endstop.train.presets import preset
    from endstop.train.rl import train_rl
    from endstop.train.rl_settings import RLSettings
    from endstop.train.run_directory import RunDirectory

    path = result_of(given.out, reward, "with" if terminator else "without", seed)
    run = RunDirectory(given.out / "runs" / path.stem)
    settings = RLSettings(
        init_from=str(start_model(given)),
        tasks=HARD,
        steps=given.steps,
        questions=given.questions,
        samples=given.samples,
        max_tokens=LIMIT,
        reward=reward,  # type: ignore[arg-type]
        truncated=given.truncated,
        terminator_in_loss=terminator,
        lr_fraction=given.lr_fraction,
        optimizer=preset("tiny").sft.optimizer,
        evaluate_every=max(1, given.steps // 10),
        save_every=max(1, given.steps // 10),
        evaluation_questions=given.evaluation_questions,
        keep_checkpoints=1,
        device="cpu",
        seed=seed,
    )
    stage = run.stage("rl")
    summary = train_rl(run, settings, resume=stage.settings.exists())
    if not summary["finished"]:
        raise SystemExit("told to end; start again to go on")
    lines = list(read_metrics(stage.metrics))
    result = {
        "reward": reward,
        "terminator": "with" if terminator else "without",
        "seed": seed,
        "metrics": summary["metrics"],
        "seconds": summary["seconds"],
        "curves": [
            {key: line[key] for key in ("step", *FIGURES, *SAMPLED)}
            for line in lines
            if line["kind"] == "eval"
        ],
        "engine_gap_max": max(line["engine_gap_max"] for line in lines if line["kind"] == "train"),
    }
    shutil.rmtree(stage.checkpoints)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(partial, path)


def summarise(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each reward, with and without the terminator: means over the seeds, before and after."""
    rows = []
    for reward in REWARDS:
        for terminator in ("with", "without"):
            found = [r["metrics"] for r in results if (r["reward"], r["terminator"]) == (reward, terminator)]
            if not found:
                continue
            names = (*FIGURES[:4], *SAMPLED, "p_stop_at_end", "p_stop_before", "mean_length")
            row: dict[str, Any] = {"reward": reward, "terminator": terminator, "seeds": len(found)}
            for name in names:
                row[name] = {
                    "before": fmean(metrics[f"{name}_before"] for metrics in found),
                    "after": fmean(metrics[name] for metrics in found),
                    "after_each": [metrics[name] for metrics in found],
                }
            rows.append(row)
    return rows


def print_table(table: Sequence[dict[str, Any]]) -> None:
    columns = {
        "accuracy": "accuracy",
        "stop_rate": "stop rate",
        "false_completion_rate": "false completion",
        "gave_up_rate": "gave up",
        "pass@1": "sampled: accuracy",
        "sampled_stop_rate": "sampled: stop rate",
        "sampled_false_completion_rate": "sampled: false completion",
        "pass@8": "pass@8",
        "p_stop_at_end": "P(stop) at ends",
        "p_stop_before": "before them",
    }
    print("| reward | terminator in the loss | seeds | " + " | ".join(columns.values()) + " |")
    print("|---|---|---|" + "---|" * len(columns))
    for row in table:
        cells = []
        for name in columns:
            each = row[name]["after_each"]
            spread = f" ({100 * min(each):.1f}-{100 * max(each):.1f})" if min(each) < max(each) else ""
            cells.append(f"{100 * row[name]['before']:.1f} -> {100 * row[name]['after']:.1f} %{spread}")
        print(f"| {row['reward']} | {row['terminator']} | {row['seeds']} | " + " | ".join(cells) + " |")


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Learning curves on the held-out questions: a line for each kind of run, thin ones for its seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "accuracy": "right and stopped",
        "pass@1": "the same of samples",
        "stop_rate": "stopped by itself",
        "false_completion_rate": "stopped and wrong",
        "gave_up_rate": "said it does not know",
    }
    colours = {"exact": "#2a6f97", "stop-shaped": "#c0532b"}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 3.6))
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for reward in REWARDS:
            for terminator, style in (("with", "-"), ("without", "--")):
                found = [
                    r["curves"] for r in results if (r["reward"], r["terminator"]) == (reward, terminator)
                ]
                if not found:
                    continue
                steps = [point["step"] for point in found[0]]
                for curve in found:
                    values = [100 * point[key] for point in curve]
                    axis.plot(steps, values, style, color=colours[reward], linewidth=0.6, alpha=0.4)
                means = [100 * fmean(curve[at][key] for curve in found) for at in range(len(steps))]
                label = f"{reward}, {terminator} terminator"
                axis.plot(steps, means, style, color=colours[reward], linewidth=1.8, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("updates")
    axes[0].set_ylabel("share of held-out answers, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
