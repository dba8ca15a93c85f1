"""What a run of all stages measures of what it has trained: vocabulary, answers, ends in long rows.

Everything lands where the report looks for it, and nothing that is there is measured again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from endstop.train.run_directory import CHAT_EVALUATION, TOKENIZER_EVALUATION, RunDirectory, write_object

if TYPE_CHECKING:
    from endstop.train.data.mixture import Mixture
    from endstop.train.pipeline import Pipeline

Tell = Callable[[float, str], None]
"""Told the share that is done and what there is to say of it."""

_LONG_ROWS = 8
_CHARACTERS = 200_000


def evaluate_vocabulary(pipeline: Pipeline, run: RunDirectory) -> None:
    """Bytes for each token on the built-in samples, and on base data that were trained on and held out.

    GPT-2's and GPT-4's vocabularies stand beside it only where TIKTOKEN_CACHE_DIR has them: a training
    fetches nothing that it was not asked for.
    """
    from endstop.train.data_arguments import open_data
    from endstop.train.tokenizer_evaluation import OTHERS, evaluate_tokenizer, first_characters

    split = open_data(pipeline.preset.base.data, "texts", seed=pipeline.seed)
    samples = {
        name: first_characters(in_order(mixture, pipeline.seed), _CHARACTERS)
        for name, mixture in (("train", split.train), ("validation", split.validation))
        if mixture is not None
    }
    others = OTHERS if os.environ.get("TIKTOKEN_CACHE_DIR") else {}
    found = evaluate_tokenizer(run.tokenizer, samples, others=others)
    write_object(run.tokenizer / TOKENIZER_EVALUATION, found.to_json())


def in_order(mixture: Mixture, seed: int = 0) -> Iterator[str]:
    """The documents of one epoch of a mixture of texts, those that can be read."""
    from endstop.train.data.sources import BadDocument

    order = mixture.order(seed)
    for place in range(len(mixture)):
        try:
            yield mixture.item(order[place])
        except BadDocument:
            continue


def ask_questions(pipeline: Pipeline, run: RunDirectory, tell: Tell) -> None:
    """Ask every model that has learned to answer; a smaller sample where it is not the one to be used."""
    from endstop.runtime.llm import load_engine
    from endstop.train.data_arguments import local_folder
    from endstop.train.evaluation.chat import evaluate_chat
    from endstop.train.evaluation.task_names import tasks_named

    asked = {"mid": max(1, pipeline.examples // 4), "sft": pipeline.examples, "rl": pipeline.examples}
    stages = [stage for stage in asked if stage in pipeline.parts]
    for number, stage in enumerate(stages):
        path = run.stage(stage).path / CHAT_EVALUATION
        if path.exists():
            continue
        questions = tasks_named(
            pipeline.preset.evaluation, examples=asked[stage], seed=pipeline.seed, place=local_folder()
        )
        names = [task.name for task in questions]

        def progress(
            task: str, done: int, total: int, *, number: int = number, stage: str = stage, names: Any = names
        ) -> None:
            within = (names.index(task) + done / max(1, total)) / len(names)
            tell((number + within) / len(stages), f"{stage} model, {task}")

        # In float32 an answer does not depend on which others are computed beside it.
        engine = load_engine(run.stage(stage).model, dtype="float32", device=pipeline.device)
        found = evaluate_chat(engine, questions, progress=progress).as_dict()
        engine.close()
        write_object(path, {"model": str(run.stage(stage).model), **found})


def measure_long_rows(pipeline: Pipeline, run: RunDirectory, tell: Tell) -> None:
    """P(stop) of the SFT model beyond its trained window, on conversations of the tasks it has learned."""
    from endstop.models.load import read_config
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.tokenizer import Tokenizer
    from endstop.train.data_arguments import DataArgument
    from endstop.train.long_context import (
        RESULTS_FILE,
        compare_scalings,
        conversation_rows,
        long_rows,
        measured_length,
        write_results,
    )
    from endstop.train.tasks import registry
    from endstop.train.tasks.sources import TaskSource

    stage = run.stage("sft")
    names = [DataArgument.parse(argument).place for argument in pipeline.preset.sft.data]
    learned = dict.fromkeys((name for name in names if name in registry), 1.0)
    if not learned or (stage.path / RESULTS_FILE).exists():
        return
    tell(1.0, "P(stop) in long rows")
    source = TaskSource(learned, seed=pipeline.seed, split="test", size=100_000)
    length = measured_length(read_config(stage.model))
    border = Tokenizer.from_pretrained(stage.model).bos_token_id
    rows = long_rows(conversation_rows(stage.model, source), length, _LONG_ROWS, border)
    stops = StopSet.from_pretrained(stage.model).ids
    found = compare_scalings(
        stage.model, rows, stops, scalings=("linear", "dynamic", "yarn"), device=pipeline.device
    )
    write_results(stage.path, found)
