"""The reference decoder against transformers: same weights, same logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from endstop.models.config import DecoderConfig
from endstop.models.decoder import Decoder
from endstop.models.load import load_model
from tests.models.tiny_models import CONFIGS, tiny_transformers_model

Checkpoint = Callable[..., tuple[Any, Path]]
TOLERANCE = 1e-4
LENGTH = 21

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn with every parameter": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4,
        "beta_slow": 0.5,
        "mscale": 0.9,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def random_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(seed))


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


@torch.no_grad()
def in_chunks(model: Decoder, ids: torch.Tensor, sizes: list[int], **arguments: Any) -> torch.Tensor:
    cache = model.new_cache()
    logits, start = [], 0
    mask = arguments.pop("attention_mask", None)
    for size in sizes:
        end = start + size
        seen = None if mask is None else mask[:, :end]
        logits.append(model(ids[:, start:end], seen, cache))
        start = end
    assert start == ids.shape[1] == cache.length
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(family: str, checkpoint: Checkpoint) -> None:
    theirs, directory = checkpoint(family)
    ours = load_model(directory)
    assert not ours.training
    ids = random_ids(2, LENGTH)
    logits = ours(ids)
    assert logits.dtype == torch.float32
    assert logits.shape == (2, LENGTH, 61)
    assert largest_difference(logits, theirs(ids).logits) < TOLERANCE


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_cached_chunks_equal_full_recomputation_and_transformers(family: str, checkpoint: Checkpoint) -> None:
    theirs, directory = checkpoint(family)
    ours = load_model(directory)
    ids = random_ids(2, LENGTH)
    whole = ours(ids)
    for sizes in ([1] * LENGTH, [7, 1, 9, 1, 3], [LENGTH - 1, 1]):
        assert largest_difference(in_chunks(ours, ids, sizes), whole) < TOLERANCE

    first = theirs(ids[:, :7], use_cache=True)
    second = theirs(ids[:, 7:8], cache=first.cache, use_cache=True)
    third = theirs(ids[:, 8:], cache=second.cache, use_cache=True)
    expected = torch.cat([first.logits, second.logits, third.logits], dim=1)
    assert largest_difference(in_chunks(ours, ids, [7, 1, LENGTH - 8]), expected) < TOLERANCE


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_padded_batches_equal_transformers_and_the_rows_alone(
    family: str, side: str, checkpoint: Checkpoint
) -> None:
    theirs, directory = checkpoint(family)
    ours = load_model(directory)
    lengths = [LENGTH, 13, 1]
    ids = torch.zeros(3, LENGTH, dtype=torch.long)
    mask = torch.zeros(3, LENGTH, dtype=torch.long)
    rows = [random_ids(1, length, seed=length) for length in lengths]
    for row, length in enumerate(lengths):
        place = slice(LENGTH - length, LENGTH) if side == "left" else slice(0, length)
        ids[row, place], mask[row, place] = rows[row], 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = ours(ids, mask, position_ids=positions)
    expected = theirs(ids, attention_mask=mask, position_ids=positions).logits
    assert torch.isfinite(logits).all()
    assert largest_difference(logits[mask == 1], expected[mask == 1]) < TOLERANCE
    for row in range(3):
        alone = ours(rows[row])[0]
        assert largest_difference(logits[row][mask[row] == 1], alone) < TOLERANCE
    chunked = in_chunks(ours, ids, [5, 1, LENGTH - 6], attention_mask=mask)
    default_positions = ours(ids, mask)
    assert largest_difference(chunked[mask == 1], default_positions[mask == 1]) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen3", "nanochat"])
@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_rope_types_equal_transformers_beyond_the_original_window(
    rope: str, family: str, checkpoint: Checkpoint
) -> None:
    window = 16 if rope == "dynamic" else 64
    theirs, directory = checkpoint(family, rope_parameters=dict(ROPES[rope]), max_position_embeddings=window)
    ours = load_model(directory)
    ids = random_ids(1, 40)
    for length in (10, 16, 40):
        expected = theirs(ids[:, :length]).logits
        assert largest_difference(ours(ids[:, :length]), expected) < TOLERANCE
    if rope != "dynamic":
        assert largest_difference(in_chunks(ours, ids, [9, 30, 1]), ours(ids)) < TOLERANCE


@torch.no_grad()
def test_every_rope_type_changes_the_logits() -> None:
    ids = random_ids(1, 40)
    seen: list[torch.Tensor] = []
    for rope in ROPES.values():
        model = tiny_transformers_model("llama", rope_parameters=dict(rope), max_position_embeddings=16)
        ours = Decoder(DecoderConfig.from_hf(model.config.to_dict()))
        ours.load_state_dict(model.state_dict())
        logits = ours(ids)
        assert all(largest_difference(logits, other) > 1e-2 for other in seen)
        seen.append(logits)


@torch.no_grad()
def test_dynamic_ntk_with_a_cache_equals_transformers_step_by_step(checkpoint: Checkpoint) -> None:
    """A cached key keeps the frequencies of its own step, so that cache and recomputation differ in both."""
    theirs, directory = checkpoint(
        "llama", rope_parameters=dict(ROPES["dynamic"]), max_position_embeddings=16
    )
    ours = load_model(directory)
    ids = random_ids(1, 30)
    cache, past = ours.new_cache(), None
    for start, end in [(0, 12), *((index, index + 1) for index in range(12, 30))]:
        output = theirs(ids[:, start:end], cache=past, use_cache=True)
        past = output.cache
        logits = ours(ids[:, start:end], cache=cache)
        assert largest_difference(logits, output.logits) < TOLERANCE
    assert largest_difference(logits[:, -1], ours(ids)[:, -1]) > 1e-2


@torch.no_grad()
def test_dynamic_ntk_rows_do_not_depend_on_their_neighbours(checkpoint: Checkpoint) -> None:
    _, directory = checkpoint("llama", rope_parameters=dict(ROPES["dynamic"]), max_position_embeddings=16)
    ours = load_model(directory)
    ids = random_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :12] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = ours(ids, mask, position_ids=positions)
    assert largest_difference(logits[1, 12:], ours(ids[1:, 12:])[0]) < TOLERANCE
    assert largest_difference(logits[0], ours(ids[:1])[0]) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 4}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
        ("qwen3", {"attention_bias": True}),
        ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
        ("gemma2", {"attention_bias": True, "tie_word_embeddings": False}),
        ("gemma3_text", {"final_logit_softcapping": 2.0}),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                }
            },
        ),
        ("nanochat", {"final_logit_softcapping": None, "attention_bias": True}),
        ("nanochat", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ],
)
@torch.no_grad()
def test_options_of_a_family_equal_transformers(
    family: str, options: dict[str, Any], checkpoint: Checkpoint
) -> None:
    theirs, directory = checkpoint(family, **options)
    ours = load_model(directory)
    ids = random_ids(2, LENGTH)
    assert largest_difference(ours(ids), theirs(ids).logits) < TOLERANCE


@pytest.mark.parametrize("family", CONFIGS)
def test_parameter_names_and_shapes_are_those_of_transformers(family: str) -> None:
    theirs = tiny_transformers_model(family)
    ours = Decoder(DecoderConfig.from_hf(theirs.config.to_dict()))
    shapes = {name: tuple(value.shape) for name, value in ours.state_dict().items()}
    assert shapes == {name: tuple(value.shape) for name, value in theirs.state_dict().items()}


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_equal_transformers(family: str) -> None:
    theirs = tiny_transformers_model(family)
    ours = Decoder(DecoderConfig.from_hf(theirs.config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    ids = random_ids(2, 12)
    for model, logits in ((theirs, theirs(ids).logits), (ours, ours(ids))):
        model.zero_grad()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert largest_difference(parameter.grad, expected[name].grad) < TOLERANCE, name


@torch.no_grad()
def test_bfloat16_forward_gives_float32_logits_near_those_of_transformers(checkpoint: Checkpoint) -> None:
    theirs, directory = checkpoint("gemma3_text")
    ours = load_model(directory, dtype="bfloat16")
    ids = random_ids(2, LENGTH)
    logits = ours(ids)
    assert logits.dtype == torch.float32
    assert largest_difference(logits, theirs.bfloat16()(ids).logits.float()) < 0.2


@torch.no_grad()
def test_a_truncated_cache_continues_as_if_the_rest_had_not_been(checkpoint: Checkpoint) -> None:
    _, directory = checkpoint("gemma2")
    ours = load_model(directory)
    ids = random_ids(1, LENGTH)
    cache = ours.new_cache()
    ours(ids, cache=cache)
    cache.truncate(8)
    assert cache.length == 8
    assert largest_difference(ours(ids[:, 8:], cache=cache), ours(ids)[:, 8:]) < TOLERANCE
    with pytest.raises(ValueError, match="cannot be cut to 99"):
        cache.truncate(99)


def test_shapes_that_do_not_fit_are_refused() -> None:
    model = Decoder(DecoderConfig.from_hf(tiny_transformers_model("llama").config.to_dict()))
    ids = random_ids(1, 4)
    with pytest.raises(ValueError, match=r"input_ids must be \[batch, tokens\]"):
        model(ids[0])
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(ids, torch.ones(1, 3))
    with pytest.raises(ValueError, match="position_ids must end in 4 positions"):
        model(ids, position_ids=torch.arange(3))


def test_fresh_weights_follow_the_initializer_range() -> None:
    config = tiny_transformers_model("gemma2", initializer_range=0.5, attention_bias=True).config.to_dict()
    model = Decoder(DecoderConfig.from_hf(config))
    assert 0.45 < float(model.model.embed_tokens.weight.detach().std()) < 0.55
    assert float(model.model.norm.weight.detach().abs().sum()) == 0.0
    assert float(model.model.layers[0].self_attn.q_proj.bias.detach().abs().sum()) == 0.0
    assert model.lm_head.weight is model.model.embed_tokens.weight
