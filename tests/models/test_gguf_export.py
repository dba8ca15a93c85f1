"""Exported GGUF files: read back by endstop with the same logits, run by llama.cpp with the same tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from endstop.models.gguf import dequantise_gguf
from endstop.models.gguf_export import export_gguf
from endstop.models.gguf_vocabulary import matching_pre_tokenizer, probe_texts
from endstop.models.load import load_model
from endstop.protocol.errors import BrokenModel, EndstopError, UnsupportedModel
from endstop.protocol.gguf import read_gguf_metadata
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenizer import Tokenizer
from tests.models.exportable import tokenizer_json, write_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 5},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "sliding_window": 5,
        "sliding_window_pattern": 6,
        "num_hidden_layers": 6,
    },
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
TEXTS = ("<|bos|>hello 12345 it's\n\n x", "the cat's 12 mats\t  — naïve 😀", "x\n \n y  z")


@torch.no_grad()
def difference(directory: Path, theirs: Any) -> float:
    ids = torch.randint(0, 300, (2, 90), generator=torch.Generator().manual_seed(5))
    return float((load_model(directory, dtype="float32")(ids) - theirs(ids).logits).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_read_back_gives_the_same_logits_tokens_and_ends(family: str, tmp_path: Path) -> None:
    theirs = write_model(tmp_path / "model", family, **FAMILIES[family])
    done = export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype="f32")
    assert done.size == (tmp_path / "model.gguf").stat().st_size
    assert done.left_out == ()
    dequantise_gguf(tmp_path / "model.gguf", tmp_path / "back")
    assert difference(tmp_path / "back", theirs) < 1e-4
    ours, back = (Tokenizer.from_pretrained(tmp_path / name) for name in ("model", "back"))
    for text in (*TEXTS, *probe_texts([], count=50, seed=9)):
        assert back.encode(text) == ours.encode(text)
    assert back.chat_template == ours.chat_template
    stops = StopSet.from_pretrained(tmp_path / "back")
    assert stops.roles == StopSet.from_pretrained(tmp_path / "model").roles
    assert {stops.texts[stop] for stop in stops.ids} == {"<|bos|>", "<|assistant_end|>"}


@pytest.mark.parametrize("scaling", ROPES)
def test_scaled_rotary_embeddings_come_back(scaling: str, tmp_path: Path) -> None:
    theirs = write_model(tmp_path / "model", rope_parameters=ROPES[scaling])
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype="f32", pre="stablelm2")
    dequantise_gguf(tmp_path / "model.gguf", tmp_path / "back")
    assert difference(tmp_path / "back", theirs) < 2e-4


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_shorter_types_hold_the_weights_as_well_as_they_can(dtype: Any, tmp_path: Path) -> None:
    theirs = write_model(tmp_path / "model")
    done = export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype=dtype, pre="stablelm2")
    vectors = 2 * theirs.config.num_hidden_layers + 1
    assert done.types == {"f32": vectors, dtype: 7 * theirs.config.num_hidden_layers + 2}
    dequantise_gguf(tmp_path / "model.gguf", tmp_path / "back")
    back = load_model(tmp_path / "back").state_dict()
    for name, weight in theirs.state_dict().items():
        if dtype == "q8_0" and weight.dim() > 1:
            # 127 steps to the largest of each 32, which itself is kept in float16.
            blocks = weight.reshape(-1, 32)
            error = (back[name].reshape(-1, 32) - blocks).abs()
            assert (error <= blocks.abs().amax(1, keepdim=True) * (0.5 / 127 + 2**-11)).all()
        else:
            kind = {"f16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
            stored = weight.to(kind).float() if weight.dim() > 1 else weight
            assert torch.equal(back[name], stored)


def test_rows_that_q8_0_cannot_hold_become_f16(tmp_path: Path) -> None:
    write_model(tmp_path / "model", intermediate_size=40)
    done = export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype="q8_0", pre="stablelm2")
    assert done.types == {"f32": 7, "q8_0": 20, "f16": 3}


def test_the_keys_say_what_the_directory_says(tmp_path: Path) -> None:
    theirs = write_model(tmp_path / "model")
    done = export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype="bf16", licence="mit")
    meta = read_gguf_metadata(tmp_path / "model.gguf").metadata
    assert (meta["general.architecture"], meta["general.license"]) == ("llama", "mit")
    assert meta["llama.context_length"] == 256
    assert meta["tokenizer.ggml.pre"] == done.pre == "stablelm2"
    assert meta["tokenizer.ggml.eot_token_id"] == theirs.config.eos_token_id
    assert (
        meta["tokenizer.ggml.eos_token_id"]
        == meta["tokenizer.ggml.bos_token_id"]
        == theirs.config.bos_token_id
    )
    assert meta["tokenizer.ggml.padding_token_id"] == theirs.config.pad_token_id
    assert meta["tokenizer.ggml.add_bos_token"] is False
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == theirs.config.vocab_size
    assert types.count(3) == 9
    assert tokens[-1] == f"[PAD{len(tokens) - 1}]"
    assert types[-1] == 5


def test_digit_groups_of_two_have_no_name_in_gguf_unless_no_token_shows_them(tmp_path: Path) -> None:
    write_model(tmp_path / "model", digits=2)
    with pytest.raises(UnsupportedModel, match=r"splits text like none of the pre-tokenizers.*--pre NAME"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert list(tmp_path.glob("*gguf*")) == []
    done = export_gguf(tmp_path / "model", tmp_path / "model.gguf", pre="stablelm2")
    assert done.pre == "stablelm2"
    # The same pattern over a vocabulary without a token of two digits never shows the difference.
    content = tokenizer_json(digits=2, size=256)
    assert all(len(token) == 1 for token in content["model"]["vocab"])
    assert matching_pre_tokenizer(content)


def test_a_llama_trained_here_with_single_digits_exports(tmp_path: Path) -> None:
    from endstop.train.presets import preset
    from endstop.train.tokenizer_training import train_tokenizer

    assert [preset(name).with_shape("llama").digits for name in ("tiny", "d12", "d20")] == [1, 1, 1]
    text = Path(__file__).read_text(encoding="utf-8") + " ".join(str(number) for number in range(2000))
    tokenizers = {digits: train_tokenizer([text] * 2, 1000, digits=digits) for digits in (1, 2)}
    write_model(tmp_path / "model", content=tokenizers[1])
    done = export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype="f32")
    assert (done.architecture, done.pre) == ("llama", "stablelm2")
    dequantise_gguf(tmp_path / "model.gguf", tmp_path / "back")
    back = Tokenizer.from_pretrained(tmp_path / "back")
    own = Tokenizer.from_pretrained(tmp_path / "model")
    for sample in (text, *TEXTS):
        assert back.encode_text(sample) == own.encode_text(sample)
    with pytest.raises(UnsupportedModel, match="single digits"):
        matching_pre_tokenizer(tokenizers[2])


def test_what_gguf_cannot_express_is_refused_in_one_sentence(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(UnsupportedModel, match=match):
            export_gguf(directory, tmp_path / "model.gguf")
        assert list(tmp_path.glob("*gguf*")) == []

    directory = tmp_path / "nanochat"
    write_model(directory, "nanochat")
    refused("train the Llama shape")
    directory = tmp_path / "mistral"
    write_model(directory, "mistral", sliding_window=8)
    refused("this one slides")
    directory = tmp_path / "dynamic"
    write_model(directory, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    refused("no dynamic scaling")
    directory = tmp_path / "gemma2"
    write_model(directory, "gemma2", query_pre_attn_scalar=13)
    refused("scaled by")
    directory = tmp_path / "words"
    write_model(directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"] = {"type": "WordLevel", "vocab": content["model"]["vocab"], "unk_token": "a"}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    refused("not byte-level BPE")


def test_bad_input_leaves_no_file(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    with pytest.raises(ValueError, match="dtype must be one of"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype="q4_0")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(EndstopError, match="cannot be written"):
        export_gguf(tmp_path / "model", tmp_path / "file" / "model.gguf")
    with pytest.raises(BrokenModel):
        export_gguf(tmp_path / "nothing", tmp_path / "model.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]


@contextmanager
def llama_cpp(path: Path) -> Iterator[Any]:
    """llama.cpp's own server with a model, as an HTTP client."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")
    import httpx

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    with httpx.Client(base_url=server.listening_address, timeout=60) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_says_the_same_tokens(family: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", family, **FAMILIES[family])
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype="f32")
    model = load_model(tmp_path / "model", dtype="float32")
    tokenizer = Tokenizer.from_pretrained(tmp_path / "model")
    stops = StopSet.from_pretrained(tmp_path / "model").ids
    with llama_cpp(tmp_path / "model.gguf") as client:
        for text in (*TEXTS, *probe_texts([], count=20, seed=3)):
            asked = {"content": text, "parse_special": True, "add_special": True}
            assert client.post("/tokenize", json=asked).json()["tokens"] == tokenizer.encode(text)
        for prompt in ([5, 6, 7, 80, 9], tokenizer.encode("<|bos|>the cat")):
            asked = {"prompt": prompt, "n_predict": 24, "temperature": 0.0, "return_tokens": True}
            said = client.post("/completion", json=asked).json()
            ids = list(prompt)
            while len(ids) < len(prompt) + 24:
                with torch.no_grad():
                    logits = model(torch.tensor([ids]))[0, -1]
                ids.append(int(logits.argmax()))
                best = logits.topk(2).values
                assert best[0] - best[1] > 1e-4, "the case is not fit to compare two programs"
                if ids[-1] in stops:
                    break
            assert said["tokens"] == ids[len(prompt) :]
            assert said["stop_type"] == ("eos" if ids[-1] in stops else "limit")


