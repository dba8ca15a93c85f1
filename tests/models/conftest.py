"""Fixtures of the model tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny_models import tiny_transformers_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Write a tiny model of a family with `save_pretrained`; returns (transformers model, directory)."""

    def write(family: str, *, shard: str = "5GB", **options: Any) -> tuple[Any, Path]:
        model = tiny_transformers_model(family, **options)
        directory = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(directory, max_shard_size=shard)
        return model, directory

    return write
