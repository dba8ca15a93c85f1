"""`endstop train plan`: what a training takes, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import verb

if TYPE_CHECKING:
    from endstop.train.plan import Plan

app = verb_app()


@app.command("plan")
@verb()
def train_plan(
    preset: Annotated[str, typer.Argument(help="tiny, d12, d20 or d32.")],
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="A machine, as H200, 8xH100 or 2xcpu; without it the usual ones."),
    ] = None,
    shape: Annotated[str, typer.Option("--shape", help="nanochat or llama.")] = "nanochat",
    mfu: Annotated[
        float | None, typer.Option("--mfu", help="Share of the peak that training reaches, 0 to 1.")
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", help="Dollars for an hour of the whole machine.")
    ] = None,
    with_rl: Annotated[bool, typer.Option("--rl/--no-rl", help="With the RL stage.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON: a list of machines.")] = False,
) -> None:
    """Show parameters, FLOPs, tokens, memory, hours and cost of a preset. Nothing runs.

    Example: endstop train plan d20 --hardware 8xH100
    """
    from endstop.cli.output import write_json
    from endstop.train.hardware import COMMON, machine
    from endstop.train.plan import plan
    from endstop.train.presets import preset as preset_of

    if shape not in ("nanochat", "llama"):
        raise typer.BadParameter(f"a shape is nanochat or llama, not {shape}", param_hint="--shape")
    wanted = preset_of(preset).with_shape("llama" if shape == "llama" else "nanochat")
    names = (hardware,) if hardware is not None else COMMON
    plans = [plan(wanted, machine(name, mfu=mfu, price=price), rl=with_rl) for name in names]
    if as_json:
        write_json([found.to_json() for found in plans])
        return
    _show(plans, wanted.what)


def _show(plans: list[Plan], what: str) -> None:
    from rich.table import Table

    from endstop.cli.output import console, write_line
    from endstop.train.tables import short

    first = plans[0]
    config, counts = first.config, first.parameters
    write_line(f"{first.preset}: {what}")
    write_line(
        f"{config.model_type}, {config.num_hidden_layers} layers, width {config.hidden_size}, "
        f"{config.num_attention_heads} heads, vocabulary {config.vocab_size}, "
        f"context {config.max_position_embeddings}"
    )
    write_line(
        f"parameters {short(counts['total'])}: embedding {short(counts['embedding'])}, "
        f"layers {short(counts['layers'])}, head {short(counts['head'])}; "
        f"{first.flops_per_token:.3g} FLOPs for each token"
    )
    machines = Table(box=None, pad_edge=False, title=None)
    for name in ("hardware", "hours", "cost", "memory for each", "rows at a time"):
        machines.add_column(name, justify="left" if name == "hardware" else "right")
    for found in plans:
        base = found.stage("base")
        assert base.memory is not None
        machines.add_row(
            found.machine.name,
            duration(found.seconds),
            "-" if found.cost is None else f"${found.cost:,.0f}",
            f"{base.memory.total / 2**30:.1f} of {found.machine.memory / 2**30:.0f} GiB"
            if found.fits
            else f"{base.memory.total / 2**30:.1f} GiB: too small",
            str(base.micro_rows),
        )
    out = console()
    if len(plans) > 1:
        out.print()
        out.print(machines)
        write_line()
        write_line("One of them in detail: --hardware NAME.")
        return
    stages = Table(box=None, pad_edge=False)
    for name in ("stage", "tokens", "steps", "FLOPs", "rows", "memory", "time", "cost"):
        stages.add_column(name, justify="left" if name == "stage" else "right")
    for stage in first.stages:
        stages.add_row(
            stage.stage,
            short(stage.tokens) if stage.tokens else "-",
            f"{stage.steps:,}" if stage.steps else "-",
            f"{stage.flops:.2e}" if stage.flops else "-",
            str(stage.micro_rows) if stage.memory else "-",
            f"{stage.memory.total / 2**30:.1f} GiB" if stage.memory else "-",
            duration(stage.seconds),
            "-" if stage.cost is None else f"${stage.cost:,.2f}",
        )
    stages.add_section()
    total = "-" if first.cost is None else f"${first.cost:,.2f}"
    stages.add_row("all", "", "", f"{first.flops:.2e}", "", "", duration(first.seconds), total)
    out.print()
    out.print(f"on {first.machine.name}")
    out.print(stages)
    _memory(first)
    write_line()
    for sentence in first.assumptions:
        write_line(sentence)
    if not first.fits:
        write_line(f"It does not fit on {first.machine.name}.")


def _memory(found: Plan) -> None:
    """The parts of the base stage's memory, in one line."""
    from endstop.cli.output import write_line

    needed = found.stage("base").memory
    assert needed is not None
    parts = {
        "weights": needed.weights,
        "gradients": needed.gradients,
        "optimiser": needed.optimizer,
        "activations": needed.activations,
        "output": needed.output,
    }
    unit, name_of = (2**30, "GiB") if needed.total > 2**30 else (2**20, "MiB")
    said = ", ".join(f"{name} {size / unit:.1f}" for name, size in parts.items())
    write_line()
    write_line(f"base, {name_of} for each process: {said}; while sampling {needed.sampling / unit:.1f}")


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 51 min`, `12 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 72 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    days = seconds / 86_400
    return f"{days:,.0f} days" if days < 1000 else f"{days / 365:,.0f} years"
