"""The native backend against the reference decoder: every family, every way to cut rows into calls."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from endstop.models.config import DecoderConfig
from endstop.models.save import save_pretrained
from endstop.runtime.native import NativeModel, linear, segments
from endstop.runtime.token_model import RowChunk, TokenModel
from tests.models.tiny_models import CONFIGS, tiny_transformers_model
from tests.runtime.native_models import compute, expected_logits, tiny_pair, tokens_of

FAMILIES = list(CONFIGS)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_is_a_token_model() -> None:
    _, model = tiny_pair("llama")
    assert isinstance(model, TokenModel)
    assert (model.vocab_size, model.context_len) == (61, 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_prompt_equals_the_decoder_and_transformers(family: str) -> None:
    decoder, model = tiny_pair(family)
    tokens = tokens_of(23)
    logits = compute(model, model.open_row(), tokens)
    assert logits.dtype == torch.float32
    close(logits, expected_logits(decoder, tokens))
    with torch.no_grad():
        close(logits, tiny_transformers_model(family)(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "sizes", [[1] * 23, [5, 1, 9, 8], [22, 1]], ids=["tokens", "chunks", "prefill-decode"]
)
def test_chunks_equal_the_whole_prompt(family: str, sizes: list[int]) -> None:
    decoder, model = tiny_pair(family)
    tokens = tokens_of(23)
    row, start, parts = model.open_row(), 0, []
    for size in sizes:
        parts.append(compute(model, row, tokens[start : start + size], start))
        start += size
    close(torch.cat(parts), expected_logits(decoder, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_steps_equal_single_rows(family: str) -> None:
    """Rows that decode, a prompt in chunks and one at once share calls; every row as if it were alone."""
    decoder, model = tiny_pair(family)
    texts = [tokens_of(length, seed=length) for length in (20, 14, 26, 31)]
    rows = [model.open_row() for _ in texts]
    done = [0] * 4
    steps = [
        (9, 0, 0, 0),
        (1, 13, 0, 0),
        (1, 1, 12, 0),
        (1, 0, 12, 0),
        (1, 0, 1, 29),
        (1, 0, 1, 1),
        (6, 0, 0, 1),
    ]
    for step in steps:
        chunks = [
            RowChunk(row, texts[i][done[i] : done[i] + size], done[i], "all")
            for i, (row, size) in enumerate(zip(rows, step, strict=True))
            if size
        ]
        expected = [
            expected_logits(decoder, texts[i][: done[i] + size])[done[i] :]
            for i, size in enumerate(step)
            if size
        ]
        close(model.forward(chunks).logits, torch.cat(expected))
        done = [before + size for before, size in zip(done, step, strict=True)]
    assert done == [20, 14, 26, 31]


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("family", ["llama", "nanochat"])
def test_scaled_rotations(name: str, family: str) -> None:
    decoder, model = tiny_pair(family, options={"rope_parameters": {"rope_theta": 10000.0, **ROPES[name]}})
    tokens = tokens_of(40)
    row = model.open_row()
    logits = [compute(model, row, tokens[:33]), *(compute(model, row, [tokens[i]], i) for i in range(33, 40))]
    close(torch.cat(logits), expected_logits(decoder, tokens))


def test_dynamic_rotation_beyond_the_window_does_not_depend_on_chunks() -> None:
    """Beyond the original window every position has the frequencies it has in token-by-token decoding."""
    options = {"rope_parameters": {"rope_theta": 10000.0, **ROPES["dynamic"]}, "max_position_embeddings": 16}
    decoder, model = tiny_pair("llama", options=options, context_len=40)
    tokens = tokens_of(40)
    cache = decoder.new_cache()
    with torch.no_grad():
        expected = torch.cat([decoder(torch.tensor([[token]]), cache=cache)[0] for token in tokens])
    close(compute(model, model.open_row(), tokens), expected)
    row = model.open_row()
    parts = [compute(model, row, tokens[begin : begin + 11], begin) for begin in range(0, 40, 11)]
    close(torch.cat(parts), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_long_chunks_are_computed_in_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, model = tiny_pair(family, options={"max_position_embeddings": 256})
    tokens = tokens_of(150)
    monkeypatch.setattr(segments, "_MAX_SCORES", 4 * 160 * 37)
    row = model.open_row()
    logits = [compute(model, row, tokens[:100]), compute(model, row, tokens[100:], 100)]
    close(torch.cat(logits), expected_logits(decoder, tokens))


def test_logits_come_in_chunk_order() -> None:
    decoder, model = tiny_pair("llama")
    texts = [tokens_of(length, seed=length) for length in (4, 12, 1, 7)]
    rows = [model.open_row() for _ in texts]
    wanted = ["last", "all", "none", "last"]
    chunks = [RowChunk(row, text, 0, kind) for row, text, kind in zip(rows, texts, wanted, strict=True)]  # type: ignore[arg-type]
    first, second, _, last = (expected_logits(decoder, text) for text in texts)
    close(model.forward(chunks).logits, torch.cat([first[-1:], second, last[-1:]]))
    assert model.forward([RowChunk(rows[2], [5], 1, "none")]).logits is None
    assert model.forward([]).logits is None


def test_logits_may_be_changed_in_place() -> None:
    _, model = tiny_pair("llama")
    logits = compute(model, model.open_row(), [1, 2, 3])
    logits[:, 5] = -torch.inf
    logits /= 2.0
    assert torch.isneginf(logits[:, 5]).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_fork_and_truncate(family: str) -> None:
    decoder, model = tiny_pair(family)
    tokens, other = tokens_of(20), tokens_of(9, seed=1)
    row = model.open_row()
    compute(model, row, tokens)
    fork = model.fork_row(row, 11)
    both = model.forward([RowChunk(fork, other, 11, "all"), RowChunk(row, [3], 20, "all")]).logits
    close(both[:9], expected_logits(decoder, tokens[:11] + other)[11:])
    close(both[9:], expected_logits(decoder, [*tokens, 3])[20:])
    model.truncate_row(row, 6)
    close(compute(model, row, other, 6), expected_logits(decoder, tokens[:6] + other)[6:])
    model.truncate_row(fork, 0)
    close(compute(model, fork, other), expected_logits(decoder, other))


def test_row_with_nan_leaves_the_others_alone() -> None:
    """What a broken row leaves in the cache reaches neither its neighbours nor later rows in its place."""
    decoder, model = tiny_pair("llama")
    state = copy.deepcopy(decoder.state_dict())
    state["model.embed_tokens.weight"][7] = torch.nan
    state["lm_head.weight"] = decoder.state_dict()["lm_head.weight"]
    model.load_weights(state)
    rows = [model.open_row(), model.open_row(), model.open_row()]
    model.forward([RowChunk(row, [1, 2], 0, "none") for row in rows])
    texts = [[3, 4, 5], [7, 4], [3, 4, 5]]
    logits = model.forward([RowChunk(row, text, 2) for row, text in zip(rows, texts, strict=True)]).logits
    assert torch.isnan(logits[1]).all()
    close(logits[[0, 2]], expected_logits(decoder, [1, 2, 3, 4, 5])[-1:].expand(2, -1))
    model.truncate_row(rows[1], 2)
    long = compute(model, rows[0], tokens_of(6, seed=2, vocab_size=6), 5)
    assert torch.isfinite(long).all()
    chunks = [RowChunk(rows[0], [3], 11), RowChunk(rows[1], [3], 2), RowChunk(rows[2], [3], 5)]
    close(model.forward(chunks).logits[1], expected_logits(decoder, [1, 2, 3])[-1])
    compute(model, rows[1], [7, 7, 7], 3)
    model.close_row(rows[1])
    again = model.open_row()
    chunks = [RowChunk(rows[0], [3], 12), RowChunk(again, [3], 0)]
    close(model.forward(chunks).logits[1], expected_logits(decoder, [3])[-1])


def test_bfloat16_is_near_float32() -> None:
    """A whole prompt and decoding: the error is about that of the reference in bfloat16."""
    for family in FAMILIES:
        decoder, model = tiny_pair(family, dtype="bfloat16")
        tokens = tokens_of(24)
        row = model.open_row()
        logits = [
            compute(model, row, tokens[:16]),
            *(compute(model, row, [tokens[i]], i) for i in range(16, 24)),
        ]
        expected = expected_logits(decoder, tokens)
        reference = (expected_logits(decoder.to(torch.bfloat16), tokens) - expected).pow(2).mean().sqrt()
        error = (torch.cat(logits) - expected).pow(2).mean().sqrt()
        assert error < 1.5 * reference < 0.15 * expected.std(), family


def test_batch_in_bfloat16_is_near_single_rows() -> None:
    _, model = tiny_pair("llama", dtype="bfloat16")
    texts = [tokens_of(length, seed=length) for length in (5, 9, 17)]
    alone = [compute(model, model.open_row(), text, logits="last") for text in texts]
    rows = [model.open_row() for _ in texts]
    model.forward([RowChunk(row, text[:-1], 0, "none") for row, text in zip(rows, texts, strict=True)])
    together = model.forward(
        [RowChunk(row, text[-1:], len(text) - 1) for row, text in zip(rows, texts, strict=True)]
    ).logits
    assert (together - torch.cat(alone)).abs().max() < 0.05 * torch.cat(alone).std()


def test_load_weights_swaps_and_copies() -> None:
    decoder, model = tiny_pair("qwen3")
    fresh = tiny_transformers_model("qwen3", seed=5).state_dict()
    tokens = tokens_of(8)
    model.load_weights(fresh)
    for value in fresh.values():
        value.zero_()
    decoder.load_state_dict(tiny_transformers_model("qwen3", seed=5).state_dict())
    close(compute(model, model.open_row(), tokens), expected_logits(decoder, tokens))


def test_load_weights_refuses_what_does_not_fit() -> None:
    decoder, model = tiny_pair("llama")
    state = dict(decoder.state_dict())
    with pytest.raises(ValueError, match=r"lacks 'model\.norm\.weight'"):
        model.load_weights({name: value for name, value in state.items() if name != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"'lm_head\.weight' has shape \[60, 32\]"):
        model.load_weights({**state, "lm_head.weight": state["lm_head.weight"][:60]})
    with pytest.raises(ValueError, match="'adapter', which this model does not have"):
        model.load_weights({**state, "adapter": state["lm_head.weight"]})
    tokens = tokens_of(8)
    close(compute(model, model.open_row(), tokens), expected_logits(decoder, tokens))


def test_tied_weights_need_no_head() -> None:
    decoder, model = tiny_pair("llama", options={"tie_word_embeddings": True})
    state = dict(decoder.state_dict())
    assert state.pop("lm_head.weight") is not None
    tokens = tokens_of(8)
    close(compute(model, model.open_row(), tokens), expected_logits(decoder, tokens))
    model.load_weights(state)
    close(compute(model, model.open_row(), tokens), expected_logits(decoder, tokens))


def test_from_pretrained(tmp_path: Path) -> None:
    decoder, _ = tiny_pair("gemma2")
    save_pretrained(decoder, tmp_path / "model")
    model = NativeModel.from_pretrained(tmp_path / "model", dtype="float32", device="cpu")
    assert NativeModel.from_pretrained(tmp_path / "model", device="auto").vocab_size == 61
    tokens = tokens_of(8)
    close(compute(model, model.open_row(), tokens), expected_logits(decoder, tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_and_packed_products_agree(dtype: torch.dtype) -> None:
    weight, bias, x, residual = (
        torch.randn(shape).to(dtype) for shape in [(24, 16), (24,), (3, 16), (3, 24)]
    )
    kinds: list[type[Any]] = [linear.PlainLinear]
    if linear.packing_works(dtype):
        kinds.append(linear.PackedLinear)
    exact = x.double() @ weight.double().T + bias.double()
    for kind in kinds:
        product = kind(weight, bias)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        close(product(x).double(), exact, tolerance)
        close(product.plus(x, residual).double(), exact + residual.double(), tolerance)
        close(kind(weight, None)(x).double(), exact - bias.double(), tolerance)


def test_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    linear.packing_works.cache_clear()
    try:
        decoder, model = tiny_pair("qwen2")
    finally:
        monkeypatch.undo()
        linear.packing_works.cache_clear()
    assert isinstance(model._weights.head, linear.PlainLinear)
    tokens = tokens_of(8)
    close(compute(model, model.open_row(), tokens), expected_logits(decoder, tokens))


def test_chunks_that_cannot_be_computed_are_refused() -> None:
    _, model = tiny_pair("llama")
    row = model.open_row()
    compute(model, row, [1, 2, 3])
    cases = [
        ([RowChunk(row, [1], 2)], "has 3 computed tokens, but its chunk starts at 2"),
        ([RowChunk(row, [], 3)], "is empty"),
        ([RowChunk(row, [61], 3)], r"must be in \[0, 61\)"),
        ([RowChunk(row, [-1], 3)], r"must be in \[0, 61\)"),
        ([RowChunk(row, [1] * 62, 3)], "would be 65 tokens long, but the window is 64"),
        ([RowChunk(row, [1], 3), RowChunk(row, [1], 4)], "only one chunk of each row"),
        ([RowChunk(99, [1], 0)], "row 99 is not open"),
    ]
    for chunks, message in cases:
        with pytest.raises(ValueError, match=message):
            model.forward(chunks)
    with pytest.raises(ValueError, match="cannot be cut to 4"):
        model.truncate_row(row, 4)
    with pytest.raises(ValueError, match="4 cannot be forked"):
        model.fork_row(row, 4)


def test_settings_out_of_range_are_refused() -> None:
    decoder, _ = tiny_pair("llama")
    config, state = decoder.config, decoder.state_dict()
    for settings, message in [
        ({"dtype": "float16"}, "dtype must be"),
        ({"device": "gpu0"}, "device must be 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps', not 'gpu0'"),
        ({"device": "cuda:99"}, "there is no device 'cuda:99' here"),
        ({"max_rows": 0}, "max_rows must be"),
        ({"context_len": 0}, "context_len must be"),
        ({"memory_budget": -1}, "memory_budget must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            NativeModel(config, state, **settings)  # type: ignore[arg-type]
    assert isinstance(config, DecoderConfig)
