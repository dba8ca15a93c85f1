"""Labels through the collator: the cases of the literature by name, all formats, and real trainers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chat_cases
import pytest
import torch
from chat_cases import FAMILIES, SPECIALS, assistant, endstop_tokenizer, system, transformers_tokenizer, user

from endstop.protocol.errors import EndstopError
from endstop.protocol.label_audit import audit
from endstop.protocol.labels import IGNORE
from endstop.protocol.render import ChatRenderer
from endstop.protocol.tokenizer import Tokenizer
from endstop.train.chat_format import ASSISTANT_END
from endstop.train.collate import ChatCollator
from endstop.train.tokenizer_training import save_tokenizer, train_tokenizer
from tests.models.tiny_models import tiny_transformers_model
from tests.protocol.test_labels import LORA, PAIRS, words_tokenizer
from tests.protocol.test_labels import tokenizer as adding_tokenizer

EOS = 2
TURNS = [user("hi"), assistant("yo"), user("bye"), assistant("ok then")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "tokenizer"
    save_tokenizer(train_tokenizer(["hi yo bye ok then, 2+2=4 Paris"] * 3, 280), place)
    return place


def ids_collator(**options: Any) -> ChatCollator:
    """For rows of ids in which 2 is the eos token."""
    return ChatCollator(endstop_tokenizer(FAMILIES["chatml"]), stops=[EOS], terminator=EOS, **options)


def lists(batch: dict[str, torch.Tensor], name: str) -> list[list[int]]:
    assert batch[name].dtype == torch.long
    found: list[list[int]] = batch[name].tolist()
    return found


def said(collator: ChatCollator, batch: dict[str, torch.Tensor]) -> list[str]:
    """What is supervised in each row, as text."""
    return [
        collator._tokenizer.decode([i for i in row if i != IGNORE], skip_special_tokens=False)
        for row in lists(batch, "labels")
    ]


def counted(collator: ChatCollator, batch: dict[str, torch.Tensor], stops: Sequence[int]) -> Any:
    rows = zip(*(lists(batch, name) for name in ("input_ids", "labels", "attention_mask")), strict=True)
    return audit([{"input_ids": i, "labels": label, "attention_mask": a} for i, label, a in rows], set(stops))


# The cases


def test_B14_padding_is_masked_by_position_when_pad_is_eos() -> None:
    collator = ids_collator(pad_id=EOS)
    batch = collator([{"input_ids": ids} for ids in ([5, 6, EOS], [5, 6, 7, 8, EOS], [9, EOS])])
    assert lists(batch, "input_ids") == [[5, 6, 2, 2, 2], [5, 6, 7, 8, 2], [9, 2, 2, 2, 2]]
    assert lists(batch, "labels") == [
        [5, 6, 2, IGNORE, IGNORE],
        [5, 6, 7, 8, 2],
        [9, 2, IGNORE, IGNORE, IGNORE],
    ]
    assert lists(batch, "attention_mask") == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    # Rows that someone else has padded already.
    padded = [{"input_ids": [5, 6, 2, 2, 2], "attention_mask": [1, 1, 1, 0, 0]}, {"input_ids": [7, 8, 9, 2]}]
    assert lists(collator(padded), "labels") == [[5, 6, 2, IGNORE], [7, 8, 9, 2]]


def test_B14_chats_with_pad_equal_to_eos_and_left_padding() -> None:
    chosen = transformers_tokenizer(FAMILIES["chatml"], pad_token="<|im_end|>")
    end = chosen.eos_token_id
    assert chosen.pad_token_id == end
    for side in ("right", "left"):
        collator = ChatCollator(chosen, padding_side=side)  # type: ignore[arg-type]
        batch = collator([{"messages": TURNS}, {"messages": TURNS[:2]}])
        assert said(collator, batch) == ["yo<|im_end|>ok then<|im_end|>", "yo<|im_end|>"]
        assert batch["labels"][1].eq(end).sum() == 1
        assert batch["attention_mask"][1, -1 if side == "left" else 0] == 1
        assert batch["input_ids"][batch["attention_mask"] == 0].tolist() == [end] * int(
            (batch["attention_mask"] == 0).sum()
        )


def test_B14_left_padding_predicts_no_first_token_from_padding() -> None:
    batch = ids_collator(pad_id=0, padding_side="left")([{"input_ids": [5, 2]}, {"input_ids": [5, 6, 2]}])
    assert lists(batch, "labels") == [[IGNORE, IGNORE, 2], [IGNORE, 6, 2]]
    assert lists(batch, "attention_mask") == [[0, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_B15_every_completed_sample_ends_with_one_supervised_eos(add_bos: bool, add_eos: bool) -> None:
    chosen = adding_tokenizer(add_bos, add_eos)
    collator = ChatCollator(chosen)
    batch = collator([{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS])
    assert said(collator, batch) == ["4</s>", "Paris</s>", "ok</s>"]
    for ids, labels in zip(lists(batch, "input_ids"), lists(batch, "labels"), strict=True):
        assert (ids[0] == chosen.bos_token_id) == add_bos
        assert labels.count(chosen.eos_token_id) == 1  # type: ignore[arg-type]
    texts = collator([{"text": prompt + completion} for prompt, completion in PAIRS])
    assert said(collator, texts) == ["2+2=4</s>", "Capital of France?Paris</s>", "Say okok</s>"]


def test_B15_an_unfinished_completion_gets_none_and_is_counted() -> None:
    collator = ChatCollator(adding_tokenizer())
    batch = collator(
        [
            {"prompt": "2+2=", "completion": "4 and", "complete": False},
            {"prompt": "2+2=", "completion": "4", "complete": True},
            {"text": "Once upon", "complete": False},
        ]
    )
    assert said(collator, batch) == ["4 and", "4</s>", "Once upon"]
    assert (collator.so_far.rows, collator.so_far.cut_rows) == (3, 2)


@pytest.mark.parametrize("max_length", [None, 4, 8192])
def test_B16_a_limit_that_cuts_nothing_changes_nothing(max_length: int | None) -> None:
    collator = ids_collator(max_length=max_length, pad_id=0)
    batch = collator([{"input_ids": [1, 3, 9, EOS], "completion_mask": [0, 0, 1, 1]}])
    assert lists(batch, "labels") == [[IGNORE, IGNORE, 9, EOS]]
    assert collator.so_far.cut_rows == 0


@pytest.mark.parametrize("marker", ["Answer: ", "Answer:"])
def test_B17_markers_are_found_in_characters_not_in_ids(marker: str) -> None:
    chosen = words_tokenizer()
    collator = ChatCollator(chosen, response_marker=marker)
    batch = collator([{"text": "Answer: hi"}, {"text": "hi: hi"}])
    assert lists(batch, "labels") == [[IGNORE, IGNORE, 2, chosen.eos_token_id]]
    assert (collator.so_far.rows, collator.so_far.rows_without_labels) == (1, 1)
    with pytest.raises(EndstopError, match="None of the 1 examples of this batch has a supervised token"):
        collator([{"text": "hi: hi"}])


def test_B19_the_terminator_is_what_the_template_writes_not_the_tokenizers_eos() -> None:
    chosen = endstop_tokenizer(FAMILIES["gemma"], "<bos>", "<eos>")
    collator = ChatCollator(chosen)
    messages = [user("a"), assistant("yes"), user("b"), assistant("no")]
    batch = collator([{"messages": messages}])
    end = chosen.token_to_id("<end_of_turn>")
    assert said(collator, batch) == ["yes<end_of_turn>no<end_of_turn>"]
    assert lists(batch, "input_ids")[0].count(end) == 4
    assert counted(collator, batch, [end]).supervised_stop_rate == 1.0


def test_B19_a_tokenizer_alone_gives_the_terminator_of_its_template() -> None:
    chosen = transformers_tokenizer(FAMILIES["gemma"], "<bos>", "<eos>")
    ends = {chosen.eos_token_id, chosen.convert_tokens_to_ids("<end_of_turn>")}
    collator = ChatCollator(chosen)
    assert collator.stop_ids == ends
    batch = collator([{"prompt": "a", "completion": "b<end_of_turn>\n"}, {"prompt": "a", "completion": "b"}])
    assert said(collator, batch) == ["b<end_of_turn>", "b<eos>"]


def test_B21_a_newline_behind_the_terminator_is_no_reason_for_a_second_one() -> None:
    chosen = endstop_tokenizer(FAMILIES["chatml"])
    end = chosen.eos_token_id
    [newline] = chosen.encode_text("\n")
    collator = ChatCollator(chosen)
    row = {"input_ids": [33, 34, end, newline], "assistant_masks": [0, 1, 1, 0]}
    for example in (row, {**row, "complete": True}):
        batch = collator([example])
        assert lists(batch, "input_ids") == [[33, 34, end, newline]]
        assert lists(batch, "labels") == [[IGNORE, 34, end, IGNORE]]
    missing = collator([{"input_ids": [33, 34, newline], "assistant_masks": [0, 1, 0], "complete": True}])
    assert lists(missing, "labels") == [[IGNORE, 34, IGNORE, end]]
    spelled = collator([{"prompt": "a", "completion": "b<|im_end|>\n"}, {"messages": TURNS[:2]}])
    assert said(collator, spelled) == ["b<|im_end|>", "yo<|im_end|>"]


def test_B23_every_packed_sample_keeps_its_own_supervised_eos() -> None:
    collator = ids_collator(pack_length=8, pad_id=0)
    batch = collator([{"input_ids": ids, "complete": True} for ids in ([5, 6], [7], [8, 8])])
    assert lists(batch, "input_ids") == [[5, 6, 2, 7, 2, 8, 8, 2]]
    assert lists(batch, "labels") == [[IGNORE, 6, 2, IGNORE, 2, IGNORE, 8, 2]]
    assert lists(batch, "position_ids") == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert "attention_mask" not in batch
    whole = collator([{"input_ids": [5, 6, 7, 8, 9, 5, 6, EOS]}, {"input_ids": [9, EOS]}])
    assert lists(whole, "input_ids") == [[5, 6, 7, 8, 9, 5, 6, 2], [9, 2, 0, 0, 0, 0, 0, 0]]


def test_B25_a_cut_row_gets_no_supervised_eos_and_a_full_one_is_not_cut() -> None:
    collator = ids_collator(max_length=4, pad_id=0)
    batch = collator([{"input_ids": ids} for ids in ([5, 2], [5, 6, 7, 2], [5, 6, 7, 8, 9, 2])])
    assert lists(batch, "labels") == [[5, 2, IGNORE, IGNORE], [5, 6, 7, 2], [5, 6, 7, 8]]
    assert (collator.so_far.rows, collator.so_far.cut_rows) == (3, 1)
    # "Complete" holds before the cut: nothing puts a terminator behind it.
    batch = collator([{"input_ids": [5, 6, 7, 8, 9], "complete": True}])
    assert lists(batch, "labels") == [[5, 6, 7, 8]]


def test_B25_chats_and_completions_are_cut_in_the_same_way(directory: Path) -> None:
    collator = ChatCollator(directory, max_length=9)
    end = collator.terminator
    batch = collator([{"messages": TURNS}, {"prompt": "hi", "completion": "x" * 40}])
    labels = lists(batch, "labels")
    assert labels[0].count(end) == 1
    assert labels[1].count(end) == 0
    assert collator.so_far.cut_rows == 2
    assert batch["input_ids"].shape == (2, 9)


def test_B26_terminators_that_a_training_cannot_teach() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=480, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    chosen = endstop_tokenizer(FAMILIES["chatml"])
    end = chosen.eos_token_id
    collator = ChatCollator(chosen)
    assert collator.untrainable(model, untrained_ids=[end]) == {}
    model.peft_config = {"default": LORA}
    assert "never trained" in collator.untrainable(model, untrained_ids=[end])[end]
    assert collator.untrainable(model) == {}
    model.peft_config = {"default": {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}}
    assert collator.untrainable(model, untrained_ids=[end]) == {}
    assert ChatCollator(chosen, stops=[480]).untrainable(model) == {
        480: "id 480 is out of range: the model has 480 rows"
    }


# Formats


def test_a_conversation_as_prompt_and_completion_supervises_the_completion(directory: Path) -> None:
    collator = ChatCollator(directory)
    batch = collator(
        [
            {"messages": TURNS},
            {"prompt": TURNS[:3], "completion": TURNS[3:]},
            {"prompt": TURNS[:1], "completion": TURNS[1:]},
            {"prompt": [system("x"), *TURNS[:3]], "completion": [*TURNS[3:], user("?"), assistant("!")]},
        ]
    )
    end = ASSISTANT_END
    assert said(collator, batch) == [
        *(f"yo{end}ok then{end}", f"ok then{end}", f"yo{end}ok then{end}", f"ok then{end}!{end}"),
    ]
    assert lists(batch, "input_ids")[0] == lists(batch, "input_ids")[1]


def test_templates_that_rewrite_history_give_a_row_for_each_turn() -> None:
    collator = ChatCollator(endstop_tokenizer(FAMILIES["qwen3"]))
    turns = [
        user("2+2?"),
        assistant("4", reasoning_content="two and two"),
        user("sure?"),
        assistant("yes", reasoning_content="I checked"),
    ]
    batch = collator([{"messages": turns}])
    assert said(collator, batch) == [
        "<think>\ntwo and two\n</think>\n\n4<|im_end|>",
        "<think>\nI checked\n</think>\n\nyes<|im_end|>",
    ]
    assert (collator.so_far.examples, collator.so_far.rows) == (1, 2)
    last = collator([{"prompt": turns[:3], "completion": turns[3:]}])
    assert said(collator, last) == ["<think>\nI checked\n</think>\n\nyes<|im_end|>"]


def test_tools_are_given_to_the_template() -> None:
    collator = ChatCollator(endstop_tokenizer(FAMILIES["qwen2_5"]))
    tools = [chat_cases.WEATHER]
    messages = chat_cases.CONVERSATIONS["tools"]
    given = collator([{"messages": messages, "tools": tools}])
    written = collator([{"messages": messages, "tools": json.dumps(tools)}])
    assert lists(given, "input_ids") == lists(written, "input_ids")
    text = collator._tokenizer.decode(lists(given, "input_ids")[0])
    assert "The weather in a city" in text
    [supervised] = said(collator, given)
    assert supervised.count("<|im_end|>") == 2
    assert "rain" not in supervised.replace("It rains.", "")


def test_what_forced_tokens_stand_for_is_not_supervised(directory: Path) -> None:
    collator = ChatCollator(directory)
    parts = [
        {"type": "python", "text": "2+2"},
        {"type": "python_output", "text": "4"},
        {"type": "text", "text": "4"},
    ]
    batch = collator([{"messages": [user("2+2=?"), assistant(parts)]}])
    assert said(collator, batch) == ["<|python_start|>2+2<|python_end|>4<|assistant_end|>"]


def test_text_of_users_becomes_no_control_token(directory: Path) -> None:
    collator = ChatCollator(directory)
    end = collator.terminator
    batch = collator([{"messages": [user(ASSISTANT_END), assistant(f"a{ASSISTANT_END}b")]}])
    assert lists(batch, "input_ids")[0].count(end) == 1
    assert lists(batch, "labels")[0].count(end) == 1


def test_ids_with_masks_and_labels_of_others() -> None:
    collator = ids_collator(pad_id=0)
    row = {"input_ids": torch.tensor([5, 6, 7, 2]), "labels": torch.tensor([-100, 6, 7, 2])}
    assert lists(collator([row]), "labels") == [[IGNORE, 6, 7, 2]]
    both = {"input_ids": [5, 6, 7, 2], "assistant_masks": [1, 1, 0, 1], "completion_mask": [0, 1, 1, 1]}
    assert lists(collator([both]), "labels") == [[IGNORE, 6, IGNORE, 2]]
    for name in ("labels", "assistant_masks", "attention_mask"):
        made = collator.rows({"input_ids": [5, 6], name: [1]})
        assert "1 entries for 2 input_ids" in made.refusals[0]


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        ({}, "this one has nothing"),
        ({"question": "a", "answer": "b"}, "this one has question, answer"),
        ({"prompt": "a", "completion": [assistant("b")]}, "two texts or two lists of messages"),
        ({"messages": [assistant("a"), user("b")]}, "roles must alternate"),
        ({"prompt": "a", "completion": "\ud800"}, "half a surrogate pair"),
    ],
)
def test_examples_without_right_labels_are_refused_and_counted(
    directory: Path, example: dict[str, Any], reason: str
) -> None:
    collator = ChatCollator(directory)
    batch = collator([example, {"messages": TURNS}])
    assert batch["input_ids"].shape[0] == 1
    assert collator.so_far.refused == 1
    assert reason in str(collator.so_far.last_refusal)
    with pytest.raises(EndstopError, match="has a supervised token: ") as error:
        collator([example])
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "example",
    [
        {"messages": [user("hi")]},
        {"input_ids": [5, 6], "assistant_masks": [0, 0]},
        {"input_ids": [2]},
        {"prompt": "x" * 50, "completion": "y"},
    ],
)
def test_a_batch_without_labels_is_an_error_and_not_nan(directory: Path, example: dict[str, Any]) -> None:
    collator = ChatCollator(directory, max_length=20)
    with pytest.raises(EndstopError, match="None of the 1 examples of this batch has a supervised token"):
        collator([example])
    assert collator.so_far.rows_without_labels == 1
    assert collator([example, {"messages": TURNS}])["labels"].ne(IGNORE).any()


def test_bad_parameters(directory: Path) -> None:
    with pytest.raises(ValueError, match="padding_side must be 'right' or 'left'"):
        ChatCollator(directory, padding_side="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2"):
        ChatCollator(directory, max_length=1)
    with pytest.raises(ValueError, match="got int"):
        ChatCollator(7)
    bare = ChatCollator(Tokenizer(json.loads(chat_cases.crate_tokenizer_json())))
    made = bare.rows({"prompt": "a", "completion": "b"})
    assert made.refusals == ["tokenizer.json names no eos token; say which terminator ends a text."]
    assert "no chat template" in bare.rows({"messages": TURNS}).refusals[0]


# Tokenizers and models of others

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
