"""What the stop machine and its text cost per token, with 0, 4 and 64 stop strings.

    python benchmarks/stop_machine.py [--model smollm2-135m-instruct] [--json FILE]

The rows are real text (Python's own language reference), tokenised by the model's tokenizer. `first`
is a row that meets every token for the first time, `later` one for which the moves are known, as in
a server after its first requests. `build` is compiling the stop strings, `again` the cached one.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import statistics
import time
from pathlib import Path

from endstop import SamplingParams, StopMachine, StopSet, TokenBytes
from endstop.protocol.automaton import compile_stop_strings
from endstop.protocol.tokenizer import Tokenizer

TOKENS = 4000
REPEATS = 9


def stop_strings(count: int) -> list[str]:
    """Strings that resemble what people stop on and often nearly match, but never do."""
    common = ["\n\nUser:", "\n\nQuestion:", "</answer>", "the end of the answer"]
    return (common + [f"the {number} stop string of many\n" for number in range(count)])[:count]


def row_seconds(stops: StopSet, params: SamplingParams, pieces: TokenBytes, ids: list[int]) -> float:
    push = StopMachine(stops, params, pieces).push
    begin = time.perf_counter()
    for token_id in ids:
        push(token_id)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/stop_machine.json"))
    options = parser.parse_args()

    from endstop.protocol.resolve import resolve_model

    path = resolve_model(options.model).path
    text = "\n".join(pydoc_data.topics.topics.values())
    ids = Tokenizer.from_pretrained(path).encode_text(text[: TOKENS * 6])[:TOKENS]
    stops = StopSet.from_pretrained(path)
    table = list(TokenBytes.from_pretrained(path))
    ids = [token_id for token_id in ids if token_id not in stops.ids]

    rows = []
    for count in (0, 4, 64):
        params = SamplingParams(stop=stop_strings(count))
        first, later, build, again = [], [], [], []
        for _ in range(REPEATS):
            # A table of its own has no moves yet, so the first row on it is a cold one.
            pieces = TokenBytes(table)
            first.append(row_seconds(stops, params, pieces, ids))
            later.append(row_seconds(stops, params, pieces, ids))
            compile_stop_strings.cache_clear()
            for times in (build, again):
                begin = time.perf_counter()
                compile_stop_strings(params.stop)
                times.append(time.perf_counter() - begin)
        per_token = 1e6 / len(ids)
        rows.append(
            {
                "stop_strings": count,
                "first_us_per_token": statistics.median(first) * per_token,
                "later_us_per_token": statistics.median(later) * per_token,
                "build_us": statistics.median(build) * 1e6,
                "again_us": statistics.median(again) * 1e6,
            }
        )

    print(f"{len(ids)} tokens, median of {REPEATS} rows, microseconds")
    print(f"{'stops':>6} {'first/token':>12} {'later/token':>12} {'build':>10} {'again':>8}")
    for row in rows:
        print(
            f"{row['stop_strings']:>6} {row['first_us_per_token']:>12.3f} {row['later_us_per_token']:>12.3f}"
            f" {row['build_us']:>10.1f} {row['again_us']:>8.2f}"
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"tokens": len(ids), "repeats": REPEATS, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
