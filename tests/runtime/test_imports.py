"""The engine's core, and scripted ids through it, need no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from endstop import Engine, SamplingParams, StopSet, TokenBytes
from endstop.runtime import chat, generator, llm, async_llm
from endstop.testing import ScriptedModel
engine = Engine(ScriptedModel({(1,): [2, 3]}), StopSet.of({3: "eos"}), TokenBytes([b"a", b"b", b"c"]))
assert engine.generate([1], SamplingParams(logprobs=0, trace=True))[0].outputs[0].text == "c"
heavy = {"torch", "transformers", "numpy", "tokenizers", "jinja2"} & set(sys.modules)
assert not heavy, heavy
"""


def test_the_core_imports_no_torch() -> None:
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
