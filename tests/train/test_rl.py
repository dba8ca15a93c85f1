"""The RL stage on a tiny model: it learns to stop, goes on as if never killed, refuses what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from endstop.models.load import load_model
from endstop.protocol.errors import EndstopError
from endstop.train.distributed import Process
from endstop.train.metrics_log import read_metrics
from endstop.train.questions import GROUPS, TaskQuestions, task_names, tasks_of
from endstop.train.rl import RLProgress, train_rl
from endstop.train.rl_settings import RLSettings
from endstop.train.rollouts import Question
from endstop.train.run_directory import RunDirectory
from endstop.train.tasks.registry import task_named
from tests.train.processes import run_processes
from tests.train.tiny_policy import BOS, END, chat_renderer, question, save_chat_model, tiny_decoder


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows nothing: every token is about as likely as any other."""
    model = tiny_decoder(context=64)
    with torch.no_grad():
        model.lm_head.weight *= 0.2
    return save_chat_model(model, tmp_path_factory.mktemp("start") / "model")


class Asked:
    """The same few questions again and again; right is what `right` says."""

    def __init__(self, directory: Path, right: Callable[[str], bool], answer: str = "") -> None:
        renderer = chat_renderer(directory)
        self.questions = [question(renderer, text, answer, right=right) for text in ("a", "b", "c", "d")]

    def question(self, split: str, index: int, *, gold: bool = False) -> Question:
        return self.questions[index % 4]


def anything(text: str) -> bool:
    return True


def settings_of(start: Path, **changes: Any) -> RLSettings:
    small = RLSettings(
        init_from=str(start),
        tasks=("echo",),
        steps=6,
        questions=4,
        samples=8,
        max_tokens=8,
        lr_fraction=1.0,
        evaluation_questions=4,
        evaluation_samples=4,
        device="cpu",
    )
    return replace(small, **changes)


