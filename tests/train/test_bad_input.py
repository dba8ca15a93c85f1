"""Whatever is wrong: one sentence, an exit code that is not 0, nothing lost, nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import endstop
from endstop.cli.run import run as command
from endstop.protocol.errors import EndstopError
from endstop.train.checkpoint import checkpoints
from endstop.train.exclusive import exclusive
from endstop.train.metrics_log import read_metrics
from endstop.train.run_directory import RunDirectory
from endstop.train.stages import ALONE
from tests.train.test_resume import assert_same
from tests.train.tiny_runs import conversations, documents, new_run

SHAPE = ("--depth", "2", "--width", "32", "--head-dim", "16", "--context", "64", "--batch-tokens", "256")
MACHINE = ("--samples", "0", "--device", "cpu", "--dtype", "float32")
ROWS = ("--row-length", "64", "--batch-tokens", "256")

Said = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Said:
    """Runs a command that must fail; gives its one sentence."""

    def run(*arguments: Any, code: int = 1) -> str:
        assert command([str(argument) for argument in arguments]) == code
        out, err = capfd.readouterr()
        assert not out
        assert "Traceback" not in err
        assert "Unexpected" not in err
        said = [line for line in err.splitlines() if line.startswith("endstop: ")]
        assert len(said) == 1 or code == 2, err
        return said[0].removeprefix("endstop: ") if said else err

    return run


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _jsonl(tmp_path_factory.mktemp("texts") / "texts.jsonl", [{"text": t} for t in documents(120)])


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    return _jsonl(place, [{"messages": messages} for messages in conversations(60)])


@pytest.fixture(scope="module")
def finished(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A base stage of six steps with a checkpoint for each second one."""
    run = new_run(tmp_path_factory.mktemp("finished") / "run")
    options = ("--data", str(texts), "--steps", "6", "--save-every", "2", "--keep", "3")
    assert command(["train", "base", "--run", str(run.path), *SHAPE, *MACHINE, *options]) == 0
    return run


