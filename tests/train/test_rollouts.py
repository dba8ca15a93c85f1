"""Rollouts by the engine: raw ids with the terminator, masks of forced tokens, the same draws again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from endstop.models.decoder import Decoder
from endstop.runtime.engine import Engine
from endstop.train.rewards import RewardSettings
from endstop.train.rollouts import Rollout, draw_seed, roll_out, rollout_engine
from tests.train.tiny_policy import (
    BOS,
    END,
    PYTHON_END,
    PYTHON_START,
    chat_renderer,
    question,
    save_chat_model,
    tiny_decoder,
)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Weights that make the tags of a tool call and the terminator frequent."""
    decoder = tiny_decoder()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        decoder.lm_head.weight.copy_(torch.randn(decoder.lm_head.weight.shape, generator=generator) * 0.5)
    return decoder


@pytest.fixture(scope="module")
def directory(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(model, tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return rollout_engine(directory, max_rows=64)


def rolled(engine: Engine, directory: Path, model: Decoder, **options: object) -> list[Rollout]:
    renderer = chat_renderer(directory)
    questions = [question(renderer, text, "4") for text in ("2+2", "say ab")]
    return roll_out(
        engine,
        questions,
        RewardSettings(),
        samples=16,
        max_tokens=40,
        state_dict=model.state_dict(),
        **options,  # type: ignore[arg-type]
    )


def test_a_rollout_holds_every_token_and_the_terminator_where_one_was_sampled(
    engine: Engine, directory: Path, model: Decoder
) -> None:
    rollouts = rolled(engine, directory, model)
    assert [rollout.question for rollout in rollouts] == [0] * 16 + [1] * 16
    ended = [rollout for rollout in rollouts if rollout.finish_reason == "stop"]
    cut = [rollout for rollout in rollouts if rollout.finish_reason == "length"]
    assert ended
    assert cut
    for rollout in ended:
        assert rollout.ids[-1] in (END, BOS)
        assert rollout.mask[-1] == 1
        assert not {END, BOS} & set(rollout.ids[:-1])
        assert rollout.judgement.finished
        assert rollout.logprobs[-1] < 0
    for rollout in cut:
        assert len(rollout.ids) == 40
        assert not rollout.judgement.finished
    for rollout in rollouts:
        assert len(rollout.ids) == len(rollout.mask) == len(rollout.logprobs)


def test_the_calculators_tokens_have_mask_0_and_no_logprob(tmp_path: Path) -> None:
    """A model that calls the calculator whatever it is asked: 7*6, tags around it, then it stops."""
    script = [PYTHON_START, *b"7*6", PYTHON_END]
    directory = save_chat_model(cycle(script, after_output=END), tmp_path / "model")
    rollouts = roll_out(
        rollout_engine(directory),
        [question(chat_renderer(directory), "calculate", "42")],
        RewardSettings(),
        samples=2,
        max_tokens=40,
    )
    output_start, output_end = END + 3, END + 4
    for rollout in rollouts:
        assert rollout.ids == [*script, output_start, *b"42", output_end, END]
        assert rollout.mask == [1] * 5 + [0] * 4 + [1]
        assert all(
            (logprob == 0.0) or bit for logprob, bit in zip(rollout.logprobs, rollout.mask, strict=True)
        )
        assert rollout.text == "7*642"


def cycle(script: list[int], after_output: int) -> Decoder:
    """Attention and MLP add nothing, so the next token depends on the last one only."""
    decoder = tiny_decoder(hidden=272)
    vocabulary = decoder.config.vocab_size
    assistant_start, output_end = END - 1, END + 4
    follow = dict(zip([assistant_start, *script], [*script, END], strict=True)) | {output_end: after_output}
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "o_proj" in name or "fc2" in name:
                parameter.zero_()
        decoder.model.embed_tokens.weight.copy_(torch.eye(vocabulary, 272))
        decoder.lm_head.weight.zero_()
        for token, after in follow.items():
            decoder.lm_head.weight[after, token] = 10.0
    return decoder


def test_the_same_seed_and_step_draw_the_same_and_another_step_draws_anew(
    engine: Engine, directory: Path, model: Decoder
) -> None:
    first = rolled(engine, directory, model, seed=3, step=5)
    again = rolled(engine, directory, model, seed=3, step=5)
    fresh = rolled(rollout_engine(directory), directory, model, seed=3, step=5)
    assert [r.ids for r in first] == [r.ids for r in again] == [r.ids for r in fresh]
    assert [r.ids for r in first] != [r.ids for r in rolled(engine, directory, model, seed=3, step=6)]
    assert len({tuple(r.ids) for r in first[:16]}) > 8  # the samples of a group are different draws


def test_draw_seeds_are_stable_and_distinct() -> None:
    assert draw_seed(0, 0, 0) == draw_seed(0, 0, 0)
    seeds = {draw_seed(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_rewards_come_with_the_rollouts(engine: Engine, directory: Path, model: Decoder) -> None:
    renderer = chat_renderer(directory)
    everything = question(renderer, "2+2", "4", right=lambda text: True)
    rollouts = roll_out(
        engine,
        [everything],
        RewardSettings("exact", "mask"),
        samples=16,
        max_tokens=12,
        state_dict=model.state_dict(),
    )
    assert {(r.finish_reason, r.counts) for r in rollouts} == {("stop", True), ("length", False)}
    assert all(r.reward == 1.0 for r in rollouts if r.counts)
