"""Tokens per second of base training beside nanochat's own model code of October 2025, commit c75fe54.

    git clone https://github.com/karpathy/nanochat /tmp/nanochat && git -C /tmp/nanochat checkout c75fe54
    python benchmarks/train_throughput.py --nanochat /tmp/nanochat [--json FILE]

Only `nanochat/gpt.py` of the checkout (and what it imports) is used. Both models have the same shape, weights
and batches, and their losses are compared. One run, interleaved: in each repetition both take the same number
of steps, in an order that rotates. Ours is the path of `endstop train base` with its metrics. A step is
forward, backward, clipping to norm 1 and, in the second row of each case, the optimisers: torch's fused AdamW
and Muon, nanochat's with `torch.optim.Muon`, ours with what `build_optimizer` makes of it. bfloat16 is
autocast over float32 weights in both. Reported are medians of tokens per second, and the median over
repetitions of (nanochat's seconds / endstop's seconds).

    --clock cpu  counts processor seconds instead of seconds on the wall; with --threads 1 that gives sound
                 ratios on a machine that is busy with other things.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import endstop
from endstop.models.decoder import Decoder
from endstop.train.flops import measured_flops, utilisation
from endstop.train.model_shapes import flops_per_token, nanochat_config, new_model
from endstop.train.objective import Objective
from endstop.train.optimizer import OptimizerSettings, build_optimizer
from endstop.train.stop_events import StopEvents

Step = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Case:
    """A shape: rows of `length` tokens, `rows` of them in a batch."""

    depth: int
    width: int
    heads: int
    vocab: int
    length: int
    rows: int

    def __str__(self) -> str:
        return (
            f"depth {self.depth}, width {self.width}, {self.heads} heads, vocabulary {self.vocab}, "
            f"{self.rows} x {self.length} tokens"
        )


CASES = {
    "tiny": Case(depth=4, width=128, heads=4, vocab=512, length=256, rows=16),
    "d4": Case(depth=4, width=256, heads=2, vocab=4096, length=512, rows=8),
}


def computing(dtype: torch.dtype, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def endstop_step(model: Decoder, dtype: torch.dtype, device: torch.device, optimise: bool) -> Step:
    vocab = model.config.vocab_size
    ends = [0] * (vocab - 9) + [1] * 9
    objective = Objective(StopEvents(tuple(ends), frozenset()), [1] * (vocab - 9), device=device)
    optimizers = build_optimizer(model, OptimizerSettings())

    def step(ids: Tensor, targets: Tensor) -> float:
        divisor = objective.weight_sum([targets.cpu()])
        with computing(dtype, device):
            loss, sums = objective(model, ids, targets, None, divisor)
        loss.backward()
        sums.tolist()
        optimizers.clip_gradients()
        if optimise:
            optimizers.step()
        optimizers.zero_grad()
        return loss.item()

    return step


def nanochat_model(path: Path, case: Case, like: Decoder, device: torch.device) -> nn.Module:
    """The checkout's GPT with the weights of our decoder."""
    sys.path.insert(0, str(path))
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    config = GPTConfig(
        sequence_len=case.length,
        vocab_size=case.vocab,
        n_layer=case.depth,
        n_head=case.heads,
        n_kv_head=case.heads,
        n_embd=case.width,
    )
    model: nn.Module = GPT(config)
    names = {
        "self_attn.q_proj": "attn.c_q",
        "self_attn.k_proj": "attn.c_k",
        "self_attn.v_proj": "attn.c_v",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    weights = {}
    for name, value in like.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        name = name.replace("model.layers.", "transformer.h.")
        weights[name.replace("model.embed_tokens", "transformer.wte")] = value.clone()
    model.load_state_dict(weights)
    return model.to(device)


def nanochat_step(model: Any, dtype: torch.dtype, device: torch.device, optimise: bool) -> Step:
    matrices = list(model.transformer.h.parameters())
    scale = (model.config.n_embd / 768) ** -0.5
    groups = [
        {"params": list(model.lm_head.parameters()), "lr": 0.004 * scale},
        {"params": list(model.transformer.wte.parameters()), "lr": 0.2 * scale},
    ]
    optimizers = [
        torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True),
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0),
    ]

    def step(ids: Tensor, targets: Tensor) -> float:
        with computing(dtype, device):
            loss = model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            if optimise:
                optimizer.step()
        model.zero_grad(set_to_none=True)
        return float(loss.item())

    return step


