"""The tiny preset's data and settings."""

from __future__ import annotations

import re

from endstop.train import presets_tiny
from endstop.train.data_arguments import open_data
from endstop.train.tasks import SYNTHETIC


def test_every_synthetic_task_is_in_the_mixture_and_nothing_that_has_no_end():
    assert set(presets_tiny.WEIGHTS) == {task.name for task in SYNTHETIC}


def test_a_mixture_has_about_as_many_examples_as_asked_for():
    counts = {name: int(count) for name, count in (item.split("@") for item in presets_tiny.data(10_000))}
    assert abs(sum(counts.values()) - 10_000) < 20
    assert counts["until"] == counts["letters"] == max(counts.values())
    assert "entry" not in counts
    assert any(item.startswith("entry@") for item in presets_tiny.data(10_000, base=True))


def test_stages_open_their_data():
    stages = presets_tiny.stages("RUN/before/model")
    assert list(stages) == ["base", "mid", "sft"]
    assert stages["base"].init_from is None
    assert stages["mid"].init_from == stages["sft"].init_from == "RUN/before/model"
    for name, settings in stages.items():
        kind = "texts" if name == "base" else "conversations"
        split = open_data(settings.data, kind, seed=settings.seed)
        assert len(split.train) == sum(int(re.split("[@*]", item)[1]) for item in settings.data)
        assert split.validation is not None


def test_the_model_has_fewer_than_a_million_parameters():
    config = presets_tiny.MODEL.config(presets_tiny.VOCAB_SIZE)
    layers = config.num_hidden_layers * 12 * config.hidden_size**2
    assert config.num_attention_heads == 4
    assert layers + 2 * config.vocab_size * config.hidden_size == 868_352
