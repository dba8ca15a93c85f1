"""A run that is killed at any moment goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import endstop
from endstop.models.load import load_model
from endstop.protocol.errors import EndstopError
from endstop.train.checkpoint import checkpoints, newest_checkpoint, read_position
from endstop.train.metrics_log import read_metrics
from endstop.train.optimizer import OptimizerSettings
from endstop.train.run_directory import RunDirectory
from endstop.train.settings import ModelSettings, StageSettings
from endstop.train.stages import run_base, run_chat, run_stage
from endstop.train.tokenizer_training import save_tokenizer, train_tokenizer
from endstop.train.training_loop import Progress, Report
from tests.train.tiny_runs import conversations, documents, list_data, new_run, tiny_settings

TIMES = {"tokens_per_second", "mfu", "seconds"}
SETTINGS: dict[str, Any] = {"steps": 9, "save_every": 2, "evaluate_every": 4}


class Killed(BaseException):
    """Ends a run without letting it tidy up."""


def at_step(step: int, error: BaseException | None = None) -> Report:
    """Reports that end the run behind a step: with an error, or with a signal to this process."""

    def report(progress: Progress) -> None:
        if progress.step == step:
            if error is not None:
                raise error
            os.kill(os.getpid(), signal.SIGTERM)

    return report


def story(run: RunDirectory, stage: str = "base") -> list[dict[str, Any]]:
    """The metrics of a run without times."""
    return [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in read_metrics(run.stage(stage).metrics)
    ]


def weights(run: RunDirectory, stage: str = "base") -> dict[str, torch.Tensor]:
    return dict(load_model(run.stage(stage).model).state_dict())


def assert_same(run: RunDirectory, other: RunDirectory, stage: str = "base") -> None:
    assert story(run, stage) == story(other, stage)
    theirs = weights(other, stage)
    assert all(torch.equal(value, theirs[name]) for name, value in weights(run, stage).items())


def base_run(
    place: Path, report: Report | None = None, *, resume: bool = False, **changes: Any
) -> RunDirectory:
    run = RunDirectory(place) if resume else new_run(place)
    settings = tiny_settings(**{**SETTINGS, "data_shards": 2, "buffer": 20, **changes})
    run_base(settings, run, documents(60), validation=documents(10, 4), resume=resume, report=report)
    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return base_run(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("packing", ["crop", "keep-ends"])
def test_resumed_base_training_is_the_uninterrupted_one(packing: str, tmp_path: Path) -> None:
    whole = base_run(tmp_path / "whole", packing=packing)
    with pytest.raises(Killed):
        base_run(tmp_path / "run", at_step(5, Killed()), packing=packing)
    # The last checkpoint is that of step 4: step 5 is taken again, then step 7 is lost.
    with pytest.raises(Killed):
        base_run(tmp_path / "run", at_step(7, Killed()), resume=True, packing=packing)
    assert_same(base_run(tmp_path / "run", resume=True, packing=packing), whole)


def test_killed_before_the_first_checkpoint_begins_again(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    with pytest.raises(Killed):
        base_run(tmp_path / "run", at_step(1, Killed()))
    assert_same(base_run(tmp_path / "run", resume=True), uninterrupted)


def test_resumed_sft_is_the_uninterrupted_one(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    def sft(place: Path, report: Report | None = None, resume: bool = False) -> RunDirectory:
        settings = tiny_settings(
            **SETTINGS,
            stage="sft",
            model=None,
            init_from=str(uninterrupted.stage("base").model),
            row_length=64,
            batch_tokens=512,
            buffer=10,
        )
        run = RunDirectory(place)
        run_chat(settings, run, conversations(40), resume=resume, report=report)
        return run

    whole = sft(tmp_path / "whole")
    with pytest.raises(Killed):
        sft(tmp_path / "run", at_step(5, Killed()))
    assert_same(sft(tmp_path / "run", resume=True), whole, "sft")


def test_templates_are_told_the_day_on_which_the_run_was_begun(
    tmp_path: Path, uninterrupted: RunDirectory
) -> None:
    start = tmp_path / "start"
    shutil.copytree(uninterrupted.stage("base").model, start)
    template = (start / "chat_template.jinja").read_text()
    (start / "chat_template.jinja").write_text(
        template.replace("{{- '<|bos|>' -}}", "{{- '<|bos|>' + strftime_now('%Y %m %d') -}}")
    )
    assert "strftime_now" in (start / "chat_template.jinja").read_text()

    def sft(place: Path, day: str | None, report: Report | None = None, resume: bool = False) -> RunDirectory:
        changes = {"stage": "sft", "model": None, "init_from": str(start), "row_length": 64, "buffer": 10}
        settings = tiny_settings(**{**SETTINGS, **changes}, batch_tokens=512, date=day)
        run = RunDirectory(place)
        run_chat(settings, run, conversations(40), resume=resume, report=report)
        return run

    whole = sft(tmp_path / "whole", "2020-02-03")
    with pytest.raises(Killed):
        sft(tmp_path / "run", "2020-02-03", at_step(5, Killed()))
    assert_same(sft(tmp_path / "run", None, resume=True), whole, "sft")
    assert RunDirectory(tmp_path / "run").stage("sft").read_settings()["date"] == "2020-02-03"
    today = sft(tmp_path / "today", None).stage("sft")
    assert today.read_settings()["date"] >= "2026"
    lines = [next(read_metrics(stage.metrics)) for stage in (today, whole.stage("sft"))]
    assert lines[0]["loss"] != lines[1]["loss"]


def test_batches_made_ahead_change_nothing_not_even_over_a_kill(
    tmp_path: Path, uninterrupted: RunDirectory
) -> None:
    """With a thread, without it, and with it again: the checkpoints of each are those of the other."""
    with pytest.raises(Killed):
        base_run(tmp_path / "run", at_step(3, Killed()), prepare_ahead=True)
    assert "endstop-data" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(Killed):
        base_run(tmp_path / "run", at_step(5, Killed()), resume=True)
    run = base_run(tmp_path / "run", resume=True, prepare_ahead=True)
    assert_same(run, uninterrupted)
    summaries = [json.loads(each.stage("base").summary.read_text()) for each in (run, uninterrupted)]
    assert summaries[0]["data"] == summaries[1]["data"]


def test_a_signal_saves_and_ends(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    run = base_run(tmp_path / "run", at_step(3))
    assert not run.stage("base").model.exists()
    newest = newest_checkpoint(run.stage("base").checkpoints)
    assert newest is not None
    # The step that was begun when the signal came is finished first.
    assert read_position(newest).step == 4
    assert_same(base_run(tmp_path / "run", resume=True), uninterrupted)


def test_a_finished_run_can_be_resumed_and_made_longer(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    run = base_run(tmp_path / "run")
    assert_same(base_run(tmp_path / "run", resume=True), uninterrupted)
    longer = base_run(tmp_path / "run", resume=True, steps=11)
    assert [line["step"] for line in story(longer) if line["kind"] == "train"] == list(range(1, 12))
    assert run.stage("base").read_settings()["steps"] == 11


def test_a_half_written_checkpoint_is_no_checkpoint(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    run = base_run(tmp_path / "run", at_step(3))
    directory = run.stage("base").checkpoints
    partial = directory / ".step-000006.partial" / "training"
    partial.mkdir(parents=True)
    (partial / "state.json").write_text("{}")
    (directory / "step-000008").mkdir()
    assert [path.name for path in checkpoints(directory)] == ["step-000002", "step-000004"]
    (directory / "step-000008").rmdir()
    assert_same(base_run(tmp_path / "run", resume=True), uninterrupted)
    assert not partial.exists()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    run = base_run(tmp_path / "run", keep_checkpoints=3)
    assert [path.name for path in checkpoints(run.stage("base").checkpoints)] == [
        "step-000006",
        "step-000008",
        "step-000009",
    ]
    model = load_model(run.stage("base").checkpoints / "step-000009")
    assert all(torch.equal(value, weights(run)[name]) for name, value in model.state_dict().items())


def test_an_old_checkpoint_that_was_not_removed_whole_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("endstop.train.checkpoint.shutil.rmtree", lambda *args, **options: None)
    run = base_run(tmp_path / "run", keep_checkpoints=2)
    kept = ["step-000008", "step-000009"]
    assert [path.name for path in checkpoints(run.stage("base").checkpoints)] == kept
    monkeypatch.undo()
    base_run(tmp_path / "run", resume=True)
    assert sorted(path.name for path in run.stage("base").checkpoints.iterdir()) == kept


def test_every_checkpoint_is_a_model_directory(uninterrupted: RunDirectory) -> None:
    """With tokenizer and both ends, and transformers computes the same with it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = checkpoints(uninterrupted.stage("base").checkpoints)
    assert len(found) == 2
    ids = torch.arange(300)[None, :60]
    for directory in (*found, uninterrupted.stage("base").model):
        theirs = AutoModelForCausalLM.from_pretrained(directory).eval()
        with torch.no_grad():
            assert (load_model(directory)(ids) - theirs(ids).logits).abs().max() < 1e-4
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ends = [tokenizer.convert_tokens_to_ids(text) for text in ("<|assistant_end|>", "<|bos|>")]
        assert theirs.generation_config.eos_token_id == ends
        assert tokenizer.chat_template


