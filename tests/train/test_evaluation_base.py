from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenbytes import TokenBytes
from endstop.protocol.tokenizer import Tokenizer
from endstop.train.evaluation.bits_per_byte import TextFormat, score_texts
from endstop.train.evaluation.in_context import (
    InContextTask,
    encoder_of,
    evaluate_tasks,
    load_bundle,
    spans_of,
)
from endstop.train.evaluation.scoring import Span, score_spans
from tests.train.bigram_model import BOS, END, bigram, chain
from tests.train.tiny_policy import save_chat_model, tiny_decoder


@pytest.fixture(scope="module")
def random_model() -> Decoder:
    return tiny_decoder(context=64)


@pytest.fixture(scope="module")
def text_format(tmp_path_factory: pytest.TempPathFactory, random_model: Decoder) -> TextFormat:
    place = save_chat_model(random_model, tmp_path_factory.mktemp("model") / "random")
    return TextFormat.of(
        Tokenizer.from_pretrained(place), StopSet.from_pretrained(place), TokenBytes.from_pretrained(place)
    )


def one_by_one(model: Decoder, ids: list[int], at: int) -> torch.Tensor:
    """log P of every token behind ids[:at], by itself."""
    return torch.log_softmax(model(torch.tensor([ids[:at]]))[0, -1].double(), -1)


@torch.no_grad()
def test_spans_equal_one_token_at_a_time(random_model: Decoder) -> None:
    random = Random(0)
    spans = []
    for _ in range(9):
        ids = [random.randrange(265) for _ in range(random.randint(2, 30))]
        start = random.randint(1, len(ids) - 1)
        spans.append(Span(ids, start, random.randint(start + 1, len(ids))))
    for batch_tokens in (1, 64, 8192):
        for span, found in zip(
            spans,
            score_spans(random_model, spans, stop_ids=[BOS, END], batch_tokens=batch_tokens),
            strict=True,
        ):
            for place, at in enumerate(range(span.start, span.end)):
                logp = one_by_one(random_model, list(span.ids), at)
                assert float(found.nats[place]) == pytest.approx(-float(logp[span.ids[at]]), abs=2e-5)
                assert bool(found.greedy[place]) == (int(logp.argmax()) == span.ids[at])
                assert float(found.p_stop[place]) == pytest.approx(
                    float(logp[[BOS, END]].exp().sum()), abs=2e-6
                )


def test_a_span_has_a_target_with_something_before_it() -> None:
    for start, end in ((0, 1), (2, 2), (1, 4)):
        with pytest.raises(ValueError, match="a span of a row of 3 tokens"):
            Span([1, 2, 3], start, end)


def test_weights_that_are_no_numbers() -> None:
    model = bigram({})
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(EndstopError, match="no numbers"):
        score_spans(model, [Span([0, 2], 1, 2)])


def test_training_mode_is_kept(random_model: Decoder) -> None:
    random_model.train()
    score_spans(random_model, [Span([1, 2], 1, 2)])
    assert random_model.training
    random_model.eval()
    score_spans(random_model, [Span([1, 2], 1, 2)])
    assert not random_model.training


@torch.no_grad()
def test_bits_per_byte_equals_a_slow_computation(random_model: Decoder, text_format: TextFormat) -> None:
    documents = ["one", "zwei Wörter", "", "a longer one, in three rows of eight"]
    found = score_texts(random_model, text_format, documents, row_length=8, batch_tokens=32)
    nats = end_nats = p_ends = p_before = 0.0
    size = targets = 0
    for document in documents:
        ids = [BOS, *document.encode(), BOS]
        for at in range(1, len(ids)):
            # Rows of 8 inputs: the row of target `at` begins at the last multiple of 8 before it.
            begin = (at - 1) // 8 * 8
            logp = one_by_one(random_model, ids[begin:], at - begin)
            stop = float(logp[[BOS, END]].exp().sum())
            targets += 1
            if at == len(ids) - 1:
                end_nats -= float(logp[ids[at]])
                p_ends += stop
            else:
                nats -= float(logp[ids[at]])
                size += 1
                p_before += stop
    assert (found.bytes, found.tokens, found.documents, found.ends) == (size, size, 4, 4)
    assert size == sum(len(document.encode()) for document in documents)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found.nats_per_end == pytest.approx(end_nats / 4, rel=1e-5)
    assert found.p_stop_at_ends == pytest.approx(p_ends / 4, rel=1e-4)
    assert found.p_stop_before == pytest.approx(p_before / (targets - 4), rel=1e-4)


