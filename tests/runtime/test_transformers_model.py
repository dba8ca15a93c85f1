"""Any architecture behind the TokenModel protocol, on tiny random models."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from endstop import SamplingParams, StopSet, TokenBytes  # noqa: E402
from endstop.protocol.errors import BrokenModel, UnsupportedModel  # noqa: E402
from endstop.runtime.engine import Engine  # noqa: E402
from endstop.runtime.token_model import RowChunk, TokenModel  # noqa: E402
from endstop.runtime.transformers_model import TransformersModel  # noqa: E402

BASE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PLAIN = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**BASE),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    ),
    "bloom": lambda: transformers.BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2),
}
OTHERS = {
    "mistral": lambda: transformers.MistralConfig(**BASE, num_key_value_heads=1, sliding_window=4),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **BASE,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4
    ),
}


def network(name, seed=0):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config({**PLAIN, **OTHERS}[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


@pytest.fixture(params=[*PLAIN, *OTHERS])
def pair(request):
    model = network(request.param)
    return model, TransformersModel(model)


def whole(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


IDS = [3, 9, 27, 1, 4, 12, 36, 28, 4, 2, 11, 33]


def test_chunks_of_any_size_give_the_logits_of_the_whole(pair):
    model, rows = pair
    assert isinstance(rows, TokenModel)
    want = whole(model, IDS)
    for sizes in ([12], [1] * 12, [5, 7], [3, 1, 8]):
        row, start, parts = rows.open_row(), 0, []
        for size in sizes:
            chunk = RowChunk(row, IDS[start : start + size], start, "all")
            parts.append(rows.forward([chunk]).logits)
            start += size
        got = torch.cat(parts)
        assert got.dtype == torch.float32
        assert got.shape == (12, 40)
        assert (got - want).abs().max() < 1e-5
        rows.close_row(row)


def test_last_and_none_give_one_row_and_no_row(pair):
    model, rows = pair
    a, b = rows.open_row(), rows.open_row()
    result = rows.forward([RowChunk(a, IDS[:4], 0, "last"), RowChunk(b, IDS[:6], 0, "none")])
    assert result.logits.shape == (1, 40)
    assert (result.logits[0] - whole(model, IDS[:4])[-1]).abs().max() < 1e-5
    assert rows.forward([RowChunk(b, IDS[6:8], 6, "none")]).logits is None
    result = rows.forward([RowChunk(b, IDS[8:10], 8, "last"), RowChunk(a, IDS[4:6], 4, "last")])
    assert (result.logits[0] - whole(model, IDS[:10])[-1]).abs().max() < 1e-5
    assert (result.logits[1] - whole(model, IDS[:6])[-1]).abs().max() < 1e-5


@pytest.mark.parametrize("name", PLAIN)
def test_forks_and_cut_rows_go_on_from_where_they_were_cut(name):
    model = network(name)
    rows = TransformersModel(model)
    assert rows.capabilities.fork
    assert rows.capabilities.truncate
    first = rows.open_row()
    rows.forward([RowChunk(first, IDS[:8], 0, "none")])
    second, empty = rows.fork_row(first, 5), rows.fork_row(first, 0)
    other = [*IDS[:5], 7, 7]
    got = rows.forward([RowChunk(second, [7, 7], 5, "last"), RowChunk(empty, IDS[:3], 0, "last")]).logits
    assert (got[0] - whole(model, other)[-1]).abs().max() < 1e-5
    assert (got[1] - whole(model, IDS[:3])[-1]).abs().max() < 1e-5
    got = rows.forward([RowChunk(first, IDS[8:9], 8)]).logits  # the fork left it alone
    assert (got[0] - whole(model, IDS[:9])[-1]).abs().max() < 1e-5
    rows.truncate_row(first, 2)
    got = rows.forward([RowChunk(first, [7], 2)]).logits
    assert (got[0] - whole(model, [*IDS[:2], 7])[-1]).abs().max() < 1e-5
    with pytest.raises(ValueError, match="cannot be cut to 9"):
        rows.truncate_row(first, 9)


@pytest.mark.parametrize("name", OTHERS)
def test_caches_without_a_past_say_so(name):
    rows = TransformersModel(network(name))
    assert not rows.capabilities.fork
    assert not rows.capabilities.truncate
    row = rows.open_row()
    rows.forward([RowChunk(row, IDS[:3], 0, "none")])
    with pytest.raises(UnsupportedModel, match="cannot truncate rows"):
        rows.truncate_row(row, 1)
    with pytest.raises(UnsupportedModel, match="cannot fork rows"):
        rows.fork_row(row, 1)


def test_the_budget_is_in_bytes():
    # Keys and values of 2 layers, 16 wide, in float32.
    token = 2 * 2 * 16 * 4
    rows = TransformersModel(network("llama"), memory_budget=50 * token)
    assert (rows.vocab_size, rows.context_len) == (40, 50)
    assert rows.fits([20, 30])
    assert not rows.fits([20, 31])
    rows = TransformersModel(network("llama"), max_rows=2)
    assert rows.context_len == 64
    assert rows.fits([64, 64])
    assert not rows.fits([64, 64, 1])
    states = TransformersModel(network("mamba"), memory_budget=10**6)
    assert states.context_len is None
    assert states.fits([10**9])
    assert not states.fits([1] * 10**4)


def test_a_chunk_that_does_not_follow_is_refused():
    rows = TransformersModel(network("llama"))
    row = rows.open_row()
    with pytest.raises(ValueError, match="has 0 tokens, the chunk starts at 3"):
        rows.forward([RowChunk(row, [1], 3)])


def test_weights_can_be_swapped():
    rows = TransformersModel(network("llama"))
    other = network("llama", seed=5)
    rows.load_weights(other.state_dict())
    row = rows.open_row()
    got = rows.forward([RowChunk(row, IDS, 0)]).logits
    assert (got[0] - whole(other, IDS)[-1]).abs().max() < 1e-5
    with pytest.raises(BrokenModel, match=r"lm_head\.weight is missing"):
        rows.load_weights({k: v for k, v in other.state_dict().items() if k != "lm_head.weight"})
    config = transformers.LlamaConfig(**BASE, tie_word_embeddings=True)
    tied = transformers.LlamaForCausalLM(config)
    state = {k: v for k, v in tied.state_dict().items() if k != "lm_head.weight"}
    TransformersModel(transformers.LlamaForCausalLM(config)).load_weights(state)
    with pytest.raises(BrokenModel, match="x is unknown"):
        rows.load_weights({**other.state_dict(), "x": torch.zeros(1)})
    with pytest.raises(BrokenModel, match="of another shape"):
        rows.load_weights({**other.state_dict(), "lm_head.weight": torch.zeros(1)})


def test_a_directory_loads_and_gives_the_same_logits(tmp_path):
    model = network("gpt2")
    model.save_pretrained(tmp_path)
    rows = TransformersModel.from_pretrained(tmp_path, dtype="float32", device="cpu")
    got = rows.forward([RowChunk(rows.open_row(), IDS, 0)]).logits
    assert (got[0] - whole(model, IDS)[-1]).abs().max() < 1e-5
    rows = TransformersModel.from_pretrained(tmp_path, dtype="bfloat16", device="cpu")
    assert rows.model.dtype == torch.bfloat16
    assert rows.forward([RowChunk(rows.open_row(), IDS, 0)]).logits.dtype == torch.float32
    with pytest.raises(ValueError, match="dtype must be"):
        TransformersModel.from_pretrained(tmp_path, dtype="int8")


def test_what_cannot_be_loaded_is_refused_in_one_sentence(tmp_path):
    model = network("llama")
    model.save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    good_weights, good_config = weights.read_bytes(), json.loads(config.read_text())

    def refused(error, match):
        with pytest.raises(error, match=match) as caught:
            TransformersModel.from_pretrained(tmp_path, device="cpu")
        assert "\n" not in str(caught.value)

    weights.write_bytes(good_weights[: len(good_weights) // 2])
    refused(BrokenModel, "cannot be loaded")
    weights.unlink()
    refused(BrokenModel, "cannot be loaded")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    refused(BrokenModel, "cannot be loaded")
    from safetensors.torch import save_file

    state = {k: v.contiguous() for k, v in model.state_dict().items() if "o_proj" not in k}
    save_file(state, weights, metadata={"format": "pt"})
    refused(BrokenModel, r"lacks 2 weights, among them model\.layers\.0\.self_attn\.o_proj\.weight")
    weights.write_bytes(good_weights)
    config.write_text("{broken")
    refused(BrokenModel, "cannot be loaded")
    config.write_text(json.dumps({**good_config, "model_type": "never_heard_of"}))
    refused(UnsupportedModel, "never_heard_of")
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    config.write_text(json.dumps({**good_config, **own}))
    (tmp_path / "code.py").write_text("raise SystemExit('code was run')")
    refused(UnsupportedModel, "trust_remote_code is off")


def test_encoder_decoders_and_models_without_a_cache_are_refused():
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        TransformersModel(transformers.T5ForConditionalGeneration(config))
    config = transformers.RwkvConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2)
    with pytest.raises(UnsupportedModel, match="rwkv keeps no cache"):
        TransformersModel(transformers.RwkvForCausalLM(config))


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
def test_the_engine_over_it_gives_what_generate_gives(name):
    model = network(name)
    pieces = TokenBytes([bytes([97 + i % 26]) for i in range(40)])
    engine = Engine(TransformersModel(model), StopSet.of({}), pieces)
    prompts = [IDS, IDS[:3], [*IDS[:5], 7]]
    results = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=10))
    for prompt, result in zip(prompts, results, strict=True):
        want = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=10, eos_token_id=2**31 - 1
        )
        assert result.outputs[0].token_ids == want[0, len(prompt) :].tolist()
