"""State on disk, one process (several: `test_distributed`): exact, quick, refused when it does not fit."""

from __future__ import annotations

import pickle
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError
from endstop.train.optimizer import Optimizers, OptimizerSettings, build_optimizer
from endstop.train.training_state import load_training_state, save_training_state, whole_state_dict
from tests.train.small_models import small_model


def trained(shape: str = "nanochat", steps: int = 2, **options: int) -> tuple[Decoder, Optimizers]:
    model = small_model(shape, **options)
    optimizers = build_optimizer(model, OptimizerSettings())
    for seed in range(steps):
        step_once(model, optimizers, seed)
    return model, optimizers


def step_once(model: Decoder, optimizers: Optimizers, seed: int) -> float:
    ids = torch.randint(0, 61, (4, 13), generator=torch.Generator().manual_seed(seed))
    loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizers.step()
    optimizers.zero_grad()
    return loss.item()


@pytest.mark.parametrize("shape", ["nanochat", "llama", "tied"])
def test_training_goes_on_exactly(tmp_path: Path, shape: str) -> None:
    model, optimizers = trained(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_training_state(tmp_path / "state", model, optimizers)
        expected = [step_once(model, optimizers, seed) for seed in (2, 3, 4)]
        other, fresh = trained(shape, steps=1)
        load_training_state(tmp_path / "state", other, fresh)
    assert [step_once(other, fresh, seed) for seed in (2, 3, 4)] == expected
    for name, value in optimizers.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name


def test_a_million_parameters_are_saved_in_no_time(tmp_path: Path) -> None:
    model, optimizers = trained(steps=1, hidden_size=144, intermediate_size=576)
    seconds = []
    for number in range(3):
        begun = time.perf_counter()
        save_training_state(tmp_path / str(number), model, optimizers)
        seconds.append(time.perf_counter() - begun)
    # Some 20 ms; far more would mean one file or one process for each tensor.
    assert min(seconds) < 0.3


def test_another_shape_is_refused(tmp_path: Path) -> None:
    save_training_state(tmp_path, *trained())
    with pytest.raises(EndstopError, match=r"model\.model\.layers\.0\.mlp\.fc1\.weight has shape \(40, 24\)"):
        load_training_state(tmp_path, *trained(intermediate_size=48))
    with pytest.raises(EndstopError, match=r"has model\.model\.layers\.2\..*, which this model lacks"):
        load_training_state(tmp_path, *trained(num_hidden_layers=2))


def test_what_is_not_there_or_broken_is_named(tmp_path: Path) -> None:
    model, optimizers = trained()
    with pytest.raises(EndstopError, match="nowhere holds no whole training state"):
        load_training_state(tmp_path / "nowhere", model, optimizers)
    save_training_state(tmp_path, model, optimizers)
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(EndstopError, match="is broken"):
        load_training_state(tmp_path, model, optimizers)
    (tmp_path / ".metadata").write_bytes(b"no index")
    with pytest.raises(EndstopError, match="no whole training state"):
        load_training_state(tmp_path, model, optimizers)


class Trap:
    """What an attacker would put into a pickle."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("ran",)


def test_an_index_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizers = trained()
    save_training_state(tmp_path, model, optimizers)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(EndstopError, match=r"index names builtins\.print"):
        load_training_state(tmp_path, model, optimizers)
    assert capsys.readouterr().out == ""


def test_the_whole_state_of_one_process_is_its_models(tmp_path: Path) -> None:
    model, _ = trained("tied")
    whole = whole_state_dict(model)
    assert whole.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(whole[name], value)


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    model, optimizers = trained()
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="could not be written"):
        save_training_state(tmp_path, model, optimizers)