def lines_of(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    """The lines of a kind without what the clock says."""
    return [
        {name: value for name, value in line.items() if "seconds" not in name}
        for line in read_metrics(run.stage("rl").metrics)
        if line["kind"] == kind
    ]


def test_it_learns_to_stop_at_once(start: Path, tmp_path: Path) -> None:
    """Reward 1 for any answer that ends by itself, 0 for a cut one: all there is to learn is to stop."""
    run = RunDirectory(tmp_path)
    settings = settings_of(start, steps=30, samples=32, evaluate_every=10)
    seen: list[RLProgress] = []
    summary = train_rl(run, settings, questions=Asked(start, anything), report=seen.append)
    first, last = lines_of(run, "train")[0], lines_of(run, "train")[-1]
    assert first["stop_rate"] < 0.3
    assert last["stop_rate"] > 0.95
    assert last["mean_length"] < first["mean_length"] / 2
    assert [progress.step for progress in seen] == list(range(1, 31))
    metrics = summary["metrics"]
    assert metrics["stop_rate"] == metrics["accuracy"] == metrics["pass@4"] == 1.0
    assert metrics["stop_rate_before"] == 0.0
    assert metrics["p_stop_at_end"] > 0.5 > 0.1 > metrics["p_stop_at_end_before"]
    assert [line["step"] for line in lines_of(run, "eval")] == [0, 10, 20, 30]
    # Written whole, and the engine and the trainer agreed all the way.
    assert max(line["engine_gap_max"] for line in lines_of(run, "train")) < 1e-3
    stored = json.loads(run.stage("rl").summary.read_text(encoding="utf-8"))
    assert stored["finished"] is True
    assert stored["steps"] == 30
    assert stored["data"]["statistics"]["rollouts"] == 30 * 4 * 32
    model = load_model(run.stage("rl").model)
    prompt = Asked(start, anything).questions[0].prompt_ids
    assert int(model(torch.tensor([prompt]))[0, -1].argmax()) in (END, BOS)


class Interrupted(Exception):
    pass


def stop_at(step: int) -> Callable[[RLProgress], None]:
    def report(progress: RLProgress) -> None:
        if progress.step == step:
            raise Interrupted

    return report


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(start: Path, tmp_path: Path) -> None:
    settings = settings_of(start, save_every=2, evaluate_every=3)
    asked = Asked(start, lambda text: len(text) < 3)
    whole, parts = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "parts")
    one = train_rl(whole, settings, questions=asked)
    for step in (1, 5):  # before there is a checkpoint, and behind the one of step 4
        with pytest.raises(Interrupted):
            train_rl(parts, settings, questions=asked, resume=step > 1, report=stop_at(step))
        assert not parts.stage("rl").model.exists()
    two = train_rl(parts, settings, questions=asked, resume=True)
    for kind in ("train", "eval"):
        assert lines_of(whole, kind) == lines_of(parts, kind)
    assert lines_of(whole, "train")[-1]["step"] == 6
    assert any(line["groups_without_signal"] < 1 for line in lines_of(whole, "train"))
    assert one["metrics"] == two["metrics"]
    a, b = (load_model(run.stage("rl").model).state_dict() for run in (whole, parts))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_checkpoints_are_model_directories_and_old_ones_go(start: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    train_rl(run, settings_of(start, save_every=1, steps=4), questions=Asked(start, anything))
    found = sorted(path.name for path in run.stage("rl").checkpoints.iterdir())
    assert found == ["step-000003", "step-000004"]
    last = run.stage("rl").checkpoints / "step-000004"
    assert (last / "tokenizer.json").exists()
    final = load_model(run.stage("rl").model).state_dict()
    assert all(torch.equal(final[name], value) for name, value in load_model(last).state_dict().items())


def test_a_stage_that_is_there_and_settings_that_changed_are_refused(start: Path, tmp_path: Path) -> None:
    run, settings = RunDirectory(tmp_path), settings_of(start, steps=1)
    asked = Asked(start, anything)
    with pytest.raises(EndstopError, match="no stage to resume"):
        train_rl(run, settings, questions=asked, resume=True)
    train_rl(run, settings, questions=asked)
    with pytest.raises(EndstopError, match="holds a stage already"):
        train_rl(run, settings, questions=asked)
    with pytest.raises(EndstopError, match=r"steps \(1 before, 2 now\)"):
        train_rl(run, replace(settings, steps=2), questions=asked, resume=True)
    again = train_rl(run, replace(settings, micro_rows=7), questions=asked, resume=True)
    assert again["steps"] == 1


def test_a_step_without_signal_leaves_the_weights_alone(start: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    settings = settings_of(start, steps=2, max_tokens=1)
    train_rl(run, settings, questions=Asked(start, lambda text: False))
    assert {line["groups_without_signal"] for line in lines_of(run, "train")} == {1.0}
    before, after = load_model(start).state_dict(), load_model(run.stage("rl").model).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_questions_longer_than_the_window_are_left_out_and_counted(start: Path, tmp_path: Path) -> None:
    asked = Asked(start, lambda text: len(text) < 3, answer="x")
    long = question(chat_renderer(start), "long " * 20, "x", right=anything)
    asked.questions[1] = long
    settings = settings_of(start, steps=2)
    run = RunDirectory(tmp_path / "run")
    counted = train_rl(run, settings, questions=asked)["data"]["statistics"]
    assert [line["skipped_questions"] for line in lines_of(run, "train")] == [1, 1]
    assert (counted["skipped_questions"], counted["skipped_held_out"], counted["rollouts"]) == (2, 1, 48)
    asked.questions = [long] * 4
    with pytest.raises(EndstopError, match="each of the 4 held-out questions is longer than the window"):
        train_rl(RunDirectory(tmp_path / "none"), settings, questions=asked)

    class OnlyHeldOut(Asked):
        def question(self, split: str, index: int, *, gold: bool = False) -> Question:
            return long if split == "train" else self.questions[index % 4]

    with pytest.raises(EndstopError, match="every question of step 1 is longer than the window of 64 tokens"):
        train_rl(
            RunDirectory(tmp_path / "held_out"), settings, questions=OnlyHeldOut(start, anything, answer="x")
        )


def test_numbers_that_are_not_finite_end_the_run(start: Path, tmp_path: Path) -> None:
    broken = load_model(start, dtype="float32")
    with torch.no_grad():
        broken.lm_head.weight[5, 0] = float("nan")
    directory = save_chat_model(broken, tmp_path / "broken")
    with pytest.raises(EndstopError, match="rollout failed"):
        train_rl(RunDirectory(tmp_path), settings_of(directory), questions=Asked(start, anything))


def test_settings_come_back_from_their_file(start: Path) -> None:
    settings = settings_of(start, reward="stop-shaped", truncated="mask", give_up=("?",))
    assert RLSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    with pytest.raises(EndstopError, match="no 'pace'"):
        RLSettings.from_json({**settings.to_json(), "pace": 1})
    with pytest.raises(EndstopError, match="damaged"):
        RLSettings.from_json({**settings.to_json(), "steps": 0})
    for wrong, words in (
        ({"samples": 1}, "samples must be at least 2"),
        ({"tasks": ()}, "at least one task"),
        ({"questions": 0}, "questions must be at least 1"),
        ({"reward": "best"}, "the reward must be"),
        ({"lr_fraction": -1.0}, "lr_fraction must be 0 or more, got -1.0"),
        ({"lr_fraction": float("nan")}, "lr_fraction must be 0 or more, got nan"),
        ({"give_up": ("",)}, "must not be empty"),
    ):
        with pytest.raises(ValueError, match=words):
            settings_of(start, **wrong)


def test_questions_come_from_tasks_in_turn_and_are_always_the_same(start: Path) -> None:
    renderer = chat_renderer(start)
    tasks = [task_named("echo"), task_named("calc")]
    asked = TaskQuestions(tasks, renderer, seed=3)
    assert [asked.question("train", index).task for index in range(4)] == ["echo", "calc"] * 2
    one = asked.question("test", 6, gold=True)
    assert one.prompt_ids == asked.question("test", 6).prompt_ids
    assert one.prompt_ids != asked.question("test", 4).prompt_ids
    assert one.prompt_ids != asked.question("train", 6).prompt_ids
    example = tasks[0].example(3, 3, "test")
    assert one.right(str(example.answer))
    assert not one.right(str(example.answer) + "x")
    assert bytes(one.gold_ids[:-1]).decode() == example.answer
    assert one.gold_ids[-1] == END
    assert set(one.gold_mask) == {1}
    assert one.gave_up(" I do not know. ")
    assert not one.gave_up("I do not know what")
    calc = asked.question("test", 1, gold=True)
    assert set(calc.gold_mask) == {0, 1}
    assert calc.gold_ids[-1] == END
    with pytest.raises(EndstopError, match="at least one task"):
        TaskQuestions([], renderer)


def test_gsm8k_from_files_is_a_task_like_others(start: Path, tmp_path: Path) -> None:
    for split, count in (("train", 5), ("test", 3)):
        rows = [
            {"question": f"{split} {i}?", "answer": f"{i}+1 is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"}
            for i in range(count)
        ]
        (tmp_path / "gsm8k").mkdir(exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    (task,) = tasks_of(["gsm8k"], tmp_path)
    first = [str(task.example(0, index, "train").messages[-1]["content"]) for index in range(10)]
    assert sorted(first[:5]) == sorted(first[5:]) == [f"train {i}?" for i in range(5)]
    assert first[:5] != first[5:]
    one = TaskQuestions([task], chat_renderer(start), seed=0).question("test", 0, gold=True)
    number = int(task.example(0, 0, "test").messages[-1]["content"].split()[1].rstrip("?"))
    assert one.right(f"so #### {number + 1}")
    assert not one.right(f"so #### {number + 2}")
    assert set(one.gold_mask) == {0, 1}
    assert one.gold_ids[-1] == END
    with pytest.raises(EndstopError, match="there is no task 'chess'"):
        tasks_of(["chess"])
    assert task_names(["hard", "gsm8k", "echo-hard"])[-1] == "gsm8k"


def train_with_others(process: Process, start: str, place: str) -> None:
    directory = Path(start)
    asked = Asked(directory, lambda text: len(text) < 3)
    train_rl(RunDirectory(Path(place)), settings_of(directory, steps=3), process=process, questions=asked)


@pytest.mark.slow
def test_two_processes_share_the_questions_and_train_as_one(start: Path, tmp_path: Path) -> None:
    one, two = RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "two")
    train_rl(one, settings_of(start, steps=3), questions=Asked(start, lambda text: len(text) < 3))
    run_processes(2, train_with_others, str(start), str(two.path))
    for a, b in zip(lines_of(one, "train"), lines_of(two, "train"), strict=True):
        numbers = {name: value for name, value in a.items() if name != "kind"}
        assert numbers == pytest.approx({name: b[name] for name in numbers}, rel=1e-4, abs=1e-5)
    assert [line["step"] for line in lines_of(two, "eval")] == [0, 3]
    a, b = (load_model(run.stage("rl").model).state_dict() for run in (one, two))
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-3, atol=2e-4)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "endstop.cli", "train", "rl", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1"},
        timeout=300,
    )