@pytest.mark.slow
def test_llama_cpp_renders_the_template_and_stops_at_both_ends(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype="f32")
    messages = [
        {"role": "system", "content": "be nice"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "bye"},
    ]
    with llama_cpp(tmp_path / "model.gguf") as client:
        rendered = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
        assert rendered == (
            "<|bos|><|user_start|>be nice\n\nhi<|user_end|><|assistant_start|>yo<|assistant_end|>"
            "<|user_start|>bye<|user_end|><|assistant_start|>"
        )
        for stop in StopSet.from_pretrained(tmp_path / "model").ids:
            bias = {"prompt": [5, 6], "n_predict": 8, "logit_bias": [[stop, 1000]], "return_tokens": True}
            said = client.post("/completion", json=bias).json()
            assert (said["tokens"], said["stop_type"]) == ([stop], "eos")


@pytest.mark.slow
def test_a_tokenizer_trained_here_adds_its_bos_once(tmp_path: Path) -> None:
    """Its post-processor puts `<|bos|>` before a raw prompt, and its template writes one as well."""
    from endstop.protocol.render import ChatRenderer
    from endstop.train.tokenizer_training import train_tokenizer

    content = train_tokenizer(["the cat sat on the mat, they say"] * 20, 280, engine="tokenizers")
    write_model(tmp_path / "model", content=content)
    done = export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype="f32")
    meta = read_gguf_metadata(tmp_path / "model.gguf").metadata
    assert meta["tokenizer.ggml.add_bos_token"] is True
    assert done.pre in ("stablelm2", "llama3", "gpt-2")
    tokenizer = Tokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "say the cat 12345"}]
    rendered = ChatRenderer(tokenizer).render(messages, add_generation_prompt=True)
    with llama_cpp(tmp_path / "model.gguf") as client:
        asked = {"content": "the cat", "parse_special": True, "add_special": True}
        assert client.post("/tokenize", json=asked).json()["tokens"] == tokenizer.encode("the cat")
        said = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
        assert said["usage"]["prompt_tokens"] == len(rendered.ids)
