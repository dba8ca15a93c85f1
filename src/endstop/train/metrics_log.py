"""metrics.jsonl: one JSON object per line, appended as the run goes; resuming cuts what is repeated."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from endstop.protocol.errors import EndstopError


class MetricsLog:
    """Appends lines; each is in the file when `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Add a line. Numbers that JSON has no word for become null. EndstopError on a full disk."""
        line = {"step": step, "kind": kind, **{name: _finite(value) for name, value in values.items()}}
        try:
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise EndstopError(f"{self.path} cannot be written: {error.strerror or error}.") from error

    def close(self) -> None:
        # What could not be written was said by `write`.
        with suppress(OSError):
            self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; a last one that a crash has cut is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                value = json.loads(text)
            except ValueError:
                continue
            if not isinstance(value, dict):
                continue
            if isinstance(value.get("step"), int) and isinstance(value.get("kind"), str):
                yield value


def cut_metrics(path: Path, step: int) -> None:
    """Forget lines beyond a step, and one that a crash has cut."""
    if not path.exists():
        return
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    partial = path.with_name(f"{path.name}.part")
    try:
        partial.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept), "utf-8")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise EndstopError(f"{path} cannot be written: {error.strerror or error}.") from error


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
