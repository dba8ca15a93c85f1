"""What a training will take, computed before anything runs: parameters, FLOPs, tokens, memory, hours, cost.

Nothing is measured: every assumption is a constant here or in `hardware`, and is named in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from endstop.models.config import DecoderConfig
from endstop.protocol.errors import EndstopError
from endstop.train.hardware import GIB, Machine, this_machine
from endstop.train.model_shapes import flops_per_token, parameter_counts
from endstop.train.presets import Preset, ReinforcementNumbers
from endstop.train.settings import StageSettings

OVERHEAD = 0.12
"""Share of a stage's time that evaluations, samples, checkpoints and the first steps take on top."""
CHARACTERS_PER_SECOND = {"cpu": 6e5, "gpu": 2.8e7}
"""Of training a tokenizer: on two cores, and beside GPUs (nanochat: 2e9 characters in 71 s on 240 cores)."""
PROMPT_TOKENS = 128
"""Assumed length of a prompt in RL."""
DECODE_SECONDS = {"cpu": 0.004, "gpu": 0.010}
"""A decoding step takes at least this long: Python, and on a GPU the launches of its kernels."""
SAMPLE_ROWS, SAMPLE_TOKENS = 64, 512
"""Rows and tokens that are sampled at a time in evaluations, at most."""
USABLE = 0.92
"""Share of a device's memory that a plan may fill: the rest is fragmentation, buffers and the driver."""
SHARD_ABOVE = 1_000_000_000
"""Models with more parameters are sharded over the processes (FSDP2), smaller ones copied (DDP)."""
_LOGIT_BYTES = {"bfloat16": 2**29, "float32": 2**26}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device.

    weights: float32, and the copies in the dtype of the computation. optimizer: Muon's momentum (4 bytes for
    each element of the matrices in the layers) and AdamW's two moments (8 for everything else).
    activations: what the layers keep for the way back. output: the part of the logits that exists at a time,
    with its gradient, and the gradient of the output matrix. sampling: weights and KV cache of the engine
    that samples; it runs while no activations are kept.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    output: float
    sampling: float

    @property
    def total(self) -> float:
        """The most that is in use at a time."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + max(self.activations + self.output, self.sampling)
        )


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage on one machine.

    Attributes:
        tokens: computed tokens, prompts of RL included. steps: optimiser steps. flops: of the training alone.
        micro_rows: rows that a device computes at a time; fewer than the preset's where they would not fit.
        fits: the memory is enough with at least one row. seconds: OVERHEAD included. cost: dollars or None.
    """

    stage: str
    tokens: float
    steps: int
    flops: float
    micro_rows: int
    memory: Memory | None
    fits: bool
    seconds: float
    cost: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole training.

    Attributes:
        parameters: `embedding`, `layers`, `head`, `total`. flops_per_token: in rows of the base stage.
        assumptions: sentences for people.
    """

    preset: str
    machine: Machine
    config: DecoderConfig
    parameters: dict[str, int]
    flops_per_token: float
    stages: tuple[StagePlan, ...]
    assumptions: tuple[str, ...] = field(default=())

    @property
    def flops(self) -> float:
        return sum(stage.flops for stage in self.stages)

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def cost(self) -> float | None:
        """US dollars, None where the machine has no price."""
        costs = [stage.cost for stage in self.stages if stage.cost is not None]
        return sum(costs) if costs else None

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    def stage(self, name: str) -> StagePlan:
        return next(stage for stage in self.stages if stage.stage == name)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a program that reads the plan."""
        return {
            "preset": self.preset,
            "hardware": self.machine.name,
            "mfu": self.machine.device.mfu,
            "price_per_hour": self.machine.price,
            "parameters": self.parameters,
            "flops_per_token": self.flops_per_token,
            "flops": self.flops,
            "seconds": self.seconds,
            "cost": self.cost,
            "fits": self.fits,
            "stages": [_stage_json(stage) for stage in self.stages],
            "assumptions": list(self.assumptions),
        }


def plan(preset: Preset, machine: Machine, *, rl: bool = True) -> Plan:
    """The plan of a preset on a machine, with the RL stage or without it."""
    config = preset.config()
    stages = [_tokenizer(preset, machine)]
    for settings in (preset.base, preset.mid, preset.sft):
        stages.append(_stage(settings, config, machine))
    if rl:
        stages.append(_reinforcement(preset.rl, config, machine))
    return Plan(
        preset.name,
        machine,
        config,
        parameter_counts(config),
        flops_per_token(config, preset.base.row_length),
        tuple(stages),
        _assumptions(machine),
    )


