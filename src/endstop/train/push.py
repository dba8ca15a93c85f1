"""Putting a trained model on the Hugging Face Hub: its directory and a model card, in one commit.

What is pushed is a list of known files; what may not leave the machine (training state) or could run code at
the other end (pickles) is refused. Only huggingface_hub speaks to the network.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from endstop.protocol.errors import BrokenModel, EndstopError, UnsupportedModel
from endstop.train.model_card import model_card

_KNOWN = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors"),
    *("model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *(
        "added_tokens.json",
        "chat_template.jinja",
        "tokenizer.model",
        "*.gguf",
        "LICENSE*",
        "LICENCE*",
        "NOTICE*",
    ),
)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.distcp", "*.metadata")
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class PushFile:
    """A file of the commit: its name there, its size in bytes, and where it lies (None: made here)."""

    name: str
    size: int
    path: Path | None


@dataclass(frozen=True)
class Pushable:
    """What a push would send.

    Attributes:
        files: in the order of their names. card: the model card's text. left_out: files that stay here.
    """

    directory: Path
    files: tuple[PushFile, ...]
    card: str
    left_out: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def pushable(directory: str | Path, repository: str, *, licence: str | None = None) -> Pushable:
    """Look a model directory over and write its card (a README.md that lies there is taken as it is).

    Raises BrokenModel or UnsupportedModel for a directory that is not whole, and EndstopError for one with
    pickles or training state in it, or a name that the Hub would not take.
    """
    from endstop.models.load import check_stored, read_config, stored_tensors

    directory = Path(directory)
    _check_name(repository)
    if not directory.is_dir():
        raise EndstopError(f"{directory} is no directory; name the model's, as RUN/sft/model.")
    if (directory / "training").exists():
        raise EndstopError(
            f"{directory} is a checkpoint: training/ holds the state of its training, which is nothing for "
            f"the Hub. Push the finished model ({directory.parent.parent / 'model'}), or a copy without it."
        )
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    for name in names:
        if any(fnmatch.fnmatch(name.rpartition("/")[2].lower(), pattern) for pattern in _PICKLED):
            raise UnsupportedModel(
                f"{directory / name} may be a pickle, which can run code where it is loaded; remove it and "
                "push again."
            )
    config = read_config(directory)
    check_stored(stored_tensors(directory), config, directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if not (directory / name).is_file():
            raise BrokenModel(f"{directory} lacks {name}, without which others would not stop it rightly.")
    known = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in _KNOWN)]
    written = directory / CARD
    try:
        card = written.read_text(encoding="utf-8") if written.is_file() else None
    except (OSError, ValueError) as error:
        raise EndstopError(f"{written}, which would be the model card, cannot be read: {error}.") from error
    if card is None:
        card = model_card(directory, repository, licence=licence)
    files = [PushFile(name, (directory / name).stat().st_size, directory / name) for name in known]
    files.append(PushFile(CARD, len(card.encode()), None))
    left_out = tuple(name for name in names if name not in known and name != CARD)
    return Pushable(directory, tuple(sorted(files, key=lambda file: file.name)), card, left_out)


def push(found: Pushable, repository: str, *, private: bool = False, message: str | None = None) -> str:
    """Make the repository if it is not there, and send all files in one commit; returns its address.

    The token is HF_TOKEN's or that of `hf auth login`; HF_ENDPOINT names another Hub. Raises EndstopError, as
    one sentence that never holds the token, for everything that the network or the Hub answers.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    token = get_token()
    if not token:
        raise EndstopError(
            "there is no token for the Hub: set HF_TOKEN to one that may write, or use `hf auth login`."
        )
    endpoint = os.environ.get("HF_ENDPOINT") or None
    with _hub_errors(repository, token):
        api = HfApi(endpoint=endpoint, token=token)
        api.create_repo(repository, private=private, exist_ok=True)
        operations = [
            CommitOperationAdd(file.name, str(file.path) if file.path is not None else found.card.encode())
            for file in found.files
        ]
        done = api.create_commit(
            repository, operations, commit_message=message or f"Upload {found.directory.name} with endstop"
        )
    return str(done.commit_url)


def _check_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise EndstopError(f"{repository!r} is no name for a repository: {_line(error)}") from None
    if "/" not in repository:
        raise EndstopError(f"{repository!r} lacks an owner; write it as NAME/{repository}.")


@contextmanager
def _hub_errors(repository: str, token: str) -> Iterator[None]:
    """What the Hub or the network says, as one sentence."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # huggingface_hub's HTTP error derives from the error of the HTTP client it uses, httpx or httpx2.
    network: Any = HfHubHTTPError.__bases__[0]
    try:
        yield
    except OfflineModeIsEnabled:
        raise EndstopError("HF_HUB_OFFLINE is set, so nothing can be pushed; unset it first.") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            said = f"the Hub does not let this token write to {repository}; use one with write access"
        else:
            said = f"the Hub refused {repository} (status {status}): {error.server_message or _line(error)}"
        raise EndstopError(_without(said, token)) from None
    except (network, OSError, RuntimeError, ValueError) as error:
        said = f"the Hub cannot be reached, and no commit was made: {_line(error)}"
        if "xet" in said:
            said = f"{said.rstrip('.')}; if it has no Xet storage, set HF_HUB_DISABLE_XET=1"
        raise EndstopError(_without(said, token)) from None


def _without(said: str, token: str) -> str:
    said = said.replace(token, "<token>")
    return said if said.endswith(".") else f"{said}."


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] or type(error).__name__


def as_json(found: Pushable, repository: str) -> dict[str, Any]:
    """What a push would send, as plain values."""
    return {
        "repository": repository,
        "files": [{"name": file.name, "size": file.size} for file in found.files],
        "size": found.size,
        "left_out": list(found.left_out),
        "card": found.card,
    }
