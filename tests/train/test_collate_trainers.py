"""The collator beside tokenizers, models and trainers of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chat_cases import FAMILIES, SPECIALS, endstop_tokenizer, transformers_tokenizer

from endstop.protocol.render import ChatRenderer
from endstop.train.collate import ChatCollator
from tests.models.tiny_models import tiny_transformers_model
from tests.train.collate_cases import TURNS, lists, trained_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_tokenizer(tmp_path_factory.mktemp("run") / "tokenizer")


FOREIGN = ("chatml", "llama3", "gemma", "mistral_v1", "zephyr", "qwen2_5", "phi3", "generation")


@pytest.mark.parametrize("family", FOREIGN)
def test_the_tokenizer_of_transformers_gives_the_same_batch(family: str) -> None:
    names = SPECIALS.get(family, ("<s>", "<|im_end|>"))
    theirs = ChatCollator(transformers_tokenizer(FAMILIES[family], *names))
    ours = ChatCollator(endstop_tokenizer(FAMILIES[family], *names))
    renderer = ChatCollator(ChatRenderer(endstop_tokenizer(FAMILIES[family], *names)))
    batches = [collator([{"messages": TURNS}]) for collator in (theirs, ours, renderer)]
    for batch in batches:
        assert lists(batch, "labels") == lists(batches[0], "labels")
    ids = transformers_tokenizer(FAMILIES[family], *names).apply_chat_template(TURNS, return_dict=False)
    assert lists(batches[0], "input_ids")[0] == list(ids)
    ends = ours.renderer.render(TURNS).stop_ids
    assert sum(label in ends for label in lists(batches[0], "labels")[0]) == 2


def tiny(vocab_size: int, family: str = "llama") -> Any:
    return tiny_transformers_model(family, vocab_size=vocab_size, max_position_embeddings=256)


def test_packed_rows_do_not_see_each_other(directory: Path) -> None:
    model = tiny(280)
    model.set_attn_implementation("sdpa")
    examples = [{"messages": TURNS[:2]}, {"messages": TURNS}, {"prompt": "2+2=", "completion": "4"}]
    alone = ChatCollator(directory)
    together = ChatCollator(directory, pack_length=64)(examples)
    assert together["input_ids"].shape == (1, 64)
    with torch.no_grad():
        packed_logits = model(**together, use_cache=False).logits[0]
    start = 0
    for example in examples:
        batch = alone([example])
        with torch.no_grad():
            logits = model(**batch).logits[0]
        end = start + len(logits)
        torch.testing.assert_close(packed_logits[start:end], logits, atol=1e-5, rtol=1e-4)
        assert together["labels"][0, start + 1 : end].tolist() == batch["labels"][0, 1:].tolist()
        start = end


def stop_probability(model: Any, collator: ChatCollator) -> float:
    """P(terminator) where an answer is complete."""
    batch = collator([{"messages": TURNS[:2]}])
    [(_, at)] = batch["labels"].eq(collator.terminator).nonzero().tolist()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
    return float(logits[0, at - 1].float().softmax(-1)[collator.terminator])


@pytest.mark.parametrize("family", ["own", "chatml", "llama3"])
@pytest.mark.parametrize("pack_length", [None, 96])
def test_the_trainer_of_transformers_learns_to_stop(
    directory: Path, tmp_path: Path, family: str, pack_length: int | None
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    chosen: Any = directory
    if family != "own":
        names = SPECIALS.get(family, ("<s>", "<|im_end|>"))
        chosen = transformers_tokenizer(FAMILIES[family], *names)
    collator = ChatCollator(chosen, pack_length=pack_length)
    model = tiny(collator._tokenizer.vocab_size).train()
    examples = [
        {"messages": TURNS},
        {"messages": TURNS[:2]},
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        {"prompt": "2+2=", "completion": "4"},
    ] * 3
    before = stop_probability(model, ChatCollator(chosen))
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=4,
            learning_rate=3e-2,
            lr_scheduler_type="constant",
            remove_unused_columns=False,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
        train_dataset=examples,
        data_collator=collator,
    )
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert stop_probability(model.eval(), ChatCollator(chosen)) > before
    assert (collator.so_far.examples, collator.so_far.rows, collator.so_far.refused) == (12, 12, 0)


def test_the_trainer_of_trl_takes_examples_as_they_are(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("accelerate")
    chosen = transformers_tokenizer(FAMILIES["chatml"], pad_token="<|im_end|>")
    collator = ChatCollator(chosen)
    trainer = trl.SFTTrainer(
        model=tiny(collator._tokenizer.vocab_size).train(),
        args=trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list([{"messages": TURNS}] * 4),
        data_collator=collator,
        processing_class=chosen,
    )
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)
    assert collator.so_far.examples == 4


def test_the_example_of_the_documentation_runs(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    page = Path(__file__).parents[2] / "docs" / "training_rows.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    tiny(280).save_pretrained(tmp_path / "model")
    for file in directory.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(page), "exec"), {"path": "model"})
    assert "CollatedSoFar(examples=6, rows=6, cut_rows=0" in capsys.readouterr().out
