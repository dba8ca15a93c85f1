"""Shapes and first weights of new models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from endstop.models.config import DecoderConfig
from endstop.models.load import load_model
from endstop.models.save import save_pretrained
from endstop.protocol.stopset import StopSet
from endstop.train.model_shapes import (
    flops_per_token,
    llama_config,
    nanochat_config,
    new_model,
    parameter_counts,
)
from endstop.train.run_directory import tokenizer_files
from tests.train.tiny_runs import new_run

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def test_d20_has_the_561_million_parameters_of_nanochat() -> None:
    counts = parameter_counts(nanochat_config(20, 65_536))
    assert counts == {
        "embedding": 83_886_080,
        "layers": 393_216_000,
        "head": 83_886_080,
        "total": 560_988_160,
    }
    # 6 for each multiplied element, 12 * heads * head_dim * length for each layer's attention.
    flops = flops_per_token(nanochat_config(20, 65_536), 2048)
    assert flops == 6 * (393_216_000 + 83_886_080) + 20 * 12 * 1280 * 2048


@pytest.mark.parametrize(
    ("depth", "width", "heads"), [(1, 128, 1), (4, 256, 2), (12, 768, 6), (26, 1664, 13)]
)
def test_width_follows_the_depth_in_whole_heads(depth: int, width: int, heads: int) -> None:
    config = nanochat_config(depth, 300)
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (width, heads, 128)


def test_a_llama_layer_is_as_large_as_a_nanochat_layer() -> None:
    llama, nanochat = (parameter_counts(make(12, 65_536)) for make in (llama_config, nanochat_config))
    assert math.isclose(llama["layers"], nanochat["layers"], rel_tol=0.01)
    assert parameter_counts(llama_config(12, 65_536, tie_word_embeddings=True))["head"] == 0


@pytest.mark.parametrize(
    "broken",
    [
        {"depth": 0},
        {"vocab_size": 9},
        {"head_dim": 3},
        {"hidden_size": 100, "head_dim": 64},
        {"num_kv_heads": 3},
        {"context": 0},
    ],
)
def test_sizes_that_do_not_fit_are_refused(broken: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must"):
        nanochat_config(**{"depth": 4, "vocab_size": 300, **broken})


def test_first_weights_have_the_deviations_of_nanochat() -> None:
    model = new_model(nanochat_config(2, 4000, hidden_size=256, head_dim=64, num_kv_heads=1), seed=3)
    layer = model.model.layers[0]
    deviations = {
        "embedding": (model.model.embed_tokens.weight, 1.0),
        "q": (layer.self_attn.q_proj.weight, 1 / 16),
        "k": (layer.self_attn.k_proj.weight, 0.5 / 16),
        "fc1": (layer.mlp.fc1.weight, 1 / 16),
    }
    for name, (weight, expected) in deviations.items():
        assert math.isclose(float(weight.detach().std()), expected, rel_tol=0.05), name
        assert abs(float(weight.detach().mean())) < expected / 20
    for zero in (model.lm_head.weight, layer.self_attn.o_proj.weight, layer.mlp.fc2.weight):
        assert not zero.any()
    uniform = model(torch.tensor([[1, 2, 3]])).softmax(-1)
    assert torch.allclose(uniform, torch.full_like(uniform, 1 / 4000))


def test_first_weights_depend_on_the_seed_alone() -> None:
    config = nanochat_config(2, 300, hidden_size=64, head_dim=32)
    first = new_model(config, seed=1).state_dict()
    torch.manual_seed(5)
    torch.randn(7)
    again, other = new_model(config, seed=1).state_dict(), new_model(config, seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(first[name], other[name])
    # A deeper model begins with the same lower layers.
    deeper = new_model(nanochat_config(3, 300, hidden_size=64, head_dim=32), seed=1).state_dict()
    assert torch.equal(first[name], deeper[name])


def shaken(config: DecoderConfig) -> torch.nn.Module:
    """A model without zeros, so that every matrix shows in the logits."""
    model = new_model(config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize(
    "config",
    [
        nanochat_config(2, 300, hidden_size=64, head_dim=16, num_kv_heads=2, context=128),
        nanochat_config(2, 300, hidden_size=64, head_dim=16, context=128, rope_scaling=YARN),
        llama_config(2, 300, hidden_size=64, head_dim=32, num_kv_heads=1, context=128),
        llama_config(2, 300, hidden_size=64, head_dim=32, context=128, tie_word_embeddings=True),
    ],
    ids=["nanochat", "nanochat-yarn", "llama", "llama-tied"],
)
def test_transformers_loads_what_is_written_with_equal_logits(config: DecoderConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = tokenizer_files(new_run(tmp_path).tokenizer)
    directory = tmp_path / "model"
    save_pretrained(shaken(config), directory, files=files)  # type: ignore[arg-type]
    theirs, ours = AutoModelForCausalLM.from_pretrained(directory), load_model(directory)
    ids = torch.randint(0, 300, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert float((theirs(ids).logits - ours(ids)).abs().max()) < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(directory)
    bos, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|bos|>", "<|assistant_end|>"))
    assert theirs.generation_config.eos_token_id == [end, bos]
    assert set(StopSet.from_pretrained(directory).ids) == {end, bos}
    assert {conflict.severity for conflict in StopSet.from_pretrained(directory).conflicts} == {"info"}


def test_isolated_documents_are_as_if_alone() -> None:
    model = shaken(nanochat_config(2, 300, hidden_size=64, head_dim=16))
    ids = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(2))
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    with torch.no_grad():
        isolated = model(ids, document_ids=documents)
        # Rotary positions only matter by their differences.
        assert torch.allclose(isolated[0, :5], model(ids[:1, :5])[0], atol=1e-5)
        assert torch.allclose(isolated[0, 5:], model(ids[:1, 5:])[0], atol=1e-4)
        assert torch.allclose(isolated[1], model(ids[1:])[0], atol=1e-5)
    with pytest.raises(ValueError, match="document_ids must be"):
        model(ids, document_ids=documents[:, :3])
