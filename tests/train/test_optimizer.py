"""Muon against torch's, who gets which rate, clipping, and state by name."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError
from endstop.train.muon import Muon, orthogonalized
from endstop.train.optimizer import Optimizers, OptimizerSettings, build_optimizer
from tests.train.small_models import small_model


def step_once(model: Decoder, optimizers: Optimizers, seed: int = 0) -> float:
    ids = torch.randint(0, 61, (4, 13), generator=torch.Generator().manual_seed(seed))
    loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizers.clip_gradients()
    optimizers.step()
    optimizers.zero_grad()
    return loss.item()


def matrices(seed: int, shapes: list[tuple[int, int]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_equals_torchs(weight_decay: float) -> None:
    # Squares, tall and wide ones, below and above the size from which matrices are not stacked.
    shapes = [(24, 24), (96, 24), (24, 96), (24, 24), (24, 96), (5, 3), (300, 260), (1, 7)]
    ours, theirs = matrices(0, shapes), matrices(0, shapes)
    options = {"lr": 0.02, "weight_decay": weight_decay}
    muon, reference = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for step in range(4):
        for optimizer, parameters in ((muon, ours), (reference, theirs)):
            optimizer.param_groups[0]["momentum"] = 0.85 + 0.02 * step
            for parameter, gradient in zip(parameters, matrices(step + 1, shapes), strict=True):
                # One without a gradient, in one step.
                missing = step == 2 and parameter.shape == (5, 3)
                parameter.grad = None if missing else gradient.data
        muon.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 40, 16), (2, 16, 40), (16, 40)])
def test_orthogonalized_matrices_keep_directions_and_lose_lengths(shape: tuple[int, ...]) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(stack, full_matrices=False)
    found = orthogonalized(stack, dtype=torch.float32)
    inner = left.mT @ found @ right.mT
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.4
    assert values.max() < 1.3
    torch.testing.assert_close(inner, torch.diag_embed(values), rtol=0, atol=1e-5)


def test_float32_iterations_stay_near_bfloat16() -> None:
    stack = torch.randn((3, 24, 96), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        orthogonalized(stack, dtype=torch.float32), orthogonalized(stack).float(), rtol=0, atol=0.03
    )


def test_rates_of_every_parameter_by_nanochats_rules() -> None:
    settings = OptimizerSettings(batch_tokens=2**17)
    rates = build_optimizer(small_model("llama"), settings).learning_rates()
    width, batch = math.sqrt(768 / 24), 0.5
    assert rates["model.embed_tokens.weight"] == pytest.approx(0.2 * width * batch)
    assert rates["lm_head.weight"] == pytest.approx(0.004 * width * batch)
    assert rates["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(0.02 * batch)
    assert rates["model.layers.2.mlp.down_proj.weight"] == pytest.approx(0.02 * batch)
    assert rates["model.norm.weight"] == pytest.approx(0.004 * width * batch)
    assert rates["model.layers.1.input_layernorm.weight"] == pytest.approx(0.004 * width * batch)


def test_a_tied_matrix_is_trained_once_with_the_heads_rate() -> None:
    model = small_model("tied")
    optimizers = build_optimizer(model, OptimizerSettings())
    assert "lm_head.weight" not in optimizers.parameters
    rate = optimizers.learning_rates()["model.embed_tokens.weight"]
    assert rate == pytest.approx(0.004 * math.sqrt(768 / 24))


def test_the_schedule_multiplies_peaks_and_sets_the_momentum() -> None:
    optimizers = build_optimizer(small_model(), OptimizerSettings())
    peaks = optimizers.learning_rates()
    for multiplier in (0.5, 0.25):
        optimizers.set_schedule(multiplier, 0.9)
        assert optimizers.learning_rates() == pytest.approx({k: v * multiplier for k, v in peaks.items()})


def test_a_multiplier_of_zero_changes_nothing() -> None:
    model = small_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers = build_optimizer(model, OptimizerSettings(weight_decay=0.1, matrix_weight_decay=0.1))
    optimizers.set_schedule(0.0, 0.9)
    step_once(model, optimizers)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("shape", ["nanochat", "llama", "tied"])
def test_training_lowers_the_loss(shape: str) -> None:
    model = small_model(shape)
    optimizers = build_optimizer(model, OptimizerSettings(embedding_lr=0.02))
    losses = [step_once(model, optimizers) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_frozen_parameters_stay_and_have_no_state() -> None:
    model = small_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers = build_optimizer(model, OptimizerSettings())
    step_once(model, optimizers)
    for name, value in model.state_dict().items():
        frozen = name.startswith(("model.embed_tokens", "model.layers.0."))
        assert torch.equal(value, before[name]) == frozen, name
        assert any(key.startswith(name) for key in optimizers.state_dict()) != frozen, name
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        build_optimizer(model, OptimizerSettings())


def test_gradients_are_clipped_to_their_global_norm() -> None:
    model = small_model()
    optimizers = build_optimizer(model, OptimizerSettings(clip_norm=0.01))
    ids = torch.arange(20).view(1, 20)
    functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:]).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    assert optimizers.clip_gradients() == pytest.approx(expected, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name] * (0.01 / expected), rtol=1e-3, atol=1e-9)
    assert optimizers.clip_gradients() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_is_reported_as_it_is(bad: float) -> None:
    model = small_model()
    optimizers = build_optimizer(model, OptimizerSettings())
    model.lm_head.weight.grad = torch.full_like(model.lm_head.weight, bad)
    assert not math.isfinite(optimizers.clip_gradients())


def test_without_gradients_the_norm_is_zero() -> None:
    assert build_optimizer(small_model(), OptimizerSettings()).clip_gradients() == 0.0


def test_state_goes_by_name_into_another_optimizer() -> None:
    first, second = small_model("llama"), small_model("llama")
    left, right = (build_optimizer(model, OptimizerSettings()) for model in (first, second))
    step_once(first, left)
    step_once(first, left, seed=1)
    second.load_state_dict(first.state_dict())
    # Names, so another order does not matter; copies, so the two do not change each other.
    right.load_state_dict(dict(reversed(left.state_dict().items())))
    assert [step_once(first, left, seed) for seed in (2, 3)] == [
        step_once(second, right, seed) for seed in (2, 3)
    ]
    assert left.state_dict().keys() == right.state_dict().keys()


def test_the_state_of_another_model_is_refused() -> None:
    optimizers = build_optimizer(small_model(), OptimizerSettings())
    state = optimizers.state_dict()
    name = "model.layers.0.mlp.fc1.weight.momentum_buffer"

    def without(key: str) -> dict[str, Tensor]:
        return {k: v for k, v in state.items() if k != key}

    with pytest.raises(EndstopError, match=f"lacks {name}"):
        optimizers.load_state_dict(without(name))
    with pytest.raises(EndstopError, match=r"has x\.exp_avg"):
        optimizers.load_state_dict({**state, "x.exp_avg": torch.zeros(2)})
    with pytest.raises(EndstopError, match=r"shape \(2, 2\), this model needs \(40, 24\)"):
        optimizers.load_state_dict({**without(name), name: torch.zeros(2, 2)})


@pytest.mark.parametrize(
    "options",
    [
        {"matrix_lr": -1.0},
        {"weight_decay": -0.1},
        {"beta1": 1.0},
        {"eps": 0.0},
        {"clip_norm": 0.0},
        {"batch_tokens": 0},
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        OptimizerSettings(**options)  # type: ignore[arg-type]
