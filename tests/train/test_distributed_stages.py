"""Whole stages in several processes: the same losses as in one, and a run that changes their number."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import endstop
from endstop.train.distributed import Process
from endstop.train.metrics_log import read_metrics
from endstop.train.run_directory import RunDirectory
from endstop.train.stages import run_base, run_chat
from tests.train.processes import alone, run_processes
from tests.train.tiny_runs import conversations, documents, new_run, tiny_settings

pytestmark = pytest.mark.slow
TIMES = {"tokens_per_second", "mfu", "seconds"}


def base(process: Process, place: str, strategy: str, resume: bool) -> None:
    settings = tiny_settings(
        data_shards=4,
        buffer=20,
        strategy=strategy,
        save_every=3,
        evaluate_every=3,
        samples=2,
        sample_tokens=8,
    )
    run_base(
        settings,
        RunDirectory(Path(place)),
        documents(80),
        validation=documents(11, 4),
        process=process,
        resume=resume,
    )


def sft(process: Process, place: str, strategy: str, resume: bool) -> None:
    run = RunDirectory(Path(place))
    settings = tiny_settings(
        stage="sft",
        model=None,
        init_from=str(run.stage("base").model),
        row_length=64,
        batch_tokens=512,
        micro_rows=2,
        data_shards=2,
        buffer=10,
        strategy=strategy,
        samples=2,
        sample_tokens=8,
    )
    run_chat(settings, run, conversations(40), validation=conversations(8, 3), process=process, resume=resume)


def run(place: Path, world: int, strategy: str, stage: Any = base, *, resume: bool = False) -> Path:
    if world == 1:
        alone(stage, str(place), strategy, resume)
    else:
        run_processes(world, stage, str(place), strategy, resume)
    return place


def story(place: Path, stage: str) -> list[dict[str, Any]]:
    lines = read_metrics(RunDirectory(place).stage(stage).metrics)
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def assert_same(place: Path, other: Path, stage: str = "base") -> None:
    # The last line evaluates the final weights. These are not compared one by one: AdamW makes whole steps of
    # gradients that are nothing but rounding, which differ.
    mine, theirs = story(place, stage), story(other, stage)
    assert len(mine) == len(theirs) > 6
    for line, expected in zip(mine, theirs, strict=True):
        for name in ("kind", "prompt", "text", "stop_kind"):
            assert line.pop(name, None) == expected.pop(name, None)
        assert line == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def in_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("one") / "run"
    new_run(place)
    return run(run(place, 1, "auto"), 1, "auto", sft)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_stages_in_two_processes_are_those_in_one(tmp_path: Path, in_one: Path, strategy: str) -> None:
    place = tmp_path / "run"
    new_run(place)
    run(place, 2, strategy)
    assert_same(place, in_one)
    run(place, 2, strategy, sft)
    assert_same(place, in_one, "sft")
    assert not list(place.rglob("*.partial"))


@pytest.mark.parametrize(("before", "after"), [((2, "fsdp"), (1, "auto")), ((1, "auto"), (4, "fsdp"))])
def test_a_stage_is_resumed_in_another_number_of_processes(
    tmp_path: Path, in_one: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    place = tmp_path / "run"
    new_run(place)
    run(place, *before)
    # As if it had been killed in its second half. The strategy is no part of what a run is.
    stage = RunDirectory(place).stage("base")
    for gone in (stage.checkpoints / "step-000006", stage.model):
        shutil.rmtree(gone)
    stored = json.loads(stage.settings.read_text())
    stage.settings.write_text(json.dumps({**stored, "strategy": after[1]}))
    run(place, *after, resume=True)
    assert_same(place, in_one)


def torchrun(place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        "-m",
        "endstop",
        "--",
        "train",
        "base",
        "--run",
        str(place),
        "--data",
        str(place / "texts.jsonl"),
    ]
    command += ["--depth", "2", "--width", "32", "--head-dim", "16", "--context", "64", "--row-length", "32"]
    command += ["--batch-tokens", "256", "--steps", "4", "--samples", "0", "--device", "cpu", *options]
    source = str(Path(endstop.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def test_torchrun_trains_and_only_the_main_process_speaks(tmp_path: Path) -> None:
    new_run(tmp_path)
    texts = [json.dumps({"text": text}) for text in documents(200)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))
    wrong = torchrun(tmp_path, "--data-shards", "1")
    assert wrong.returncode != 0
    assert "1 data shards cannot be dealt out to 2 processes" in wrong.stderr
    done = torchrun(tmp_path, "--data-shards", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4
    assert done.stderr.count("4 steps in") == 1
    assert (tmp_path / "base" / "model" / "config.json").exists()
    lines = read_metrics(tmp_path / "base" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]

    again = torchrun(tmp_path, "--data-shards", "2")
    assert again.returncode != 0
    assert "holds a stage already" in again.stderr