def memory(
    config: DecoderConfig,
    settings: StageSettings,
    *,
    micro_rows: int,
    world: int = 1,
    dtype: str = "bfloat16",
) -> Memory:
    """Bytes on each of `world` devices while a stage trains with `micro_rows` rows at a time.

    dtype: of the computation; weights, gradients and optimiser are float32.
    """
    counts = parameter_counts(config)
    total, matrices = counts["total"], counts["layers"]
    sharded = settings.strategy == "fsdp" or (settings.strategy == "auto" and total > SHARD_ABOVE)
    parts = world if sharded and world > 1 else 1
    narrow = dtype == "bfloat16"
    copies = 2.0 * total if narrow else 0.0
    if parts > 1:
        # Of a sharded model one layer, and embedding and output matrix, are whole at a time.
        whole = counts["embedding"] + counts["head"] + 2 * counts["layers"] / config.num_hidden_layers
        copies = (2.0 if narrow else 4.0) * whole
    head = config.vocab_size * config.hidden_size
    logits = _LOGIT_BYTES[dtype]
    width = 2 if narrow else 4
    return Memory(
        weights=4.0 * total / parts + copies,
        gradients=4.0 * total / parts,
        optimizer=(4.0 * matrices + 8.0 * (total - matrices)) / parts,
        activations=activation_bytes(config, dtype) * micro_rows * settings.row_length,
        output=3.5 * logits
        + 4.0 * head
        + 2.0 * width * micro_rows * settings.row_length * config.hidden_size,
        sampling=4.0 * total + kv_cache_bytes(config) * SAMPLE_ROWS * min(SAMPLE_TOKENS, settings.row_length),
    )


def activation_bytes(config: DecoderConfig, dtype: str = "bfloat16") -> float:
    """Bytes that all layers keep of one token for the way back, without recomputing anything.

    Each element of the residual stream costs 31 bytes a layer in bfloat16 (the stream itself is float32:
    norms, q, k and v before and after the rotation, the attention's output) and 44 in float32; each element
    inside the MLP costs two, or four where it is gated, numbers. Counted from the tensors that autograd keeps
    of this package's decoder as a GPU computes it; a CPU and `torch.compile` keep fewer.
    """
    wide = dtype == "float32"
    stream = 44.0 if wide else 31.0
    inner = (4 if config.gated else 2) * (4.0 if wide else 2.0)
    return config.num_hidden_layers * (stream * config.hidden_size + inner * config.intermediate_size)


