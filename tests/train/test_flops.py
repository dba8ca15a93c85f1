"""Peaks of hardware, and the operations and parameters of the seeds' d20."""

from __future__ import annotations

import pytest
import torch

from endstop.train.flops import HARDWARE, known_hardware, measured_flops, peak_flops, utilisation
from endstop.train.model_shapes import flops_per_token, nanochat_config, parameter_counts


@pytest.mark.parametrize(
    ("name", "flops", "gigabytes"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 80),
        ("NVIDIA H100 PCIe", 756e12, 80),
        ("h200", 989e12, 141),
        ("NVIDIA GH200 480GB", 989e12, 96),
        ("NVIDIA A100-SXM4-40GB", 312e12, 40),
        ("NVIDIA A100-SXM4-80GB", 312e12, 80),
        ("NVIDIA L40S", 362e12, 48),
        ("NVIDIA L4", 121e12, 24),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 24),
    ],
)
def test_hardware_is_found_by_the_names_of_drivers(name: str, flops: float, gigabytes: int) -> None:
    found = known_hardware(name)
    assert found is not None
    assert (found.flops, found.memory) == (flops, gigabytes * 10**9)


def test_unknown_hardware_is_not_guessed() -> None:
    assert known_hardware("Some CPU") is None


def test_no_entry_hides_a_later_one() -> None:
    assert [known_hardware(entry.name) for entry in HARDWARE] == list(HARDWARE)


def test_the_peak_of_this_machine_is_measured() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < measured_flops(cpu, torch.float32, seconds=0.05) < 1e15
    assert peak_flops(cpu, torch.float32) == peak_flops(cpu, torch.float32)


def test_d20_has_the_published_size_and_cost() -> None:
    # 83.9 + 393.2 + 83.9 M parameters; 4e19 operations for 21,400 steps of 524,288 tokens.
    config = nanochat_config(20, 65_536)
    counts = parameter_counts(config)
    assert counts == {
        "embedding": 83_886_080,
        "layers": 393_216_000,
        "head": 83_886_080,
        "total": 560_988_160,
    }
    per_token = flops_per_token(config, 2048)
    assert per_token == 6 * (393_216_000 + 83_886_080) + 20 * 12 * 10 * 128 * 2048
    assert per_token * 21_400 * 524_288 == pytest.approx(3.9e19, rel=0.01)


def test_utilisation_of_d32s_published_speed() -> None:
    # 1.572 s for a step of 524,288 tokens on 8 H100, printed as 50.9 % (facts of the run of October 2025).
    per_token = flops_per_token(nanochat_config(32, 65_536), 2048)
    assert utilisation(524_288 / 1.572, per_token, 8 * 989e12) == pytest.approx(0.509, abs=0.005)