@pytest.fixture
def stopped(finished: RunDirectory, tmp_path: Path) -> RunDirectory:
    """The same, as it was before its end: with checkpoints and no model."""
    shutil.copytree(finished.path, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    shutil.rmtree(run.stage("base").model)
    run.stage("base").summary.unlink()
    return run


def _jsonl(path: Path, records: list[Any]) -> Path:
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def _files(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


@contextmanager
def _no_file_above(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--steps", 0), "steps must be above 0, got 0"),
        (("--tokens", "inf"), "--tokens takes a number of tokens such as 11.2e9, got inf"),
        (("--tokens", "nan"), "--tokens takes a number of tokens such as 11.2e9, got nan"),
        (("--seconds", "nan"), "seconds must be above 0, got nan"),
        (("--seconds", "inf"), "seconds must be above 0, got inf"),
        (("--steps", 2, "--samples", -1), "samples must not be negative, got -1"),
        (("--steps", 2, "--matrix-lr", "nan"), "learning rates and weight decays must be 0 or more, got nan"),
        (("--steps", 2, "--head-lr", "inf"), "learning rates and weight decays must be 0 or more, got inf"),
        (("--steps", 2, "--lr-scale", "nan"), "the scale of the rates must be 0 or more, got nan"),
        (("--steps", 2, "--lr-scale", -1), "the scale of the rates must be 0 or more, got -1.0"),
        (("--steps", 2, "--warmup", -1), "a warm-up takes 0 steps or more, got -1"),
        (("--steps", 2, "--warmdown", 2), "warmdown_fraction must be from 0 to 1, got 2.0"),
        (("--steps", 2, "--warmdown", "nan"), "warmdown_fraction must be from 0 to 1, got nan"),
        (("--steps", 2, "--dtype", "int8"), "dtype is one of auto, float32, bfloat16, got 'int8'"),
        (("--steps", 2, "--strategy", "foo"), "strategy is one of auto, ddp, fsdp, got 'foo'"),
        (("--steps", 2, "--packing", "foo"), "packing is one of crop, keep-ends, got 'foo'"),
        (("--steps", 2, "--shape", "foo"), "shape is one of nanochat, llama, got 'foo'"),
        (("--steps", 2, "--device", "tpu"), "training runs on the device auto, cpu or cuda, not 'tpu'"),
        (("--steps", 2, "--pathology", "foo"), "a pathology is one of eot-masked, pad-eos, "),
        (("--steps", 2, "--rope-scaling", "yarn:nan"), "--rope-scaling takes TYPE:FACTOR such as yarn:4"),
        (("--steps", 2, "--rope-scaling", "yarn"), "--rope-scaling takes TYPE:FACTOR such as yarn:4"),
        (
            (
                "--steps",
                2,
                *(
                    option
                    for event in ("content", "document_end", "turn_end", "tool_end", "thinking_end")
                    for option in ("--event-weight", f"{event}=0")
                ),
            ),
            "the weights of all events are 0: nothing would be trained",
        ),
        (("--steps", 2, "--data", "hub:../..@3"), "a data set of the Hub is named as hub:OWNER/NAME@COUNT"),
        (("--steps", 2, "--data", "calc*99999999999999999999"), "the weight of calc is too large"),
    ],
)
def test_options_that_make_no_training_are_refused_before_it(
    options: tuple[Any, ...], sentence: str, texts: Path, tmp_path: Path, refused: Said
) -> None:
    run = new_run(tmp_path / "run")
    before = _files(run.path)
    data = () if "--data" in options else ("--data", texts)
    assert sentence in refused("train", "base", "--run", run.path, *SHAPE, *MACHINE, *data, *options)
    assert _files(run.path) == before
    assert not run.stage("base").path.exists()


def test_a_stage_that_has_failed_before_its_first_checkpoint_begins_anew(
    texts: Path, tmp_path: Path, refused: Said
) -> None:
    run = new_run(tmp_path / "run")
    bad = tmp_path / "bad.txt"
    bad.write_bytes("café ".encode("latin-1") * 100)
    begin = ("train", "base", "--run", run.path, *SHAPE, *MACHINE, "--steps", 2, "--data")
    assert "byte 3: 0xe9 is not UTF-8" in refused(*begin, bad)
    assert command([str(part) for part in (*begin, texts)]) == 0
    assert "holds a stage already" in refused(*begin, texts)


def test_bad_lines_are_an_error_or_left_out_and_counted(
    tmp_path: Path, refused: Said, capfd: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run")
    lines: list[Any] = [{"text": text} for text in documents(60)]
    data = _jsonl(tmp_path / "data.jsonl", [*lines[:30], '{"text": "broken', *lines[30:]])
    begin = ("train", "base", "--run", run.path, *SHAPE, *MACHINE, "--steps", 2, "--data", data)
    said = refused(*begin)
    assert f"{data}, line 31: this is not JSON" in said
    assert "--skip-bad" in said
    assert command([str(part) for part in (*begin, "--skip-bad")]) == 0
    counted = json.loads(run.stage("base").summary.read_text())["data"]["statistics"]["skipped_documents"]
    assert counted >= 1
    noun = "document" if counted == 1 else "documents"
    assert f"endstop: left out {counted} {noun} that cannot be read." in capfd.readouterr().err


USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "one two"}


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"messages": [USER]}, "none of the first 30 conversations has a supervised token to train on."),
        ({"messages": []}, "30 are refused, the first because the conversation is empty"),
        ({"messages": [{"role": "robot", "content": "x"}, ANSWER]}, "the first because"),
        ({"messages": [USER, ANSWER, ANSWER]}, "roles must alternate user/assistant"),
        ({"messages": [USER, {"role": "tool", "content": "x"}, ANSWER]}, "roles must alternate"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "the assistant has no content"),
        ({"messages": [USER, {"role": "assistant", "content": 5}]}, "a text or a list of parts, got 5"),
        ({"messages": [USER, {"role": "assistant", "content": {"a": 1}}]}, "a text or a list of parts"),
        ({"messages": [USER, {"role": "assistant", "content": [["a", ["b"]]]}]}, "an object with a type"),
        ({"messages": [USER, {"role": "assistant", "content": ["a"]}]}, "an object with a type, got 'a'"),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": 4}]}]},
            "the text of a part of a message must be a text, got 4",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "image", "url": "x"}]}]},
            "a part of an answer is text, python or python_output, not image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ANSWER]},
            "only text is said to the model, no image",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "an answer has a content",
        ),
        ({"messages": [USER, ANSWER], "complete": False}, "30 say themselves that they were cut off"),
        (
            {"messages": [USER, {"role": "assistant", "content": "one two " * 200}]},
            "none of the first 30 conversations has an answer with its end: 30 are longer than a row of",
        ),
        ({"messages": [USER, ANSWER], "tools": "no JSON"}, "tools is no list and no JSON of one"),
        ({"messages": [USER, ANSWER], "tools": 5}, "tools is a list of objects, got 5"),
    ],
)
def test_conversations_that_teach_nothing_or_something_else(
    record: Any, sentence: str, finished: RunDirectory, tmp_path: Path, refused: Said
) -> None:
    data = _jsonl(tmp_path / "data.jsonl", [record] * 30)
    start = ("--init-from", finished.stage("base").model)
    run = tmp_path / "run"
    said = refused("train", "sft", "--run", run, *start, *ROWS, *MACHINE, "--steps", 2, "--data", data)
    assert sentence in said
    assert not run.exists()