def test_a_stage_without_a_tokenizer_names_the_command(tmp_path: Path) -> None:
    place = tmp_path / "tokenizer"
    with pytest.raises(EndstopError, match=rf"endstop train tokenizer --out {place}`"):
        run_base(tiny_settings(), RunDirectory(tmp_path), documents(9))


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    run = base_run(tmp_path / "run", at_step(3))

    def resumed(**changes: Any) -> None:
        base_run(tmp_path / "run", resume=True, **changes)

    with pytest.raises(EndstopError, match=r"other settings: seed \(0 before, 5 now\)"):
        resumed(seed=5)
    with pytest.raises(EndstopError, match="other settings: model"):
        resumed(model=ModelSettings(depth=3, hidden_size=32, head_dim=16, context=64))
    # Even where the settings were changed by hand, the checkpoint itself is looked at.
    path = run.stage("base").settings
    stored = path.read_text()
    path.write_text(json.dumps({**json.loads(stored), "data_shards": 4}))
    with pytest.raises(EndstopError, match="shards"):
        resumed(data_shards=4)
    changed = tiny_settings(model=ModelSettings(depth=3, hidden_size=32, head_dim=16, context=64)).to_json()
    path.write_text(json.dumps({**json.loads(stored), "model": changed["model"]}))
    with pytest.raises(EndstopError, match="is of another model: its num_hidden_layers is 2, here it is 3"):
        resumed(model=ModelSettings(depth=3, hidden_size=32, head_dim=16, context=64))
    path.write_text(stored)
    other = train_tokenizer(documents(80, 3), 300, engine="tokenizers")
    save_tokenizer(other, run.tokenizer, replace=True)
    with pytest.raises(EndstopError, match=r"was trained with another tokenizer.json"):
        resumed()
    save_tokenizer(train_tokenizer(documents(80, 3), 290, engine="tokenizers"), run.tokenizer, replace=True)
    with pytest.raises(EndstopError, match="its vocab_size is 300, here it is 290"):
        resumed()
    with pytest.raises(EndstopError, match="holds no stage to resume"):
        run_base(tiny_settings(), RunDirectory(tmp_path / "none"), documents(5), resume=True)