def kv_cache_bytes(config: DecoderConfig, width: int = 4) -> float:
    """Bytes of keys and values of one token in all layers, of `width` bytes each."""
    return 2.0 * width * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def fitting_rows(config: DecoderConfig, settings: StageSettings, machine: Machine) -> tuple[int, bool]:
    """Rows that a device computes at a time: the settings' own, halved until they fit, and whether 1 does."""
    rows = min(settings.micro_rows, max(1, settings.rows // machine.processes))
    while True:
        needed = memory(
            config, settings, micro_rows=rows, world=machine.processes, dtype=machine.device.dtype
        ).total
        if needed <= USABLE * machine.memory:
            return rows, True
        if rows == 1:
            return 1, False
        rows //= 2


def out_of_memory_sentence(
    config: DecoderConfig, settings: StageSettings, machine: Machine, micro_rows: int | None = None
) -> str:
    """What to say when a device has run out of memory: how much was needed, for what, and what would fit."""
    asked = micro_rows or settings.micro_rows
    dtype = machine.device.dtype
    needed = memory(config, settings, micro_rows=asked, world=machine.processes, dtype=dtype)
    fixed = needed.weights + needed.gradients + needed.optimizer
    said = (
        f"{settings.stage} with {_rows(asked)} of {settings.row_length} tokens at a time needs about "
        f"{_gib(needed.total)} on each device ({_gib(fixed)} for weights, gradients and optimiser, "
        f"{_gib(needed.activations)} for activations), and there are {_gib(machine.memory)}"
    )
    rows, fits = fitting_rows(config, settings, machine)
    if fits and rows < asked:
        one = memory(config, settings, micro_rows=rows, world=machine.processes, dtype=dtype)
        return f"{said}; use --micro-rows {rows} (about {_gib(one.total)}), which gives the same losses."
    if not fits and machine.processes > 1 and settings.strategy != "fsdp":
        return f"{said}; share the model over the devices with --strategy fsdp, or train a smaller one."
    if not fits:
        return f"{said}; use more devices with --strategy fsdp, shorter rows, or a smaller model."
    return f"{said}; something else holds memory: end it, or use fewer --micro-rows."


@contextmanager
def memory_explained(settings: StageSettings, run: Path, device: str, processes: int) -> Iterator[None]:
    """Turn an error of memory inside into `out_of_memory_sentence`, as EndstopError; others pass.

    device: "cpu" or "cuda", on which this stage runs in so many processes.
    """
    from endstop.models.load import read_config
    from endstop.protocol.tokenizer import Tokenizer

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if settings.model is not None:
            config = settings.model.config(Tokenizer.from_pretrained(run / "tokenizer").vocab_size)
        else:
            config = read_config(settings.init_from or "")
        here = this_machine(device, processes)
        raise EndstopError(out_of_memory_sentence(config, settings, here)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python or torch means that memory was not enough, on any device."""
    said = str(error)
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, RuntimeError) and ("out of memory" in said or "not enough memory" in said))
        or "can't allocate memory" in said
    )


def _tokenizer(preset: Preset, machine: Machine) -> StagePlan:
    seconds = preset.tokenizer_characters / CHARACTERS_PER_SECOND[_kind(machine)]
    return StagePlan("tokenizer", 0, 0, 0.0, 0, None, True, seconds, _cost(seconds, machine))


def _stage(settings: StageSettings, config: DecoderConfig, machine: Machine) -> StagePlan:
    per_token = flops_per_token(config, settings.row_length)
    rate = machine.count * machine.device.peak * machine.device.mfu / per_token
    if settings.seconds is not None:
        seconds = float(settings.seconds)
        steps = max(1, round(seconds / (1 + OVERHEAD) * rate / settings.batch_tokens))
    else:
        assert settings.fixed_steps is not None
        steps = settings.fixed_steps
        seconds = steps * settings.batch_tokens / rate * (1 + OVERHEAD)
    tokens = float(steps * settings.batch_tokens)
    rows, fits = fitting_rows(config, settings, machine)
    needed = memory(config, settings, micro_rows=rows, world=machine.processes, dtype=machine.device.dtype)
    cost = _cost(seconds, machine)
    return StagePlan(settings.stage, tokens, steps, tokens * per_token, rows, needed, fits, seconds, cost)


def _reinforcement(numbers: ReinforcementNumbers, config: DecoderConfig, machine: Machine) -> StagePlan:
    """Sampling step by step, bound by reading the weights, then one training step on what was sampled."""
    length = PROMPT_TOKENS + numbers.max_tokens
    answers = numbers.questions * numbers.samples
    tokens = float(numbers.steps * answers * length)
    flops = tokens * flops_per_token(config, length)
    total = parameter_counts(config)["total"]
    rows = -(-answers // machine.processes)
    turns = -(-rows // SAMPLE_ROWS)
    # Reading float32 weights, and two operations for each parameter and row.
    step = max(
        4.0 * total / machine.device.bandwidth,
        2.0 * total * min(rows, SAMPLE_ROWS) / (machine.device.peak * machine.device.mfu),
        DECODE_SECONDS[_kind(machine)],
    )
    sampling = numbers.steps * turns * numbers.max_tokens * step
    training = flops / (machine.count * machine.device.peak * machine.device.mfu)
    seconds = (sampling + training) * (1 + OVERHEAD)
    settings = StageSettings(
        "sft",
        init_from="rl",
        row_length=length,
        batch_tokens=answers * length,
        micro_rows=8,
        steps=numbers.steps,
    )
    micro_rows, fits = fitting_rows(config, settings, machine)
    needed = memory(
        config, settings, micro_rows=micro_rows, world=machine.processes, dtype=machine.device.dtype
    )
    return StagePlan(
        "rl", tokens, numbers.steps, flops, micro_rows, needed, fits, seconds, _cost(seconds, machine)
    )


def _cost(seconds: float, machine: Machine) -> float | None:
    return None if machine.price is None else seconds / 3600 * machine.price


def _assumptions(machine: Machine) -> tuple[str, ...]:
    device = machine.device
    said = [
        f"MFU {device.mfu:.0%} of {device.peak / 1e12:.4g} TFLOP/s in {device.dtype} for each device "
        f"({device.mfu_source}).",
        f"{OVERHEAD:.0%} on top for evaluations, samples, checkpoints and the first steps.",
        "FLOPs of a token: 6 for an element of a matrix, 12 x heads x head size x row length for a layer.",
        "Memory: weights, gradients, optimiser in float32; activations neither recomputed nor compiled away.",
    ]
    if device.price is not None:
        said.append(f"${machine.price:.2f} an hour ({device.price_source}).")
    return tuple(said)


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: getattr(stage, name)
        for name in ("stage", "tokens", "steps", "flops", "micro_rows", "fits", "seconds", "cost")
    }
    if stage.memory is not None:
        names = ("weights", "gradients", "optimizer", "activations", "output", "sampling", "total")
        found["memory"] = {name: getattr(stage.memory, name) for name in names}
    return found


def _kind(machine: Machine) -> str:
    return "cpu" if machine.device.name == "cpu" else "gpu"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