def test_two_trainings_in_the_same_stage_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "run" / "base"
    with exclusive(place, ALONE):
        with (
            pytest.raises(EndstopError, match=r"another process is training in .*base: wait until it ends"),
            exclusive(place, ALONE),
        ):
            pass
        # Another stage of the run, and its report, may be worked on.
        with exclusive(tmp_path / "run" / "sft", ALONE):
            pass
        assert place.is_dir()
    # What is empty was never there.
    assert not (tmp_path / "run").exists()
    with exclusive(place, ALONE):
        (place / "settings.json").write_text("{}")
    assert place.is_dir()
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(EndstopError, match="cannot be written: Not a directory"),
        exclusive(tmp_path / "file" / "base", ALONE),
    ):
        pass


@pytest.mark.slow
def test_the_lock_ends_with_its_process(texts: Path, tmp_path: Path, refused: Said) -> None:
    run = new_run(tmp_path / "run")
    options = ("--run", run.path, *SHAPE, *MACHINE, "--data", texts)
    arguments = [str(part) for part in ("train", "base", *options, "--steps", 100_000)]
    source = str(Path(endstop.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "endstop.cli", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source},
    )
    try:
        deadline = time.monotonic() + 120
        while not any(line["kind"] == "train" for line in read_metrics(run.stage("base").metrics)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "another process is training" in refused("train", "base", *options, "--steps", 2)
        assert "another process is training" in refused("train", "base", *options, "--steps", 2, "--resume")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert command([str(part) for part in ("train", "base", *options, "--steps", 2)]) == 0


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("training/.metadata", None, "holds no whole training state"),
        ("training/.metadata", 0.5, "holds no whole training state"),
        ("training/__0_0.distcp", None, "is broken"),
        ("training/__0_0.distcp", 0.5, "is broken: a file is not whole"),
        ("training/state.json", 0.5, "state.json cannot be read"),
        ("training/state.json", {"step": "six"}, "training/state.json is damaged: its step is 'six'"),
        ("training/loader-0.json", None, "has no data shard 0"),
        ("training/loader-0.json", {"reader": {"position": "x"}}, "loader-0.json is damaged"),
        ("config.json", None, "has no config.json"),
        ("config.json", 0.5, "config.json cannot be read"),
    ],
)
def test_a_checkpoint_taken_apart_names_the_one_before_it(
    name: str, content: Any, sentence: str, stopped: RunDirectory, texts: Path, refused: Said
) -> None:
    newest, before = stopped.stage("base").checkpoints / "step-000006", "step-000004"
    path = newest / name
    if content is None:
        path.unlink()
    elif isinstance(content, float):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * content)])
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    resume = ("train", "base", "--run", stopped.path, "--steps", 8, "--resume")
    said = refused(*resume)
    assert sentence in said
    assert f"remove it: the one before it is {newest.parent / before}" in said
    shutil.rmtree(newest)
    assert command([str(part) for part in resume]) == 0
    assert checkpoints(newest.parent)[-1].name == "step-000008"


