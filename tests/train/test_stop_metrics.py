"""Measures of endings, on models whose probabilities are known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop.models.config import DecoderConfig
from endstop.models.decoder import Decoder
from endstop.protocol.labels import IGNORE, Row, chat_rows
from endstop.protocol.params import SamplingParams
from endstop.protocol.render import ChatRenderer
from endstop.train.batch import TokenBatch
from endstop.train.chat_format import (
    ASSISTANT_END,
    OUTPUT_END,
    OUTPUT_START,
    PYTHON_END,
    PYTHON_START,
    SPECIAL_TOKENS,
)
from endstop.train.distributed import Process
from endstop.train.model_shapes import nanochat_config, new_model
from endstop.train.objective import Objective
from endstop.train.run_directory import tokenizer_files
from endstop.train.starting_point import Vocabulary
from endstop.train.stop_events import EVENTS, StopEvents
from endstop.train.stop_metrics import (
    EventScores,
    Probe,
    auroc,
    draw_samples,
    natural_stops,
    probes_of,
    sampling_engine,
    score,
    validate,
)
from tests.train.tiny_runs import new_run

VOCABULARY = 20
TURN_END, TOOL_END = 12, 13
EVENTS_OF_IDS = StopEvents(
    tuple({TURN_END: 2, TOOL_END: 3}.get(id, 0) for id in range(VOCABULARY)), frozenset({TURN_END})
)


def loud_model(seed: int = 0) -> Decoder:
    """A model with an output matrix that is not 0."""
    model = new_model(nanochat_config(2, VOCABULARY, hidden_size=16, head_dim=8), seed)
    with torch.no_grad():
        model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return model


def some_batch() -> TokenBatch:
    """Three rows: two turns; one turn behind a masked prompt and no end; nothing but masked."""
    ids = torch.randint(0, 12, (3, 9), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    targets[0, 3], targets[0, 7] = TURN_END, TURN_END
    targets[1, 5] = TOOL_END
    targets[1, :2] = IGNORE
    targets[2] = IGNORE
    return TokenBatch(ids, targets)


def test_scores_are_those_of_the_softmax() -> None:
    model, batch = loud_model(), some_batch()
    objective = Objective(EVENTS_OF_IDS, [1] * 12)
    losses, scores = score(model, batch, objective)
    with torch.no_grad():
        logits = model(batch.input_ids)
    probability = logits.softmax(-1)[..., TURN_END]
    ends = batch.targets == TURN_END
    other = (batch.targets != IGNORE) & ~ends
    turn = scores["turn_end"]
    assert torch.allclose(torch.cat(turn.at_end), probability[ends], atol=1e-6)
    assert torch.allclose(torch.cat(turn.before), probability[other], atol=1e-6)
    # The first stretch of row 0 are its positions 0 to 2, the second 4 to 6; what is behind its last end, and
    # row 1, have no end of a turn.
    expected = torch.stack([probability[0, :3].max(), probability[0, 4:7].max()])
    assert torch.allclose(torch.cat(turn.highest_before), expected, atol=1e-6)
    without = logits.clone()
    without[..., TURN_END] = -torch.inf
    margin = logits[..., TURN_END] - without.amax(-1)
    assert torch.allclose(torch.cat(turn.margin), margin[ends], atol=1e-5)
    assert torch.cat(scores["tool_end"].at_end).shape == (1,)
    assert losses.counts == (13, 0, 2, 1, 0)
    nats = -logits.log_softmax(-1).gather(2, batch.targets.clamp(min=0).unsqueeze(2)).squeeze(2)
    assert math.isclose(losses.nats[2], float(nats[ends].sum()), rel_tol=1e-5)
    assert set(scores) == {"turn_end", "tool_end"}


def test_validation_of_several_batches_is_that_of_all_rows_at_once() -> None:
    model, batch = loud_model(), some_batch()
    objective = Objective(EVENTS_OF_IDS, [1] * 12)
    process = Process(0, 1, torch.device("cpu"))
    parts = [TokenBatch(batch.input_ids[row : row + 1], batch.targets[row : row + 1]) for row in range(3)]
    whole = validate(model, [batch], objective, process, lambda: torch.no_grad())
    split = validate(model, parts, objective, process, lambda: torch.no_grad())
    assert whole.keys() == split.keys()
    for name, value in whole.items():
        assert math.isclose(value, split[name], rel_tol=1e-5, abs_tol=1e-6), name
    assert 0 <= whole["auroc_turn_end"] <= 1
    assert not any("document_end" in name for name in whole)


@settings(max_examples=60, deadline=None)
@given(
    positives=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    negatives=st.lists(st.integers(0, 5), min_size=1, max_size=12),
)
def test_auroc_counts_pairs(positives: list[int], negatives: list[int]) -> None:
    pairs = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positives for n in negatives]
    found = auroc(torch.tensor(positives, dtype=torch.float32), torch.tensor(negatives, dtype=torch.float32))
    assert math.isclose(found, sum(pairs) / len(pairs), abs_tol=1e-9)


def test_an_event_that_never_occurs_has_no_metrics() -> None:
    assert EventScores(before=[torch.tensor([0.5])]).metrics("turn_end") == {}


def test_probes_are_first_answers_that_end() -> None:
    def row(*tokens: tuple[int, bool]) -> Row:
        return Row([id for id, _ in tokens], [id if own else IGNORE for id, own in tokens])

    answer = row((1, False), (2, False), (3, True), (TURN_END, True), (4, False), (5, True), (TURN_END, True))
    hands_over = row((1, False), (3, True), (TOOL_END, True), (4, False), (TURN_END, True))
    unmasked = row((1, True), (TURN_END, True))
    cut = row((1, False), (3, True))
    rows = [hands_over, unmasked, cut, answer, answer, answer]
    assert probes_of(rows, EVENTS_OF_IDS, 2) == [Probe([1, 2], 2)] * 2
    # With the tool in the engine: up to the end of the turn, the tool's output counted.
    opened, closed = 14, 15
    uses_tool = row(
        *((1, False), (3, True), (TOOL_END, True), (opened, False), (6, False), (closed, False)),
        *((7, True), (TURN_END, True), (1, False), (3, True), (TURN_END, True)),
    )
    cut_inside = row((1, False), (3, True), (TOOL_END, True), (opened, False), (6, False))
    rows = [hands_over, cut_inside, uses_tool]
    assert probes_of(rows, EVENTS_OF_IDS, 9, (opened, closed)) == [Probe([1], 7)]
    assert probes_of(rows, EVENTS_OF_IDS, 9) == []
    assert [len(probes_of(rows, EVENTS_OF_IDS, 9, (opened, closed), longest)) for longest in (6, 7)] == [0, 1]


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    return Vocabulary.of(new_run(tmp_path).tokenizer, 300)


def test_own_vocabulary_has_three_kinds_of_endings(vocabulary: Vocabulary) -> None:
    texts = {
        event: [vocabulary.tokenizer.id_to_token(id) for id in vocabulary.events.ids_of(event)]
        for event in EVENTS[1:]
    }
    assert texts == {
        "document_end": ["<|bos|>"],
        "turn_end": ["<|assistant_end|>"],
        "tool_end": ["<|python_end|>"],
        "thinking_end": [],
    }
    assert "tokenizer.json" in tokenizer_files(vocabulary.directory)


def test_samples_with_calls_get_the_calculators_answers(vocabulary: Vocabulary) -> None:
    """A model that asks for 2+3 and ends after any output: right where the runtime has answered."""
    ids = {name: vocabulary.tokenizer.token_to_id(name) for name in SPECIAL_TOKENS}
    start, end, opened, closed, stop = (
        ids[name] for name in (PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END, ASSISTANT_END)
    )
    assert None not in ids.values()
    assert vocabulary.output_tags == (opened, closed)
    follows = {1: start, start: ord("2"), ord("2"): ord("+"), ord("+"): ord("3"), ord("3"): end, closed: stop}
    config = nanochat_config(1, 300, hidden_size=320, head_dim=64)
    model = new_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight[:300, :300] = torch.eye(300)
        for token in range(300):
            model.lm_head.weight[follows.get(token, ord("x")), token] = 1.0
    engine = sampling_engine(config, model.state_dict(), vocabulary.directory)
    messages = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": [
                {"type": "python", "text": "2+3"},
                {"type": "python_output", "text": "5"},
            ],
        },
    ]
    rows = chat_rows(ChatRenderer(vocabulary.tokenizer, stops=vocabulary.stops), messages).rows
    (probe,) = probes_of(rows, vocabulary.events, 1, vocabulary.output_tags)
    assert probe.gold_length == len(
        [start, ord("2"), ord("+"), ord("3"), end, opened, ord("5"), closed, stop]
    )
    probes = [Probe([1], probe.gold_length)]
    samples = draw_samples(engine, probes, 20)
    assert [sample.text for sample in samples] == ["2+35"]
    found = natural_stops(samples, probes)
    engine.close()
    assert found == {
        "natural_stop_rate": 1.0,
        "mean_sample_tokens": 9.0,
        "early_stop_rate": 0.0,
        "late_stop_rate": 0.0,
    }


def test_samples_of_equal_prompts_differ(vocabulary: Vocabulary) -> None:
    engine = sampling_engine(*uniform_model(), vocabulary.directory)
    probes = [Probe([1])] * 40
    samples = draw_samples(engine, probes, 100, temperature=1.0)
    assert len({sample.text for sample in samples}) == 40
    found = natural_stops(samples, probes)
    engine.close()
    # Two of 300 ids end a sample, so that half of them run to the limit: (1 - 2/300) ** 100 = 0.51.
    assert 0.2 < found["natural_stop_rate"] < 0.8
    assert set(found) == {"natural_stop_rate", "mean_sample_tokens"}


def uniform_model() -> tuple[DecoderConfig, dict[str, torch.Tensor]]:
    config = nanochat_config(1, 300, hidden_size=16, head_dim=8)
    return config, dict(new_model(config).state_dict())


def test_natural_stops_of_a_model_that_counts(vocabulary: Vocabulary) -> None:
    """A model whose greedy successor of each token is known: it stops behind token 5."""
    end = vocabulary.events.ids_of("turn_end")[0]
    config = nanochat_config(1, 300, hidden_size=320, head_dim=64)
    model = new_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight[:300, :300] = torch.eye(300)
        for token in range(300):
            model.lm_head.weight[end if token == 5 else (token + 1) % 300, token] = 1.0
    engine = sampling_engine(config, model.state_dict(), vocabulary.directory)
    assert engine.generate([[3]], SamplingParams(temperature=0))[0].outputs[0].generated_token_ids == [
        4,
        5,
        end,
    ]
    # Four tokens follow 1, the right answer has four: not early, not late. After 6 it does not end within 9.
    probes = [Probe([1], 5), Probe([2], 6), Probe([2], 2), Probe([6], 4)]
    samples = draw_samples(engine, probes, 9)
    assert [(sample.stop_kind, sample.length) for sample in samples[2:]] == [
        ("turn_end", 4),
        ("max_tokens", 9),
    ]
    found = natural_stops(samples, probes)
    assert natural_stops([], []) == {}
    assert draw_samples(engine, [], 9) == []
    engine.close()
    assert found == {
        "natural_stop_rate": 0.75,
        "mean_sample_tokens": (5 + 4 + 4 + 9) / 4,
        "early_stop_rate": 0.25,
        "late_stop_rate": 0.25,
    }
