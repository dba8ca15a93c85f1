from __future__ import annotations

import json
from pathlib import Path

import pytest

from endstop.cli.options import sampling_params
from endstop.cli.settings import SAMPLING_NAMES, resolve
from endstop.protocol.errors import EndstopError
from endstop.protocol.params import FIELD_NAMES, SamplingParams
from tests.cli.conftest import Run


def test_flags_win_over_variables_over_files(tmp_path: Path) -> None:
    (tmp_path / "endstop.toml").write_text('max-tokens = 1\ntop_k = 2\nseed = 3\nstop = ["END"]\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    environment = {"ENDSTOP_TOP_K": "20", "ENDSTOP_SEED": "30", "ENDSTOP_CACHE": "/elsewhere"}
    found = resolve({"seed": 300}, SAMPLING_NAMES, environment, below)
    assert found == {"max_tokens": 1, "top_k": 20, "seed": 300, "stop": ["END"]}


def test_pyproject_is_read_where_it_has_a_table(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.endstop]\ntemperature = 0.5\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert resolve({}, SAMPLING_NAMES, {}, inner) == {"temperature": 0.5}


def test_values_of_variables() -> None:
    environment = {
        "ENDSTOP_STOP": "THE END",
        "ENDSTOP_BAD_WORDS": '["a", "b"]',
        "ENDSTOP_IGNORE_EOS": "true",
        "ENDSTOP_LOGIT_BIAS": '{"5": -1}',
        "ENDSTOP_STOP_SCOPE": "all",
        "ENDSTOP_MAX_TIME": "",
    }
    assert resolve({}, SAMPLING_NAMES, environment, Path("/")) == {
        "stop": "THE END",
        "bad_words": ["a", "b"],
        "ignore_eos": True,
        "logit_bias": {"5": -1},
        "stop_scope": "all",
    }
    with pytest.raises(EndstopError, match="ENDSTOP_SEED is 'seven', which is no number"):
        resolve({}, SAMPLING_NAMES, {"ENDSTOP_SEED": "seven"}, Path("/"))


def test_unknown_keys_and_broken_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "endstop.toml"
    file.write_text("temprature = 1\n")
    with pytest.raises(EndstopError, match="unknown option temprature; known are "):
        resolve({}, SAMPLING_NAMES, {}, tmp_path)
    file.write_text("temperature = = 1\n")
    with pytest.raises(EndstopError, match=r"endstop\.toml cannot be read as TOML"):
        resolve({}, SAMPLING_NAMES, {}, tmp_path)


def test_the_preset_comes_from_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.3, "top_k": 7}')
    assert sampling_params({}, tmp_path) == SamplingParams(temperature=0.3, top_k=7)
    assert sampling_params({"temperature": 0.9}, tmp_path) == SamplingParams(temperature=0.9, top_k=7)
    assert sampling_params({"preset": "plain"}, tmp_path) == SamplingParams()
    with pytest.raises(ValueError, match="--preset must be model or plain"):
        sampling_params({"preset": "best"}, tmp_path)


def test_compound_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"logit_bias": ["5=-1.5", "7=2"], "repetition_detection": "8,2", "preset": "plain"}
    params = sampling_params(given, tmp_path)
    assert params.logit_bias == {5: -1.5, 7: 2.0}
    assert params.repetition_detection is not None
    assert params.repetition_detection.max_pattern_size == 8
    assert params.repetition_detection.min_pattern_size == 2
    for wrong in ("5", "a=1", "5=x"):
        with pytest.raises(ValueError, match="--logit-bias takes ID=BIAS"):
            sampling_params({"logit_bias": [wrong]}, tmp_path)
    for wrong in ("a", "1,2,3,4", ""):
        with pytest.raises(ValueError, match="--repetition-detection takes MAX"):
            sampling_params({"repetition_detection": wrong}, tmp_path)


def test_every_sampling_parameter_has_a_flag() -> None:
    from endstop.cli.options import SAMPLING

    assert set(SAMPLING.annotations) - {"preset"} == FIELD_NAMES - {"trace"}


def test_settings_reach_the_command(endstop: Run, cycle: Path, home: Path) -> None:
    (home / "endstop.toml").write_text("max_tokens = 2\ntemperature = 0.0\n")
    assert endstop("chat", str(cycle), "-p", "Hi").stdout == " one two\n"
    found = endstop("chat", str(cycle), "-p", "Hi", "--json", env={"ENDSTOP_MAX_TOKENS": "3"})
    assert json.loads(found.stdout)["text"] == " one two three"