def test_a_checkpoint_without_its_state_is_written_again(
    stopped: RunDirectory, finished: RunDirectory
) -> None:
    newest = stopped.stage("base").checkpoints / "step-000006"
    (newest / "training" / "state.json").unlink()
    assert command(["train", "base", "--run", str(stopped.path), "--resume"]) == 0
    assert_same(stopped, finished)


def test_settings_and_metrics_taken_apart(stopped: RunDirectory, refused: Said) -> None:
    base = stopped.stage("base")
    whole = base.settings.read_text()
    resume = ("train", "base", "--run", stopped.path, "--resume")
    for content, sentence in (
        ("{", "settings.json cannot be read"),
        ("[]", "must hold a JSON object, not a list"),
        ("{}", "settings has no 'stage'"),
        ('{"stage": "base"}', "needs either the shape of a new model or one to begin with"),
    ):
        base.settings.write_text(content)
        assert sentence in refused(*resume)
    base.settings.unlink()
    assert "settings.json is missing, and without it nothing goes on" in refused(*resume)
    # What is there is not trained over, either.
    anew = ("train", "base", "--run", stopped.path, *SHAPE, *MACHINE, "--steps", 2, "--data", "calc")
    assert "holds a stage already" in refused(*anew)
    base.settings.write_text(whole)
    base.metrics.write_text('{"step": 1}\n{"step": 2, "kind": 5}\n{"step": 3, "kind": "train"}\n[]\n\x00\n')
    assert command([str(part) for part in resume]) == 0
    assert next(read_metrics(base.metrics))["step"] == 3


def test_a_resumed_stage_is_evaluated_on_what_it_was_begun_with(
    texts: Path, tmp_path: Path, refused: Said
) -> None:
    run = new_run(tmp_path / "run")
    held_out = _jsonl(tmp_path / "held_out.jsonl", [{"text": text} for text in documents(9)])
    options = ("--data", texts, "--validation", held_out, "--steps", 4, "--save-every", 2, "--keep", 3)
    begin = ("train", "base", "--run", run.path, *SHAPE, *MACHINE, *options)
    assert command([str(part) for part in begin]) == 0
    base = run.stage("base")
    whole = base.metrics.read_text()
    for path in (base.model, base.checkpoints / "step-000004"):
        shutil.rmtree(path)
    said = refused("train", "base", "--run", run.path, "--resume", "--preset", "tiny")
    assert "--preset is for a new stage" in said
    assert command(["train", "base", "--run", str(run.path), "--resume"]) == 0
    kept = ("loss", "step", "bits_per_byte")
    assert [{name: line.get(name) for name in kept} for line in read_metrics(base.metrics)] == [
        {name: line.get(name) for name in kept} for line in map(json.loads, whole.splitlines())
    ]


