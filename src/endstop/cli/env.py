"""`endstop env`: what a bug report needs. It works without torch and names nothing of the person's."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from endstop.cli.app import verb_app
from endstop.cli.verb import verb

app = verb_app()

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "gguf",
    "numpy",
    "jinja2",
    "httpx",
    "typer",
    "rich",
    "matplotlib",
)
# Features that decide which kernels a CPU runs.
_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
    "bf16",
    "asimd",
    "sve",
    "i8mm",
)


@app.command("env")
@verb()
def env(as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False) -> None:
    """Show versions, platform, processor, threads and cache folder, to be pasted into a bug report.

    Example: endstop env --json
    """
    from endstop.cli.output import write_json, write_line

    facts = environment_facts()
    if as_json:
        write_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        write_line(f"{name:<12} {value}")


def environment_facts() -> dict[str, Any]:
    """Everything that `endstop env` shows. The home folder is written as ~, variables only by their names."""
    from endstop import __version__
    from endstop.protocol.cache import cache_root

    home = str(Path.home())
    return {
        "endstop": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "cpu": _cpu(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch": _torch(),
        "cache": str(cache_root()).replace(home, "~", 1),
        "encoding": f"{sys.stdout.encoding}, {sys.getfilesystemencoding()}",
        "variables": sorted(name for name in os.environ if name.startswith(("ENDSTOP_", "HF_"))),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _cpu() -> dict[str, Any]:
    found: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count()}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines: dict[str, str] = {}
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            lines[name.strip()] = value.strip()
        if "model name" in lines:
            found["model"] = lines["model name"]
        flags = set(lines.get("flags", lines.get("Features", "")).split())
        found["features"] = " ".join(feature for feature in _FEATURES if feature in flags)
    return found


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a broken installation is exactly what a bug report is about
        return {"usable": f"no, {type(error).__name__}: {error}"}
    mps = getattr(torch.backends, "mps", None)
    return {
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "no",
        "mps": "yes" if mps is not None and mps.is_available() else "no",
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
