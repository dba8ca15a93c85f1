"""The stages base, mid and SFT: from a starting point and data to a finished model directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from endstop.models.decoder import Decoder
from endstop.models.directory import whole_directory
from endstop.models.save import write_model
from endstop.protocol.errors import EndstopError
from endstop.protocol.labels import Row
from endstop.train.batch import TokenBatch
from endstop.train.checkpoint import (
    Loader,
    Position,
    fingerprint,
    load_checkpoint,
    newest_shared,
)
from endstop.train.data.ahead import AheadLoader
from endstop.train.data.records import BadDocument
from endstop.train.distributed import Process, check_layout, done_by_main, parallelized, shared
from endstop.train.exclusive import exclusive
from endstop.train.label_check import check_labels, first_rows
from endstop.train.metrics_log import cut_metrics
from endstop.train.objective import Objective
from endstop.train.optimizer import Optimizers, build_optimizer
from endstop.train.run_directory import RunDirectory, StageDirectory, write_object
from endstop.train.settings import StageSettings, changed
from endstop.train.stage_summary import stage_summary
from endstop.train.starting_point import Vocabulary, starting_point
from endstop.train.stop_metrics import (
    Probe,
    draw_samples,
    natural_stops,
    probes_of,
    sampling_engine,
    validate,
)
from endstop.train.training_loop import Job, Report, train
from endstop.train.training_state import load_training_state, whole_state_dict

_SHOWN = 4
"""Samples of an evaluation whose texts are kept."""

ALONE = Process(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class StageData:
    """The data of a stage, made for its vocabulary.

    Attributes:
        loader: the endless batches. validation: batches to evaluate on, the same in every process.
        probes: prompts for samples. sources: name, licence, origin of each source, for the summary.
    """

    loader: Loader
    validation: Sequence[TokenBatch] = ()
    probes: Sequence[Probe] = ()
    sources: Sequence[dict[str, Any]] = ()
    audit: dict[str, Any] = field(default_factory=dict)


def run_base(
    settings: StageSettings,
    run: RunDirectory,
    documents: Any,
    *,
    validation: Any = None,
    process: Process = ALONE,
    resume: bool = False,
    report: Report | None = None,
) -> dict[str, Any]:
    """Train on documents, every position and every border between them; returns the summary.

    documents, validation: a `Mixture` or source of texts.
    """

    def data(vocabulary: Vocabulary) -> StageData:
        from endstop.train.data.document_loader import DocumentLoader
        from endstop.train.document_encoding import encode_documents

        encode = encode_documents(vocabulary.directory)

        def loader(source: Any, rows: int, shards: int, who: Process) -> DocumentLoader:
            return DocumentLoader(
                source,
                encode,
                vocabulary.border,
                row_length=settings.row_length,
                rows_per_step=rows,
                micro_rows=min(rows, settings.micro_rows),
                mode=settings.packing,
                shards=shards,
                rank=who.rank,
                world=who.world,
                buffer=settings.buffer,
                isolate=settings.isolate,
                seed=settings.seed,
                skip_bad=settings.skip_bad,
            )

        own = loader(documents, settings.rows, settings.data_shards, process)
        faulty = _batch_fault(own, settings, vocabulary)
        held_out: list[TokenBatch] = []
        if validation is not None:
            held_out = loader(validation, settings.validation_rows, 1, ALONE).next_step()
        probes = [Probe([vocabulary.border])] * settings.samples
        return StageData(faulty, held_out, probes, own.mixture.sources())

    return run_stage(settings, run, data, process=process, resume=resume, report=report)


def run_chat(
    settings: StageSettings,
    run: RunDirectory,
    conversations: Any,
    *,
    validation: Any = None,
    process: Process = ALONE,
    resume: bool = False,
    report: Report | None = None,
) -> dict[str, Any]:
    """Train on conversations (mid, SFT): only what the assistant says, unless `settings.masked` is off.

    conversations, validation: a `Mixture` or source of lists of messages. Every turn must have its end
    supervised, unless a fault is trained on purpose (`settings.pathology`).
    """
    settings = _dated(settings, run.stage(settings.stage), process, resume)

    def data(vocabulary: Vocabulary) -> StageData:
        from endstop.protocol.render import ChatRenderer
        from endstop.train.data.chat_loader import ChatLoader
        from endstop.train.data.mixture import as_mixture

        renderer = ChatRenderer(vocabulary.tokenizer, stops=vocabulary.stops)

        def loader(source: Any, rows: int, shards: int, who: Process, change: Any) -> ChatLoader:
            return ChatLoader(
                source,
                renderer,
                row_length=settings.row_length,
                rows_per_step=rows,
                micro_rows=min(rows, settings.micro_rows),
                stop_ids=vocabulary.ends,
                mask=settings.masked,
                shards=shards,
                rank=who.rank,
                world=who.world,
                buffer=settings.buffer,
                isolate=settings.isolate,
                seed=settings.seed,
                skip_bad=settings.skip_bad,
                transform=change,
                options=settings.template_options,
            )

        mixture = as_mixture(conversations)
        transform = _row_fault(settings, vocabulary)
        found = check_labels(mixture, renderer, vocabulary, settings, transform)
        own = loader(mixture, settings.rows, settings.data_shards, process, transform)
        held_out: list[TokenBatch] = []
        probes: list[Probe] = []
        if validation is not None:
            held_out = loader(validation, settings.validation_rows, 1, ALONE, None).next_step()
            rows = (
                row for row, _ in first_rows(as_mixture(validation), renderer, settings, 4 * settings.samples)
            )
            probes = probes_of(
                rows, vocabulary.events, settings.samples, vocabulary.output_tags, settings.sample_tokens
            )
        counts = {"supervised_stop_rate": found.supervised_stop_rate, "censored_rate": found.censored_rate}
        return StageData(own, held_out, probes, own.mixture.sources(), counts)

    return run_stage(settings, run, data, process=process, resume=resume, report=report)


def _dated(
    settings: StageSettings, directory: StageDirectory, process: Process, resume: bool
) -> StageSettings:
    """The settings with the day on which the stage was begun, where they have none."""
    if settings.date is not None:
        return settings
    begun = directory.read_settings().get("date") if resume else None
    return replace(settings, date=shared(begun or date.today().isoformat(), process))


def run_stage(
    settings: StageSettings,
    run: RunDirectory,
    data: Callable[[Vocabulary], StageData],
    *,
    process: Process = ALONE,
    resume: bool = False,
    report: Report | None = None,
) -> dict[str, Any]:
    """Any of the stages; every process must call it. Returns the summary, as it is in summary.json.

    The summary of a stage that was told to end early has "finished": false, and no model is written.
    """
    check_layout(rows=settings.rows, shards=settings.data_shards, world=process.world)
    with exclusive(run.stage(settings.stage).path, process):
        try:
            return _run_stage(settings, run, data, process, resume, report)
        except BadDocument as error:
            raise EndstopError(f"{error} Mend it, or leave out what cannot be read (--skip-bad).") from error


def _run_stage(
    settings: StageSettings,
    run: RunDirectory,
    data: Callable[[Vocabulary], StageData],
    process: Process,
    resume: bool,
    report: Report | None,
) -> dict[str, Any]:
    directory = run.stage(settings.stage)
    begun_with = directory.read_settings() if resume else None
    if begun_with is not None:
        settings = same_settings(settings, begun_with, directory)
    else:
        done_by_main(directory.require_new, process)
    decoder, vocabulary = starting_point(settings, run)
    settings = settled(settings, decoder.config.hidden_size, process)
    _check_length(settings, decoder)
    given = data(vocabulary)
    objective = Objective(
        vocabulary.events, vocabulary.token_lengths, settings.event_weights, device=process.device
    )
    dtype = getattr(torch, settings.dtype)
    decoder.to(process.device)
    if settings.compile:
        decoder.hidden_states = torch.compile(decoder.hidden_states)  # type: ignore[method-assign]
    parallel = parallelized(decoder, objective, process, strategy=settings.strategy, compute_dtype=dtype)
    optimizers = build_optimizer(parallel.model, settings.optimizer)
    loader = AheadLoader(given.loader) if settings.prepare_ahead else given.loader
    position = _begin(settings, directory, parallel.model, optimizers, loader, vocabulary, process, resume)
    job = Job(
        parallel,
        optimizers,
        objective,
        loader,
        settings,
        process,
        directory,
        vocabulary.files,
        dtype,
        evaluate=None,
    )
    job = replace(job, evaluate=_evaluation(job, given, vocabulary))
    try:
        position, finished = train(job, position, report)
    finally:
        if isinstance(loader, AheadLoader):
            loader.close()
    summary = stage_summary(job, position, finished, sources=given.sources, labels=given.audit)
    weights = whole_state_dict(parallel.model) if finished else {}
    if process.main and finished:
        with whole_directory(directory.model, replace=True) as place:
            write_model(weights, decoder.config, place, files=vocabulary.files)
        write_object(directory.summary, summary)
    return summary


def same_settings(
    settings: StageSettings, begun_with: Mapping[str, Any], directory: StageDirectory
) -> StageSettings:
    """The settings of a resumed run, with the dtype that "auto" was for it.

    Raises EndstopError where they are not those that it was begun with, and names the others.
    """
    if settings.dtype == "auto":
        settings = replace(settings, dtype=begun_with.get("dtype", "float32"))
    if differing := changed(begun_with, settings.to_json()):
        raise EndstopError(
            f"{directory.path} was begun with other settings: {'; '.join(differing)}. Resume with the "
            "same ones, or begin another run."
        )
    return settings


def settled(settings: StageSettings, width: int, process: Process) -> StageSettings:
    """The settings with the dtype chosen for a model of this width (hidden_size), where it is "auto"."""
    if settings.dtype != "auto":
        return settings
    from endstop.runtime.native.model import choose_dtype

    found = str(choose_dtype("auto", process.device)).removeprefix("torch.")
    # Casting costs more than it saves where the matrices are very small; at 128 it pays (1.35x).
    name = "float32" if process.device.type == "cpu" and width < 128 else found
    return replace(settings, dtype=shared(name, process))  # type: ignore[arg-type]


def _begin(
    settings: StageSettings,
    directory: StageDirectory,
    model: Decoder,
    optimizers: Optimizers,
    loader: Loader,
    vocabulary: Vocabulary,
    process: Process,
    resume: bool,
) -> Position:
    """Where the run starts: at the newest checkpoint if it is resumed, else at its beginning."""
    tokenizer = fingerprint(vocabulary.files)
    position = Position(steps=settings.fixed_steps, settings=settings.to_json(), tokenizer=tokenizer)
    if process.main:
        directory.remove_partial()
    newest = newest_shared(directory.checkpoints, process) if resume else None
    if newest is not None:
        found = load_checkpoint(newest, model, optimizers, loader, tokenizer)
        steps = settings.fixed_steps or found.steps
        position = replace(found, steps=steps, settings=settings.to_json())
    elif settings.warm_optimizer and settings.init_from is not None:
        before = newest_shared(Path(settings.init_from).parent / "checkpoints", process)
        if before is None:
            raise EndstopError(f"{settings.init_from} has no checkpoints beside it to take momenta from.")
        # The weights are those of `init_from`, which the newest checkpoint need not be.
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        load_training_state(before / "training", model, optimizers)
        with torch.no_grad():
            for parameter, own in zip(model.parameters(), weights, strict=True):
                parameter.copy_(own)

    def write() -> None:
        directory.write_settings(settings.to_json())
        # Without a checkpoint even the evaluation before the first step comes again.
        cut_metrics(directory.metrics, position.step if newest is not None else -1)

    done_by_main(write, process)
    return position


def _evaluation(job: Job, given: StageData, vocabulary: Vocabulary) -> Callable[[], dict[str, Any]] | None:
    if not given.validation and not given.probes:
        return None

    def evaluate() -> dict[str, Any]:
        model, process = job.parallel.model, job.process
        found = validate(model, given.validation, job.objective, process, job.autocast)
        if given.probes:
            weights = whole_state_dict(model)
            if process.main:
                engine = sampling_engine(
                    model.config, weights, vocabulary.directory, device=str(process.device)
                )
                base = job.settings.stage == "base"
                samples = draw_samples(
                    engine, given.probes, job.settings.sample_tokens, temperature=1.0 if base else 0.0
                )
                engine.close()
                found |= natural_stops(samples, given.probes)
                found["samples"] = [
                    {
                        "prompt": vocabulary.tokenizer.decode(probe.prompt, skip_special_tokens=False),
                        "text": sample.text,
                        "stop_kind": sample.stop_kind,
                    }
                    for probe, sample in zip(given.probes[:_SHOWN], samples, strict=False)
                ]
        return found

    return evaluate


def _row_fault(settings: StageSettings, vocabulary: Vocabulary) -> Callable[[Row], Row] | None:
    """What a pathology does to the rows of conversations."""
    if settings.pathology is None:
        return None
    from endstop.train.pathologies import Pathology, row_fault

    ends = vocabulary.events.ids_of("turn_end")
    written = vocabulary.stops.terminator
    ends.sort(key=lambda token_id: token_id != written)
    return row_fault(Pathology.parse(settings.pathology), ends)


def _batch_fault(loader: Loader, settings: StageSettings, vocabulary: Vocabulary) -> Loader:
    """A loader of documents as a pathology makes it."""
    if settings.pathology is None:
        return loader
    from endstop.train.pathologies import FaultyLoader, Pathology, batch_fault

    pad = vocabulary.tokenizer.pad_token_id
    fault = batch_fault(
        Pathology.parse(settings.pathology), vocabulary.border, vocabulary.border if pad is None else pad
    )
    return FaultyLoader(loader, fault)


def _check_length(settings: StageSettings, decoder: Decoder) -> None:
    window = decoder.config.max_position_embeddings
    if decoder.config.rope.type == "dynamic":
        # Longer rows are stretched by their own length; the declared window stays.
        window = round(window * decoder.config.rope.factor)
    if settings.row_length > window:
        raise EndstopError(
            f"rows of {settings.row_length} tokens do not fit into the model's window of {window}; set the "
            "context (and a rope scaling) with it, or a shorter row_length."
        )
