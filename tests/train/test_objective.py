"""The loss against the plain way to compute it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from endstop.protocol.labels import IGNORE
from endstop.protocol.stopset import StopSet
from endstop.train.model_shapes import nanochat_config, new_model
from endstop.train.objective import LossSums, Objective, cross_entropy
from endstop.train.stop_events import EVENTS, StopEvents

VOCABULARY = 37
EVENT_TABLE = StopEvents((*[0] * 30, 1, 2, 2, 3, 4, 0, 0), frozenset({31, 32}))
LENGTHS = [id % 4 + 1 for id in range(30)]


def plain(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, cap: float | None
) -> torch.Tensor:
    logits = hidden @ head.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return (functional.cross_entropy(logits, targets, reduction="none") * weights).sum()


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 40),
    rows=st.integers(1, 45),
    cap=st.sampled_from([None, 15.0, 2.0]),
    seed=st.integers(0, 1000),
)
def test_chunked_loss_and_gradients_are_the_plain_ones(
    count: int, rows: int, cap: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 8, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (count,), generator=generator)
    weights = torch.rand(count, generator=generator)
    expected = torch.autograd.grad(3 * plain(hidden, head, targets, weights, cap), (hidden, head))
    loss, nats = cross_entropy(hidden, head, targets, weights, cap, rows)
    found = torch.autograd.grad(3 * loss, (hidden, head))
    assert math.isclose(
        float(loss.detach()),
        float(plain(hidden.detach(), head.detach(), targets, weights, cap)),
        abs_tol=1e-4,
    )
    assert nats.shape == (count,)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_bfloat16_gradients_are_near_those_of_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator).requires_grad_()
    head = torch.randn(VOCABULARY, 32, generator=generator).requires_grad_()
    targets, weights = torch.randint(0, VOCABULARY, (64,), generator=generator), torch.full((64,), 1 / 64)
    exact = torch.autograd.grad(cross_entropy(hidden, head, targets, weights, 15.0)[0], (hidden, head))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = cross_entropy(hidden, head, targets, weights, 15.0)
    assert loss.dtype == torch.float32
    for ours, theirs in zip(torch.autograd.grad(loss, (hidden, head)), exact, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 0.02


def random_batch(rows: int, seed: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, 11), generator=generator)
    targets = torch.randint(0, VOCABULARY, (rows, 11), generator=generator)
    return ids, targets.masked_fill(torch.rand(rows, 11, generator=generator) > share, IGNORE)


def test_a_step_is_the_same_however_it_is_split() -> None:
    """One micro-batch has no label at all: it adds nothing, and there is no NaN."""
    model = new_model(nanochat_config(1, VOCABULARY, hidden_size=16, head_dim=8))
    with torch.no_grad():
        model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(3))
    objective = Objective(EVENT_TABLE, LENGTHS, {"turn_end": 4.0, "tool_end": 0.0})
    ids, targets = random_batch(6, 1, 0.5)
    targets[2:4] = IGNORE
    divisor = objective.weight_sum([targets])
    counted = targets[targets != IGNORE]
    assert divisor == sum({31: 4.0, 32: 4.0, 33: 0.0}.get(int(target), 1.0) for target in counted)
    results = []
    for parts in ([slice(0, 6)], [slice(0, 2), slice(2, 4), slice(4, 6)]):
        model.zero_grad()
        total, sums = 0.0, LossSums()
        for part in parts:
            loss, found = objective(model, ids[part], targets[part], None, divisor)
            loss.backward()
            total, sums = total + float(loss.detach()), sums + LossSums.of(found)
        results.append((total, sums, model.model.embed_tokens.weight.grad.clone()))
    (whole, whole_sums, whole_gradient), (split, split_sums, split_gradient) = results
    assert math.isclose(whole, split, rel_tol=1e-5)
    assert torch.allclose(whole_gradient, split_gradient, atol=1e-6)
    assert whole_sums.counts == split_sums.counts
    weighted = whole_sums.nats[0] + whole_sums.nats[1] + 4 * whole_sums.nats[2] + whole_sums.nats[4]
    assert math.isclose(whole, weighted / divisor, rel_tol=1e-5)


def test_every_kind_of_ending_is_counted_on_its_own() -> None:
    model = new_model(nanochat_config(1, VOCABULARY, hidden_size=16, head_dim=8))
    objective = Objective(EVENT_TABLE, LENGTHS)
    targets = torch.tensor([[0, 1, 30, 2, 31, IGNORE, 32, 33, 34, 35]])
    _, found = objective(model, torch.zeros_like(targets), targets, None, 9.0)
    sums = LossSums.of(found)
    # A new model gives every token the same probability.
    uniform = math.log(VOCABULARY)
    assert sums.counts == (4, 1, 2, 1, 1)
    assert sums.tokens == 9
    for nats, count in zip(sums.nats, sums.counts, strict=True):
        assert math.isclose(nats, count * uniform, rel_tol=1e-6)
    # Targets 0, 1 and 2 stand for 1, 2 and 3 bytes; specials and ids beyond the table stand for none.
    assert sums.bytes == 6
    assert math.isclose(sums.bits_per_byte or 0.0, 3 * math.log2(VOCABULARY) / 6, rel_tol=1e-6)
    assert set(sums.metrics()) == {
        *("loss", "bits_per_byte"),
        *(f"{what}_{event}" for what in ("loss", "count") for event in EVENTS),
    }


def test_no_targets_no_loss() -> None:
    sums = LossSums()
    assert math.isnan(sums.loss)
    assert sums.bits_per_byte is None
    with pytest.raises(ValueError, match="37 rows"):
        Objective(EVENT_TABLE, [1] * 38)


def test_weights_of_events_are_checked() -> None:
    assert EVENT_TABLE.weights({"turn_end": 2.0})[29:] == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="a weighted event is one of"):
        EVENT_TABLE.weights({"end": 2.0})
    with pytest.raises(ValueError, match="must be 0 or more"):
        EVENT_TABLE.weights({"turn_end": -1.0})


class Vocabulary:
    """As much of a tokenizer as events are read from."""

    def __init__(self, *texts: str) -> None:
        from endstop.protocol.tokenizer import AddedTokenInfo

        self.added_tokens = {at: AddedTokenInfo(text, special=True) for at, text in enumerate(texts)}
        self.vocab_size = len(texts)


def test_events_of_other_vocabularies() -> None:
    tokenizer = Vocabulary("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom_id|>", "</think>", "word")
    stops = StopSet({0: "eos", 2: "eos", 3: "tool_end"}, terminator=2)
    events = StopEvents.of(tokenizer, stops, 7)  # type: ignore[arg-type]
    assert events.table == (1, 0, 2, 3, 4, 0, 0)
    assert events.stop_ids == {0, 2, 3}
    assert events.ids_of("turn_end") == [2]
