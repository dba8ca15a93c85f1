"""The wheel in an empty environment without torch: what needs no torch works, the rest says what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

OWN_LOOP = """
import sys
from endstop import SamplingParams, StopMachine, StopSet, TokenBytes
stops = StopSet.from_pretrained(sys.argv[1])
pieces = TokenBytes.from_pretrained(sys.argv[1])
machine = StopMachine(stops, SamplingParams(stop=["three"], max_tokens=8), pieces)
text = ""
for token_id in map(int, sys.argv[2].split(",")):
    step = machine.push(token_id)
    text += step.text
    if step.finished:
        break
print([text, step.finish_reason, step.stop_kind, step.stop_reason])
assert "torch" not in sys.modules
"""


def run(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**kept, **(env or {})}, timeout=600
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, ROOT)
    assert built.returncode == 0, built.stderr
    (found,) = place.glob("endstop-*.whl")
    return found


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a new environment with the wheel and its dependencies, and nothing else."""
    place = tmp_path_factory.mktemp("environment")
    made = run(sys.executable, "-m", "venv", place)
    assert made.returncode == 0, made.stderr
    installed = run(place / "bin" / "python", "-m", "pip", "install", "--quiet", wheel)
    assert installed.returncode == 0, installed.stderr
    return place / "bin"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from endstop.testing.cycle import cycle_model

    return cycle_model(tmp_path_factory.mktemp("cycle"), follow={" three": "<|im_end|>"}).path


def test_the_wheel_holds_all_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as bundle:
        names = bundle.namelist()
    for name in ("endstop/py.typed", "endstop/view/page.css", "endstop/view/page.js"):
        assert name in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


def test_the_environment_has_no_torch(binaries: Path) -> None:
    assert run(binaries / "python", "-c", "import torch").returncode == 1
    assert run(binaries / "python", "-c", "import transformers").returncode == 1


def test_a_loop_of_ones_own(binaries: Path, model: Path) -> None:
    ids = json.loads(run(binaries / "endstop", "tokenize", model, " one", "--json").stdout)["ids"]
    following = ",".join(str(ids[0] + i) for i in range(3))
    result = run(binaries / "python", "-c", OWN_LOOP, model, following)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[' one two ', 'stop', 'stop_string', 'three']"


def test_stops_and_render(binaries: Path, model: Path) -> None:
    found = json.loads(run(binaries / "endstop", "stops", model, "--json").stdout)
    assert [(stop["id"], stop["role"]) for stop in found["stops"]] == [(2, "turn_end")]
    rendered = json.loads(run(binaries / "endstop", "render", model, "-m", "user:Hi", "--json").stdout)
    assert rendered["text"] == "<|im_start|>user\nHi<|im_end|>\n"


def test_env_and_what_needs_torch(binaries: Path, model: Path) -> None:
    facts = json.loads(run(binaries / "endstop", "env", "--json").stdout)
    assert facts["packages"]["torch"] == "missing"
    assert facts["torch"]["usable"].startswith("no, ModuleNotFoundError")
    result = run(binaries / "endstop", "chat", model, "-p", "Hi")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "endstop: This verb runs a model and needs torch: pip install 'endstop[torch]'.\n"
