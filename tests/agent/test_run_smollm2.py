"""A small real model in the loop, on our engine, with tools: it will hardly solve anything, and how each run
ends is the truth about it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest

from endstop.agent.models import open_model
from endstop.agent.run import run_agent
from endstop.agent.settings import ModelSettings, make_settings
from endstop.agent.trajectory import Trajectory
from endstop.outcomes import EXIT_CODES

SCHEMA = json.loads(files("endstop.agent").joinpath("trajectory.schema.json").read_text())
TASKS = [
    "Make add in calc.py add its arguments.",
    "Use read_file on calc.py.",
    "Nothing needs to be done. Call submit.",
    "List the files, then say what the project does.",
]
# Quick enough for twenty runs: the check is one command, whose exit code is all that is known.
CHECK = {"command": "grep -q 'return a + b' calc.py", "verifier": "command"}


@pytest.fixture(scope="module")
def model():
    sampling = {"temperature": 0.8, "seed": 0}
    opened = open_model(ModelSettings(name="smollm2-135m-instruct", max_tokens=48, sampling=sampling))
    yield opened
    opened.generator.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("task", TASKS)
def test_a_small_model_ends_truthfully(tmp_path, model, task, seed):
    project = tmp_path / "project"
    project.mkdir()
    calc = project / "calc.py"
    calc.write_text("def add(a, b):\n    return a - b\n")
    settings = make_settings(
        {
            "task": {"task": task, "verify": CHECK, "bounds": {"steps": 4}},
            "sandbox": {"virtualenv": "none"},
            "state": str(tmp_path / "state"),
        }
    )
    seeded = replace(model, params=model.params.replace(seed=100 * seed))
    result = run_agent(settings, project, model=seeded)
    assert result.exit_code == EXIT_CODES[result.outcome]
    assert 1 <= result.steps <= 4
    data = json.loads(result.trajectory.read_text())
    jsonschema.validate(data, SCHEMA)
    assert data["model"]["tool_calls"] == "text"
    # P(stop) is in the record, token by token.
    for turn in Trajectory.load(result.trajectory).turns:
        trace = turn["meta"]["trace"]
        assert len(trace["steps"]) == turn["meta"]["usage"]["completion_tokens"]
        assert all(0 <= step["p_stop"] <= 1 for step in trace["steps"])
    # How it ended is the truth: it is never an error, and verified exactly when it is.
    assert result.outcome not in ("error", "unverified", "interrupted")
    done = "return a + b" in calc.read_text()
    assert (result.outcome == "verified") <= done
    assert (result.best_verified_tree == result.tree) <= done
