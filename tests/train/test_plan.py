"""The plan: parameters, FLOPs, hours and memory against published runs and against what autograd keeps."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from endstop.cli.app import app
from endstop.cli.train_plan import duration
from endstop.models import gradients, ops
from endstop.models.save import save_pretrained
from endstop.protocol.errors import EndstopError
from endstop.train.hardware import COMMON, DEVICES, machine, this_machine
from endstop.train.model_shapes import llama_config, nanochat_config, new_model
from endstop.train.plan import (
    activation_bytes,
    is_out_of_memory,
    kv_cache_bytes,
    memory,
    memory_explained,
    out_of_memory_sentence,
    plan,
)
from endstop.train.presets import PREDECESSOR, PRESETS, preset
from endstop.train.tables import short

HOUR = 3600.0


def test_d20_is_the_published_model() -> None:
    found = plan(preset("d20"), machine("8xH100"))
    assert found.parameters == {
        "embedding": 83_886_080,
        "layers": 393_216_000,
        "head": 83_886_080,
        "total": 560_988_160,
    }
    base = found.stage("base")
    assert base.steps == 21_400
    assert base.tokens == 21_400 * 524_288
    assert base.flops == pytest.approx(4e19, rel=0.03)


def test_the_published_times_are_met_within_15_percent() -> None:
    """d20: 3 h 51 min without RL; d32: 71,680 steps of 1.572 s and 33 h in all, at 50.9 % MFU."""
    d20 = plan(preset("d20"), machine("8xH100"), rl=False)
    assert d20.seconds == pytest.approx(3 * HOUR + 51 * 60, rel=0.15)
    assert d20.cost == pytest.approx(92, rel=0.15)
    d32 = plan(preset("d32"), machine("8xH100", mfu=0.509), rl=False)
    base = d32.stage("base")
    assert base.steps == pytest.approx(71_680, rel=0.001)
    assert base.flops == pytest.approx(4.54e20, rel=0.01)
    assert base.seconds / 1.12 == pytest.approx(71_680 * 1.572, rel=0.01)
    assert d32.seconds == pytest.approx(33 * HOUR, rel=0.15)
    assert d32.cost == pytest.approx(800, rel=0.15)


def test_time_and_cost_follow_the_hardware() -> None:
    one, eight = (plan(preset("d20"), machine(name), rl=False) for name in ("H100", "8xH100"))
    assert one.stage("base").seconds == pytest.approx(8 * eight.stage("base").seconds)
    assert one.stage("base").cost == pytest.approx(eight.stage("base").cost)
    slow = plan(preset("d20"), machine("8xH100", mfu=0.24), rl=False)
    assert slow.stage("base").seconds == pytest.approx(2 * eight.stage("base").seconds)
    assert plan(preset("d20"), machine("8xH100", price=0.0)).cost == 0.0
    assert plan(preset("tiny"), machine("2xcpu")).cost is None


def test_the_tiny_preset_fits_two_cores_in_20_minutes() -> None:
    found = plan(preset("tiny"), machine("2xcpu"))
    assert found.fits
    assert found.seconds < 20 * 60
    assert 5e5 < found.parameters["total"] < 2e6


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_planned_on_every_machine(name: str) -> None:
    for hardware in COMMON:
        found = plan(preset(name), machine(hardware))
        assert [stage.stage for stage in found.stages] == ["tokenizer", "base", "mid", "sft", "rl"]
        assert all(stage.seconds > 0 for stage in found.stages)
        assert json.loads(json.dumps(found.to_json()))["seconds"] == found.seconds


@pytest.mark.parametrize("shape", ["nanochat", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_activations_are_what_autograd_keeps(
    shape: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU: a CPU has backward passes of its own, which keep less, and another attention.
    monkeypatch.setattr(gradients, "by_hand", lambda x: False)
    monkeypatch.setattr(ops, "_plain_is_faster", lambda query: False)

    def kept(layers: int) -> float:
        build = nanochat_config if shape == "nanochat" else llama_config
        model = new_model(build(layers, 512, hidden_size=256, head_dim=64, context=512))
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        storages: dict[int, Any] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage
            return tensor

        narrow = dtype == "bfloat16"
        context = torch.autocast("cpu", dtype=torch.bfloat16) if narrow else contextlib.nullcontext()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), context:
            model.hidden_states(torch.zeros((2, 256), dtype=torch.int64))
        copies = 2 * sum(value.numel() for name, value in model.named_parameters() if "layers" in name)
        return sum(storage.nbytes() for storage in storages.values()) - (copies if narrow else 0)

    build = nanochat_config if shape == "nanochat" else llama_config
    config = build(2, 512, hidden_size=256, head_dim=64, context=512)
    measured = (kept(4) - kept(2)) / (2 * 256)
    assert activation_bytes(config, dtype) == pytest.approx(measured, rel=0.05)


def test_memory_adds_up() -> None:
    wanted = preset("d20")
    config, base = wanted.config(), wanted.base
    found = memory(config, base, micro_rows=16)
    assert found.weights == 6 * 560_988_160
    assert found.gradients == 4 * 560_988_160
    assert found.optimizer == 4 * 393_216_000 + 8 * 2 * 83_886_080
    assert kv_cache_bytes(config, 2) == 2 * 2 * 20 * 1280
    assert found.total == found.weights + found.gradients + found.optimizer + found.activations + found.output
    # Copied models cost the same on every device, sharded ones their part.
    assert memory(config, base, micro_rows=16, world=8) == found
    large = preset("d32").config()
    one, eight = (memory(large, base, micro_rows=8, world=world) for world in (1, 8))
    assert eight.optimizer == one.optimizer / 8
    assert eight.activations == one.activations


def test_rows_are_halved_until_they_fit_and_the_sentence_says_so() -> None:
    found = plan(preset("d20"), machine("4090")).stage("base")
    assert found.fits
    assert found.micro_rows < preset("d20").base.micro_rows
    wanted = preset("d20")
    said = out_of_memory_sentence(wanted.config(), wanted.base, machine("4090"))
    assert f"use --micro-rows {found.micro_rows} " in said
    assert "there are 22.4 GiB" in said
    large = preset("d32")
    assert not plan(large, machine("4090")).fits
    assert "a smaller model" in out_of_memory_sentence(large.config(), large.base, machine("4090"))
    small = preset("tiny")
    assert "something else" in out_of_memory_sentence(small.config(), small.base, machine("2xcpu"))


def test_names_of_machines() -> None:
    assert (machine("8xh100").name, machine("RTX 4090").name, machine("1xH200").name) == (
        "8xH100",
        "RTX 4090",
        "H200",
    )
    assert (machine("8xH100").processes, machine("2xcpu").processes) == (8, 1)
    assert machine("2xcpu").memory == 2 * DEVICES["cpu"].memory
    for name in ("TPU", "0xH100", ""):
        with pytest.raises(ValueError, match="hardware is one of"):
            machine(name)
    with pytest.raises(ValueError, match="mfu must be"):
        machine("H100", mfu=1.2)
    for price in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a price must be 0 or more"):
            machine("H100", price=price)
    assert all(device.price is None or device.price_source for device in DEVICES.values())


def test_a_stage_of_a_preset_takes_changes() -> None:
    wanted = preset("tiny")
    assert wanted.stage("mid").init_from == PREDECESSOR
    changed = wanted.stage("sft", "run/mid/model", steps=10)
    assert (changed.init_from, changed.steps, changed.seconds, changed.tokens) == (
        "run/mid/model",
        10,
        None,
        None,
    )
    assert wanted.with_shape("llama").config().model_type == "llama"
    with pytest.raises(ValueError, match="a preset is one of tiny, d12, d20, d32"):
        preset("d13")


def test_the_verb_shows_the_plan_and_gives_json() -> None:
    run = CliRunner().invoke
    shown = run(app, ["train", "plan", "d20", "--hardware", "8xH100", "--no-rl"])
    assert shown.exit_code == 0
    for words in ("parameters 561.0M", "21,400", "3.92e+19", "$24.00 an hour"):
        assert words in shown.output
    several = json.loads(run(app, ["train", "plan", "tiny", "--json"]).output)
    assert [found["hardware"] for found in several] == list(COMMON)
    assert run(app, ["train", "plan", "d13"]).exit_code == 1
    assert run(app, ["train", "plan", "d12", "--shape", "gpt"]).exit_code == 2


def test_words_for_numbers() -> None:
    assert [short(number) for number in (12, 1200, 5.61e8, 1.12e10, 3e12)] == [
        "12",
        "1.2k",
        "561.0M",
        "11.2B",
        "3.0T",
    ]
    times = [40, 600, 3 * 3600 + 51 * 60, 4 * 86_400, 20 * 365 * 86_400]
    assert [duration(time) for time in times] == ["40 s", "10 min", "3 h 51 min", "4 days", "20 years"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_data_of_every_preset_are_spelled_as_the_command_line_has_them(name: str) -> None:
    from endstop.train.data.shards import SHARD_SETS
    from endstop.train.data_arguments import CHAT_SETS, DataArgument
    from endstop.train.tasks.registry import registry

    for settings in (preset(name).base, preset(name).mid, preset(name).sft):
        assert settings.data
        for argument in map(DataArgument.parse, settings.data):
            assert argument.place in {*registry, *CHAT_SETS, *SHARD_SETS}
            assert argument.count is not None


def test_an_allocation_that_fails_becomes_the_sentence(tmp_path: Path) -> None:
    config = nanochat_config(2, 64, hidden_size=32, head_dim=8)
    save_pretrained(new_model(config), tmp_path / "model")
    settings = preset("tiny").stage("sft", str(tmp_path / "model"))
    words = "sft with 16 rows of 256 tokens at a time needs about"
    with (
        pytest.raises(EndstopError, match=words) as caught,
        memory_explained(settings, tmp_path, "cpu", 2),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="size"), memory_explained(settings, tmp_path, "cpu", 1):
        torch.ones(2) @ torch.ones(3)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert this_machine("cpu").memory == pytest.approx(2 * this_machine("cpu", 2).memory)
