from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError, MissingTemplate
from endstop.runtime.llm import load_engine
from endstop.testing.cycle import cycle_model
from endstop.train.evaluation.chat import ChatReport, engine_of, evaluate_chat
from endstop.train.evaluation.chat_tasks import ChatExample, ChatTask, generated_task
from endstop.train.evaluation.stop_summary import AnswerRecord, by_gold_length, summary_of
from endstop.train.evaluation.teacher import last_logits, p_stop_along
from endstop.train.run_results import read_run
from endstop.train.tasks import SYNTHETIC, task_named, visible
from tests.train.bigram_model import BOS, END, SPECIAL, START, bigram, chain, save
from tests.train.tiny_policy import save_chat_model, tiny_decoder

PYTHON_START, PYTHON_END = SPECIAL["<|python_start|>"], SPECIAL["<|python_end|>"]
OUTPUT_START, OUTPUT_END = SPECIAL["<|output_start|>"], SPECIAL["<|output_end|>"]


def asked(*golds: str, only: bool = True, ends: bool = True) -> ChatTask:
    examples = [ChatExample([{"role": "user", "content": "?"}], gold, only=only, ends=ends) for gold in golds]
    return ChatTask("said", examples, lambda example, text: text == example.gold)


def evaluated(model: Decoder, place: Path, *tasks: ChatTask, **options: object) -> ChatReport:
    return evaluate_chat(save(model, place / "model"), tasks, **options)  # type: ignore[arg-type]


def answers(report: ChatReport) -> Sequence[AnswerRecord]:
    return [record for task in report.tasks for record in task.records]  # type: ignore[misc]


def test_every_way_to_end(tmp_path: Path) -> None:
    report = evaluated(bigram(chain("abc")), tmp_path, asked("abc", "ab", "abcd", "xyz", "abcdefgh"))
    assert [record.output for record in answers(report)] == ["abc"] * 5
    assert {(record.finish_reason, record.stop_kind) for record in answers(report)} == {("stop", "turn_end")}
    assert [record.exact for record in answers(report)] == [True, False, False, False, False]
    assert [record.content_ok for record in answers(report)] == [True, True, False, False, False]
    assert [record.stop_error for record in answers(report)] == [0, 1, -1, 0, -5]
    assert [record.gold_tokens for record in answers(report)] == [3, 2, 4, 3, 8]
    stop = report.stop
    assert (stop.n, stop.known) == (5, 5)
    assert (stop.exact, stop.correct, stop.content_ok) == (0.2, 0.2, 0.4)
    assert (stop.premature, stop.late, stop.overrun, stop.natural_stop) == (0.4, 0.2, 0.0, 1.0)
    assert stop.stop_error == pytest.approx(-1.0)
    assert report.chat_core == report.tasks[0].accuracy == 0.2
    assert report.tasks[0].stop == stop


def test_a_model_that_never_stops_has_its_content_right(tmp_path: Path) -> None:
    # Behind c it says d, and d for ever.
    model = bigram({**chain("abcd", None), ord("d"): {ord("d"): 12.0}})
    report = evaluated(model, tmp_path, asked("abc", "x"))
    stop = report.stop
    assert (stop.content_ok, stop.exact, stop.overrun, stop.natural_stop) == (0.5, 0.0, 1.0, 0.0)
    assert (stop.premature, stop.late, stop.stop_error) == (0.0, 0.0, None)
    # Twice the right answer and 32 more.
    assert [record.tokens for record in answers(report)] == [38, 34]
    assert {record.finish_reason for record in answers(report)} == {"length"}


def test_p_stop_along_the_right_answer(tmp_path: Path) -> None:
    logits = chain("ab")
    logits[ord("a")][END] = 11.0
    model = bigram(logits)
    record = answers(evaluated(model, tmp_path, asked("ab")))[0]

    def p_stop(token_id: int) -> float:
        row = logits.get(token_id, {})
        total = sum(math.exp(value) for value in row.values()) + 266 - len(row)
        return sum(math.exp(row.get(stop, 0.0)) for stop in (END, BOS)) / total

    assert record.p_stop_at_gold == pytest.approx(p_stop(ord("b")), rel=1e-4)
    assert record.p_stop_before_gold == pytest.approx(p_stop(ord("a")), rel=1e-4)


