"""The objective of RL against an obvious slow computation, on rollouts of a real tiny model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from endstop.models.decoder import Decoder
from endstop.train.policy_gradient import (
    PolicyStatistics,
    group_advantages,
    policy_batches,
    policy_loss,
    stop_probability,
    trained_mask,
)
from endstop.train.rewards import Judgement, RewardSettings
from endstop.train.rollouts import Question, Rollout, roll_out, rollout_engine
from tests.train.tiny_policy import BOS, END, PAD, chat_renderer, question, save_chat_model, tiny_decoder

STOPS = frozenset({END, BOS})


def rollout(
    number: int,
    reward: float,
    ids: Sequence[int] = (5, END),
    mask: Sequence[int] | None = None,
    *,
    finish: str = "stop",
    counts: bool = True,
) -> Rollout:
    mask = [1] * len(ids) if mask is None else list(mask)
    return Rollout(
        number,
        [BOS, 7, 8],
        list(ids),
        mask,
        [-1.0] * len(ids),
        finish,
        "turn_end",
        "",
        Judgement(True, True),
        reward,
        counts,  # type: ignore[arg-type]
    )


class WatchedDecoder(Decoder):
    """Keeps the last hidden states, so that the gradient of each position can be looked at."""

    watched: Tensor

    def hidden_states(self, *args: object, **options: object) -> Tensor:  # type: ignore[override]
        self.watched = super().hidden_states(*args, **options)  # type: ignore[arg-type]
        if self.watched.requires_grad:
            self.watched.retain_grad()
        return self.watched


@pytest.fixture(scope="module")
def model() -> WatchedDecoder:
    plain = tiny_decoder()
    decoder = WatchedDecoder(plain.config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        decoder.lm_head.weight *= 0.4  # so that every token is drawn now and then, the terminator too
    return decoder


@pytest.fixture(scope="module")
def drawn(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Rollout], list[Question]]:
    """Rollouts of two questions; right is what ended and has an even number of tokens."""
    directory = save_chat_model(model, tmp_path_factory.mktemp("policy") / "model")
    renderer = chat_renderer(directory)
    questions = [
        question(renderer, text, answer, right=lambda text: len(text) % 2 == 0)
        for text, answer in (("2+2", "four"), ("say ab", "ab"), ("x", ""))
    ]
    rewards = RewardSettings("stop-shaped")
    rollouts = roll_out(rollout_engine(directory), questions, rewards, samples=16, max_tokens=48)
    assert len({r.reward for r in rollouts}) > 1
    return rollouts, questions


def slow_loss(model: Decoder, rollouts: Sequence[Rollout], *, terminator: bool = True) -> Tensor:
    """One rollout after the other, one token after the other."""
    terms, tokens = [], 0
    for one in rollouts:
        group = [r.reward for r in rollouts if r.question == one.question and r.counts]
        advantage = one.reward - sum(group) / len(group) if one.counts else 0.0
        log_probabilities = torch.log_softmax(model(torch.tensor([one.prompt_ids + one.ids]))[0], -1)
        for place, (token, bit) in enumerate(zip(one.ids, one.mask, strict=True)):
            last = place == len(one.ids) - 1
            if not bit or not one.counts or (last and one.finish_reason == "stop" and not terminator):
                continue
            tokens += 1
            terms.append(-advantage * log_probabilities[len(one.prompt_ids) + place - 1, token])
    return torch.stack(terms).sum() / tokens


@pytest.mark.parametrize("micro_rows", [1, 5, 64])
@pytest.mark.parametrize("terminator", [True, False])
def test_loss_and_gradient_equal_the_slow_computation(
    model: WatchedDecoder,
    drawn: tuple[list[Rollout], list[Question]],
    micro_rows: int,
    terminator: bool,
) -> None:
    rollouts, _ = drawn
    model.zero_grad()
    expected = slow_loss(model, rollouts, terminator=terminator)
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    batches, total = policy_batches(
        rollouts,
        group_advantages(rollouts),
        STOPS,
        micro_rows=micro_rows,
        pad_id=PAD,
        terminator_in_loss=terminator,
    )
    statistics = PolicyStatistics()
    for batch in batches:
        policy_loss(model, batch, total, statistics).backward()
    assert statistics.loss == pytest.approx(float(expected.detach()), abs=1e-6)
    assert set(wanted) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-7)


def test_the_trainers_log_probabilities_are_the_engines(
    model: WatchedDecoder, drawn: tuple[list[Rollout], list[Question]]
) -> None:
    rollouts, _ = drawn
    batches, total = policy_batches(rollouts, group_advantages(rollouts), STOPS, micro_rows=64, pad_id=PAD)
    statistics = PolicyStatistics()
    policy_loss(model, batches[0], total, statistics)
    assert statistics.tokens > 50
    assert statistics.largest_gap < 1e-4
    assert 0 < statistics.entropy / statistics.tokens < torch.log(torch.tensor(265.0))


def position_gradients(model: WatchedDecoder, one: Rollout, **options: bool) -> Tensor:
    """The gradient's norm at each position of prompt and answer but the last, from one row alone."""
    batches, total = policy_batches([one], [0.7], STOPS, micro_rows=1, pad_id=PAD, **options)
    policy_loss(model, batches[0], total).backward()
    assert model.watched.grad is not None
    gradient: Tensor = model.watched.grad[0].norm(dim=-1)
    return gradient


def test_forced_tokens_get_no_gradient_and_the_terminator_gets_one(model: WatchedDecoder) -> None:
    one = rollout(0, 1.0, ids=[40, 41, 50, 51, 52, 43, END], mask=[1, 1, 0, 0, 0, 1, 1])
    gradient = position_gradients(model, one)
    # Position p predicts token p + 1; the prompt has three tokens.
    assert (gradient > 0).tolist() == [False, False, True, True, False, False, False, True, True]
    assert (gradient == 0).sum() == 5
    without = position_gradients(model, one, terminator_in_loss=False)
    assert (without > 0).tolist() == [False, False, True, True, False, False, False, True, False]


