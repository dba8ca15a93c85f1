"""How well a model knows where to end: on given text (validation) and in what it writes itself (samples).

The loss hardly shows it: one target in a hundred is an ending. So each kind of ending is measured alone: its
probability where it belongs and where it does not, and how often samples end by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from endstop.models.decoder import Decoder
from endstop.protocol.labels import IGNORE, Row
from endstop.train.batch import TokenBatch
from endstop.train.distributed import Process
from endstop.train.objective import LossSums, Objective
from endstop.train.stop_events import EVENTS, StopEvents

if TYPE_CHECKING:
    from pathlib import Path

    from endstop.models.config import DecoderConfig
    from endstop.runtime.engine import Engine

_LOGIT_BYTES = 1 << 27


@dataclass
class EventScores:
    """Probabilities of one kind of ending, collected over supervised positions.

    Attributes:
        at_end: at each true end. margin: there, the ending's logit minus the best other one.
        before: everywhere else. highest_before: the largest between the last end and each true end.
    """

    at_end: list[Tensor] = field(default_factory=list)
    margin: list[Tensor] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)
    highest_before: list[Tensor] = field(default_factory=list)

    def extend(self, other: EventScores) -> None:
        for name in ("at_end", "margin", "before", "highest_before"):
            getattr(self, name).extend(getattr(other, name))

    def metrics(self, event: str) -> dict[str, float]:
        """Means and the AUROC; empty where the event never occurred."""
        ends, margin, before, highest = (
            torch.cat(parts) if parts else torch.empty(0)
            for parts in (self.at_end, self.margin, self.before, self.highest_before)
        )
        if not len(ends):
            return {}
        found = {
            f"p_{event}_at_end": float(ends.mean()),
            f"margin_{event}": float(margin.mean()),
            f"greedy_{event}": float((margin > 0).float().mean()),
        }
        if len(before):
            found[f"p_{event}_before"] = float(before.mean())
            found[f"auroc_{event}"] = auroc(ends, before)
        if len(highest):
            found[f"p_{event}_before_max"] = float(highest.mean())
        return found


def auroc(positives: Tensor, negatives: Tensor) -> float:
    """Probability that a random positive has a higher score than a random negative, ties counting half.

    positives: [P], negatives: [N], both not empty. It is the Mann-Whitney U divided by P * N.
    """
    ordered = negatives.sort().values
    below = torch.searchsorted(ordered, positives, right=False)
    upto = torch.searchsorted(ordered, positives, right=True)
    return float((below + upto).double().mean() / (2 * len(ordered)))


def score(
    decoder: Decoder, batch: TokenBatch, objective: Objective
) -> tuple[LossSums, dict[str, EventScores]]:
    """Losses and probabilities of endings of one micro-batch, in one forward pass without gradients."""
    with torch.no_grad():
        hidden = decoder.hidden_states(batch.input_ids, document_ids=batch.document_ids).flatten(0, 1)
        at = (batch.targets.flatten() != IGNORE).nonzero().squeeze(1)
        targets = batch.targets.flatten()[at]
        groups = {event: objective.events.ids_of(event) for event in EVENTS[1:]}
        nats = torch.empty(len(at), device=hidden.device)
        probabilities = {event: torch.empty_like(nats) for event in groups}
        margins = torch.zeros_like(nats)
        rows = max(1, _LOGIT_BYTES // (4 * decoder.config.vocab_size))
        for begin in range(0, len(at), rows):
            part = slice(begin, begin + rows)
            wanted = targets[part]
            logits = decoder.logits(hidden[at[part]])
            norm = logits.logsumexp(-1)
            nats[part] = norm - logits.gather(1, wanted.unsqueeze(1)).squeeze(1)
            for number, (event, ids) in enumerate(groups.items(), 1):
                if not ids:
                    continue
                probabilities[event][part] = (logits[:, ids].logsumexp(-1) - norm).exp()
                ends = objective.event_of[wanted] == number
                if ends.any():
                    margins[part][ends] = _margin(logits[ends], ids)
        scores: dict[str, EventScores] = {}
        row = torch.div(at, batch.targets.shape[1], rounding_mode="floor")
        for number, (event, ids) in enumerate(groups.items(), 1):
            if ids:
                ends = objective.event_of[targets] == number
                scores[event] = _event_scores(probabilities[event], ends, row, margins)
    return LossSums.of(objective.sums(targets, nats)), scores


def _margin(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Best logit among `ids` minus the best among all others: [N, V] -> [N]."""
    values, places = logits.topk(min(len(ids) + 1, logits.shape[1]))
    own = torch.isin(places, torch.tensor(ids, device=logits.device))
    return logits[:, ids].amax(-1) - values.masked_fill(own, -torch.inf).amax(-1)


def _event_scores(probability: Tensor, ends: Tensor, row: Tensor, margins: Tensor) -> EventScores:
    """Sort out the positions of a batch. A stretch reaches up to an end and never into another row."""
    probability, ends, row, margins = (part.cpu() for part in (probability, ends, row, margins))
    passed = ends.cumsum(0) - ends.long()
    stretch = torch.unique_consecutive(torch.stack([row, passed]), dim=1, return_inverse=True)[1]
    count = int(stretch.max()) + 1 if len(stretch) else 0
    highest = torch.full((count,), -1.0).scatter_reduce(0, stretch[~ends], probability[~ends], "amax")
    closed = torch.zeros(count, dtype=torch.bool)
    closed[stretch[ends]] = True
    return EventScores(
        [probability[ends]], [margins[ends]], [probability[~ends]], [highest[closed & (highest >= 0)]]
    )