def test_forced_tokens_are_no_place_to_stop(tmp_path: Path) -> None:
    # It calls the calculator with 1+2, is given 3 and repeats it.
    logits = {
        START: {PYTHON_START: 12.0},
        PYTHON_START: {ord("1"): 12.0},
        ord("1"): {ord("+"): 12.0},
        ord("+"): {ord("2"): 12.0},
        ord("2"): {PYTHON_END: 12.0},
        OUTPUT_END: {ord("3"): 12.0},
        # In front of the closing tag of the output it would stop, but that is not asked.
        ord("3"): {END: 12.0},
    }
    gold = [
        {"type": "python", "text": "1+2"},
        {"type": "python_output", "text": "3"},
        {"type": "text", "text": "3"},
    ]
    example = ChatExample([{"role": "user", "content": "1+2?"}], gold, only=True)
    task = ChatTask("sum", [example], lambda example, text: text == "1+233")
    report = evaluated(bigram(logits), tmp_path, task)
    record = answers(report)[0]
    assert (record.output, record.gold, record.exact, record.stop_error) == ("1+233", "1+233", True, 0)
    assert record.tokens == record.gold_tokens == 9
    assert record.p_stop_at_gold is not None
    assert record.p_stop_before_gold is not None
    assert record.p_stop_at_gold > 0.99
    assert record.p_stop_before_gold < 0.01


def test_a_model_that_writes_the_output_of_its_tool_itself(tmp_path: Path) -> None:
    # A call that the calculator cannot answer is answered by nothing, and the model goes on alone.
    logits = {
        START: {PYTHON_START: 12.0},
        PYTHON_START: {ord("x"): 12.0},
        ord("x"): {PYTHON_END: 12.0},
        PYTHON_END: {OUTPUT_START: 12.0},
        OUTPUT_START: {END: 12.0},
    }
    made_up = evaluated(bigram(logits), tmp_path / "1", asked("a"))
    assert made_up.stop.wrote_output == 1.0
    # What the runtime writes does not count.
    logits[ord("x")] = {}
    logits[PYTHON_START] = {ord("1"): 12.0}
    logits[ord("1")] = {PYTHON_END: 12.0}
    logits[OUTPUT_END] = {END: 12.0}
    computed = evaluated(bigram(logits), tmp_path / "2", asked("a"))
    assert answers(computed)[0].output == "11"
    assert computed.stop.wrote_output == 0.0


def test_prompts_without_an_end(tmp_path: Path) -> None:
    task = asked("abcabc", ends=False)
    stops = evaluated(bigram(chain("abc")), tmp_path / "1", task)
    assert (stops.false_stop, stops.tasks[0].accuracy, stops.chat_core, stops.stop.n) == (
        1.0,
        None,
        None,
        0,
    )
    goes_on = evaluated(bigram({**chain("abc", None), ord("c"): {ord("a"): 12.0}}), tmp_path / "2", task)
    assert goes_on.false_stop == 0.0
    assert answers(goes_on)[0].output == "abcabc"


def test_an_answer_that_may_differ_has_no_stop_error(tmp_path: Path) -> None:
    report = evaluated(bigram(chain("abc")), tmp_path, asked("other", only=False))
    assert (report.stop.known, report.stop.stop_error, report.stop.premature) == (0, None, None)
    assert report.stop.natural_stop == 1.0


def test_choices_by_their_letters(tmp_path: Path) -> None:
    # It would say x, and of the letters it prefers B, then A.
    model = bigram({START: {ord("x"): 5.0, ord("B"): 3.0, ord("A"): 2.0}})
    examples = [
        ChatExample([{"role": "user", "content": "long " * count}], gold, letters=letters)
        for count, gold, letters in (
            (1, "B", ("A", "B", "C", "D")),
            (9, "A", ("A", "B", "C", "D")),
            (3, "A", ("A", "C")),
            (2, "D", ("C", "D")),
        )
    ]
    task = ChatTask("choices", examples, lambda example, text: False, kind="categorical", baseline=0.25)
    report = evaluated(model, tmp_path, task)
    assert [record.chosen for record in report.tasks[0].records] == ["B", "B", "A", "C"]  # type: ignore[union-attr]
    assert report.tasks[0].accuracy == 0.5
    assert report.chat_core == pytest.approx((0.5 - 0.25) / 0.75)
    total = math.exp(5) + math.exp(3) + math.exp(2) + 263
    both = (math.exp(3) + math.exp(2) + 2) / total
    shares = [both, both, (math.exp(2) + 1) / total, 2 / total]
    assert report.tasks[0].letter_share == pytest.approx(sum(shares) / 4, rel=1e-4)
    assert report.stop.n == 0


