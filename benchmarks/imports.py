"""How long it takes until endstop is there: its four light names, and `endstop stops` as a whole process.

    python benchmarks/imports.py [--runs 9] [--json FILE]

Limits: importing the four names takes 150 ms more than the bare interpreter and loads no torch or
transformers; the whole process of `endstop stops DIR` 0.5 s, of `endstop stops FILE.gguf` 1 s. Exit code 1
if one is missed. Times are wall-clock, so other work on the machine counts; the column CPU tells how much.
The model is smollm2-135m-instruct, whose GGUF file `endstop pull` fetches; a directory is made out of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODEL = "smollm2-135m-instruct"
NAMES = "from endstop import StopMachine, StopSet, SamplingParams, TokenBytes; StopMachine, StopSet"
HEAVY = "import sys; print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of processes: wall-clock of each, and CPU seconds (user and system) per process."""

    wall: list[float]
    cpu: float

    @property
    def median(self) -> float:
        return statistics.median(self.wall)


def timing(command: list[str], runs: int) -> Timing:
    """Run a command `runs` times, after one run that fills the caches of the disk."""
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, **quiet)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run(command, **quiet)
        wall.append(time.perf_counter() - started)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Timing(wall, cpu / runs)


def small_directory(gguf: Path, place: Path) -> Path:
    """The small files of a model directory out of a GGUF file; `stops` reads no weights."""
    from endstop.protocol.gguf import (
        generation_config_from_gguf,
        read_gguf_metadata,
        tokenizer_config_from_gguf,
        tokenizer_json_from_gguf,
    )

    meta = read_gguf_metadata(gguf)
    content = {
        "config.json": {"model_type": "llama", "vocab_size": len(meta.metadata["tokenizer.ggml.tokens"])},
        "generation_config.json": generation_config_from_gguf(meta),
        "tokenizer_config.json": tokenizer_config_from_gguf(meta),
        "tokenizer.json": tokenizer_json_from_gguf(meta),
    }
    for name, value in content.items():
        (place / name).write_text(json.dumps(value), encoding="utf-8")
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    given = parser.parse_args()
    from endstop.protocol.resolve import resolve_model

    gguf = resolve_model(MODEL).path
    if gguf.is_dir():
        raise SystemExit(f"{MODEL} came as a directory; this benchmark needs its GGUF file")
    python = [sys.executable]
    heavy = subprocess.run([*python, "-c", f"{NAMES}; {HEAVY}"], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as place:
        directory = small_directory(gguf, Path(place))
        bare = timing([*python, "-c", "pass"], given.runs)
        endstop = [*python, "-m", "endstop.cli"]
        rows = [
            ("four names, beyond the interpreter", [*python, "-c", NAMES], 0.150),
            ("endstop --version", [*endstop, "--version"], None),
            ("endstop stops DIR", [*endstop, "stops", str(directory)], 0.5),
            ("endstop stops FILE.gguf", [*endstop, "stops", str(gguf)], 1.0),
        ]
        timings = [timing(command, given.runs) for _, command, _ in rows]
    results = []
    print(f"{'what':<36} {'median':>9} {'fastest':>9} {'CPU':>9} {'limit':>9}  ({given.runs} processes each)")
    for (name, _, limit), found in zip(rows, timings, strict=True):
        less = bare if name.startswith("four") else Timing([0.0], 0.0)
        median, fastest = found.median - less.median, min(found.wall) - min(less.wall)
        cpu = found.cpu - less.cpu
        results.append(
            {"what": name, "median_s": median, "fastest_s": fastest, "cpu_s": cpu, "limit_s": limit}
        )
        numbers = " ".join(f"{1e3 * value:>6.0f} ms" for value in (median, fastest, cpu))
        shown = f"{'':>9}" if limit is None else f"{1e3 * limit:>6.0f} ms"
        print(f"{name:<36} {numbers} {shown}{'  MISSED' if limit is not None and median > limit else ''}")
    loaded = heavy.stdout.strip()
    print(f"heavy modules loaded by the four names: {loaded}")
    if given.json is not None:
        about = {"python": sys.version.split()[0], "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        given.json.write_text(json.dumps({**about, "heavy": loaded, "results": results}, indent=2) + "\n")
    held = all(r["limit_s"] is None or r["median_s"] <= r["limit_s"] for r in results)
    return 0 if held and loaded == "[]" else 1


if __name__ == "__main__":
    raise SystemExit(main())
