"""Stages from their beginning to a finished model."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from endstop.cli.app import app
from endstop.models.load import load_model
from endstop.models.save import save_pretrained
from endstop.protocol.errors import EndstopError
from endstop.train.metrics_log import MetricsLog, cut_metrics, read_metrics
from endstop.train.model_shapes import llama_config, new_model
from endstop.train.run_directory import RunDirectory, tokenizer_files
from endstop.train.settings import ModelSettings, ScheduleSettings, StageSettings, changed, default_settings
from endstop.train.stages import run_base, run_chat, run_stage
from endstop.train.training_loop import Progress
from tests.train.tiny_runs import WORDS, conversations, documents, list_data, new_run, tiny_settings


def lines(run: RunDirectory, stage: str, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run.stage(stage).metrics) if line["kind"] == kind]


def test_base_then_sft_ends_in_a_model_that_stops(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    base = tiny_settings(steps=40, evaluate_every=20, samples=4, sample_tokens=30)
    summary = run_base(base, run, documents(200), validation=documents(30, 5))
    assert summary["finished"]
    assert summary["steps"] == 40
    assert summary["tokens"] == 40 * 256
    assert summary["parameters"]["total"] == 43_776
    assert summary["data"]["statistics"]["use"] == 1.0
    trained = lines(run, "base", "train")
    assert [line["step"] for line in trained] == list(range(1, 41))
    assert trained[0]["loss"] == pytest.approx(math.log(300))
    assert trained[-1]["loss"] < 2.5
    assert [line["lr_multiplier"] for line in trained[:3]] == [0.5, 1.0, 1.0]
    assert all(line["tokens_per_second"] > 0 and 0 < line["mfu"] < 1.5 for line in trained)
    evaluated = lines(run, "base", "eval")
    assert [line["step"] for line in evaluated] == [0, 20, 40]
    assert evaluated[-1]["p_document_end_at_end"] > 0.9 > evaluated[0]["p_document_end_at_end"]
    assert evaluated[-1]["natural_stop_rate"] >= 0.75
    samples = lines(run, "base", "sample")
    assert [line["step"] for line in samples] == [0] * 4 + [20] * 4 + [40] * 4
    ended = [line["stop_kind"] == "eos" for line in samples[-4:]]
    assert sum(ended) / 4 == evaluated[-1]["natural_stop_rate"]
    assert {line["prompt"] for line in samples} == {"<|bos|>"}
    assert set(samples[-1]["text"].rstrip(".").split()) & set(WORDS)

    sft = tiny_settings(
        stage="sft",
        model=None,
        init_from=str(run.predecessor("sft")),
        row_length=64,
        batch_tokens=512,
        steps=30,
        samples=6,
        sample_tokens=40,
    )
    summary = run_chat(sft, run, conversations(200), validation=conversations(20, 5))
    assert summary["data"]["labels"]["supervised_stop_rate"] == 1.0
    assert summary["metrics"]["validation_natural_stop_rate"] == 1.0
    assert summary["metrics"]["validation_greedy_turn_end"] > 0.9
    assert json.loads(run.stage("sft").summary.read_text()) == summary
    model = load_model(run.stage("sft").model)
    assert model.config.max_position_embeddings == 64
    names = {path.name for path in run.stage("sft").model.iterdir()}
    assert {"chat_template.jinja", "generation_config.json", "tokenizer.json"} <= names
    kept = sorted(path.name for path in run.stage("base").checkpoints.iterdir())
    assert kept == ["step-000040"]


def test_mid_training_may_be_unmasked_and_begin_with_momenta(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run_base(tiny_settings(), run, documents(50))
    first: dict[str, dict[str, Any]] = {}
    for name, changes in {
        "masked": {},
        "unmasked": {"masked": False},
        "warm": {"warm_optimizer": True},
        "isolated": {"isolate": True},
    }.items():
        settings = tiny_settings(
            stage="mid",
            model=None,
            init_from=str(run.predecessor("mid")),
            row_length=64,
            batch_tokens=512,
            steps=2,
            **changes,
        )
        shutil.rmtree(run.stage("mid").path, ignore_errors=True)
        summary = run_chat(settings, run, conversations(60), validation=conversations(30, 5))
        assert summary["finished"]
        lines_of_run = lines(run, "mid", "train")
        first[name] = {"one": lines_of_run[0], "two": lines_of_run[1]}
    # Unmasked, the user's words and the border behind each conversation are targets too.
    assert first["unmasked"]["one"]["count_document_end"] > 0
    assert "count_document_end" not in first["masked"]["one"]
    assert first["unmasked"]["one"]["count_content"] > 2 * first["masked"]["one"]["count_content"]
    # Momenta change what the first step does, not what it begins with.
    assert first["warm"]["one"]["loss"] == first["masked"]["one"]["loss"]
    assert first["warm"]["two"]["loss"] != first["masked"]["two"]["loss"]
    assert first["isolated"]["one"]["loss"] != first["masked"]["one"]["loss"]
    # The newest checkpoint may be of later steps than the model: only its momenta are taken.
    longer = run.stage("base")
    shutil.copytree(longer.model, tmp_path / "model")
    run_base(tiny_settings(steps=12), run, documents(50), resume=True)
    shutil.rmtree(longer.model)
    shutil.copytree(tmp_path / "model", longer.model)
    shutil.rmtree(run.stage("mid").path)
    run_chat(replace(settings, isolate=False, warm_optimizer=True), run, conversations(60))
    assert lines(run, "mid", "train")[0]["loss"] == first["masked"]["one"]["loss"]
    elsewhere = tmp_path / "elsewhere" / "model"
    shutil.copytree(run.stage("base").model, elsewhere)
    settings = replace(settings, stage="sft", init_from=str(elsewhere), warm_optimizer=True)
    with pytest.raises(EndstopError, match="has no checkpoints beside it"):
        run_chat(settings, run, conversations(60))
    # Nothing was begun: it can be begun again, with other settings.
    assert not run.stage("sft").path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_longer_window_is_trained_measured_and_reported(kind: str, tmp_path: Path) -> None:
    """The way of docs/training.md: P(stop) at true ends past the window, before and after, in the report."""
    first, longer = tmp_path / "first", tmp_path / "longer"
    talk = conversations(200)
    run = new_run(first)
    run_base(tiny_settings(row_length=64, batch_tokens=512, steps=10), run, documents(60))
    common: dict[str, Any] = {"stage": "sft", "model": None, "batch_tokens": 1024}
    before = run.stage("base").model
    run_chat(tiny_settings(**common, init_from=str(before), row_length=64, steps=40), run, talk)
    before = run.stage("sft").model
    settings = tiny_settings(
        **common,
        init_from=str(before),
        context=256,
        rope_scaling={"rope_type": kind, "factor": 4.0},
        row_length=256,
        steps=10,
    )
    run_chat(settings, RunDirectory(longer), talk)
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in talk))
    after = longer / "sft" / "model"
    arguments = ["eval", "long-context", str(after), "--before", str(before), "--data", str(chats)]
    found = CliRunner().invoke(app, [*arguments, "--rows", "4", "--scaling", kind, "--json"])
    assert found.exit_code == 0, found.output
    kept = json.loads((longer / "sft" / "long_context.json").read_text())
    assert list(kept["series"]) == ["before", f"before, {kind}", "after"]
    assert (kept["trained"], kept["series"]["after"][-1]["end"]) == (64, 256)
    assert CliRunner().invoke(app, ["train", "report", str(longer)]).exit_code == 0
    page = " ".join((longer / "report" / "report.md").read_text().split())
    assert "| after | beyond 64 |" in page
    assert "| before | beyond 64 |" in page


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_with_another_window_is_fine_tuned(tied: bool, tmp_path: Path) -> None:
    """As a model from elsewhere is: `init_from` outside the run, rotary positions stretched."""
    files = tokenizer_files(new_run(tmp_path / "other").tokenizer)
    config = llama_config(2, 300, hidden_size=32, head_dim=16, context=64, tie_word_embeddings=tied)
    save_pretrained(new_model(config), tmp_path / "model", files=dict(files))
    settings = tiny_settings(
        stage="sft",
        model=None,
        init_from=str(tmp_path / "model"),
        context=256,
        rope_scaling={"rope_type": "yarn", "factor": 4.0},
        row_length=128,
        batch_tokens=1024,
        steps=20,
    )
    run = RunDirectory(tmp_path / "run")
    summary = run_chat(settings, run, conversations(60))
    assert summary["metrics"]["loss"] < 3.5
    model = load_model(run.stage("sft").model)
    assert model.config.max_position_embeddings == 256
    assert (model.config.rope.type, model.config.rope.original_max_position) == ("yarn", 64)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def final_weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    return dict(load_model(run.stage("base").model).state_dict())


def test_micro_batches_do_not_change_a_step(tmp_path: Path) -> None:
    weights = []
    for micro_rows in (8, 3):
        run = new_run(tmp_path / str(micro_rows))
        settings = tiny_settings(micro_rows=micro_rows)
        run_stage(settings, run, list_data(settings))
        weights.append(final_weights(run))
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], atol=1e-4), name


def test_bfloat16_learns_like_float32(tmp_path: Path) -> None:
    losses = []
    for dtype in ("float32", "bfloat16"):
        run = new_run(tmp_path / dtype)
        settings = tiny_settings(steps=30, dtype=dtype)
        losses.append(run_stage(settings, run, list_data(settings))["metrics"]["loss"])
        assert load_model(run.stage("base").model).lm_head.weight.dtype == torch.float32
    assert losses[0] == pytest.approx(losses[1], abs=0.15)


def test_a_run_of_some_seconds_fixes_its_steps_and_keeps_to_them(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    seen: list[Progress] = []
    settings = tiny_settings(steps=None, seconds=1.5, save_every=1_000_000)
    summary = run_stage(settings, run, list_data(settings), report=seen.append)
    assert summary["finished"]
    assert summary["steps"] >= 5
    assert summary["seconds"] < 5
    assert seen[0].steps is None
    assert seen[-1].steps == summary["steps"] == seen[-1].step
    known = [progress for progress in seen if progress.steps is not None]
    assert {progress.steps for progress in known} == {summary["steps"]}


def test_weights_of_events_move_what_is_learned(tmp_path: Path) -> None:
    found = {}
    for weight in (0.0, 1.0):
        run = new_run(tmp_path / str(weight))
        settings = tiny_settings(steps=30, event_weights={"document_end": weight})
        found[weight] = run_stage(settings, run, list_data(settings))["metrics"]
    assert found[0.0]["validation_p_document_end_at_end"] < 0.01
    assert found[1.0]["validation_p_document_end_at_end"] > 0.5


def test_data_without_anything_to_learn_is_an_error(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run_base(tiny_settings(), run, documents(50))
    settings = tiny_settings(stage="sft", model=None, init_from=str(run.predecessor("sft")))
    nothing = [[{"role": "user", "content": "hello"}]] * 5
    with pytest.raises(EndstopError, match=r"none of the first \d+ conversations has a supervised token"):
        run_chat(settings, run, nothing)
    assert not run.stage("sft").path.exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(EndstopError, match="endstop train tokenizer"):
        run_base(tiny_settings(), run, documents(5))
    with pytest.raises(EndstopError, match="has no finished mid or base stage for sft"):
        run.predecessor("sft")
    new_run(tmp_path / "run")
    with pytest.raises(EndstopError, match="rows of 128 tokens do not fit into the model's window of 64"):
        run_base(tiny_settings(row_length=128, batch_tokens=1024), run, documents(5))
    run_base(tiny_settings(), run, documents(50))
    with pytest.raises(EndstopError, match="holds a stage already: continue it with --resume"):
        run_base(tiny_settings(), run, documents(50))


def test_settings_survive_json() -> None:
    settings = tiny_settings(event_weights={"turn_end": 2.0}, data=("a.jsonl", "tasks*2"))
    again = StageSettings.from_json(json.loads(json.dumps(settings.to_json())))
    assert again == settings
    assert changed(settings.to_json(), replace(settings, steps=99, micro_rows=1).to_json()) == []
    (difference,) = changed(settings.to_json(), replace(settings, seed=4).to_json())
    assert difference == "seed (0 before, 4 now)"
    assert default_settings("sft", "model", steps=3).schedule.initial_fraction == 0.02


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": None}, "one of steps, tokens or seconds, got nothing"),
        ({"tokens": 5}, "got steps and tokens"),
        ({"model": None}, "either the shape of a new model or one to begin with"),
        ({"batch_tokens": 100}, "must be a multiple of row_length"),
        ({"data_shards": 3}, "8 rows of a step cannot be dealt to 3 shards"),
        ({"micro_rows": 0}, "micro_rows must be above 0"),
        ({"event_weights": {"stop": 1.0}}, "a weighted event is one of"),
        ({"stage": "rl"}, "a stage is one of base, mid, sft"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tiny_settings(**changes)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ({"step": 5}, "settings has no 'step'"),
        ({"model": {"depth": "two"}}, r"settings.model.depth must be int"),
        ({"dtype": "int8"}, "settings.dtype is one of auto, float32, bfloat16"),
        ({"schedule": 3}, "settings.schedule must be an object"),
    ],
)
def test_broken_json_settings_are_named(broken: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StageSettings.from_json({**tiny_settings().to_json(), **broken})


def test_tied_nanochat_is_refused() -> None:
    with pytest.raises(ValueError, match="tie_word_embeddings needs llama"):
        ModelSettings(tie_word_embeddings=True).config(300)


def test_tokens_become_steps() -> None:
    assert tiny_settings(steps=None, tokens=2560).fixed_steps == 10
    assert tiny_settings(steps=None, seconds=2.0).fixed_steps is None
    assert tiny_settings(schedule=ScheduleSettings(warmup_steps=100), steps=3).fixed_steps == 3


def test_metrics_are_cut_where_a_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 5):
        log.write("train", step, loss=float(step) if step != 2 else float("nan"))
    log.close()
    with path.open("a") as file:
        file.write('{"step": 5, "kind": "tr')
    cut_metrics(path, 3)
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 1.0), (2, None), (3, 3.0)]
    assert path.read_text().endswith("}\n")