def test_several_samples_and_pass_at_k(tmp_path: Path) -> None:
    # a or b with the same chance, then the end.
    model = bigram({START: {ord("a"): 20.0, ord("b"): 20.0}, ord("a"): {END: 20.0}, ord("b"): {END: 20.0}})
    engine = load_engine(save(model, tmp_path / "model"), dtype="float32")
    report = evaluate_chat(engine, [asked(*["a"] * 40)], samples=4, seed=1)
    task = report.tasks[0]
    assert len(task.records) == 160
    assert task.accuracy == pytest.approx(0.5, abs=0.12)
    assert task.pass_at[1] == pytest.approx(task.accuracy)
    assert task.pass_at[4] == pytest.approx(1 - 0.5**4, abs=0.1)
    assert list(task.pass_at) == [1, 2, 4]
    other = replace(asked("b"), name="other")
    again = evaluate_chat(engine, [other, asked(*["a"] * 40)], samples=4, seed=1)
    assert again.tasks[1] == task
    assert evaluate_chat(engine, [asked(*["a"] * 40)], samples=4, seed=2).tasks != report.tasks
    with pytest.raises(ValueError, match="all the same"):
        evaluate_chat(engine, [asked("a")], samples=2, temperature=0.0)


@pytest.mark.parametrize("max_rows", [1, 64])
@torch.no_grad()
def test_forced_answers_equal_the_decoder(tmp_path: Path, max_rows: int) -> None:
    model = tiny_decoder()
    engine = engine_of(model, save_chat_model(model, tmp_path / "model"), max_rows=max_rows)
    prompts = [[BOS, *range(40, 40 + count)] for count in (1, 7, 30, 3)] + [[BOS]]
    tails = [[65], [], list(range(97, 117)), [66, 67, 68], [70]]
    # Prefixes that the engine keeps must not be in the way.
    engine.generate(prompts)
    for prompt, logits in zip(prompts, last_logits(engine, prompts), strict=True):
        assert torch.allclose(logits, model(torch.tensor([prompt]))[0, -1], atol=1e-5)
    for prompt, tail, found in zip(prompts, tails, p_stop_along(engine, prompts, tails), strict=True):
        chances = model(torch.tensor([prompt + tail]))[0].softmax(-1)[len(prompt) - 1 :, [END, BOS]].sum(-1)
        assert found == pytest.approx(chances.tolist(), abs=1e-6)
    # And the engine works on as before.
    before = [output.outputs[0].token_ids for output in engine.generate(prompts, None, request_id=None)]
    assert len(before) == 5


def test_weights_under_training_can_be_evaluated(tmp_path: Path) -> None:
    model = bigram(chain("abc"))
    engine = engine_of(model, save(model, tmp_path / "model"))
    assert evaluate_chat(engine, [asked("abc")]).stop.exact == 1.0
    engine.load_weights(bigram(chain("xyz")).state_dict())
    assert evaluate_chat(engine, [asked("abc")]).stop.exact == 0.0


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    model = bigram(chain("abc"))
    place = save(model, tmp_path / "model")
    with torch.no_grad():
        model.lm_head.weight[:, START] = math.nan
    engine = engine_of(model, place)
    choice = ChatExample([{"role": "user", "content": "?"}], "A", letters=("A", "B"))
    choices = ChatTask("choices", [choice], lambda example, text: False, kind="categorical")
    for task in (asked("abc"), choices):
        with pytest.raises(EndstopError, match="NaN"):
            evaluate_chat(engine, [task])


