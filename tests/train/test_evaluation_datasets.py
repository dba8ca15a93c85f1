from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from endstop.protocol.errors import EndstopError
from endstop.protocol.labels import chat_rows
from endstop.train.evaluation.chat import evaluate_chat
from endstop.train.evaluation.datasets import (
    DATASETS,
    calculator_parts,
    choice_prompt,
    dataset_chats,
    dataset_examples,
    dataset_task,
    final_number,
)
from endstop.train.tasks import visible
from tests.protocol.hub_server import serve
from tests.train.bigram_model import START, bigram, save
from tests.train.tiny_policy import chat_renderer, save_chat_model, tiny_decoder

ARC = [
    {
        "id": f"q{i}",
        "question": f"Which is {i}?",
        "choices": {"text": ["one", "two", "three"], "label": ["A", "B", "C"]},
        "answerKey": "ABC"[i % 3],
    }
    for i in range(6)
]
ARC_NUMBERED = {
    "id": "n",
    "question": "Which?",
    "choices": {"text": ["a", "b", "c", "d"], "label": ["1", "2", "3", "4"]},
    "answerKey": "3",
}
MMLU = [
    {"question": f"Q{i}", "subject": "x", "choices": ["p", "q", "r", "s"], "answer": i % 4} for i in range(8)
]
WENG = (
    "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\n"
    "Working 50 minutes, she earned 0.2 x 50 = $<<0.2*50=10>>10.\n#### 10"
)
GSM8K = [{"question": "How much did she earn?", "answer": WENG}, {"question": "And?", "answer": "#### 1,234"}]
SMOLTALK = [
    {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Bye"},
            {"role": "assistant", "content": "See you"},
        ],
        "source": "test",
    }
]


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_arc_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    parquet(tmp_path / "ai2_arc" / "ARC-Easy" / "test-00000-of-00001.parquet", ARC)
    parquet(tmp_path / "ai2_arc" / "ARC-Challenge" / "test-00000-of-00001.parquet", [ARC_NUMBERED])
    parquet(tmp_path / "ai2_arc" / "ARC-Easy" / "train-00000-of-00001.parquet", ARC[:1])
    easy = dataset_task("arc-easy", place=tmp_path)
    assert (len(easy.examples), easy.kind, easy.baseline) == (6, "categorical", 0.25)
    assert sorted(str(example.messages[0]["content"]) for example in easy.examples)[1] == (
        "Question: Which is 1?\n- one=A\n- two=B\n- three=C\n"
        "Answer with the letter of the right choice, nothing else."
    )
    for example in easy.examples:
        number = int(str(example.messages[0]["content"]).split("is ")[1][0])
        assert (example.gold, example.letters) == ("ABC"[number % 3], ("A", "B", "C"))
    hard = dataset_task("arc-challenge", place=tmp_path).examples[0]
    assert (hard.gold, hard.letters) == ("3", ("1", "2", "3", "4"))
    assert len(dataset_chats("arc-easy", place=tmp_path)) == 1


def test_the_order_is_drawn_once(tmp_path: Path) -> None:
    place = parquet(tmp_path / "some.parquet", MMLU)
    first = [example.messages[0]["content"] for example in dataset_examples("mmlu", "test", place)]
    assert first == [example.messages[0]["content"] for example in dataset_examples("mmlu", "test", place)]
    assert first != sorted(first)
    assert sorted(first) == [choice_prompt(row["question"], "ABCD", row["choices"]) for row in MMLU]


def test_mmlu_and_its_training_rows(tmp_path: Path) -> None:
    parquet(tmp_path / "mmlu" / "all" / "test-00000-of-00001.parquet", MMLU)
    parquet(
        tmp_path / "mmlu" / "auxiliary_train" / "train-00000-of-00001.parquet",
        [{"train": row} for row in MMLU],
    )
    parquet(tmp_path / "mmlu" / "all" / "auxiliary_train-00000-of-00001.parquet", MMLU[:3])
    golds = {
        example.messages[0]["content"][:12]: example.gold
        for example in dataset_task("mmlu", place=tmp_path).examples
    }
    assert golds == {f"Question: Q{i}": "ABCD"[i % 4] for i in range(8)}
    assert len(dataset_chats("mmlu", place=tmp_path)) == 3
    nested = dataset_examples(
        "mmlu", "x", tmp_path / "mmlu" / "auxiliary_train" / "train-00000-of-00001.parquet"
    )
    assert sorted(example.gold for example in nested) == list("AABBCCDD")