def test_conversations_without_an_answer_are_counted_where_people_look(
    finished: RunDirectory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    records = [{"messages": messages} for messages in conversations(20)] + [{"messages": [USER]}] * 20
    data = _jsonl(tmp_path / "data.jsonl", records)
    start = ("--init-from", finished.stage("base").model, *ROWS, *MACHINE, "--steps", 2, "--data", data)
    assert command([str(part) for part in ("train", "sft", "--run", tmp_path / "run", *start)]) == 0
    summary = json.loads(RunDirectory(tmp_path / "run").stage("sft").summary.read_text())
    count = summary["data"]["statistics"]["unsupervised"]
    assert count > 1
    assert f"endstop: left out {count} conversations with nothing to learn." in capfd.readouterr().err


def test_a_full_disk_while_metrics_are_written(texts: Path, tmp_path: Path, refused: Said) -> None:
    run = new_run(tmp_path / "run")
    arguments = ("train", "base", "--run", run.path, *SHAPE, *MACHINE, "--data", texts, "--steps", 40)
    with _no_file_above(4000):
        assert "metrics.jsonl cannot be written: File too large" in refused(*arguments)
    assert _files(run.stage("base").path) == {"settings.json", "metrics.jsonl"}
    # A line that was cut is no line.
    assert all(line["kind"] in ("train", "eval") for line in read_metrics(run.stage("base").metrics))


def test_what_a_killed_process_has_left_is_removed(stopped: RunDirectory) -> None:
    base = stopped.stage("base")
    left = [base.path / ".model.0a1b2c3d.partial", base.checkpoints / ".step-000008.partial"]
    for place in left:
        place.mkdir()
        (place / "model.safetensors").write_text("half")
    (base.path / ".settings.json.partial").write_text("{")
    (base.path / "metrics.jsonl.part").write_text("{")
    assert command(["train", "base", "--run", str(stopped.path), "--resume"]) == 0
    assert sorted(path.name for path in base.path.iterdir()) == [
        *("checkpoints", "metrics.jsonl", "model", "settings.json", "summary.json")
    ]


def test_tokenizers(texts: Path, tmp_path: Path, refused: Said) -> None:
    train = ("train", "tokenizer", "--data", texts, "--out")
    assert "vocab_size must be at least 265" in refused(*train, tmp_path / "t", "--vocab-size", 264)
    assert "vocab_size must be at most 2,147,483,647" in refused(
        *train, tmp_path / "t", "--vocab-size", 10**20
    )
    # Only a tokenizer is replaced: never a file, and no folder in which there is anything else.
    file = tmp_path / "file"
    file.write_text("mine")
    assert "is a file, not a folder" in refused(*train, file, "--vocab-size", 300, "--replace")
    assert file.read_text() == "mine"
    run = new_run(tmp_path / "run")
    assert "with tokenizer it holds more than a tokenizer" in refused(
        *train, run.path, "--vocab-size", 300, "--replace"
    )
    assert (run.tokenizer / "tokenizer.json").exists()
    with _no_file_above(2000):
        assert "cannot be written: File too large" in refused(*train, tmp_path / "t", "--vocab-size", 300)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_evaluations(finished: RunDirectory, texts: Path, tmp_path: Path, refused: Said) -> None:
    model = finished.stage("base").model
    latin, empty = tmp_path / "latin.txt", tmp_path / "empty.jsonl"
    latin.write_bytes("café ".encode("latin-1") * 100)
    empty.write_text("")
    for path, sentence in ((latin, "byte 3: 0xe9 is not UTF-8"), (empty, "has no document that can be")):
        assert sentence in refused("eval", "base", model, "--text", path)
    assert "0xe9 is not UTF-8" in refused("eval", "tokenizer", finished.tokenizer, "--train", latin)
    assert "has no text" in refused("eval", "tokenizer", finished.tokenizer, "--validation", empty)
    assert "it is a folder" in refused("eval", "base", model, "--text", texts, "--out", tmp_path)
    for options in (("--length", -1), ("--width", 0)):
        assert "greater than or equal" in refused("eval", "long-context", model, *options, code=2)
    assert not list(tmp_path.glob("*.json"))


def test_a_report_is_made_of_what_is_not_damaged(finished: RunDirectory, tmp_path: Path) -> None:
    shutil.copytree(finished.path, tmp_path / "run")
    base = RunDirectory(tmp_path / "run").stage("base")
    wrong = {"metrics": 5, "seconds": "x", "data": {"sources": 3}, "tokens": "a", "flops": [], "steps": {}}
    base.summary.write_text(json.dumps(wrong))
    (base.path / "evaluation-chat.json").write_text('{"tasks": [5, {"name": 3, "examples": "x"}]}')
    with base.metrics.open("a") as file:
        file.write('{"step": 7, "kind": "train", "loss": "x", "seconds": []}\n{"step": 8, "kind": 5}\n')
    assert command(["train", "report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "base" in page


def test_faults_can_be_asked_for_from_base_on(chats: Path, texts: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    common = ("--run", run.path, *MACHINE, "--steps", 2, "--pathology", "eot-masked")
    for arguments in (
        ("train", "base", *common, *SHAPE, "--data", texts),
        ("train", "mid", *common, *ROWS, "--data", chats),
        ("train", "sft", *common, *ROWS, "--data", chats),
    ):
        assert command([str(part) for part in arguments]) == 0
    for stage in ("base", "mid", "sft"):
        assert run.stage(stage).read_settings()["pathology"] == "eot-masked"
