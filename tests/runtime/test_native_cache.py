"""Rows of the native cache: opened, forked, cut, moved and closed in any order, within a budget."""

from __future__ import annotations

import functools
from typing import Any

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


def operations() -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Steps over random subsets of rows, and what happens to rows between steps; numbers are taken modulo."""
    number = st.integers(0, 1000)
    step = st.tuples(
        st.just("step"),
        st.lists(st.tuples(number, st.sampled_from([1, 1, 1, 2, 5, 12])), min_size=1, max_size=6),
    )
    return st.lists(
        st.one_of(
            step,
            step,
            st.tuples(st.just("open"), number),
            st.tuples(st.just("close"), number),
            st.tuples(st.just("fork"), number, number),
            st.tuples(st.just("truncate"), number, number),
        ),
        min_size=3,
        max_size=20,
    )


quick = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
any_operations = given(sequence=operations(), tight=st.booleans(), seed=st.integers(0, 100))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@any_operations
@quick
def test_any_order_of_operations_equals_recomputation(
    family: str, sequence: list[tuple[Any, ...]], tight: bool, seed: int
) -> None:
    run_operations(family, sequence, tight, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@any_operations
@thorough
def test_any_order_of_operations_equals_recomputation_thoroughly(
    family: str, sequence: list[tuple[Any, ...]], tight: bool, seed: int
) -> None:
    run_operations(family, sequence, tight, seed)


def run_operations(family: str, sequence: list[tuple[Any, ...]], tight: bool, seed: int) -> None:
    """`tight` is a budget without room to grow, and segments cut finely."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_WORTH_A_SEGMENT", 8 if tight else 4096)
        check_operations(family, sequence, tight, seed)


def check_operations(family: str, sequence: list[tuple[Any, ...]], tight: bool, seed: int) -> None:
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
    texts: dict[int, list[int]] = {}
    fresh = iter(tokens_of(5000, seed=seed))
    for name, *values in sequence:
        rows = list(texts)
        if name == "open" and len(rows) < 6:
            texts[model.open_row()] = []
        elif name == "step" and rows:
            chunks: dict[int, RowChunk] = {}
            for number, size in values[0]:
                row = rows[number % len(rows)]
                if len(texts[row]) + size <= 64:
                    new = [next(fresh) for _ in range(size)]
                    chunks[row] = RowChunk(row, new, len(texts[row]), "last")
            assert model.fits(
                [
                    len(texts[row]) + len(chunks[row].tokens) if row in chunks else len(texts[row])
                    for row in rows
                ]
            )
            if not chunks:
                continue
            logits = model.forward(list(chunks.values())).logits
            for (row, chunk), actual in zip(chunks.items(), logits, strict=True):
                texts[row] = texts[row] + chunk.tokens
                torch.testing.assert_close(
                    actual, expected_logits(decoder, texts[row])[-1], rtol=1e-4, atol=1e-4
                )
        elif rows and name != "open":
            row = rows[values[0] % len(rows)]
            if name == "close":
                model.close_row(row)
                del texts[row]
                continue
            length = values[1] % (len(texts[row]) + 1)
            if name == "truncate":
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