def test_numbers_that_are_not_finite_end_the_run_with_the_last_checkpoint_whole(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    settings = tiny_settings(
        save_every=1,
        model=ModelSettings("llama", depth=1, hidden_size=32, head_dim=16, context=64),
        optimizer=OptimizerSettings(head_lr=2e37, newton_schulz="float32"),
    )
    with pytest.raises(EndstopError, match=r"of step [23] is (nan|inf); the last good checkpoint is .*step-"):
        run_stage(settings, run, list_data(settings))
    newest = newest_checkpoint(run.stage("base").checkpoints)
    assert newest is not None
    assert all(bool(value.isfinite().all()) for value in load_model(newest).state_dict().values())
    assert not run.stage("base").model.exists()


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [200_000, 60_000])
def test_a_full_disk_leaves_the_last_checkpoint(
    size: int, tmp_path: Path, uninterrupted: RunDirectory
) -> None:
    """The first limit lets the weights be written and not the optimizer's state, the second neither."""
    base_run(tmp_path / "run", at_step(3))
    with no_file_above(size), pytest.raises(EndstopError, match=r"cannot be written: .*step-000004"):
        base_run(tmp_path / "run", resume=True)
    directory = RunDirectory(tmp_path / "run").stage("base").checkpoints
    assert sorted(path.name for path in directory.iterdir()) == ["step-000002", "step-000004"]
    assert_same(base_run(tmp_path / "run", resume=True), uninterrupted)


