"""A longer window: the configuration for it, and whether the model still knows where to stop in there.

A model that was trained on rows of L tokens has never rotated a position beyond L. What becomes of P(stop) at
true ends out there, before and after training on longer rows, is measured on conversations that go on and on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from endstop.models.config import DecoderConfig
from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError
from endstop.protocol.labels import IGNORE, Row
from endstop.train.data.mixture import Finite
from endstop.train.run_directory import write_object

Scaling = Literal["none", "linear", "dynamic", "yarn"]
SCALINGS: tuple[Scaling, ...] = ("none", "linear", "dynamic", "yarn")
RESULTS_FILE = "long_context.json"
_LOGIT_BYTES = 1 << 27


def rope_scaling(
    config: DecoderConfig, length: int, kind: Scaling, factor: float | None = None
) -> dict[str, Any]:
    """The rope parameters of a config.json that stretch a model's window to `length` tokens.

    factor: by default `length` over the model's window, at least 1. Sources: linear arXiv 2306.15595, dynamic
    NTK and YaRN arXiv 2309.00071. Raises ValueError for a factor below 1 or an unknown kind.
    """
    window = trained_window(config)
    stretch = max(1.0, length / window) if factor is None else float(factor)
    if kind not in SCALINGS:
        raise ValueError(f"a rope scaling is one of {', '.join(SCALINGS)}, got {kind!r}")
    if not 1.0 <= stretch < float("inf"):
        raise ValueError(f"the factor of a rope scaling is 1 or more, got {stretch}")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta}
    if kind == "none":
        return parameters
    parameters |= {"rope_type": kind, "factor": stretch}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = window
    return parameters


def trained_window(config: DecoderConfig) -> int:
    """The window before any scaling of the rotary positions, in tokens."""
    if config.rope.type == "linear":
        return round(config.max_position_embeddings / config.rope.factor)
    return config.rope.original_max_position


def extend_context(
    config: DecoderConfig, length: int, kind: Scaling = "yarn", factor: float | None = None
) -> DecoderConfig:
    """The same network with a window of `length` tokens; the weights fit as they are.

    `linear` and `yarn` are for training on longer rows. `dynamic` is for using a model beyond its window
    without training: it changes nothing within the window, so the declared window stays the trained one, as
    transformers reads it, and longer rows are stretched by their own length. `none` only declares the window.
    Raises ValueError as `rope_scaling`, and for a model whose layers have several rotations.
    """
    if config.rope_local is not None:
        raise ValueError(f"the window of a {config.model_type} model cannot be extended: its layers differ")
    if length < 1:
        raise ValueError(f"a window has at least 1 token, got {length}")
    source = {
        name: value for name, value in config.source.items() if name not in ("rope_scaling", "rope_theta")
    }
    source["rope_parameters"] = rope_scaling(config, length, kind, factor)
    source["max_position_embeddings"] = trained_window(config) if kind == "dynamic" else length
    return DecoderConfig.from_hf(source)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions `begin` to `end` (not included) of the rows, counted from the first token.

    Attributes:
        ends: true ends that lie there. p_at_end: mean P(stop) where they stand. greedy: the share of them at
            which the most probable token is a stop. p_before: mean P(stop) at the other supervised positions.
    """

    begin: int
    end: int
    ends: int
    p_at_end: float | None
    greedy: float | None
    p_before: float | None


def long_rows(rows: Iterable[Row], length: int, count: int, bos_id: int | None) -> list[Row]:
    """`count` conversations of exactly `length` tokens: short ones joined, all but the first without BOS.

    Raises EndstopError where the rows do not suffice.
    """
    found: list[Row] = []
    ids: list[int] = []
    labels: list[int] = []
    for row in rows:
        skip = 1 if ids and row.ids and row.ids[0] == bos_id else 0
        ids += row.ids[skip:]
        labels += row.labels[skip:]
        if len(ids) >= length:
            found.append(Row(ids[:length], labels[:length]))
            ids, labels = [], []
            if len(found) == count:
                return found
    raise EndstopError(
        f"the conversations fill only {len(found)} of {count} rows of {length} tokens; give more of them, or "
        "ask for fewer or shorter rows."
    )


