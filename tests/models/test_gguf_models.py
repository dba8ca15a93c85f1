"""GGUF files as models: the logits of a dequantised directory are those of the model it was made from."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from endstop.models.config import DecoderConfig, RopeConfig
from endstop.models.gguf import dequantise_gguf, ensure_directory
from endstop.models.gguf_config import hf_config_of
from endstop.models.load import load_model
from endstop.models.ops import rope_frequencies
from endstop.protocol.cache import cache_entries, remove_cache_entry
from endstop.protocol.errors import BrokenModel, EndstopError, UnsupportedModel
from endstop.protocol.gguf import GGUFMetadata, GGUFTensor
from endstop.protocol.resolve import ResolvedModel, resolve_model
from tests.models.gguf_files import Tensors, gguf_name, interleave, write_gguf
from tests.models.tiny_models import tiny_transformers_model

TOLERANCE = 1e-4
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"rope.dimension_count": 8, "vocab_size": 61}),
    "mistral": ({"tie_word_embeddings": True}, {}),
    "qwen2": ({"use_sliding_window": False, "tie_word_embeddings": True}, {"attention.value_length": None}),
    "qwen3": ({"head_dim": 16}, {}),
    "gemma2": ({"query_pre_attn_scalar": 8}, {}),
    "gemma3_text": ({"query_pre_attn_scalar": 8}, {"attention.sliding_window_pattern": 2}),
}


def ids_of(length: int = 21) -> torch.Tensor:
    return torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def difference(directory: Path, theirs: Any, length: int = 21) -> float:
    ids = ids_of(length)
    return float((load_model(directory)(ids) - theirs(ids).logits).abs().max())


@pytest.fixture
def llama_file(tmp_path: Path) -> Path:
    path = tmp_path / "llama.gguf"
    write_gguf(path, tiny_transformers_model("llama"))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_comes_back_with_the_same_logits(family: str, tmp_path: Path) -> None:
    options, keys = FAMILIES[family]
    theirs = tiny_transformers_model(family, **options)
    write_gguf(tmp_path / "model.gguf", theirs, keys=keys)
    dequantise_gguf(tmp_path / "model.gguf", tmp_path / "model")
    assert difference(tmp_path / "model", theirs) < TOLERANCE
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert type(again) is type(theirs)
    assert again.dtype == torch.float32
    assert difference(tmp_path / "model", again) < TOLERANCE


def test_attention_and_mlp_biases_come_back(tmp_path: Path) -> None:
    theirs = tiny_transformers_model("llama", attention_bias=True, mlp_bias=True)
    write_gguf(tmp_path / "model.gguf", theirs)
    dequantise_gguf(tmp_path / "model.gguf", tmp_path / "model")
    assert difference(tmp_path / "model", theirs) < TOLERANCE


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_are_their_dequantised_values(kind: str, tmp_path: Path) -> None:
    theirs = tiny_transformers_model("llama", num_key_value_heads=1)
    write_gguf(tmp_path / "model.gguf", theirs, kind=kind, change=lambda tensors: only_32(tensors, kind))
    dequantise_gguf(tmp_path / "model.gguf", tmp_path / "model")
    quantised = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1 and (kind in ("F16", "BF16") or parameter.shape[-1] % 32 == 0):
                values = gguf.dequantize(gguf.quantize(parameter.numpy(), quantised), quantised)
                assert not np.array_equal(values, parameter.numpy())
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    assert difference(tmp_path / "model", theirs) < TOLERANCE


def only_32(tensors: Tensors, kind: str) -> None:
    """Leave matrices whose rows are no multiple of a block as F32, as llama.cpp falls back for them."""
    for name, (array, stored) in tensors.items():
        if stored == kind and kind not in ("F16", "BF16") and array.shape[-1] % 32:
            tensors[name] = (array, "F32")


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quantised_weights_are_their_dequantised_values(kind: str, tmp_path: Path) -> None:
    """Blocks of 256 with random bits and small scales; the package can read but not write these types."""
    theirs = tiny_transformers_model(
        "llama", hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1
    )
    stored = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[stored]
    generator = np.random.default_rng(7)
    raw: dict[str, tuple[np.ndarray, str]] = {}
    config = theirs.config
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.dim() == 1:
                continue
            rows, columns = parameter.shape
            blocks = generator.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
            scale = np.frombuffer(np.float16(1e-4).tobytes(), dtype=np.uint8)
            for place in {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[
                kind
            ]:
                blocks[:, :, place : place + 2] = scale
            data = blocks.reshape(rows, -1)
            parameter.copy_(torch.from_numpy(gguf.dequantize(data, stored).copy()))
            if "q_proj" in name or "k_proj" in name:
                data = interleave(
                    data, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                )
            raw[gguf_name(name, "llama")] = (np.ascontiguousarray(data), kind)
    write_gguf(tmp_path / "model.gguf", theirs, raw=raw)
    dequantise_gguf(tmp_path / "model.gguf", tmp_path / "model")
    state = load_model(tmp_path / "model").state_dict()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(state[name], parameter.detach()), name
    assert difference(tmp_path / "model", theirs) < TOLERANCE


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none", "rope.scaling.finetuned": False}, {"rope_type": "default"}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling_comes_back(keys: dict[str, Any], rope: dict[str, Any], tmp_path: Path) -> None:
    theirs = tiny_transformers_model("llama", rope_parameters={**rope, "rope_theta": 5000.0})
    write_gguf(tmp_path / "model.gguf", theirs, keys=keys)
    dequantise_gguf(tmp_path / "model.gguf", tmp_path / "model")
    assert difference(tmp_path / "model", theirs, length=50) < TOLERANCE


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """The tensor `rope_freqs.weight` as the converter computes it, from wavelengths."""
    divisors = []
    low_wave = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high_wave = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    for pair in range(head_dim // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        if wave < high_wave:
            divisors.append(1.0)
        elif wave > low_wave:
            divisors.append(rope["factor"])
        else:
            share = rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]
            share /= rope["high_freq_factor"] - rope["low_freq_factor"]
            divisors.append(1 / ((1 - share) / rope["factor"] + share))
    return divisors


def test_llama_3_frequency_divisors_come_back(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    theirs = tiny_transformers_model("llama", hidden_size=64, head_dim=32, rope_parameters=dict(rope))
    divisors = np.array(llama3_divisors(rope, 32), dtype=np.float32)
    assert sum(1 < value < 8 for value in divisors) == 2

    def add(tensors: Tensors) -> None:
        tensors["rope_freqs.weight"] = (divisors, "F32")

    write_gguf(tmp_path / "model.gguf", theirs, change=add)
    dequantise_gguf(tmp_path / "model.gguf", tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["rope_parameters"] == rope
    assert difference(tmp_path / "model", theirs, length=50) < TOLERANCE

    def add_wrong(tensors: Tensors) -> None:
        tensors["rope_freqs.weight"] = (divisors[::-1].copy(), "F32")

    write_gguf(tmp_path / "wrong.gguf", theirs, change=add_wrong)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight\) that is not Llama 3's scaling"):
        dequantise_gguf(tmp_path / "wrong.gguf", tmp_path / "wrong")


@pytest.mark.parametrize(
    ("factor", "head_dim", "high", "original"), [(8, 128, 4, 8192), (32, 64, 4, 8192), (16, 128, 8, 4096)]
)
def test_llama_3_scaling_is_recovered_from_its_divisors_alone(
    factor: int, head_dim: int, high: int, original: int
) -> None:
    rope = {
        "rope_theta": 500000.0,
        "factor": float(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": float(high),
        "original_max_position_embeddings": original,
    }
    keys = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 131072,
        "llama.embedding_length": 4 * head_dim,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "llama.rope.freq_base": 500000.0,
    }
    embedding = GGUFTensor("token_embd.weight", (100, 4 * head_dim), "F32", 0, None)
    meta = GGUFMetadata(Path("x.gguf"), 3, keys, [embedding])
    divisors = np.array(llama3_divisors(rope, head_dim), dtype=np.float32).tolist()
    config = hf_config_of(meta, divisors)
    assert config["rope_parameters"] == {"rope_type": "llama3", **rope}
    assert config["rms_norm_eps"] == 1e-5
    ours = rope_frequencies(DecoderConfig.from_hf(config).rope, head_dim)
    plain = rope_frequencies(RopeConfig(theta=500000.0), head_dim)
    assert torch.allclose(ours, plain / torch.tensor(divisors), rtol=1e-5)


@pytest.mark.parametrize(
    ("layers", "hidden", "scalar"),
    [(46, 256, 64), (42, 256, 32)],
)
def test_gemma_2_attention_scale_follows_the_size_of_the_model(layers: int, hidden: int, scalar: int) -> None:
    keys = {
        "general.architecture": "gemma2",
        "gemma2.block_count": layers,
        "gemma2.context_length": 8192,
        "gemma2.embedding_length": hidden,
        "gemma2.feed_forward_length": 64,
        "gemma2.attention.head_count": 4,
        "gemma2.attention.key_length": 32,
        "gemma2.attention.value_length": 32,
        "gemma2.attention.layer_norm_rms_epsilon": 1e-6,
    }
    tensors = [GGUFTensor("token_embd.weight", (100, hidden), "F32", 0, None)]
    tensors += [
        GGUFTensor(f"blk.{layer}.attn_q.weight", (128, hidden), "F32", 0, None) for layer in range(layers)
    ]
    meta = GGUFMetadata(Path("x"), 3, keys, tensors)
    config = hf_config_of(meta)
    assert config["query_pre_attn_scalar"] == scalar
    assert config["layer_types"][:2] == ["sliding_attention", "full_attention"]
    assert config["sliding_window"] == 4096


def test_the_directory_has_the_files_of_a_hugging_face_model(llama_file: Path, tmp_path: Path) -> None:
    dequantise_gguf(llama_file, tmp_path / "model")
    names = sorted(file.name for file in (tmp_path / "model").iterdir())
    assert names == [
        "config.json",
        "endstop.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer('!"A').input_ids == [60, 35]
    assert tokenizer.apply_chat_template([{"content": "A"}], tokenize=False) == "A<eos>"


def changed(
    path: Path, *, keys: dict[str, Any] | None = None, change: Callable[[Tensors], None] | None = None
) -> Path:
    write_gguf(path, tiny_transformers_model("llama"), keys=keys, change=change or (lambda tensors: None))
    return path


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"expert_count": 8}, r"sets llama\.expert_count to 8"),
        ({"rope.dimension_count": 4}, "must equal the head dimension 8"),
        ({"attention.value_length": 4}, "must equal the head dimension 8"),
        ({"rope.scaling.type": "longrope"}, "known are linear and yarn"),
        ({"logit_scale": 2.0}, r"llama\.logit_scale"),
        ({"attention.head_count_kv": [2, 2, 1]}, "its layers differ"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_keys_that_would_change_the_network_are_refused(
    keys: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=match):
        dequantise_gguf(changed(tmp_path / "x.gguf", keys=keys), tmp_path / "x")
    assert [file.name for file in tmp_path.iterdir()] == ["x.gguf"]


def test_an_unknown_architecture_tensor_or_type_is_refused(tmp_path: Path) -> None:
    gpt2 = tmp_path / "gpt2.gguf"
    writer = gguf.GGUFWriter(gpt2, "gpt2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"architecture 'gpt2'; endstop reads llama, qwen2"):
        dequantise_gguf(gpt2, tmp_path / "x")

    def extra(tensors: Tensors) -> None:
        tensors["blk.0.ffn_gate_inp.weight"] = (np.zeros((2, 32), dtype=np.float32), "F32")

    with pytest.raises(UnsupportedModel, match=r"the tensor blk\.0\.ffn_gate_inp\.weight"):
        dequantise_gguf(changed(tmp_path / "extra.gguf", change=extra), tmp_path / "x")

    def integers(tensors: Tensors) -> None:
        tensors["output.weight"] = (np.zeros((61, 32), dtype=np.int32), "I32")

    with pytest.raises(UnsupportedModel, match=r"output\.weight is of type I32"):
        dequantise_gguf(changed(tmp_path / "integers.gguf", change=integers), tmp_path / "x")


def test_missing_keys_and_tensors_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"lacks the key llama\.block_count"):
        dequantise_gguf(changed(tmp_path / "a.gguf", keys={"block_count": None}), tmp_path / "x")
    with pytest.raises(BrokenModel, match=r"llama\.block_count must be a whole number"):
        dequantise_gguf(changed(tmp_path / "b.gguf", keys={"block_count": "three"}), tmp_path / "x")

    with pytest.raises(BrokenModel, match=r"llama\.block_count must be at most the number of tensors"):
        dequantise_gguf(changed(tmp_path / "e.gguf", keys={"block_count": 2**31}), tmp_path / "x")

    def without(tensors: Tensors) -> None:
        del tensors["blk.1.attn_v.weight"]

    with pytest.raises(BrokenModel, match=r"lacks the tensor blk\.1\.attn_v\.weight"):
        dequantise_gguf(changed(tmp_path / "c.gguf", change=without), tmp_path / "x")

    def misshapen(tensors: Tensors) -> None:
        tensors["blk.1.attn_v.weight"] = (np.zeros((8, 32), dtype=np.float32), "F32")

    with pytest.raises(BrokenModel, match=r"blk\.1\.attn_v\.weight has shape \[8, 32\].* \[16, 32\]"):
        dequantise_gguf(changed(tmp_path / "d.gguf", change=misshapen), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_truncated_file_leaves_nothing_and_the_next_run_works(
    llama_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDSTOP_CACHE", str(tmp_path / "cache"))
    whole = llama_file.read_bytes()
    llama_file.write_bytes(whole[:-100])
    with pytest.raises(BrokenModel, match="is truncated"):
        ensure_directory(resolve_model(llama_file))
    assert not [entry for entry in (tmp_path / "cache" / "gguf").iterdir() if entry.is_dir()]
    llama_file.write_bytes(whole)
    assert (ensure_directory(resolve_model(llama_file)) / "model.safetensors").exists()
    with pytest.raises(BrokenModel, match="cannot be read"):
        ensure_directory(ResolvedModel(tmp_path / "none.gguf", "gguf", "nowhere"))


def test_the_cache_is_used_again_until_the_file_changes(
    llama_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDSTOP_CACHE", str(tmp_path / "cache"))
    first = ensure_directory(resolve_model(llama_file))
    assert first.parent == tmp_path / "cache" / "gguf"
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert ensure_directory(resolve_model(llama_file)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    (first / "tokenizer.json").unlink()
    assert ensure_directory(resolve_model(llama_file)) == first
    assert (first / "tokenizer.json").exists()
    write_gguf(llama_file, tiny_transformers_model("llama", seed=1))
    second = ensure_directory(resolve_model(llama_file))
    assert second != first
    assert difference(second, tiny_transformers_model("llama", seed=1)) < TOLERANCE
    entries = cache_entries()
    assert {entry.path for entry in entries} == {first, second}
    assert {entry.model for entry in entries} == {"llama.gguf"}
    assert remove_cache_entry("llama.gguf") > 0
    assert not first.exists()


def test_two_processes_at_once_make_one_directory_without_torch(llama_file: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from endstop.models.gguf import ensure_directory; "
        "from endstop.protocol.resolve import resolve_model; "
        "print(ensure_directory(resolve_model(sys.argv[1]))); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    environment = {**os.environ, "ENDSTOP_CACHE": str(tmp_path / "cache"), "PYTHONPATH": "src"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(llama_file)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    answers = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(answers) == 1
    made = [entry.name for entry in (tmp_path / "cache" / "gguf").iterdir() if entry.is_dir()]
    assert made == [Path(answers.pop().strip()).name]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes")
def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    llama_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setenv("ENDSTOP_CACHE", str(tmp_path / "cache"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(EndstopError, match=r"cannot be written: File too large\."):
            ensure_directory(resolve_model(llama_file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [entry for entry in (tmp_path / "cache" / "gguf").iterdir() if entry.is_dir()]
    assert ensure_directory(resolve_model(llama_file)).is_dir()


def test_smollm2_from_its_gguf_has_the_logits_of_transformers() -> None:
    directory = ensure_directory(resolve_model("smollm2-135m-instruct"))
    ours = load_model(directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompt = torch.tensor([[2020, 536, 346, 1643, 9984, 346, 281, 4097, 47]])
    text = torch.randint(17, 49152, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours(prompt)
        assert int(logits[0, -1].argmax()) == 2
        for ids in (prompt, text):
            assert float((ours(ids) - theirs(ids).logits).abs().max()) < TOLERANCE
