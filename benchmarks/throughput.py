"""Generated tokens per second of endstop's engine beside transformers' `generate` and `generate_batch`.

    python benchmarks/throughput.py [--model smollm2-135m-instruct] [--rows 1 8 32] [--json FILE]

One run, interleaved: in every repetition each contender generates from the same prompts, in an order that
rotates, so that whatever else the machine does meets all of them. Prompts are random ids, new ones for each
repetition (nothing can be reused from an earlier one). All generate greedily, ignore EOS and produce the same
number of tokens; prefill, scheduling and the text (endstop's only) are included, loading is not. A first
repetition warms up and is not counted. Reported are medians; a ratio is the median over repetitions of (their
seconds / endstop's seconds).

    --direct     runs the native model in a bare loop as a further contender: what the engine costs.
    --clock cpu  counts processor seconds of the whole process instead of seconds on the wall; with
                 --threads 1 that gives sound ratios on a machine that is busy with other things.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import endstop
from endstop import LLM, SamplingParams
from endstop.models.gguf import ensure_directory
from endstop.protocol.resolve import resolve_model
from endstop.runtime.native import NativeModel
from endstop.runtime.token_model import RowChunk

Prompts = list[list[int]]
Contender = Callable[[Prompts, int], list[list[int]]]
PEERS = ("generate", "generate_batch")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
BLOCK = 256  # tokens of a block in generate_batch's cache


def engine_contender(llm: LLM) -> Contender:
    def run(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        return [list(result.outputs[0].generated_token_ids) for result in llm.generate(prompts, params)]

    return run


def direct_contender(model: NativeModel) -> Contender:
    def run(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        texts = [list(prompt) for prompt in prompts]
        rows = [model.open_row() for _ in texts]
        done = [0] * len(rows)
        for _ in range(new_tokens):
            chunks = [
                RowChunk(row, text[start:], start) for row, text, start in zip(rows, texts, done, strict=True)
            ]
            done = [len(text) for text in texts]
            for text, token_id in zip(texts, model.forward(chunks).logits.argmax(-1).tolist(), strict=True):
                text.append(token_id)
        for row in rows:
            model.close_row(row)
        return [text[-new_tokens:] for text in texts]

    return run


def generate_contender(model: Any) -> Contender:
    def run(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        # Padding is never used: the prompts are equally long and EOS is off.
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        result: list[list[int]] = generated[:, ids.shape[1] :].tolist()
        return result

    return run


def generate_batch_contender(model: Any) -> Contender:
    def run(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        # The cache is sized for the load, so that making it costs little.
        blocks = len(prompts) * -(-(len(prompts[0]) + new_tokens) // BLOCK) + 1
        outputs = model.generate_batch(
            inputs=prompts,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=BLOCK,
                num_blocks=blocks,
                max_batch_tokens=max(2048, len(prompts)),
                allow_block_sharing=False,
            ),
        )
        return [list(output.generated_tokens) for output in outputs.values()]

    return run


def measure(
    contenders: dict[str, Contender], rows: int, vocab_size: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each contender in each repetition."""
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(-1, options.repetitions):
        generator = torch.Generator().manual_seed(1000 * rows + repetition + 1)
        prompts = torch.randint(0, vocab_size, (rows, options.prompt_tokens), generator=generator).tolist()
        names = list(contenders)
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            begin = clock()
            generated = contenders[name](prompts, options.new_tokens)
            elapsed = clock() - begin
            lengths = {len(ids) for ids in generated}
            if len(generated) != rows or lengths != {options.new_tokens}:
                raise RuntimeError(f"{name} gave {len(generated)} rows of {sorted(lengths)} tokens")
            if repetition >= 0:
                seconds[name].append(elapsed)
    return seconds


def summary(seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, times in seconds.items():
        result[name] = {
            "tokens_per_second": round(tokens / statistics.median(times), 1),
            "best_tokens_per_second": round(tokens / min(times), 1),
            "seconds": [round(value, 4) for value in times],
        }
        if name != "endstop":
            pairs = zip(times, seconds["endstop"], strict=True)
            result[name]["endstop_is_faster_by"] = round(statistics.median(a / b for a, b in pairs), 3)
    return result


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/throughput.json"))
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

    directory = ensure_directory(resolve_model(options.model))
    llm = LLM(directory, dtype=options.dtype, device="cpu", max_rows=max(options.rows))
    native = llm.engine.model
    assert isinstance(native, NativeModel)
    contenders = {"endstop": engine_contender(llm)}
    if options.direct:
        contenders["direct"] = direct_contender(NativeModel.from_pretrained(directory, dtype=options.dtype))
    makers = {"generate": generate_contender, "generate_batch": generate_batch_contender}
    for peer in options.peers:
        # generate_batch changes the model's attention, so each peer has its own.
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=native.dtype)
        contenders[peer] = makers[peer](model.eval())

    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "model": options.model,
        "dtype": DTYPES[native.dtype],
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "repetitions": options.repetitions,
        "processor": processor(),
        "endstop": endstop.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_before": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "rows": {},
    }
    print(
        f"{options.model}, {report['dtype']}, {report['threads']} threads, {options.clock} clock, prompts of "
        f"{options.prompt_tokens}, {options.new_tokens} new tokens, ignore_eos, greedy, median of "
        f"{options.repetitions}"
    )
    print(f"{'rows':>5} {'contender':<16} {'tokens/s':>10} {'best':>10}   endstop is faster by")
    for rows in options.rows:
        seconds = measure(contenders, rows, native.vocab_size, options)
        result = report["rows"][str(rows)] = summary(seconds, rows * options.new_tokens)
        for name, values in result.items():
            ratio = values.get("endstop_is_faster_by")
            speed, best = values["tokens_per_second"], values["best_tokens_per_second"]
            print(
                f"{rows:>5} {name:<16} {speed:>10} {best:>10}   {f'{ratio:.2f}x' if ratio else ''}",
                flush=True,
            )
    assert llm.engine.stats.rows_computed_after_stop == 0
    report["load_after"] = os.getloadavg() if hasattr(os, "getloadavg") else None
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