def conversation_rows(directory: str | Path, source: Finite[Any]) -> Iterator[Row]:
    """The rows of conversations as the model of a directory writes them, with their labels, one after the
    other."""
    from endstop.protocol.render import ChatRenderer
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.tokenizer import Tokenizer
    from endstop.train.data.messages import training_rows

    tokenizer, stops = Tokenizer.from_pretrained(directory), StopSet.from_pretrained(directory)
    renderer = ChatRenderer(tokenizer, stops=stops)
    for index in range(len(source)):
        yield from training_rows(renderer, source[index]).rows


def measured_length(config: DecoderConfig) -> int:
    """Tokens of a row on which a model is measured unless told otherwise: four times its trained window."""
    return max(config.max_position_embeddings, 4 * trained_window(config))


def stop_by_position(
    decoder: Decoder, rows: Sequence[Row], stop_ids: Iterable[int], width: int
) -> list[Stretch]:
    """How sure the model is of stopping, by where in the row it is, in stretches of `width` tokens."""
    stops = torch.tensor(sorted(set(stop_ids)))
    if not len(stops) or width < 1:
        raise ValueError("stop ids and a width of at least 1 token are needed")
    longest = max((len(row.ids) for row in rows), default=0)
    figures = torch.zeros((longest + width - 1) // width, 5, dtype=torch.float64)
    for row in rows:
        positions, ends, probability, greedy = _row_probabilities(decoder, row, stops)
        at = positions // width
        one = torch.ones_like(probability)
        for column, mask, value in (
            (0, ends, one),
            (1, ends, probability),
            (2, ends, greedy.double()),
            (3, ~ends, one),
            (4, ~ends, probability),
        ):
            figures[:, column].index_add_(0, at[mask], value[mask])
    found = []
    for index, (ends_here, at_end, greedy_here, others, before) in enumerate(figures.tolist()):
        found.append(
            Stretch(
                index * width,
                min((index + 1) * width, longest),
                int(ends_here),
                at_end / ends_here if ends_here else None,
                greedy_here / ends_here if ends_here else None,
                before / others if others else None,
            )
        )
    return found


@torch.no_grad()
def _row_probabilities(decoder: Decoder, row: Row, stops: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each supervised target: its position, whether it is a stop, P(stop), whether a stop is on top."""
    device = decoder.lm_head.weight.device
    ids = torch.tensor(row.ids, device=device)
    labels = torch.tensor(row.labels)[1:]
    at = (labels != IGNORE).nonzero().squeeze(1)
    hidden = decoder.hidden_states(ids[None, :-1])[0, at.to(device)]
    probability, greedy = [torch.empty(0, dtype=torch.float64)], [torch.empty(0, dtype=torch.bool)]
    step = max(1, _LOGIT_BYTES // (4 * decoder.config.vocab_size))
    for begin in range(0, len(hidden), step):
        logits = decoder.logits(hidden[begin : begin + step]).float().cpu()
        probability.append((logits[:, stops].logsumexp(-1) - logits.logsumexp(-1)).exp().double())
        greedy.append(torch.isin(logits.argmax(-1), stops))
    return at + 1, torch.isin(labels[at], stops), torch.cat(probability), torch.cat(greedy)


def compare_scalings(
    directory: str | Path,
    rows: Sequence[Row],
    stop_ids: Iterable[int],
    *,
    scalings: Sequence[Scaling] = (),
    label: str = "as it is",
    width: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """A model on long rows, as it is and with other scalings of its rotary positions, as plain values.

    width: tokens of a stretch, by default a quarter of the trained window. Returns `trained` (the window it
    was trained on), `width`, and `series`: name -> stretches.
    """
    from endstop.models.load import read_config
    from endstop.runtime.llm import available_device
    from endstop.train.starting_point import loaded_model

    directory = Path(directory)
    config = read_config(directory)
    width = width or max(1, trained_window(config) // 4)
    place = available_device(device)
    stops = list(stop_ids)
    longest = max(len(row.ids) for row in rows)
    configs = {label: config}
    for kind in scalings:
        configs[f"{label}, {kind}"] = extend_context(config, longest, kind)
    series = {}
    for name, changed in configs.items():
        decoder = loaded_model(directory, changed).eval().to(place)
        series[name] = [asdict(stretch) for stretch in stop_by_position(decoder, rows, stops, width)]
    return {"trained": trained_window(config), "width": width, "series": series}


def write_results(stage: Path, found: Mapping[str, Any]) -> Path:
    """Put the figures beside a stage's other files, for the report. EndstopError where that fails."""
    path = stage / RESULTS_FILE
    write_object(path, dict(found))
    return path
