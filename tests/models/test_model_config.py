"""Reading config.json: families, both spellings of the rotation, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from endstop.models.config import FAMILIES, DecoderConfig, RopeConfig
from endstop.models.load import load_model
from endstop.protocol.errors import BrokenModel, UnsupportedModel
from tests.models.tiny_models import CONFIGS, FAMILY_OPTIONS, TINY

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def read(**changes: Any) -> DecoderConfig:
    return DecoderConfig.from_hf({**LLAMA, **changes})


@pytest.mark.parametrize("family", CONFIGS)
def test_a_config_written_by_transformers_reads_the_same_from_its_diff_and_in_full(family: str) -> None:
    theirs = CONFIGS[family](**{**TINY, **FAMILY_OPTIONS[family]})
    config = DecoderConfig.from_hf(theirs.to_dict())
    assert config == DecoderConfig.from_hf(theirs.to_diff_dict())
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (61, 32, 3)
    assert config.kv_groups == 2
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert hash(config) == hash(DecoderConfig.from_hf(config.source))


def test_defaults_of_the_families_are_those_of_transformers() -> None:
    sizes = {**LLAMA, "num_hidden_layers": 3, "num_attention_heads": 32, "hidden_size": 256}
    del sizes["model_type"]
    for family, config_class in CONFIGS.items():
        theirs = config_class(**sizes)
        bare = DecoderConfig.from_hf({**sizes, "model_type": family})
        assert bare.num_key_value_heads == theirs.num_key_value_heads
        assert bare.head_dim == (getattr(theirs, "head_dim", None) or 8)
        assert bare.rms_norm_eps == theirs.rms_norm_eps
        assert bare.tie_word_embeddings == theirs.tie_word_embeddings
        assert bare.final_logit_softcap == getattr(theirs, "final_logit_softcapping", None)
        assert bare.max_position_embeddings == config_class().max_position_embeddings
        declared = getattr(theirs, "layer_types", None)
        if declared is not None:
            assert bare.layer_types == tuple(name.removesuffix("_attention") for name in declared)
        assert bare.sliding_window == (4096 if family in ("mistral", "gemma2", "gemma3_text") else None)


OLD_SPELLINGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 500.0}),
    ("llama", {"rope_theta": 500.0, "rope_scaling": None}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16}),
    (
        "qwen2",
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 16},
    ),
    (
        "llama",
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 8}),
    ("gemma3_text", {"rope_theta": 1e5, "rope_local_base_freq": 50.0}),
    ("gemma3_text", {"rope_theta": 1e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("nanochat", {"rope_theta": 100000.0}),
]


@pytest.mark.parametrize(("family", "rope"), OLD_SPELLINGS)
@torch.no_grad()
def test_the_older_spelling_of_the_rotation_means_what_transformers_reads_in_it(
    family: str, rope: dict[str, Any], checkpoint: Callable[..., tuple[Any, Path]]
) -> None:
    _, directory = checkpoint(family)
    config = json.loads((directory / "config.json").read_text())
    del config["rope_parameters"]
    config["torch_dtype"] = config.pop("dtype")
    (directory / "config.json").write_text(json.dumps({**config, **rope}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    ours = load_model(directory)
    ids = torch.randint(3, 61, (1, 40), generator=torch.Generator().manual_seed(3))
    assert float((ours(ids) - theirs(ids).logits).abs().max()) < 1e-4


def test_rope_values() -> None:
    assert read().rope == RopeConfig("default", 10000.0, original_max_position=2048)
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 5.0}, rope_theta=7.0).rope.theta == 5.0
    both = read(rope_parameters={"rope_type": "default"}, rope_scaling={"type": "linear", "factor": 2})
    assert (both.rope.type, both.rope.factor) == ("linear", 2.0)
    yarn = read(rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 512}).rope
    assert yarn.attention_factor == pytest.approx(1.1386294361)
    assert (
        read(rope_scaling={"type": "yarn", "factor": 4, "attention_factor": 1.5}).rope.attention_factor == 1.5
    )
    assert DecoderConfig.from_hf({**LLAMA, "model_type": "nanochat"}).rope.sign == -1


def test_rope_of_a_layer() -> None:
    config = DecoderConfig.from_hf({**LLAMA, "model_type": "gemma3_text", "sliding_window_pattern": 2})
    assert [config.rope_of(layer).theta for layer in range(2)] == [10000.0, 1000000.0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mixtral"}, "model type 'mixtral'"),
        ({"model_type": "gpt2"}, "model type 'gpt2'"),
        ({"model_type": "gemma3"}, "model type 'gemma3'"),
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}, "trust_remote_code"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"hidden_act": ["silu"]}, "activation"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "only a part of each head",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "type 'longrope'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "'mrope_section'"),
        ({"num_local_experts": 8}, "'num_local_experts'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'quantization_config'"),
        ({"rope_interleaved": True}, "'rope_interleaved'"),
        ({"logits_scaling": 8.0}, "'logits_scaling'"),
        ({"use_sliding_window": True}, "'use_sliding_window'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "mixes full and sliding"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
        ({"model_type": "mistral", "num_key_value_heads": 4, "attention_bias": True}, "'attention_bias'"),
        ({"model_type": "qwen2", "num_key_value_heads": 4, "mlp_bias": True}, "'mlp_bias'"),
        (
            {"model_type": "qwen2", "num_key_value_heads": 4, "layer_types": ["sliding_attention"] * 2},
            "no sliding_window in use",
        ),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "'attn_logit_softcapping'"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "'use_bidirectional_attention'"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}},
            "two layer types (rope_type)",
        ),
    ],
)
def test_what_endstop_does_not_run_itself_is_refused_and_transformers_offered(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(**changes)
    assert named in str(caught.value)
    assert "--backend transformers" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "32"}, "'hidden_size' must be a positive integer"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers'"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000, which no model has"),
        ({"hidden_size": 10**80}, "which no model has"),
        ({"vocab_size": True}, "'vocab_size'"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads (3)"),
        ({"head_dim": 7}, "must be even"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
        ({"eos_token_id": "2"}, "'eos_token_id' must be a token id"),
        ({"rope_scaling": "linear"}, "'rope_scaling' must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "need 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' must be a positive number"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "need 'low_freq_factor'"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            "must be larger",
        ),
        ({"layer_types": ["full_attention"]}, "must list 2 layers"),
    ],
)
def test_contradictory_values_are_one_sentence(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BrokenModel) as caught:
        read(**changes)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_features_written_as_not_used_are_accepted() -> None:
    config = read(
        rope_interleaved=False, num_local_experts=0, quantization_config=None, partial_rotary_factor=1.0
    )
    assert config == read()


def test_token_ids_may_be_a_list() -> None:
    assert read(eos_token_id=[2, 7]).eos_token_ids == (2, 7)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_every_family_is_tested() -> None:
    assert set(CONFIGS) == set(FAMILIES)


def test_configurations_are_read_without_torch() -> None:
    code = (
        "import sys; from endstop.models.config import DecoderConfig; "
        f"DecoderConfig.from_hf({LLAMA!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src"})