def test_generated_tasks_with_a_model_that_knows_nothing(tmp_path: Path) -> None:
    model = tiny_decoder(context=512)
    engine = engine_of(model, save_chat_model(model, tmp_path / "model"))
    tasks = [generated_task(task, size=3) for task in SYNTHETIC] + [
        generated_task(task_named("count-on"), size=2)
    ]
    told: list[tuple[str, int, int]] = []
    report = evaluate_chat(
        engine, tasks, n=2, max_tokens=4, progress=lambda name, done, total: told.append((name, done, total))
    )
    assert [task.name for task in report.tasks] == [task.name for task in tasks]
    assert all(task.examples == 2 for task in report.tasks)
    assert report.stop.n == 2 * len(SYNTHETIC)
    assert told == [(task.name, number, 2) for task in tasks for number in (1, 2)]
    as_dict = report.as_dict(records=False)
    assert "records" not in as_dict["tasks"][0]
    text = json.dumps(report.as_dict(), allow_nan=False)
    assert json.loads(text)["tasks"][0]["records"][0]["finish_reason"] in ("stop", "length")
    # The right answers, said by somebody who knows them, are right.
    for task in tasks[:-1]:
        for example in (task.examples[0], task.examples[2]):
            assert task.right(example, visible(example.gold))


def test_examples_do_not_depend_on_how_many_are_asked() -> None:
    few, many = generated_task(task_named("calc"), size=3), generated_task(task_named("calc"), size=30)
    assert [few.examples[i].messages for i in range(3)] == [many.examples[i].messages for i in range(3)]
    with pytest.raises(IndexError):
        few.examples[3]


def test_prompts_longer_than_the_window_are_counted(tmp_path: Path) -> None:
    model = bigram(chain("abc"), context=32)
    long = ChatExample([{"role": "user", "content": "x" * 40}], "abc", only=True)
    task = asked("abc")
    both = ChatTask("both", [*task.examples, long], task.right)
    report = evaluated(model, tmp_path, both)
    assert (report.tasks[0].examples, report.tasks[0].skipped, report.tasks[0].accuracy) == (1, 1, 1.0)


def test_a_foreign_model_with_its_own_template(tmp_path: Path) -> None:
    place = cycle_model(tmp_path / "cycle", follow={" three": "<|im_end|>"}).path
    # Its template knows no parts: of the answer the words are left.
    gold = [
        {"type": "text", "text": " one"},
        {"type": "python", "text": "1+1"},
        {"type": "python_output", "text": "2"},
        {"type": "text", "text": " two three"},
    ]
    example = ChatExample([{"role": "user", "content": "?"}], gold, only=True)
    report = evaluate_chat(place, [ChatTask("t", [example], lambda e, text: text == " one two three")])
    record = answers(report)[0]
    assert (record.exact, record.tokens, record.stop_kind) == (True, 3, "turn_end")
    assert (record.gold, record.stop_error) == (" one two three", 0)


def test_a_base_model_is_refused(tmp_path: Path) -> None:
    place = cycle_model(tmp_path / "cycle").path
    config = json.loads((place / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(MissingTemplate, match="endstop eval base"):
        evaluate_chat(load_engine(place), [asked("a")])


def test_a_run_finds_what_was_written_into_its_stage(tmp_path: Path) -> None:
    report = evaluated(
        bigram(chain("abc")), tmp_path, asked("abc", "ab"), replace(asked("aaaaaa", ends=False), name="on")
    )
    stage = tmp_path / "run" / "sft"
    stage.mkdir(parents=True)
    (stage / "summary.json").write_text('{"stage": "sft"}')
    (stage / "eval-chat.json").write_text(json.dumps(report.as_dict()))
    found = read_run(tmp_path / "run").stages[0].tasks
    assert [(task.name, task.count, task.exact, task.late, task.false_stop) for task in found] == [
        ("said", 2, 0.5, 0.5, None),
        ("on", 1, None, None, 1.0),
    ]


def test_ranges_of_lengths() -> None:
    def record(gold_tokens: int, tokens: int) -> AnswerRecord:
        right = gold_tokens == tokens
        text = "x" * tokens
        return AnswerRecord(
            "t",
            0,
            0,
            "?",
            text,
            "x" * gold_tokens,
            "stop",
            "turn_end",
            tokens,
            gold_tokens,
            right,
            right,
            True,
        )

    ranges = by_gold_length([record(0, 0), record(8, 9), record(9, 9), record(17, 1), record(32, 32)])
    assert {name: summary.n for name, summary in ranges.items()} == {"0-8": 2, "9-16": 1, "17-32": 2}
    assert (ranges["0-8"].late, ranges["17-32"].premature) == (0.5, 0.5)
    assert summary_of([]).exact is None