def test_the_terminator_option_concerns_nothing_but_a_terminator() -> None:
    cut = rollout(0, 1.0, ids=[5, 6, 7], finish="length")
    assert trained_mask(cut, STOPS, terminator_in_loss=False) == [1, 1, 1]
    ended = rollout(0, 1.0, ids=[5, END])
    assert trained_mask(ended, STOPS) == [1, 1]
    assert trained_mask(ended, STOPS, terminator_in_loss=False) == [1, 0]
    assert trained_mask(rollout(0, 1.0, counts=False), STOPS) == [0, 0]


def test_an_answer_of_nothing_but_its_end_is_neither_praised_nor_blamed_without_the_terminator() -> None:
    rollouts = [rollout(0, 0.0, ids=[END]), rollout(0, 1.0, ids=[5, END])]
    advantages = group_advantages(rollouts)
    batches, total = policy_batches(rollouts, advantages, STOPS, micro_rows=8, pad_id=PAD)
    assert (batches[0].advantages.tolist(), total) == ([-0.5, 0.5], 3)
    batches, total = policy_batches(
        rollouts, advantages, STOPS, micro_rows=8, pad_id=PAD, terminator_in_loss=False
    )
    assert (batches[0].advantages.tolist(), total) == ([0.5], 1)


def test_advantages_are_rewards_above_the_groups_mean() -> None:
    rollouts = [rollout(0, 1.0), rollout(0, 0.0), rollout(1, 0.1), rollout(1, 0.1), rollout(1, 0.1)]
    assert group_advantages(rollouts) == [0.5, -0.5, 0.0, 0.0, 0.0]
    masked = [rollout(0, 1.0), rollout(0, 0.0), rollout(0, 0.0, counts=False)]
    assert group_advantages(masked) == [0.5, -0.5, 0.0]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(-2, 2).map(lambda x: round(x, 2)), st.booleans()),
        min_size=1,
        max_size=24,
    )
)
def test_advantages_of_a_group_add_up_to_nothing(items: list[tuple[int, float, bool]]) -> None:
    rollouts = [rollout(group, reward, counts=counts) for group, reward, counts in items]
    advantages = group_advantages(rollouts)
    for group in {group for group, _, _ in items}:
        members = [a for a, r in zip(advantages, rollouts, strict=True) if r.question == group]
        assert sum(members) == pytest.approx(0.0, abs=1e-9)
    assert all(a == 0.0 for a, r in zip(advantages, rollouts, strict=True) if not r.counts)


def test_all_tokens_that_count_are_in_the_divisor_and_rows_without_signal_are_not_computed() -> None:
    rollouts = [
        rollout(0, 1.0, ids=[5, 6, END]),
        rollout(0, 0.0, ids=[5, END]),
        rollout(1, 1.0, ids=[5, 6, 7, END]),
        rollout(1, 1.0, ids=[9, END]),
        rollout(2, 0.0, ids=[9] * 8, finish="length", counts=False),
    ]
    batches, total = policy_batches(rollouts, group_advantages(rollouts), STOPS, micro_rows=8, pad_id=PAD)
    assert total == 3 + 2 + 4 + 2
    assert len(batches) == 1
    assert batches[0].input_ids.tolist() == [[BOS, 7, 8, 5, PAD], [BOS, 7, 8, 5, 6]]
    assert batches[0].targets.tolist() == [[-100, -100, 5, END, -100], [-100, -100, 5, 6, END]]
    assert batches[0].advantages.tolist() == [-0.5, 0.5]
    assert policy_batches(rollouts[2:], [0.0] * 3, STOPS, micro_rows=8, pad_id=PAD) == ([], 6)


def test_p_stop_along_right_answers(
    model: WatchedDecoder, drawn: tuple[list[Rollout], list[Question]]
) -> None:
    _, questions = drawn
    found = stop_probability(model, questions, STOPS, micro_rows=2, pad_id=PAD)
    ends, before = [], []
    for one in questions:
        probabilities = torch.softmax(model(torch.tensor([one.prompt_ids + one.gold_ids]))[0], -1)
        along = probabilities[len(one.prompt_ids) - 1 : -1, sorted(STOPS)].sum(-1).tolist()
        assert len(along) == len(one.gold_ids)
        ends.append(along[-1])
        before += along[:-1]
    assert found.at_end == pytest.approx(sum(ends) / 3, rel=1e-4)
    assert found.before == pytest.approx(sum(before) / len(before), rel=1e-4)
    assert found.curve[10] == pytest.approx(found.at_end)
    assert len(found.curve) == 11


def test_p_stop_leaves_forced_tokens_and_questions_without_an_answer_out(model: WatchedDecoder) -> None:
    one = Question([BOS, 7], [40, 41, 42, END], [1, 0, 0, 1], bool, bool)
    with torch.no_grad():
        logits = model(torch.tensor([[BOS, 7, 40, 41, 42]]))[0]
    along = torch.softmax(logits, -1)[1:, sorted(STOPS)].sum(-1)
    found = stop_probability(
        model, [one, Question([BOS], [], [], bool, bool)], STOPS, micro_rows=8, pad_id=PAD
    )
    assert found.at_end == pytest.approx(float(along[3]), rel=1e-4)
    assert found.before == pytest.approx(float(along[0]), rel=1e-4)
    nothing = stop_probability(model, [], STOPS, micro_rows=8, pad_id=PAD)
    assert (nothing.at_end, nothing.before, nothing.curve) == (None, None, [None] * 11)