def validate(
    decoder: Decoder,
    batches: Sequence[TokenBatch],
    objective: Objective,
    process: Process,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> dict[str, Any]:
    """Loss, bits per byte and stop metrics over batches that are the same in every process.

    The processes share them, and each computes equally many (a sharded model asks for it).
    """
    losses = LossSums()
    scores = {event: EventScores() for event in EVENTS[1:]}
    for first in range(0, len(batches), process.world):
        mine = first + process.rank
        batch = batches[mine if mine < len(batches) else 0].to(process.device)
        with autocast():
            found, stops = score(decoder, batch, objective)
        if mine < len(batches):
            losses = losses + found
            for event, part in stops.items():
                scores[event].extend(part)
    if process.world > 1:
        everyone: list[Any] = [None] * process.world
        torch.distributed.all_gather_object(everyone, (losses, scores))
        losses = sum((theirs for theirs, _ in everyone), LossSums())
        scores = {event: EventScores() for event in EVENTS[1:]}
        for _, theirs in everyone:
            for event, part in theirs.items():
                scores[event].extend(part)
    metrics: dict[str, Any] = losses.metrics()
    for event, part in scores.items():
        metrics |= part.metrics(event)
    return metrics


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt to be continued.

    gold_length: tokens of the right answer, its terminator and what a tool puts into it included.
    """

    prompt: list[int]
    gold_length: int | None = None


def probes_of(
    rows: Iterable[Row],
    events: StopEvents,
    limit: int,
    output_tags: tuple[int, int] | None = None,
    longest: int | None = None,
) -> list[Probe]:
    """The first answers of conversations, as prompts, each up to the first id of the stop set in it.

    output_tags: the ids around a tool's output, where `sampling_engine` has the tool. Without them answers
    that hand over to a tool inside the turn are left out. longest: answers of more tokens are left out, too:
    those for which a sample has no room cannot end by themselves.
    """
    probes: list[Probe] = []
    for row in rows:
        if len(probes) == limit:
            break
        begin = next((at for at, label in enumerate(row.labels) if label != IGNORE), len(row.labels))
        end = _answer_end(row, begin, events, output_tags)
        if begin and end is not None and (longest is None or end - begin <= longest):
            probes.append(Probe(row.ids[:begin], end - begin))
    return probes


def _answer_end(row: Row, begin: int, events: StopEvents, output_tags: tuple[int, int] | None) -> int | None:
    """Behind the stop that ends the answer which begins there; None where it has none."""
    forced = False
    for at in range(begin, len(row.ids)):
        token_id = row.ids[at]
        if row.labels[at] != IGNORE:
            if token_id in events.stop_ids:
                return at + 1
        elif output_tags is not None and (forced or token_id == output_tags[0]):
            forced = token_id != output_tags[1]
        else:
            return None
    return None


@dataclass(frozen=True, slots=True)
class Sample:
    """What a model wrote to a prompt.

    Attributes:
        text: visible text. stop_kind: how it ended. stopped: by itself.
        length: generated tokens, the terminator and what a tool put between included.
    """

    text: str
    stop_kind: str
    stopped: bool
    length: int


def draw_samples(
    engine: Engine, probes: Sequence[Probe], max_tokens: int, *, temperature: float = 0.0, seed: int = 0
) -> list[Sample]:
    """One continuation of each prompt, of `max_tokens` at most."""
    from endstop.protocol.params import SamplingParams

    if not probes:
        return []
    # Draws follow from the seed: equal prompts need different ones.
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + number)
        for number in range(len(probes))
    ]
    outputs = [result.outputs[0] for result in engine.generate([p.prompt for p in probes], params)]
    return [
        Sample(output.text, output.stop_kind, output.finish_reason == "stop", len(output.generated_token_ids))
        for output in outputs
    ]


def natural_stops(samples: Sequence[Sample], probes: Sequence[Probe]) -> dict[str, float]:
    """How samples end: the shares that stop by themselves, and where the right length is known those that end
    earlier or later than it."""
    if not samples:
        return {}
    found = {
        "natural_stop_rate": sum(sample.stopped for sample in samples) / len(samples),
        "mean_sample_tokens": sum(sample.length for sample in samples) / len(samples),
    }
    known = [
        (sample.stopped, sample.length, probe.gold_length)
        for sample, probe in zip(samples, probes, strict=True)
        if probe.gold_length is not None
    ]
    if known:
        found["early_stop_rate"] = sum(s and n < gold for s, n, gold in known) / len(known)
        found["late_stop_rate"] = sum(s and n > gold for s, n, gold in known) / len(known)
    return found


def sampling_engine(
    config: DecoderConfig, weights: Mapping[str, Tensor], tokenizer: Path, *, device: str = "cpu"
) -> Engine:
    """An engine over weights in training; `tokenizer` is a directory with the tokenizer's files.

    It has the calculator where the vocabulary has its tags.
    """
    from endstop.runtime.llm import engine_over
    from endstop.runtime.native import NativeModel

    model = NativeModel(config, weights, dtype="float32", device=device, max_rows=64)
    return engine_over(model, tokenizer)
