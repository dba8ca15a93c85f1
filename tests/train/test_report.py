"""The report: what a whole run and a broken one have left is on the page, with figures that are pictures."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from endstop.cli.app import app
from endstop.protocol.errors import EndstopError
from endstop.train.figures import smoothed
from endstop.train.report import write_report
from endstop.train.run_results import read_run, run_of
from endstop.train.tables import markdown_table, number, percent, spent
from tests.train.finished_run import write_run

LONG_CONTEXT = {
    "trained": 256,
    "width": 128,
    "series": {
        "before": [
            {"begin": 0, "end": 256, "ends": 10, "p_at_end": 0.9, "greedy": 1.0, "p_before": 0.01},
            {"begin": 256, "end": 512, "ends": 20, "p_at_end": 0.3, "greedy": 0.25, "p_before": 0.2},
        ],
        "after": [
            {"begin": 0, "end": 256, "ends": 0, "p_at_end": None, "greedy": None, "p_before": None},
            {"begin": 256, "end": 512, "ends": 20, "p_at_end": 0.8, "greedy": 0.95, "p_before": 0.02},
        ],
    },
}
RL_METRICS = {
    "accuracy": 0.7,
    "accuracy_before": 0.5,
    "stop_rate": 1.0,
    "stop_rate_before": 0.9,
    "false_completion_rate": 0.3,
    "pass@1": 0.6,
    "pass@1_before": 0.4,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def add_rl(run: Path) -> None:
    (run / "rl").mkdir()
    lines = [{"step": 0, "kind": "eval", "reward": 0.1, "accuracy": 0.5, "stop_rate": 0.9}]
    lines += [
        {"step": step, "kind": "train", "reward": 0.1 * step, "seconds": 2.0 * step} for step in range(1, 6)
    ]
    lines += [{"step": 5, "kind": "eval", "reward": 0.5, "accuracy": 0.7, "stop_rate": 1.0}]
    (run / "rl" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "stage": "rl",
        "steps": 5,
        "seconds": 10.0,
        "metrics": RL_METRICS,
        "settings": {"reward": "exact"},
    }
    (run / "rl" / "summary.json").write_text(json.dumps(summary))


def test_a_whole_run_is_on_the_page(run: Path) -> None:
    add_rl(run)
    (run / "sft" / "long_context.json").write_text(json.dumps(LONG_CONTEXT))
    page = write_report(run, machine={"python": "3.11", "packages": {"torch": "2.13"}}, price=3.6)
    assert page == run / "report" / "report.md"
    text = page.read_text(encoding="utf-8")
    for words in (
        "Stages: base -> mid -> sft -> rl.",
        "## All stages",
        "Time of all stages: 10.2 min, $0.61 at $3.60 an hour.",
        "|  | BASE | MID | SFT | RL |",
        "| bits per byte | 1.25 | 1.25 | 1.25 |  |",
        "| cost | $0.10 | $0.20 | $0.30 | $0.01 |",
        "| tasks: right, and ended by itself |  |  | 61.7 % |  |",
        "| questions of RL: right, and ended by itself |  |  |  | 70.0 % |",
        "| until | 100 | 50.0 % | 25.0 % | 75.0 % |  |  | 25.0 % |  |",
        "| sft | until | 100 |",
        "| corpus-mid (1,200) | public domain | https://example.org/corpus |",
        "| supervised ends | 345 |",
        "| right | 0.5 | 0.7 |",
        "| pass@1 | 0.4 | 0.6 |",
        "| before | within 256 | 10 | 0.9 | 100.0 % | 0.01 |",
        "| before | beyond 256 | 20 | 0.3 | 25.0 % | 0.2 |",
        "| after | beyond 256 | 20 | 0.8 | 95.0 % | 0.02 |",
        "| echo | `echo \\| abc` | `a'bc` | `abc` | max_tokens |",
        "| packages | torch 2.13 |",
    ):
        assert words in text, words
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert len(pictures) == len(set(pictures)) == 12
    assert {path.name for path in (run / "report").iterdir()} == {"report.md", *pictures}
    for name in pictures:
        content = (run / "report" / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000
    # Every table is whole: each of its lines has as many cells as its head.
    for table in re.findall(r"(?:^\|.*\|$\n)+", text, re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1, table


def test_kept_evaluations_of_tokenizer_and_base_are_on_the_page(run: Path) -> None:
    tokens = {"ours": 348, "gpt-2": 265}
    sample = {"name": "news", "bytes": 1202, "tokens": tokens}
    sample |= {"bytes_per_token": {"ours": 3.4540, "gpt-2": 4.5358}, "ratio": {"gpt-2": 1.3132}}
    vocabulary = {"vocab_sizes": {"ours": 32768, "gpt-2": 50257}, "samples": [sample], "lossless": True}
    (run / "tokenizer").mkdir()
    (run / "tokenizer" / "evaluation.json").write_text(json.dumps(vocabulary))
    texts = {"bits_per_byte": 1.5, "bytes": 1000, "ends": 9, "nats_per_end": 0.5, "p_stop_at_ends": 0.75}
    task = {"label": "copa", "shots": 0, "examples": 100, "accuracy": 0.6, "baseline": 0.5, "centred": 0.2}
    found = {"texts": {"held.jsonl": texts}, "core": {"core": 0.2219, "tasks": [task]}, "seconds": 1.0}
    (run / "base" / "evaluation-base.json").write_text(json.dumps(found))
    text = write_report(run).read_text(encoding="utf-8")
    for words in (
        "Tokens in the vocabulary: ours 32,768, gpt-2 50,257.",
        "| sample | bytes | tokens | bytes for each token | gpt-2 | our tokens for each of its |",
        "| news | 1,202 | 348 | 3.454 | 4.536 | 1.313 |",
        "| held.jsonl | 1.5 | 1,000 | 9 | 0.5 | 0.75 |  |",
        "### CORE: 0.2219",
        "| copa | 0 | 100 | 60.0 % | 50.0 % | 0.2 |",
    ):
        assert words in text, words


def test_what_is_missing_is_no_obstacle(run: Path) -> None:
    shutil.rmtree(run / "base")
    (run / "mid" / "summary.json").unlink()
    (run / "sft" / "evaluation-chat.json").write_text("{ broken")
    (run / "sft" / "metrics.jsonl").write_text('{"step": 1, "kind": "train", "loss": null}\n{"step": 2, "ki')
    text = write_report(run).read_text(encoding="utf-8")
    assert "Stages: mid -> sft." in text
    assert "Not finished: mid." in text
    assert "## Tasks" not in text
    assert "## Machine" not in text
    # An unfinished stage is shown as far as it came.
    assert "10 steps, 1.7 min; not finished." in text
    assert read_run(run).stage("mid").metrics["validation_loss"] == 1.0  # type: ignore[union-attr]


def test_the_report_is_written_anew_and_whole(run: Path) -> None:
    write_report(run)
    (run / "report" / "old.png").write_text("")
    shutil.rmtree(run / "mid")
    write_report(run)
    names = {path.name for path in (run / "report").iterdir()}
    assert "old.png" not in names
    assert not any("mid" in name for name in names)
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_a_folder_without_stages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EndstopError, match="is no run"):
        write_report(tmp_path)
    done = CliRunner().invoke(app, ["train", "report", str(tmp_path / "nowhere")])
    assert (done.exit_code, done.stdout) == (1, "")


def test_the_verb_prints_where_the_page_is(run: Path) -> None:
    done = CliRunner().invoke(app, ["train", "report", str(run)])
    assert done.exit_code == 0
    assert done.stdout == f"{run / 'report' / 'report.md'}\n"
    assert "## Machine" in Path(done.stdout.strip()).read_text(encoding="utf-8")


def test_the_run_of_a_model_is_found(run: Path, tmp_path: Path) -> None:
    found, stage = run_of(run / "mid" / "model")
    assert stage == "mid"
    assert found is not None
    assert [each.name for each in found.until(stage)] == ["base", "mid"]
    assert run_of(tmp_path / "somewhere" / "model") == (None, None)


def test_small_things() -> None:
    assert markdown_table(["a"], [["x|y"], ["two\nlines"]]) == "| a |\n| --- |\n| x\\|y |\n| two lines |\n"
    assert [number(value) for value in (None, 1234, 0.123456, 5.0, "text", True)] == [
        *("", "1,234", "0.1235", "5", "text", "yes"),
    ]
    # A damaged file may hold what no measurement gives.
    assert [number(value) for value in (float("nan"), float("inf"))] == ["nan", "inf"]
    assert [percent(value) for value in (None, 0.5)] == ["", "50.0 %"]
    assert [spent(value) for value in (None, 42, 750, 13_860)] == ["", "42 s", "12.5 min", "3 h 51 min"]
    assert smoothed([1.0, 1.0, 1.0]) == [1.0, 1.0, 1.0]
    assert smoothed([0.0] * 100 + [1.0] * 100)[-1] > 0.99