def test_a_model_that_knows_its_document(text_format: TextFormat) -> None:
    model = bigram({**chain("dog", BOS, first=BOS, margin=40.0)})
    found = score_texts(model, text_format, ["dog"])
    assert found.bits_per_byte < 1e-6
    assert found.nats_per_end is not None
    assert found.nats_per_end < 1e-6
    assert found.p_stop_at_ends == pytest.approx(1.0)
    assert found.p_stop_before == pytest.approx(0.0, abs=1e-6)
    # One that gives every token the same chance.
    uniform = score_texts(bigram({}), text_format, ["dog"])
    assert uniform.bits_per_byte == pytest.approx(math.log2(266))
    assert uniform.p_stop_at_ends == pytest.approx(2 / 266)


def test_no_bytes_and_limits(random_model: Decoder, text_format: TextFormat) -> None:
    assert score_texts(random_model, text_format, []).bits_per_byte == math.inf
    assert score_texts(random_model, text_format, [""]).ends == 1
    told: list[tuple[int, int]] = []
    found = score_texts(
        random_model, text_format, ["abcd"] * 100, max_tokens=12, progress=lambda a, b: told.append((a, b))
    )
    assert found.documents == 3
    assert told == [(15, 15)]


CHOICES = [
    {"query": "x", "choices": ["abc", "acb", "bca"], "gold": 0},
    {"query": "y", "choices": ["cab", "abc", "bac"], "gold": 1},
    {"query": "z", "choices": ["abc", "ab"], "gold": 1},
]
CONTEXTS = [
    {"context_options": ["the a", "the c"], "continuation": "bc", "gold": 0},
    {"context_options": ["the b", "the a"], "continuation": "b", "gold": 0},
]
TEXTS = [
    {"context": " a ", "continuation": "bc"},
    {"context": "a", "continuation": "bd"},
    {"context": "b", "continuation": "c"},
]


def tasks_of(shots: int, delimiter: str = "") -> list[InContextTask]:
    return [
        InContextTask("choices", "multiple_choice", CHOICES, shots, delimiter, 0.25),
        InContextTask("contexts", "schema", CONTEXTS, shots, delimiter, 0.5),
        InContextTask("texts", "language_modeling", TEXTS, shots, delimiter, 0.0),
    ]


def test_answers_that_are_known() -> None:
    # Behind a comes b, behind b comes c; everything else is a surprise.
    model = bigram({ord("a"): {ord("b"): 9.0}, ord("b"): {ord("c"): 9.0}})
    report = evaluate_tasks(model, encoder_of(BOS, lambda text: list(text.encode())), tasks_of(0))
    # Of "ab" against "abc" at least the last token counts: b behind a is as likely as c behind b.
    assert [round(task.accuracy, 4) for task in report.tasks] == [0.6667, 0.5, 0.6667]
    centred = [(2 / 3 - 0.25) / 0.75, 0.0, 2 / 3]
    assert [task.centred for task in report.tasks] == pytest.approx(centred)
    assert report.core == pytest.approx(sum(centred) / 3)
    assert report.as_dict()["tasks"][0]["label"] == "choices"


@torch.no_grad()
def test_equal_to_a_slow_computation_with_worked_examples(random_model: Decoder) -> None:
    random = Random(5)
    letters = "abcde"

    def word(count: int) -> str:
        return "".join(random.choice(letters) for _ in range(count))

    choices = [
        {"query": word(3), "choices": [word(2), word(3), word(1) + "x"], "gold": random.randrange(3)}
        for _ in range(12)
    ]
    contexts = [
        {"context_options": [word(3), word(4)], "continuation": word(2), "gold": random.randrange(2)}
        for _ in range(12)
    ]
    tasks = [
        InContextTask("c", "multiple_choice", choices, 2, ": ", 1 / 3),
        InContextTask("s", "schema", contexts, 2, ": ", 0.5),
    ]
    encode = encoder_of(BOS, lambda text: list(text.encode()))
    report = evaluate_tasks(random_model, encode, tasks, max_length=64)
    for task, found in zip(tasks, report.tasks, strict=True):
        order = list(range(12))
        Random(1337).shuffle(order)
        right = 0
        for place, at in enumerate(order):
            pool = [order[other] for other in range(12) if other != place]
            shots = Random(1234 + place).sample(pool, 2)
            before, options = "", []
            for shot in shots:
                item = task.items[shot]
                if task.kind == "schema":
                    before += item["context_options"][item["gold"]] + ": " + item["continuation"] + "\n\n"
                else:
                    before += item["query"] + ": " + item["choices"][item["gold"]] + "\n\n"
            item = task.items[at]
            if task.kind == "schema":
                options = [
                    before + context + ": " + item["continuation"] for context in item["context_options"]
                ]
            else:
                options = [before + item["query"] + ": " + choice for choice in item["choices"]]
            rows = [[BOS, *option.encode()] for option in options]
            turned = [row[::-1] for row in rows] if task.kind == "schema" else rows
            common = 0
            while all(common < len(row) and row[common] == turned[0][common] for row in turned):
                common += 1
            means = []
            for row in rows:
                start = len(row) - common if task.kind == "schema" else min(common, len(row) - 1)
                values = [-float(one_by_one(random_model, row, k)[row[k]]) for k in range(start, len(row))]
                means.append(sum(values) / len(values))
            right += means.index(min(means)) == item["gold"]
        assert found.accuracy == pytest.approx(right / 12)