def batches(case: Case, steps: int, seed: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, case.vocab, (steps, case.rows, case.length + 1), generator=generator).to(device)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in ids]


def measure(
    contenders: dict[str, Step], case: Case, device: torch.device, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each contender in each repetition, `options.steps` steps each."""
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for repetition in range(-1, options.repetitions):
        data = batches(case, options.steps, repetition + 1, device)
        losses = {}
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun = clock()
            for ids, targets in data:
                losses[name] = contenders[name](ids, targets)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repetition >= 0:
                seconds[name].append(clock() - begun)
        if max(losses.values()) - min(losses.values()) > options.tolerance:
            raise RuntimeError(f"the models are not the same: losses {losses}")
    return seconds


def run(name: str, dtype: torch.dtype, optimise: bool, options: argparse.Namespace) -> dict[str, Any]:
    case, device = CASES[name], torch.device(options.device)
    head_dim = case.width // case.heads
    config = nanochat_config(
        case.depth, case.vocab, hidden_size=case.width, head_dim=head_dim, context=case.length
    )
    ours = new_model(config, seed=0)
    with torch.no_grad():
        for parameter in ours.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.02)
    ours = ours.to(device)
    contenders = {"endstop": endstop_step(ours, dtype, device, optimise)}
    if options.nanochat is not None:
        theirs = nanochat_model(options.nanochat, case, ours, device)
        contenders["nanochat"] = nanochat_step(theirs, dtype, device, optimise)
    seconds = measure(contenders, case, device, options)
    tokens = case.rows * case.length * options.steps
    peak = measured_flops(device, dtype)
    result: dict[str, Any] = {
        "case": name,
        "shape": str(case),
        "dtype": str(dtype).removeprefix("torch."),
        "optimizer": optimise,
    }
    for contender, times in seconds.items():
        speed = tokens / statistics.median(times)
        result[contender] = {
            "tokens_per_second": round(speed, 1),
            "mfu_of_measured_peak": round(utilisation(speed, flops_per_token(config, case.length), peak), 4),
            "seconds": [round(value, 4) for value in times],
        }
    if "nanochat" in seconds:
        pairs = zip(seconds["nanochat"], seconds["endstop"], strict=True)
        result["endstop_is_faster_by"] = round(statistics.median(a / b for a, b in pairs), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat at c75fe54")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=3, help="steps in a repetition")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tolerance", type=float, default=0.02, help="how far losses may be apart")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/train_throughput.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "steps": options.steps,
        "repetitions": options.repetitions,
        "processor": platform.processor() or platform.machine(),
        "endstop": endstop.__version__,
        "torch": torch.__version__,
        "load_before": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "runs": [],
    }
    print(f"{'case':<6} {'dtype':<9} {'step':<20} {'endstop':>9} {'nanochat':>9}   endstop is faster by")
    for name in options.cases:
        for dtype in options.dtypes:
            for optimise in (False, True):
                result = run(name, getattr(torch, dtype), optimise, options)
                report["runs"].append(result)
                ours, theirs = result["endstop"], result.get("nanochat", {})
                ratio = result.get("endstop_is_faster_by")
                print(
                    f"{name:<6} {dtype:<9} {'with optimisers' if optimise else 'forward and backward':<20} "
                    f"{ours['tokens_per_second']:>9} {theirs.get('tokens_per_second', ''):>9}   "
                    f"{f'{ratio:.2f}x' if ratio else ''}",
                    flush=True,
                )
    report["load_after"] = os.getloadavg() if hasattr(os, "getloadavg") else None
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