def test_gsm8k_with_the_calculator(tmp_path: Path) -> None:
    lines(tmp_path / "gsm8k" / "test.jsonl", GSM8K)
    task = dataset_task("gsm8k", place=tmp_path)
    example = next(e for e in task.examples if "earn" in e.messages[0]["content"])
    assert example.gold == [
        {"type": "text", "text": "Weng earns 12/60 = $"},
        {"type": "python", "text": "12/60"},
        {"type": "python_output", "text": "0.2"},
        {"type": "text", "text": "0.2 per minute.\nWorking 50 minutes, she earned 0.2 x 50 = $"},
        {"type": "python", "text": "0.2*50"},
        {"type": "python_output", "text": "10"},
        {"type": "text", "text": "10.\n#### 10"},
    ]
    assert task.right(example, visible(example.gold))
    assert task.right(example, "so #### 10.00 and more")
    assert not task.right(example, "so #### 100")
    assert not task.right(example, "ten")
    other = next(e for e in task.examples if e is not example and "And" in e.messages[0]["content"])
    assert task.right(other, "#### $1234")


def test_numbers_and_annotations() -> None:
    assert [str(final_number(text)) for text in ("#### -1,000.50.", "####7", "#### x", "7")] == [
        "-1000.50",
        "7",
        "None",
        "None",
    ]
    assert calculator_parts("a<<1+1=2>>2") == [
        {"type": "text", "text": "a"},
        {"type": "python", "text": "1+1"},
        {"type": "python_output", "text": "2"},
        {"type": "text", "text": "2"},
    ]
    assert calculator_parts("no") == [{"type": "text", "text": "no"}]


def test_conversations_can_be_trained_on(tmp_path: Path) -> None:
    renderer = chat_renderer(save_chat_model(tiny_decoder(), tmp_path / "model"))
    lines(tmp_path / "data" / "gsm8k" / "train.jsonl", GSM8K)
    parquet(tmp_path / "data" / "smoltalk" / "data" / "train-00000-of-00001.parquet", SMOLTALK)
    parquet(tmp_path / "data" / "mmlu" / "all" / "auxiliary_train-0.parquet", MMLU)
    for name in ("gsm8k", "smoltalk", "mmlu"):
        source = dataset_chats(name, place=tmp_path / "data")
        assert (source.name, source.licence) == (name, DATASETS[name].licence)
        for index in range(len(source)):
            rows = chat_rows(renderer, source[index])
            assert rows.refusals == []
            assert any(label >= 0 for label in rows.rows[0].labels)
    assert dataset_chats("smoltalk", place=tmp_path / "data")[0] == SMOLTALK[0]["messages"]


def test_a_model_chooses(tmp_path: Path) -> None:
    lines(tmp_path / "mmlu" / "test.jsonl", MMLU)
    model = save(bigram({START: {ord("C"): 4.0}}), tmp_path / "model")
    report = evaluate_chat(model, [dataset_task("mmlu", place=tmp_path)])
    assert (report.tasks[0].accuracy, report.chat_core) == (0.25, 0.0)


def test_gzipped_lines(tmp_path: Path) -> None:
    (tmp_path / "humaneval").mkdir()
    row = {
        "task_id": "t",
        "prompt": "def f():\n",
        "canonical_solution": "    pass\n",
        "test": "x",
        "entry_point": "f",
    }
    with gzip.open(tmp_path / "humaneval" / "test.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    assert dataset_task("humaneval", place=tmp_path).examples[0].gold == "```python\ndef f():\n    pass\n```"


@pytest.mark.parametrize(
    ("name", "rows", "sentence"),
    [
        ("test.jsonl", [{"question": "x"}], "line 1 is not a row of this data set"),
        (
            "test.jsonl",
            [{"question": None, "answer": "#### 3"}],
            "line 1 is not a row of this data set: a message of the user has no content",
        ),
        ("test.jsonl", [{"question": "x", "answer": "y"}], "no number behind ####"),
        ("test.jsonl", [], "has no rows"),
        ("test.parquet", [{"x": 1}], "has no column 'question' or 'answer'"),
        ("train.jsonl", GSM8K, "there is no gsm8k in .*, and the Hub does not give openai/gsm8k"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: Any, sentence: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (lines if name.endswith("jsonl") else parquet)(tmp_path / "gsm8k" / name, rows)
    with pytest.raises(EndstopError, match=sentence):
        _ = list(dataset_task("gsm8k", place=tmp_path).examples)


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(EndstopError, match="known are arc-easy"):
        dataset_examples("gsm9k", "test")
    with pytest.raises(EndstopError, match="no data set to evaluate on"):
        dataset_task("smoltalk")
    with pytest.raises(EndstopError, match="does not exist"):
        dataset_task("gsm8k", place=tmp_path / "none")


def test_from_a_hub(tmp_path: Path) -> None:
    """In a process of its own: the Hub's library reads its settings once, when it is imported."""
    content = parquet(tmp_path / "made.parquet", GSM8K).read_bytes()
    files = {"main/test-00000-of-00001.parquet": content, "socratic/test-00000-of-00001.parquet": b"no"}
    with serve(repositories={"openai/gsm8k": {"0" * 40: files}}) as hub:
        code = (
            "from endstop.train.evaluation.datasets import dataset_task\n"
            "print(len(dataset_task('gsm8k').examples), len(dataset_task('gsm8k', offline=True).examples))"
        )
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.stdout == "2 2\n", done.stderr
        assert hub.fetched() == ["test-00000-of-00001.parquet"]