SMALL = (
    *("--task", "echo", "--questions", "4", "--samples", "4", "--max-tokens", "8"),
    *("--evaluation-questions", "4", "--evaluation-samples", "2", "--device", "cpu"),
)


@pytest.mark.slow
def test_a_run_killed_outright_goes_on_on_the_command_line(start: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = (*SMALL, "--init-from", str(start), "--steps", "40", "--save-every", "3")
    done = command("--run", str(whole), *options, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"] is True
    assert "right 0.0% -> 0.0%" in done.stderr
    killed = subprocess.Popen(
        [sys.executable, "-m", "endstop.cli", "train", "rl", "--run", str(parts), *options],
        env={**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1"},
    )
    metrics = parts / "rl" / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text(encoding="utf-8").splitlines()) > 8):
        time.sleep(0.02)
        assert killed.poll() is None
    killed.kill()
    killed.wait()
    assert not (parts / "rl" / "model").exists()
    again = command("--run", str(parts), "--resume")
    assert again.returncode == 0, again.stderr
    for kind in ("train", "eval"):
        assert lines_of(RunDirectory(whole), kind) == lines_of(RunDirectory(parts), kind)


@pytest.mark.slow
def test_what_is_wrong_on_the_command_line_is_one_sentence(start: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (("--run", str(tmp_path)), "name what is asked"),
        (("--run", str(tmp_path), "--task", "chess"), "there is no task 'chess'"),
        (("--run", str(tmp_path), "--task", "echo"), "no finished sft stage"),
        (("--run", str(tmp_path), "--resume"), "no stage to resume"),
        (
            ("--run", str(tmp_path), *SMALL, "--init-from", str(start), "--reward", "best"),
            "exact, stop-shaped",
        ),
    ):
        done = command(*arguments)
        assert done.returncode == 1
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_preset_brings_its_own_questions(tmp_path: Path) -> None:
    from endstop.cli.train_rl import rl_settings

    run = RunDirectory(tmp_path)
    given = {"preset": "d20", "init_from": "somewhere"}
    assert rl_settings(run, given, resume=False).tasks == ("gsm8k",)
    assert rl_settings(run, given, resume=False).steps == 467
    tiny = rl_settings(run, {**given, "preset": "tiny"}, resume=False)
    assert tiny.tasks == GROUPS["hard"]
    assert rl_settings(run, {**given, "tasks": ["echo"]}, resume=False).tasks == ("echo",)
