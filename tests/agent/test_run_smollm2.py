"""A small real model in the loop, on our engine, with tools: it will hardly solve anything, and how each run
ends is the truth about it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest

from endstop.agent.models import open_model
from endstop.agent.run import run_agent
from endstop.agent.settings import ModelSettings, make_settings
from endstop.agent.trajectory import Trajectory
from endstop.outcomes import EXIT_CODES

from . import small_repository as small

SCHEMA = json.loads(files("endstop.agent").joinpath("trajectory.schema.json").read_text())
TASKS = [
    "Make the tests pass without changing them.",
    "Use read_file on src/shelf/stock.py.",
    "Nothing needs to be done. Call submit.",
    "List the files, then say what the project does.",
]


@pytest.fixture(scope="module")
def model():
    sampling = {"temperature": 0.8, "seed": 0}
    opened = open_model(ModelSettings(name="smollm2-135m-instruct", max_tokens=64, sampling=sampling))
    yield opened
    opened.generator.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("task", TASKS)
def test_a_small_model_ends_truthfully(tmp_path, model, task, seed):
    project = small.make(tmp_path / "shelf")
    settings = make_settings(
        {
            "task": {"task": task, "verify": {"command": small.VERIFY}, "bounds": {"steps": 3}},
            "sandbox": {"virtualenv": small.virtualenv()},
            "state": str(tmp_path / "state"),
        }
    )
    seeded = replace(model, params=model.params.replace(seed=100 * seed))
    result = run_agent(settings, project, model=seeded)
    assert result.exit_code == EXIT_CODES[result.outcome]
    assert 1 <= result.steps <= 3
    data = json.loads(result.trajectory.read_text())
    jsonschema.validate(data, SCHEMA)
    assert data["model"]["tool_calls"] == "text"
    # P(stop) is in the record, token by token.
    for turn in Trajectory.load(result.trajectory).turns:
        trace = turn["meta"]["trace"]
        assert len(trace["steps"]) == turn["meta"]["usage"]["completion_tokens"]
        assert all(0 <= step["p_stop"] <= 1 for step in trace["steps"])
    passes = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=project, capture_output=True
    ).returncode
    assert result.outcome != "unverified"
    assert (result.outcome == "verified") <= (passes == 0)
    assert passes == 0 or result.best_verified_tree != result.tree
