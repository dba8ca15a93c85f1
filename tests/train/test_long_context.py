"""Longer windows: transformers reads the configuration alike, and P(stop) is counted where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from endstop.models.config import DecoderConfig
from endstop.models.save import save_pretrained
from endstop.protocol.errors import EndstopError
from endstop.protocol.labels import IGNORE, Row
from endstop.train.long_context import (
    SCALINGS,
    Scaling,
    compare_scalings,
    extend_context,
    long_rows,
    rope_scaling,
    stop_by_position,
    trained_window,
    write_results,
)
from endstop.train.model_shapes import llama_config, nanochat_config, new_model
from endstop.train.starting_point import loaded_model, with_window

WINDOW = 32


def small(shape: str = "nanochat") -> DecoderConfig:
    build = nanochat_config if shape == "nanochat" else llama_config
    return build(2, 64, hidden_size=32, head_dim=8, context=WINDOW)


@pytest.mark.parametrize("shape", ["nanochat", "llama"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_transformers_computes_the_same_past_the_old_window(
    kind: Scaling, shape: str, tmp_path: Path
) -> None:
    config = extend_context(small(shape), 4 * WINDOW, kind)
    model = new_model(config)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3, generator=generator)
    save_pretrained(model, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.randint(0, 64, (1, 4 * WINDOW), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert (model(ids) - theirs(ids).logits).abs().max() < 1e-4
        # The first rows of the window are not changed by what is behind them, but by the scaling they are.
        plain = loaded_model(tmp_path / "model", extend_context(config, 4 * WINDOW, "none"))
        assert ((model(ids) - plain(ids)).abs().max() > 0.01) == (kind != "none")
    assert theirs.config.max_position_embeddings == (WINDOW if kind == "dynamic" else 4 * WINDOW)


@pytest.mark.parametrize("kind", SCALINGS)
def test_the_configuration_round_trips_and_can_be_extended_again(kind: Scaling, tmp_path: Path) -> None:
    config = extend_context(small(), 4 * WINDOW, kind)
    save_pretrained(new_model(config), tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    back = DecoderConfig.from_hf(written)
    assert back.rope == config.rope
    assert back.max_position_embeddings == config.max_position_embeddings
    saved = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    saved.save_pretrained(tmp_path / "theirs")
    assert (
        DecoderConfig.from_hf(json.loads((tmp_path / "theirs" / "config.json").read_text())).rope
        == config.rope
    )
    if kind != "none":
        # A second extension counts from the window of the training, not from the stretched one.
        again = extend_context(back, 8 * WINDOW, "yarn")
        assert (again.rope.factor, again.rope.original_max_position) == (8.0, WINDOW)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_stage_extends_a_window_once_and_again(kind: str) -> None:
    """As `--context 128 --rope-scaling yarn:4` does, and in a later stage 256 and yarn:8."""
    once = with_window(small(), 4 * WINDOW, {"rope_type": kind, "factor": 4.0})
    assert once == extend_context(small(), 4 * WINDOW, kind, 4.0)  # type: ignore[arg-type]
    again = with_window(once, 8 * WINDOW, {"rope_type": kind, "factor": 8.0})
    assert again == extend_context(small(), 8 * WINDOW, kind, 8.0)  # type: ignore[arg-type]
    assert trained_window(again) == WINDOW
    # Without --context the window follows from the factor.
    assert with_window(once, None, {"rope_type": kind, "factor": 8.0}) == again
    # Changed alone, it is only declared.
    assert with_window(once, 5 * WINDOW, None).max_position_embeddings == 5 * WINDOW


def test_within_the_window_dynamic_scaling_changes_nothing() -> None:
    ids = torch.randint(0, 64, (1, WINDOW), generator=torch.Generator().manual_seed(2))
    plain, dynamic = new_model(small()), new_model(extend_context(small(), 4 * WINDOW, "dynamic"))
    with torch.no_grad():
        for model in (plain, dynamic):
            model.lm_head.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
        assert torch.equal(plain(ids), dynamic(ids))


def test_factors() -> None:
    assert rope_scaling(small(), 4 * WINDOW, "linear")["factor"] == 4.0
    assert rope_scaling(small(), WINDOW // 2, "yarn")["factor"] == 1.0
    assert rope_scaling(small(), 4 * WINDOW, "yarn", 6.0)["factor"] == 6.0
    assert rope_scaling(small(), 4 * WINDOW, "none") == {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="1 or more"):
        rope_scaling(small(), 64, "linear", 0.5)
    with pytest.raises(ValueError, match="one of none, linear"):
        rope_scaling(small(), 64, "longrope")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1 token"):
        extend_context(small(), 0)


def test_short_conversations_are_joined_to_long_ones() -> None:
    row = Row([9, 1, 2, 5], [IGNORE, IGNORE, 2, 5])
    (joined,) = long_rows([row] * 9, 9, 1, bos_id=9)
    assert joined.ids == [9, 1, 2, 5, 1, 2, 5, 1, 2]
    assert joined.labels == [IGNORE, IGNORE, 2, 5, IGNORE, 2, 5, IGNORE, 2]
    assert len(long_rows([row] * 9, 9, 3, bos_id=9)) == 3
    with pytest.raises(EndstopError, match="fill only 3 of 4 rows"):
        long_rows([row] * 9, 9, 4, bos_id=9)


def test_probabilities_are_counted_where_they_stand() -> None:
    """Against a slow computation over the whole logits."""
    model = new_model(small())
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(4)
    rows = []
    for _ in range(3):
        ids = torch.randint(0, 64, (21,), generator=generator).tolist()
        labels = [token if index % 3 else IGNORE for index, token in enumerate(ids)]
        ids[7] = labels[7] = ids[17] = labels[17] = 5
        rows.append(Row(ids, labels))
    found = stop_by_position(model, rows, [5, 6], width=8)
    assert [(stretch.begin, stretch.end) for stretch in found] == [(0, 8), (8, 16), (16, 21)]
    for stretch in found:
        at_end: list[float] = []
        before: list[float] = []
        greedy: list[bool] = []
        for row in rows:
            with torch.no_grad():
                probabilities = model(torch.tensor([row.ids]))[0].softmax(-1)
            for position in range(max(1, stretch.begin), stretch.end):
                if row.labels[position] == IGNORE:
                    continue
                own = probabilities[position - 1]
                if row.labels[position] in (5, 6):
                    at_end.append(float(own[[5, 6]].sum()))
                    greedy.append(int(own.argmax()) in (5, 6))
                else:
                    before.append(float(own[[5, 6]].sum()))
        assert stretch.ends == len(at_end)
        if at_end:
            assert stretch.p_at_end == pytest.approx(sum(at_end) / len(at_end), rel=1e-4)
            assert stretch.greedy == pytest.approx(sum(greedy) / len(greedy))
        assert stretch.p_before == pytest.approx(sum(before) / len(before), rel=1e-4)
    empty = Row([1] * 5, [IGNORE] * 5)
    assert stop_by_position(model, [empty], [5], width=8)[0].p_at_end is None


def test_scalings_are_compared_and_written(tmp_path: Path) -> None:
    save_pretrained(new_model(small()), tmp_path / "model")
    row = Row([9, 1, 2, 5], [IGNORE, IGNORE, 2, 5])
    rows = long_rows([row] * 99, 2 * WINDOW, 2, bos_id=9)
    found: dict[str, Any] = compare_scalings(
        tmp_path / "model", rows, [5], scalings=("linear", "yarn"), label="before", width=WINDOW
    )
    assert (found["trained"], list(found["series"])) == (WINDOW, ["before", "before, linear", "before, yarn"])
    # All tokens are as probable in a new model.
    for series in found["series"].values():
        assert [stretch["p_at_end"] for stretch in series] == pytest.approx([1 / 64, 1 / 64])
    path = write_results(tmp_path, found)
    assert json.loads(path.read_text()) == found
