"""Rows of the native cache: opened, forked, cut, moved and closed in any order, within a budget."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from endstop.runtime.native import segments
from endstop.runtime.native.cache import SlotCache, round_up
from endstop.runtime.token_model import RowChunk
from tests.runtime.native_models import compute, expected_logits, tiny_pair, tokens_of

# Bytes of a token in the tiny models' caches: keys and values, 3 layers, 2 heads of 8 float32 elements.
TOKEN_BYTES = 2 * 3 * 2 * 8 * 4

pairs = functools.cache(tiny_pair)


def operations() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """What happens to rows, one after another: a name and two numbers, which are taken modulo what is there.

    A step computes the rows in the bits of its first number; its second says how many tokens each gets.
    """
    names = st.sampled_from(["step", "step", "step", "decode", "decode", "open", "close", "fork", "truncate"])
    return st.lists(st.tuples(names, st.integers(0, 63), st.integers(0, 63)), min_size=12, max_size=30)


quick = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
any_operations = given(sequence=operations(), tight=st.booleans(), seed=st.integers(0, 100))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@any_operations
@quick
def test_any_order_of_operations_equals_recomputation(
    family: str, sequence: list[tuple[str, int, int]], tight: bool, seed: int
) -> None:
    run_operations(family, sequence, tight, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@any_operations
@thorough
def test_any_order_of_operations_equals_recomputation_thoroughly(
    family: str, sequence: list[tuple[str, int, int]], tight: bool, seed: int
) -> None:
    run_operations(family, sequence, tight, seed)


def run_operations(family: str, sequence: list[tuple[str, int, int]], tight: bool, seed: int) -> None:
    """`tight` is a budget without room to grow, and segments cut finely."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_WORTH_A_SEGMENT", 8 if tight else 4096)
        check_operations(family, sequence, tight, seed)


def check_operations(family: str, sequence: list[tuple[str, int, int]], tight: bool, seed: int) -> None:
    decoder, model = pairs(family, max_rows=6)
    model.cache = SlotCache(
        3,
        2,
        8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows=6,
        budget=6 * 64 * TOKEN_BYTES if tight else 1 << 30,
    )
    texts: dict[int, list[int]] = {model.open_row(): [] for _ in range(4)}
    fresh = iter(tokens_of(20_000, seed=seed))
    for name, first, second in sequence:
        rows = list(texts)
        if name == "open" and len(rows) < 6:
            texts[model.open_row()] = []
        elif name in ("step", "decode"):
            chunks = []
            for bit, row in enumerate(rows):
                size = 1 if name == "decode" else (1, 1, 3, 12, 20)[(second + bit) % 5]
                if first & 1 << bit and len(texts[row]) + size <= 64:
                    chunks.append(RowChunk(row, [next(fresh) for _ in range(size)], len(texts[row])))
            grown = {row: len(text) for row, text in texts.items()}
            grown |= {chunk.row: chunk.start + len(chunk.tokens) for chunk in chunks}
            assert model.fits(list(grown.values()))
            logits = model.forward(chunks).logits
            for i, chunk in enumerate(chunks):
                texts[chunk.row] = texts[chunk.row] + chunk.tokens
                expected = expected_logits(decoder, texts[chunk.row])[-1]
                torch.testing.assert_close(logits[i], expected, rtol=1e-4, atol=1e-4)
        elif rows and name != "open":
            row = rows[first % len(rows)]
            length = second % (len(texts[row]) + 1)
            if name == "close":
                model.close_row(row)
                del texts[row]
            elif name == "truncate":
                model.truncate_row(row, length)
                texts[row] = texts[row][:length]
            elif len(rows) < 6:
                texts[model.fork_row(row, length)] = texts[row][:length]
        assert len(model.cache) == len(texts)
        assert model.cache.slots * model.cache.capacity * TOKEN_BYTES <= model.cache.budget


