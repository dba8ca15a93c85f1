"""Settings of a run: files, overrides, and what is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from endstop.agent.reading import names_of, read_mapping
from endstop.agent.settings import make_settings, merged, overrides
from endstop.protocol.errors import EndstopError


def test_overrides_are_read_as_yaml_and_merge():
    data = overrides(["task.bounds.steps=7", "model.name=m", "task.allow=[a, b]", "interactive=true"])
    assert data == {
        "task": {"bounds": {"steps": 7}, "allow": ["a", "b"]},
        "model": {"name": "m"},
        "interactive": True,
    }


def test_an_override_keeps_its_neighbours():
    base = {"task": {"task": "x", "bounds": {"steps": 3, "refusals": 2}}}
    settings = make_settings(merged(base, overrides(["task.bounds.steps=9"])))
    assert (settings.task.bounds.steps, settings.task.bounds.refusals) == (9, 2)


def test_a_value_may_hold_an_equals_sign():
    data = overrides(["task.verify.command=pytest -q --maxfail=1"])
    assert data["task"]["verify"]["command"] == "pytest -q --maxfail=1"


@pytest.mark.parametrize("entry", ["steps", "=3", "a..b=3", ".a=1"])
def test_what_is_no_override_is_refused(entry):
    with pytest.raises(EndstopError, match="key=value"):
        overrides([entry])


@pytest.mark.parametrize(
    ("entry", "nearest"),
    [
        ("task.bounds.step=3", "task.bounds.steps"),
        ("task.bound.steps=3", "task.bounds"),
        ("modle.name=x", "model"),
        ("sandbox.netwrok=true", "sandbox.network"),
        ("model.max_token=3", "model.max_tokens"),
        ("tools.oracle.nam=x", "tools.oracle.name"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(entry, nearest):
    with pytest.raises(EndstopError) as refused:
        make_settings(merged({"task": {"task": "x"}}, overrides([entry])), "here")
    key = entry.partition("=")[0]
    # The first part of the path that is unknown is named.
    assert f"; the nearest is {nearest}." in str(refused.value)
    assert any(f"unknown key {key[:end]}" in str(refused.value) for end in range(1, len(key) + 1))


def test_an_unknown_sampling_field_is_refused_with_the_nearest_name():
    with pytest.raises(
        EndstopError, match=r"model\.sampling has no 'temprature'; the nearest is 'temperature'"
    ):
        make_settings({"task": {"task": "x"}, "model": {"sampling": {"temprature": 0}}})


def test_what_is_missing_and_what_is_wrong_is_said():
    with pytest.raises(EndstopError, match=r"the settings: task is missing\."):
        make_settings({})
    with pytest.raises(EndstopError, match=r"task\.bounds\.steps: .*got 0\."):
        make_settings({"task": {"task": "x", "bounds": {"steps": 0}}})


def test_files_in_yaml_json_and_toml(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("task:\n  task: fix it\n  bounds: {steps: 4}\n")
    (tmp_path / "a.json").write_text('{"task": {"task": "fix it", "bounds": {"steps": 4}}}')
    (tmp_path / "a.toml").write_text('[task]\ntask = "fix it"\n[task.bounds]\nsteps = 4\n')
    read = [make_settings(read_mapping(tmp_path / f"a.{ending}")) for ending in ("yaml", "json", "toml")]
    assert read[0] == read[1] == read[2]
    assert read[0].task.bounds.steps == 4


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "a: [", "cannot be read"),
        ("a.toml", "a = ", "cannot be read"),
        ("a.yaml", "- 1\n- 2\n", "must hold a mapping"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(EndstopError, match=says) as refused:
        read_mapping(tmp_path / name)
    assert "\n" not in str(refused.value)
    with pytest.raises(EndstopError, match="cannot be read"):
        read_mapping(tmp_path / "none.yaml")


def test_every_name_is_listed_once():
    from endstop.agent.settings import AgentSettings

    names = names_of(AgentSettings)
    assert len(names) == len(set(names))
    assert {"task.bounds.steps", "model.price.input", "tools.oracle.name", "context.remind_at"} <= set(names)
