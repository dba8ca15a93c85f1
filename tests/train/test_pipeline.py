"""`endstop train all`: everything in one run directory, nothing twice, and the end is a model that chats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers

from endstop.models.load import load_model
from endstop.protocol.errors import EndstopError
from endstop.train.pipeline import Pipeline, run_pipeline, scaled, stage_settings, tokenizer_texts
from endstop.train.presets import ReinforcementNumbers, preset
from endstop.train.run_directory import RunDirectory
from endstop.train.settings import ModelSettings


def test_stages_are_scaled() -> None:
    base = preset("tiny").base
    assert base.tokens is not None
    assert scaled(base, 0.5).tokens == base.tokens // 2
    assert scaled(base, 1e-9).fixed_steps == 1
    assert scaled(preset("tiny").stage("sft", "x", steps=10), 0.25).steps == 2
    assert scaled(preset("tiny").stage("sft", "x", seconds=10.0), 3).seconds == 30.0
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale"):
            Pipeline(preset("tiny"), Path("run"), scale=scale)


def test_the_tokenizer_reads_the_documents_of_the_base_stage() -> None:
    texts = tokenizer_texts(preset("tiny"))
    first = [next(texts) for _ in range(200)]
    assert len(set(first)) > 150
    again = tokenizer_texts(preset("tiny"))
    assert [next(again) for _ in range(200)] == first


def test_a_stage_that_was_begun_keeps_its_settings(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    settings, begun = stage_settings(Pipeline(preset("tiny"), tmp_path, scale=0.5), run, "base")
    assert not begun
    two, _ = stage_settings(Pipeline(preset("tiny"), tmp_path, scale=0.5), run, "base", world=2)
    assert two == replace(settings, data_shards=2)
    run.stage("base").begin(settings.to_json())
    assert stage_settings(Pipeline(preset("tiny"), tmp_path, scale=2.0), run, "base") == (settings, True)


def test_a_run_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mid").mkdir()
    with pytest.raises(EndstopError, match=r"holds a run already \(mid\)"):
        run_pipeline(Pipeline(preset("tiny"), tmp_path))


def test_a_run_goes_on_with_what_it_was_begun_with_or_not_at_all(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(part: str, share: float, words: str) -> None:
        raise Interrupted

    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        run_pipeline(Pipeline(preset("tiny"), run, scale=0.003, examples=1), report=interrupt)
    facts = {"preset": "tiny", "shape": "nanochat", "digits": 2, "scale": 0.003, "seed": 0}
    assert json.loads((run / "pipeline.json").read_text()) == facts
    # Nothing was done yet: it may begin in another way.
    with pytest.raises(Interrupted):
        run_pipeline(Pipeline(preset("tiny"), run, scale=0.004), report=interrupt, resume=True)
    (run / "tokenizer").mkdir()
    wrong = [
        (Pipeline(preset("tiny"), run), r"scale \(0.004 before, 1.0 now\)"),
        (Pipeline(preset("tiny"), run, scale=0.004, seed=1), r"seed \(0 before, 1 now\)"),
        (Pipeline(preset("d12"), run, scale=0.004), r"preset \('tiny' before, 'd12' now\)"),
        (Pipeline(preset("tiny").with_shape("llama"), run, scale=0.004), r"shape .*; digits \(2 before, 1"),
    ]
    for other, sentence in wrong:
        with pytest.raises(EndstopError, match=sentence):
            run_pipeline(other, resume=True)
    # How many questions are asked, of which parts and where, may change.
    same = Pipeline(preset("tiny"), run, scale=0.004, examples=7, rl=False, device="cpu")
    with pytest.raises(Interrupted):
        run_pipeline(same, report=interrupt, resume=True)


def test_a_tokenizer_that_was_not_measured_yet_is(tmp_path: Path) -> None:
    from endstop.train.pipeline import _train_tokenizer

    pipeline, run = Pipeline(preset("tiny"), tmp_path), RunDirectory(tmp_path)
    small = replace(pipeline, preset=replace(pipeline.preset, tokenizer_characters=20_000))
    _train_tokenizer(small, run, lambda share, words: None)
    files = {path.name: path.read_bytes() for path in run.tokenizer.iterdir()}
    (run.tokenizer / "evaluation.json").unlink()
    _train_tokenizer(replace(small, seed=5), run, lambda share, words: None)
    again = {path.name: path.read_bytes() for path in run.tokenizer.iterdir()}
    assert again.keys() == files.keys()
    assert again["tokenizer.json"] == files["tokenizer.json"]


def test_data_that_are_missing_are_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EndstopError, match="train data fineweb-edu --shards 80 --out data"):
        run_pipeline(Pipeline(preset("d12"), tmp_path / "run"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nothing"))
    tiny = preset("tiny")
    for wanted in (
        replace(tiny, sft=replace(tiny.sft, data=("gsm8k",))),
        replace(tiny, rl=replace(tiny.rl, tasks=("gsm8k",))),
        replace(tiny, evaluation=("gsm8k",)),
    ):
        with pytest.raises(EndstopError, match="there is no gsm8k"):
            run_pipeline(Pipeline(wanted, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_large_preset_made_small_finds_all_its_data_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards, all data sets, GSM8K in RL and ChatCORE at the end, without the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def rows(name: str, items: list[dict[str, Any]]) -> None:
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in items))

    sums = [{"question": f"{n}+1?", "answer": f"<<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"} for n in range(40)]
    arc = [
        {"question": f"{n}?", "choices": {"text": ["p", "q"], "label": ["A", "B"]}, "answerKey": "AB"[n % 2]}
        for n in range(8)
    ]
    mmlu = [
        {"question": f"{n}?", "subject": "s", "choices": ["p", "q", "r", "s"], "answer": n % 4}
        for n in range(8)
    ]
    talk = [
        {"messages": [{"role": "user", "content": f"Hi {n}"}, {"role": "assistant", "content": "Hello."}]}
        for n in range(20)
    ]
    talk[3] = {"messages": [{"role": "user", "content": "nobody answers"}]}
    for split in ("train", "test"):
        rows(f"gsm8k/{split}", sums)
        rows(f"arc-easy/{split}", arc)
        rows(f"arc-challenge/{split}", arc)
    rows("mmlu/auxiliary_train", [{"train": row} for row in mmlu])
    rows("mmlu/test", mmlu)
    rows("smoltalk/train", talk)
    problem = {"task_id": "t/0", "prompt": "def f():\n", "canonical_solution": "    return 1\n"}
    rows("humaneval/test", [{**problem, "test": "def check(f):\n    assert f() == 1\n", "entry_point": "f"}])
    shards = tmp_path / "data" / "fineweb-edu"
    for name in ("training/shard_00000", "validation/shard_01822"):
        path = shards / f"{name}.parquet"
        path.parent.mkdir(parents=True)
        texts = [f"A text about {n} and {n + 1}, and about nothing else." for n in range(400)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)

    large = preset("d12")
    model = ModelSettings(depth=2, hidden_size=64, head_dim=32, context=256)
    small: dict[str, Any] = {"row_length": 256, "batch_tokens": 2048, "tokens": 8192, "validation_rows": 8}
    small |= {"samples": 2, "sample_tokens": 16, "compile": False, "evaluate_every": None}

    def cut(data: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{argument.partition('@')[0]}@{40}" for argument in data)

    wanted = replace(
        large,
        vocab_size=300,
        tokenizer_characters=20_000,
        base=replace(large.base, model=model, data=("fineweb-edu@1",), **small),
        mid=replace(large.mid, data=cut(large.mid.data), **small),
        sft=replace(large.sft, data=cut(large.sft.data), **small),
        rl=replace(large.rl, steps=1, questions=2, samples=2, max_tokens=8, evaluation_questions=4),
    )
    run = tmp_path / "run"
    run_pipeline(Pipeline(wanted, run, examples=1, device="cpu"))
    summaries = {
        stage: json.loads((run / stage / "summary.json").read_text())
        for stage in ("base", "mid", "sft", "rl")
    }
    sources = {stage: summary["data"]["sources"] for stage, summary in summaries.items() if stage != "rl"}
    assert [source["documents"] for source in sources["base"]] == [400]
    assert {source["name"] for source in sources["sft"]} >= {"gsm8k", "arc-easy", "arc-challenge", "smoltalk"}
    assert summaries["sft"]["settings"]["prepare_ahead"]
    answers = json.loads((run / "rl" / "evaluation-chat.json").read_text())
    names = {task["name"] for task in answers["tasks"]}
    assert names >= {"arc-easy", "arc-challenge", "mmlu", "gsm8k", "humaneval", "echo"}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["nanochat", "llama"])
def test_a_run_is_resumed_to_its_end(shape: str, tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    small = ReinforcementNumbers(1, questions=2, samples=2, max_tokens=16, evaluation_questions=8)
    wanted = replace(preset("tiny").with_shape("llama" if shape == "llama" else "nanochat"), rl=small)
    pipeline = Pipeline(wanted, tmp_path / "run", scale=0.003, examples=1)
    heard: list[tuple[str, float]] = []

    def interrupt(part: str, share: float, words: str) -> None:
        if part == "mid" and "loss" in words:
            raise Interrupted

    with pytest.raises(Interrupted):
        run_pipeline(pipeline, report=interrupt)
    base = (tmp_path / "run" / "base" / "summary.json").read_bytes()
    assert not (tmp_path / "run" / "mid" / "summary.json").exists()
    model = run_pipeline(
        pipeline,
        resume=True,
        report=lambda part, share, words: heard.append((part, share)),
        facts={"cpu": "x"},
    )
    # The base stage was not trained again, and time only goes forward.
    assert (tmp_path / "run" / "base" / "summary.json").read_bytes() == base
    assert [part for part, _ in heard if part == "base"] == []
    shares = [share for _, share in heard]
    assert shares == sorted(shares)
    assert heard[-1] == ("done", 1.0)
    for stage in ("base", "mid", "sft", "rl"):
        summary = json.loads((tmp_path / "run" / stage / "summary.json").read_text())
        assert summary["finished"]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / stage / "model")
        ids = torch.arange(2, 40)[None]
        with torch.no_grad():
            ours = load_model(tmp_path / "run" / stage / "model")(ids)
            assert (ours - theirs.eval()(ids).logits).abs().max() < 1e-4
    page = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "Stages: base -> mid -> sft -> rl." in page
    assert f"endstop chat {model}" in page
    vocabulary = json.loads((tmp_path / "run" / "tokenizer" / "evaluation.json").read_text())
    assert [sample["name"] for sample in vocabulary["samples"]][-2:] == ["train", "validation"]
    assert vocabulary["lossless"]
    assert "## Tokenizer" in page
    # Beyond the trained window, as it is and stretched, with all three scalings.
    long_rows = json.loads((tmp_path / "run" / "sft" / "long_context.json").read_text())
    assert [name.removeprefix("as it is") for name in long_rows["series"]] == [
        *("", ", linear", ", dynamic", ", yarn")
    ]
    assert {stretches[-1]["end"] for stretches in long_rows["series"].values()} == {1024}
    assert "### Beyond the trained window" in page
    assert "| as it is, yarn | beyond 256 |" in " ".join(page.split())
    # Once more, and nothing is left to do but the report.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.safetensors")}
    assert run_pipeline(pipeline, resume=True) == model
    assert {path: path.stat().st_mtime_ns for path in before} == before