def test_fits_is_exactly_what_forward_can_do() -> None:
    budget = 4 * 32 * TOKEN_BYTES
    decoder, model = tiny_pair("llama", memory_budget=budget, max_rows=5)
    assert model.cache.bytes_per_token == TOKEN_BYTES
    assert [
        model.fits(lengths) for lengths in ([], [0] * 5, [0] * 6, [32] * 4, [32] * 5, [33, 1], [33, 1, 1])
    ] == [
        True,
        True,
        False,
        True,
        False,
        True,
        False,
    ]
    rows = [model.open_row() for _ in range(4)]
    for row in rows:
        compute(model, row, tokens_of(32, seed=row))
    assert (model.cache.slots, model.cache.capacity) == (4, 32)
    with pytest.raises(MemoryError, match="4 rows of up to 33 tokens, but its budget is 49152"):
        compute(model, rows[0], [1], 32)
    model.close_row(rows[1])
    model.close_row(rows[0])
    for row in rows[2:]:
        expected = expected_logits(decoder, [*tokens_of(32, seed=row), 9])[-1:]
        torch.testing.assert_close(compute(model, row, [9], 32), expected, rtol=1e-4, atol=1e-4)
    assert (model.cache.slots, model.cache.capacity) == (2, 64)


def test_storage_shrinks_for_more_and_shorter_rows() -> None:
    _, model = tiny_pair("llama", memory_budget=4 * 32 * TOKEN_BYTES)
    long = model.open_row()
    compute(model, long, tokens_of(60))
    assert model.cache.capacity == 64
    model.truncate_row(long, 10)
    for _ in range(3):
        compute(model, model.open_row(), [1, 2])
    assert (model.cache.slots, model.cache.capacity) == (4, 32)


def test_rows_that_decode_are_neighbours() -> None:
    """Closing and reopening rows in the middle: one segment for all rows that decode, wherever they were."""
    _, model = tiny_pair("llama")
    rows = [model.open_row() for _ in range(6)]
    for row in rows:
        compute(model, row, [1, 2, 3], logits="none")
    model.close_row(rows[1])
    decoding = [rows[5], rows[0], rows[3]]
    model.forward([RowChunk(row, [4], 3) for row in decoding])
    slots = sorted(model.cache.slot(row) for row in decoding)
    assert slots == list(range(slots[0], slots[0] + 3))
    others = {model.cache.slot(row) for row in (rows[2], rows[4])}
    assert len(others) == 2
    assert others.isdisjoint(slots)
    model.forward([RowChunk(row, [4], 4) for row in decoding])
    assert sorted(model.cache.slot(row) for row in decoding) == slots


def test_rows_of_very_different_lengths_attend_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long and short rows, opened in turn: a segment for each kind, and each row's logits as if alone."""
    monkeypatch.setattr(segments, "_WORTH_A_SEGMENT", 100)
    decoder, model = tiny_pair("gemma2", options={"max_position_embeddings": 512})
    texts = [tokens_of(length, seed=length) for length in (300, 5, 270, 40, 7, 333, 3)]
    rows = [model.open_row() for _ in texts]
    model.forward([RowChunk(row, text[:-1], 0, "none") for row, text in zip(rows, texts, strict=True)])
    last = [RowChunk(row, text[-1:], len(text) - 1) for row, text in zip(rows, texts, strict=True)]
    with torch.inference_mode():
        order, found = segments.lay_out(last, model.cache, model.config, model.dtype)
    assert sorted(order) == list(range(7))
    assert sorted((segment.rows, segment.blocks["full"][0].last) for segment in found) == [(3, 352), (4, 64)]
    logits = model.forward(last).logits
    expected = torch.cat([expected_logits(decoder, text)[-1:] for text in texts])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_at_most_max_rows() -> None:
    _, model = tiny_pair("llama", max_rows=2)
    first = model.open_row()
    model.open_row()
    with pytest.raises(ValueError, match="at most 2 rows"):
        model.open_row()
    with pytest.raises(ValueError, match="at most 2 rows"):
        model.fork_row(first, 0)
    model.close_row(first)
    with pytest.raises(ValueError, match=f"row {first} is not open"):
        model.close_row(first)
    model.open_row()


def test_lengths_are_rounded_up_to_steps() -> None:
    assert [round_up(length) for length in (0, 1, 32, 33, 64)] == [32, 32, 32, 64, 64]