def test_worked_examples_do_not_depend_on_how_many_items_are_asked() -> None:
    items = [{"context": f"{i} is", "continuation": str(i)} for i in range(20)]
    task = InContextTask("t", "language_modeling", items, 3, " ", 0.0)
    encode = encoder_of(None, lambda text: list(text.encode()))
    span = spans_of(task, items, 7, encode)[0]
    text = bytes(span.ids).decode()
    assert text.endswith("\n\n7 is 7")
    assert text.count("\n\n") == 3
    assert text[: -len("7 is 7")].count("7 is") == 0
    # The blank before the continuation belongs to what is predicted, as the prompt alone ends without it.
    assert bytes(span.ids[span.start : span.end]) == b" 7"


def test_rows_longer_than_the_window_keep_their_end() -> None:
    model = bigram({ord("a"): {ord("b"): 9.0}, ord("b"): {ord("c"): 9.0}})
    items = [{"context": "x" * 50 + "a", "continuation": "bc"}]
    task = InContextTask("t", "language_modeling", items, 0, "", 0.0)
    report = evaluate_tasks(model, encoder_of(BOS, lambda t: list(t.encode())), [task], max_length=8)
    assert (report.tasks[0].cropped, report.tasks[0].accuracy) == (1, 1.0)


def write_bundle(place: Path) -> Path:
    (place / "eval_data" / "sub").mkdir(parents=True)
    for name, items in (("sub/choices", CHOICES), ("contexts", CONTEXTS), ("texts", TEXTS)):
        lines = "".join(json.dumps(item) + "\n" for item in items)
        (place / "eval_data" / f"{name}.jsonl").write_text(lines)
    (place / "core.yaml").write_text(
        """
icl_tasks:
- label: choices
  dataset_uri: sub/choices.jsonl
  num_fewshot: [0]
  icl_task_type: multiple_choice
  continuation_delimiter: ""
- label: contexts
  dataset_uri: contexts.jsonl
  num_fewshot: [0]
  icl_task_type: schema
  continuation_delimiter: ""
- label: texts
  dataset_uri: texts.jsonl
  num_fewshot: [0]
  icl_task_type: language_modeling
  continuation_delimiter: ""
"""
    )
    (place / "eval_meta_data.csv").write_text(
        "Eval Task,Task Category,Random baseline\nchoices,x,25\ncontexts,y,50.0\ntexts,z,0\n"
    )
    return place


def test_a_bundle_is_read(tmp_path: Path) -> None:
    bundle = load_bundle(write_bundle(tmp_path))
    assert bundle == tasks_of(0)
    (tmp_path / "core.yaml").write_text(
        (tmp_path / "core.yaml").read_text().replace('continuation_delimiter: ""', "has_categories: true")
    )
    assert load_bundle(tmp_path)[0].delimiter == " "


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda b: (b / "core.yaml").unlink(), "no bundle of in-context tasks: core.yaml is missing"),
        (lambda b: (b / "core.yaml").write_text("tasks: 3"), "has no list `icl_tasks`"),
        (lambda b: (b / "eval_data" / "texts.jsonl").unlink(), "texts.jsonl is missing"),
        (lambda b: (b / "eval_data" / "texts.jsonl").write_text(""), "texts.jsonl has no items"),
        (
            lambda b: (b / "eval_data" / "texts.jsonl").write_text("{"),
            "texts.jsonl, line 1 is not valid JSON",
        ),
        (lambda b: (b / "eval_data" / "texts.jsonl").write_text("{}"), "line 1 lacks context, continuation"),
        (lambda b: (b / "eval_meta_data.csv").write_text("a,b\n1,2\n"), "must have the columns"),
    ],
)
def test_a_broken_bundle_is_one_sentence(tmp_path: Path, change: Any, sentence: str) -> None:
    change(write_bundle(tmp_path))
    with pytest.raises(EndstopError, match=sentence):
        load_bundle(tmp_path)


def test_too_few_items_for_the_worked_examples() -> None:
    with pytest.raises(EndstopError, match="too few for one with 3 worked examples"):
        evaluate_tasks(bigram({}), encoder_of(None, lambda t: list(t.encode())), tasks_of(3))
