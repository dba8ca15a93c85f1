"""`endstop eval base` and `endstop eval chat` as commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run, one_sentence

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers every question with `abc` and stops."""
    from tests.train.bigram_model import bigram, chain, save

    return save(bigram(chain("abc")), tmp_path_factory.mktemp("models") / "said")


def test_eval_chat_as_json_and_in_a_file(endstop: Run, said: Path, home: Path) -> None:
    done = endstop(
        "eval", "chat", str(said), "--tasks", "Echo, spelling_bee,count-on", "--examples", "3", "--json",
        "--out", "report.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    counts = {task["name"]: task["examples"] for task in report["tasks"]}
    assert counts == {"echo": 3, "bee": 3, "count-on": 3}
    assert report["stop"]["natural_stop"] == 1.0
    assert report["false_stop"] == 1.0
    assert report["settings"]["temperature"] == 0.0
    assert "records" not in report["tasks"][0]
    written = json.loads((home / "report.json").read_text())
    assert [record["output"] for record in written["tasks"][0]["records"]] == ["abc"] * 3
    assert written["stop"] == report["stop"]


def test_eval_chat_shows_a_table(endstop: Run, said: Path) -> None:
    done = endstop(
        "eval", "chat", str(said), "--tasks", "echo", "--examples", "2", "--samples", "2", "--by-length"
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert any("exact" in line and "overrun" in line for line in lines)
    assert any(line.startswith("echo ") and "100.0" in line for line in lines)
    assert any(line.startswith("pass@2") for line in lines)
    assert any("right length" in line for line in lines)


def test_eval_chat_with_a_local_data_set(endstop: Run, said: Path, home: Path) -> None:
    rows = [{"question": "Q", "subject": "s", "choices": ["a", "b", "c", "d"], "answer": 0}]
    (home / "sets" / "mmlu").mkdir(parents=True)
    (home / "sets" / "mmlu" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("eval", "chat", str(said), "--data", "sets")
    done = endstop(*arguments, "--tasks", "mmlu", "--examples", "0", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tasks"][0]["kind"] == "categorical"
    missing = endstop(*arguments, "--tasks", "gsm8k")
    assert "there is no gsm8k in sets" in one_sentence(missing)


def test_eval_chat_refuses(endstop: Run, said: Path, cycle: Path, home: Path) -> None:
    assert "there is no task 'ecko'" in one_sentence(endstop("eval", "chat", str(said), "--tasks", "ecko"))
    same = endstop("eval", "chat", str(said), "--tasks", "echo", "--samples", "2", "--temperature", "0")
    assert "all the same" in one_sentence(same)
    nowhere = endstop("eval", "chat", str(said), "--out", "no/such/report.json")
    assert "there is no folder" in one_sentence(nowhere)
    assert endstop("eval", "chat", str(said), "--examples", "-1").returncode == 2


def test_eval_base(endstop: Run, said: Path, home: Path) -> None:
    (home / "texts.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"no": 1}\n')
    (home / "bundle" / "eval_data").mkdir(parents=True)
    (home / "bundle" / "core.yaml").write_text(
        "icl_tasks:\n- {label: t, dataset_uri: t.jsonl, num_fewshot: [0], icl_task_type: language_modeling}\n"
    )
    (home / "bundle" / "eval_data" / "t.jsonl").write_text('{"context": "a", "continuation": "b"}\n')
    (home / "bundle" / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nt,0\n")
    arguments = ("eval", "base", str(said), "--text", "texts.jsonl", "--bundle", "bundle")
    done = endstop(*arguments, "--json", "--out", "base.json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert json.loads((home / "base.json").read_text()) == report
    assert (report["texts"]["texts.jsonl"]["bytes"], report["texts"]["texts.jsonl"]["ends"]) == (6, 2)
    assert report["core"]["core"] == 0.0
    assert "1 document left out" in done.stderr
    shown = endstop(*arguments)
    assert "bits/byte" in shown.stdout
    assert "CORE" in shown.stdout


def test_eval_base_refuses(endstop: Run, said: Path, home: Path) -> None:
    assert endstop("eval", "base", str(said)).returncode == 2
    assert "core.yaml is missing" in one_sentence(endstop("eval", "base", str(said), "--bundle", "."))
    assert "does not exist" in one_sentence(endstop("eval", "base", str(said), "--text", "none.txt"))


@pytest.mark.parametrize("kind", ["base", "chat"])
def test_help_has_an_example(endstop: Run, kind: str) -> None:
    assert f"Example: endstop eval {kind}" in endstop("eval", kind, "--help").stdout


def test_kept_reports_lie_where_the_report_of_a_run_reads_them(endstop: Run, said: Path, home: Path) -> None:
    stage = home / "run" / "sft"
    stage.mkdir(parents=True)
    shutil.copytree(said, stage / "model")
    (stage / "settings.json").write_text("{}")
    (home / "texts.jsonl").write_text('{"text": "one"}\n')
    chat = ("eval", "chat", "run/sft/model", "--tasks", "echo", "--examples", "2")
    base = ("eval", "base", "run/sft/model", "--text", "texts.jsonl")
    for arguments in (chat, base):
        assert endstop(*arguments).returncode == 0
    assert not list(stage.glob("evaluation*"))
    for arguments in (chat, base):
        assert endstop(*arguments, "--keep").returncode == 0
    names = {path.name: json.loads(path.read_text()) for path in stage.glob("evaluation*")}
    assert set(names) == {"evaluation-chat.json", "evaluation-base.json"}
    assert names["evaluation-chat.json"]["tasks"][0]["examples"] == 2
    assert names["evaluation-base.json"]["texts"]["texts.jsonl"]["bytes"] == 3
    refused = endstop("eval", "chat", str(said), "--tasks", "echo", "--keep")
    assert "--keep is for the model of a run" in one_sentence(refused)
    (home / "run" / "tokenizer").mkdir()
    shutil.copy(said / "tokenizer.json", home / "run" / "tokenizer")
    assert endstop("eval", "tokenizer", "run/tokenizer", "--keep").returncode == 0
    kept = json.loads((home / "run" / "tokenizer" / "evaluation.json").read_text())
    assert kept["samples"][0]["name"] == "news"
    assert endstop("train", "report", "run").returncode == 0
    page = (home / "run" / "report" / "report.md").read_text()
    assert "| texts.jsonl |" in page
    assert "| echo | 2 |" in page
    assert "## Tokenizer" in page
