"""Reading and writing Hugging Face model directories, whole ones and damaged ones."""

from __future__ import annotations

import json
import logging
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from endstop.models.directory import whole_directory
from endstop.models.load import load_model, load_state_dict, read_config, stored_tensors
from endstop.models.save import save_pretrained
from endstop.protocol.errors import BrokenModel, EndstopError, UnsupportedModel
from tests.models.tiny_models import CONFIGS

Checkpoint = Callable[..., tuple[Any, Path]]
QUERY = "model.layers.1.self_attn.q_proj.weight"


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def set_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


@torch.no_grad()
def test_shards_are_read_like_a_single_file(checkpoint: Checkpoint) -> None:
    theirs, directory = checkpoint("llama", shard="10KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    ids = torch.arange(3, 20).unsqueeze(0)
    assert torch.allclose(load_model(directory)(ids), theirs(ids).logits, atol=1e-4)


def test_dtype_auto_is_the_declared_one_and_a_given_one_wins(checkpoint: Checkpoint) -> None:
    _, directory = checkpoint("llama")
    assert load_state_dict(directory)[QUERY].dtype == torch.float32
    set_config(directory, dtype="bfloat16")
    assert load_state_dict(directory)[QUERY].dtype == torch.bfloat16
    assert load_state_dict(directory, dtype="float16")[QUERY].dtype == torch.float16
    assert load_state_dict(directory, dtype=torch.float32)[QUERY].dtype == torch.float32
    set_config(directory, dtype=None)
    rewrite(directory, lambda tensors: tensors.update({k: v.half() for k, v in tensors.items()}))
    assert load_state_dict(directory)[QUERY].dtype == torch.float16
    for wrong in ("int8", torch.int8):
        with pytest.raises(ValueError, match="dtype must be"):
            load_state_dict(directory, dtype=wrong)


def test_tied_weights_are_one_tensor_whichever_of_the_two_is_stored(checkpoint: Checkpoint) -> None:
    _, directory = checkpoint("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in stored_tensors(directory)
    model = load_model(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    embedding = model.model.embed_tokens.weight.detach().clone()

    def only_the_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(directory, only_the_head)
    state = load_state_dict(directory)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    assert torch.equal(state["lm_head.weight"], embedding)


@torch.no_grad()
def test_tied_by_config_but_stored_twice_with_different_values_stays_untied(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    _, directory = checkpoint("llama", tie_word_embeddings=False)
    set_config(directory, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        model = load_model(directory)
    assert "two different matrices" in caplog.text
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    ids = torch.arange(3, 20).unsqueeze(0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    assert torch.allclose(model(ids), theirs(ids).logits, atol=1e-4)
    save_pretrained(model, tmp_path / "again")
    assert torch.equal(load_model(tmp_path / "again")(ids), model(ids))


def test_stored_rotary_frequencies_are_ignored(checkpoint: Checkpoint) -> None:
    _, directory = checkpoint("llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(directory, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert name not in load_state_dict(directory)


def test_missing_misshapen_and_foreign_tensors_are_named(checkpoint: Checkpoint) -> None:
    _, directory = checkpoint("llama")
    whole = load_file(directory / "model.safetensors")

    def damaged(**changes: Any) -> None:
        tensors = {**whole, QUERY: changes["query"]} if "query" in changes else dict(whole)
        tensors.update(changes.get("more", {}))
        if changes.get("missing"):
            del tensors[QUERY]
        save_file(tensors, directory / "model.safetensors")

    damaged(missing=True)
    with pytest.raises(BrokenModel, match=r"lacks the tensor 'model\.layers\.1\.self_attn\.q_proj\.weight'"):
        load_model(directory)
    damaged(query=torch.zeros(7, 32))
    with pytest.raises(BrokenModel, match=r"q_proj\.weight' has shape \[7, 32\], but .* asks for \[32, 32\]"):
        load_model(directory)
    damaged(query=torch.zeros(32, 32, dtype=torch.int8))
    with pytest.raises(UnsupportedModel, match=r"q_proj\.weight' is stored as I8.*--backend transformers"):
        load_model(directory)
    damaged(more={"model.layers.1.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(
        UnsupportedModel, match=r"q_norm\.weight', which a llama model .*--backend transformers"
    ):
        load_model(directory)


@pytest.mark.parametrize("kept", [0, 5, 8, 40, 2000, -1])
def test_truncated_safetensors_are_one_sentence(kept: int, checkpoint: Checkpoint) -> None:
    _, directory = checkpoint("llama")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(BrokenModel, match=rf"{file} is truncated"):
        load_model(directory)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'"text"',
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"a": {"shape": [2], "data_offsets": [0, 8]}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_header_is_one_sentence(header: bytes, checkpoint: Checkpoint) -> None:
    _, directory = checkpoint("llama")
    file = directory / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(BrokenModel, match=rf"{file} has a damaged safetensors header"):
        load_model(directory)


def test_a_damaged_index_is_one_sentence(checkpoint: Checkpoint) -> None:
    _, directory = checkpoint("llama", shard="10KB")
    index = directory / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    shard = whole["weight_map"][QUERY]

    def broken(match: str) -> None:
        with pytest.raises(BrokenModel, match=match):
            load_model(directory)

    index.write_text(json.dumps({**whole, "weight_map": {**whole["weight_map"], "model.extra": shard}}))
    broken(r"lacks the tensor 'model\.extra'")
    index.write_text(json.dumps({"weight_map": {QUERY: "../outside.safetensors"}}))
    broken("not a file of the same directory")
    index.write_text(json.dumps({"metadata": {}}))
    broken("no 'weight_map'")
    index.write_text("{")
    broken("not valid JSON")
    index.write_text(json.dumps(whole))
    (directory / shard).unlink()
    broken(f"{shard}, named in .*, is missing")


def test_pickled_weights_are_refused_unopened(checkpoint: Checkpoint) -> None:
    _, directory = checkpoint("llama")
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(
        UnsupportedModel, match=r"pytorch_model\.bin holds pickled weights, which can run code"
    ):
        load_model(directory)
    (directory / "pytorch_model.bin").unlink()
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="only an adapter"):
        load_model(directory)
    (directory / "adapter_config.json").unlink()
    with pytest.raises(BrokenModel, match=r"neither model\.safetensors nor"):
        load_model(directory)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "missing"),
        (b"{", "not valid JSON"),
        (b"[]", "must hold a JSON object"),
        (b"\xff", "not valid JSON"),
    ],
)
def test_a_broken_config_is_one_sentence(content: bytes | None, match: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BrokenModel, match=rf"config\.json .*{match}"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_what_we_write_loads_in_transformers_and_here(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    theirs, directory = checkpoint(family)
    written = tmp_path / "written"
    save_pretrained(load_model(directory), written, files={"generation_config.json": '{"eos_token_id": 2}'})
    ids = torch.arange(3, 24).unsqueeze(0)
    again = transformers.AutoModelForCausalLM.from_pretrained(written).eval()
    assert type(again) is type(theirs)
    assert torch.allclose(again(ids).logits, theirs(ids).logits, atol=1e-4)
    assert torch.allclose(load_model(written)(ids), theirs(ids).logits, atol=1e-4)
    assert (written / "generation_config.json").read_text() == '{"eos_token_id": 2}'


@torch.no_grad()
def test_writing_in_shards_and_in_another_dtype(checkpoint: Checkpoint, tmp_path: Path) -> None:
    _, directory = checkpoint("llama", tie_word_embeddings=True)
    model = load_model(directory)
    save_pretrained(model, tmp_path / "half", dtype=torch.bfloat16, shard_bytes=10_000)
    shards = sorted(file.name for file in (tmp_path / "half").glob("*.safetensors"))
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert len(shards) > 2
    index = json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())
    stored = sum(parameter.numel() for parameter in model.parameters())
    assert index["metadata"]["total_size"] == 2 * stored
    again = load_model(tmp_path / "half")
    assert again.config.dtype == "bfloat16"
    assert torch.equal(again.model.norm.weight, model.model.norm.weight.bfloat16())


def test_a_directory_appears_whole_or_not_at_all(checkpoint: Checkpoint, tmp_path: Path) -> None:
    _, directory = checkpoint("llama")
    model = load_model(directory)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError, match="exists already"):
        save_pretrained(model, directory)
    with pytest.raises(ValueError, match="plain names"):
        save_pretrained(model, tmp_path / "new", files={"../escape": "x"})

    def interrupted() -> None:
        with whole_directory(tmp_path / "new") as partial:
            (partial / "half.bin").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(tmp_path.iterdir()) == before

    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    save_pretrained(model, directory, replace=True)
    assert float(load_model(directory).model.norm.weight.detach().mean()) == 3.0
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes")
def test_a_write_that_fails_is_one_sentence_and_leaves_the_old_model(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    import resource

    _, directory = checkpoint("llama")
    model = load_model(directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(EndstopError, match=rf"{directory} cannot be written: .*File too large"):
            save_pretrained(model, directory, replace=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_model(directory).config == model.config
    assert [file.name for file in tmp_path.iterdir()] == [directory.name]
