"""Model directories that appear whole or not at all: written beside their place, then renamed. No torch."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from endstop.protocol.errors import EndstopError


@contextmanager
def whole_directory(target: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """A directory to fill, beside `target`; it becomes `target` if the block ends well, and vanishes if not.

    With `replace` an existing target is exchanged; otherwise FileExistsError is raised before anything is
    written. An OSError inside (a full disk) becomes one sentence, as EndstopError.
    """
    target = Path(target)
    if target.exists() and not replace:
        raise FileExistsError(f"{target} exists already; choose another place or ask for it to be replaced")
    if target.exists() and not target.is_dir():
        raise EndstopError(f"{target} cannot be written: it is a file, not a folder.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
        partial.mkdir()
    except OSError as error:
        raise EndstopError(f"{target} cannot be written: {error.strerror or error}.") from error
    try:
        yield partial
        if target.exists():
            old = partial.with_suffix(".old")
            os.rename(target, old)
            os.rename(partial, target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(partial, target)
    except OSError as error:
        raise EndstopError(f"{target} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object the way Hugging Face directories have it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