def cli(run: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "endstop.cli", "train", "base", "--run", str(run), *options]
    source = str(Path(endstop.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """SIGKILL while it starts, trains and above all while it saves: at last all is as without it."""
    documents_file = tmp_path / "documents.jsonl"
    documents_file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(300)))
    options = [
        *("--data", str(documents_file), "--depth", "2", "--width", "32", "--head-dim", "16"),
        *("--context", "64", "--batch-tokens", "512", "--steps", "60", "--save-every", "1"),
        *("--dtype", "float32", "--samples", "0", "--evaluate-every", "25", "--device", "cpu"),
    ]
    whole, run = new_run(tmp_path / "whole"), new_run(tmp_path / "run")
    finished = cli(whole.path, *options)
    assert finished.wait() == 0, finished.communicate()
    chance = random.Random(7)
    place = run.stage("base").checkpoints
    saving = 0
    for attempt in range(9):
        process = cli(run.path, *options, *(["--resume"] if run.stage("base").settings.exists() else []))
        moment = ("starting", "saving", "anywhere")[attempt % 3]
        if moment == "starting":
            time.sleep(chance.uniform(0.0, 4.0))
        else:
            before, wanted = newest_checkpoint(place), chance.randint(1, 4)
            while process.poll() is None and newest_checkpoint(place) == before:
                time.sleep(0.005)
            while moment == "saving" and process.poll() is None and wanted:
                if list(place.glob(".step-*.partial")):
                    wanted -= 1
                    time.sleep(chance.uniform(0.0, 0.01) if not wanted else 0.03)
            if moment == "anywhere":
                time.sleep(chance.uniform(0.0, 0.1))
        saving += bool(list(place.glob(".step-*.partial")))
        process.kill()
        assert process.wait() in (-9, 0), process.communicate()[1].decode()
        for path in checkpoints(place):
            assert load_model(path).config.vocab_size == 300
    assert saving >= 1
    last = cli(run.path, *options, "--resume")
    assert last.wait() == 0, last.communicate()
    assert_same(run, whole)


@pytest.mark.slow
def test_a_terminated_process_says_how_to_go_on(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(300)))
    run = new_run(tmp_path / "run")
    options = ["--data", str(path), "--depth", "2", "--width", "32", "--head-dim", "16", "--context", "64"]
    process = cli(run.path, *options, "--batch-tokens", "512", "--steps", "100000", "--samples", "0")
    deadline = time.monotonic() + 120
    while not any(line["kind"] == "train" for line in read_metrics(run.stage("base").metrics)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert b"go on with --resume" in said
    assert StageSettings.from_json(run.stage("base").read_settings()).steps == 100_000
    assert newest_checkpoint(run.stage("base").checkpoints) is not None
