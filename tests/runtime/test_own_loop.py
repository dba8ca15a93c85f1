"""The hand-written loop of examples/own_loop.py, run as people run it, on a model whose output is known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from endstop.testing import cycle_model

ROOT = Path(__file__).parents[2]


def run(path, prompt):
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "own_loop.py", path, prompt],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize(
    ("follow", "prompt", "text", "end"),
    [
        ({" four": "<|im_end|>"}, "A", " one two three four", "[stop, turn_end, 2]"),
        (
            {" three": "E", "E": "N", "N": "D", "D": " five"},
            "A",
            " one two three",
            "[stop, stop_string, 'END']",
        ),
        (
            {" two": "E", "E": "N", "N": " three", " three": "<|im_end|>"},
            "A",
            " one twoEN three",
            "[stop, turn_end, 2]",
        ),
    ],
)
def test_it_stops_exactly(tmp_path, follow, prompt, text, end):
    cycle = cycle_model(tmp_path, follow=follow)
    result = run(cycle.path, prompt)
    assert result.stdout == text
    assert result.stderr.strip().splitlines()[-1] == end


def test_the_loop_is_short():
    lines = (ROOT / "examples" / "own_loop.py").read_text().split('"""')[2].splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith(("import", "from"))]) <= 20
