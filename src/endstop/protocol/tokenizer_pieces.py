"""The `model` part of a tokenizer.json: its merges, and the same model with other names for pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merges_of(model: Mapping[str, Any]) -> list[list[str]]:
    """The merges as pairs; tokenizers writes them as pairs or, in older files, with a blank between."""
    return [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in model.get("merges") or ()]


def renamed_pieces(model: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The model with pieces renamed, each at its id, and without merges that take or make them."""
    changed = dict(model)
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, Mapping):
        changed["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        changed["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        changed["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        changed["merges"] = [
            pair for pair in merges_of(model) if names.keys().isdisjoint((*pair, "".join(pair)))
        ]
    return changed
