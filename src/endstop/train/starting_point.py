"""What a stage begins with: a model in float32, its tokenizer, its stop set and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from endstop.models.config import DecoderConfig
from endstop.models.decoder import Decoder
from endstop.models.gguf import ensure_directory
from endstop.models.load import load_state_dict, read_config
from endstop.protocol.errors import EndstopError
from endstop.protocol.resolve import resolve_model
from endstop.protocol.stopset import StopSet
from endstop.protocol.tokenizer import Tokenizer
from endstop.train.chat_format import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START
from endstop.train.long_context import extend_context, trained_window
from endstop.train.model_shapes import new_model
from endstop.train.run_directory import RunDirectory, tokenizer_files
from endstop.train.settings import StageSettings
from endstop.train.stop_events import EVENTS, StopEvents
from endstop.train.token_lengths import token_lengths


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a model and what training asks of it.

    Attributes:
        directory: where its files are. files: their contents, for the checkpoints.
        events: what each id ends. token_lengths: bytes of each id, 0 for specials.
        border: the id that stands in front of every document in base training.
    """

    directory: Path
    tokenizer: Tokenizer
    stops: StopSet
    events: StopEvents
    token_lengths: list[int]
    border: int
    files: dict[str, bytes]

    @property
    def ends(self) -> frozenset[int]:
        """Ids with which a stretch of the model's own words may end: all ends but that of thinking."""
        return frozenset(i for event in EVENTS[1:4] for i in self.events.ids_of(event))

    @property
    def output_tags(self) -> tuple[int, int] | None:
        """The ids around the in-stream calculator's answers; None for a vocabulary without all its tags."""
        ids = {
            token.content: token_id
            for token_id, token in self.tokenizer.added_tokens.items()
            if token.special
        }
        if not {PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END} <= ids.keys():
            return None
        return ids[OUTPUT_START], ids[OUTPUT_END]

    @classmethod
    def of(cls, directory: Path, rows: int) -> Vocabulary:
        """That of a model directory whose lm_head has so many rows."""
        lengths = token_lengths(directory)
        tokenizer = Tokenizer.from_pretrained(directory)
        if tokenizer.vocab_size > rows:
            raise EndstopError(
                f"the tokenizer of {directory} has {tokenizer.vocab_size} tokens, but the model only "
                f"{rows} rows."
            )
        stops = StopSet.from_pretrained(directory)
        events = StopEvents.of(tokenizer, stops, rows)
        border = tokenizer.bos_token_id
        if border is None:
            border = tokenizer.eos_token_id
        if border is None:
            raise EndstopError(
                f"the tokenizer of {directory} has neither BOS nor EOS to part documents with."
            )
        return cls(directory, tokenizer, stops, events, lengths, border, tokenizer_files(directory))


def starting_point(settings: StageSettings, run: RunDirectory) -> tuple[Decoder, Vocabulary]:
    """The model that a stage begins with, on the CPU, and its vocabulary.

    A new one has the run's tokenizer. Raises EndstopError where a tokenizer or model is missing or broken.
    """
    if settings.model is not None:
        directory = run.require_tokenizer()
        rows = Tokenizer.from_pretrained(directory).vocab_size
        return new_model(settings.model.config(rows), settings.seed), Vocabulary.of(directory, rows)
    assert settings.init_from is not None
    directory = ensure_directory(resolve_model(settings.init_from))
    config = with_window(read_config(directory), settings.context, settings.rope_scaling)
    return loaded_model(directory, config), Vocabulary.of(directory, config.vocab_size)


def loaded_model(directory: Path, config: DecoderConfig) -> Decoder:
    """The weights of a directory in float32, to be trained, with a configuration of the same shapes."""
    import torch

    state = load_state_dict(directory, config=config, dtype="float32")
    with torch.device("meta"):
        model = Decoder(config)
    model.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model


def with_window(
    config: DecoderConfig, context: int | None, rope_scaling: Mapping[str, Any] | None
) -> DecoderConfig:
    """The same model with another window (tokens) or another scaling of its rotary positions.

    rope_scaling: `rope_type`, and `factor` of the window that the model had before any scaling; see
    `long_context.extend_context`. Other keys are as in a config.json. Without `context` the window is the
    factor's. Raises UnsupportedModel, BrokenModel or ValueError for a scaling that is not known.
    """
    if context is None and rope_scaling is None:
        return config
    if rope_scaling is not None and set(rope_scaling) == {"rope_type", "factor"}:
        factor = float(rope_scaling["factor"])
        length = context or max(config.max_position_embeddings, round(trained_window(config) * factor))
        return extend_context(config, length, rope_scaling["rope_type"], factor)
    source = dict(config.source)
    if context is not None:
        source["max_position_embeddings"] = context
    if rope_scaling is not None:
        source.pop("rope_scaling", None)
        source["rope_parameters"] = {
            "rope_theta": config.rope.theta,
            "original_max_position_embeddings": trained_window(config),
            **rope_scaling,
        }
    return DecoderConfig.from_hf(source)
