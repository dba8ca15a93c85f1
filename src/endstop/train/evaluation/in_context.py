"""In-context tasks of a base model, from a local bundle: the mean of their centred accuracies is CORE.

The metric is that of DCLM (Li et al., arXiv 2406.11794); the bundle has the layout of nanochat's eval_bundle:

    core.yaml             icl_tasks: [{label, dataset_uri, num_fewshot: [10], icl_task_type, continuation_delimiter}]
    eval_data/...         JSON lines; dataset_uri names one of these files
    eval_meta_data.csv    columns `Eval Task` and `Random baseline` (percent)

Prompts, few-shot examples and scores are chosen as nanochat chooses them, so that figures can be compared.
"""  # noqa: E501

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

from endstop.models.decoder import Decoder
from endstop.protocol.errors import EndstopError
from endstop.train.evaluation.scoring import BATCH_TOKENS, Progress, Span, score_spans

Kind = Literal["multiple_choice", "schema", "language_modeling"]
Item = dict[str, Any]

_ORDER_SEED = 1337
_SHOTS_SEED = 1234
# Items whose rows are scored together.
_ITEMS_AT_ONCE = 64
_FIELDS: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


@dataclass(frozen=True, slots=True)
class InContextTask:
    """One task of a bundle.

    Attributes:
        items: as they stand in the file. shots: worked examples in front of each.
        delimiter: stands between a context and its continuation.
        baseline: accuracy of guessing, from 0 to 1.
    """

    label: str
    kind: Kind
    items: Sequence[Item]
    shots: int
    delimiter: str = " "
    baseline: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskAccuracy:
    """What a model reaches in one task.

    `centred` is (accuracy - baseline) / (1 - baseline): 0 for guessing, 1 for perfect. `cropped`: rows that
    were longer than the window and lost their beginning.
    """

    label: str
    kind: str
    shots: int
    examples: int
    accuracy: float
    baseline: float
    centred: float
    cropped: int


@dataclass(frozen=True, slots=True)
class CoreReport:
    """All tasks of a bundle; `core` is the mean of their centred accuracies."""

    tasks: tuple[TaskAccuracy, ...]
    core: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def centred(accuracy: float, baseline: float) -> float:
    """(accuracy - baseline) / (1 - baseline); baseline below 1."""
    return (accuracy - baseline) / (1.0 - baseline)


def load_bundle(directory: str | Path) -> list[InContextTask]:
    """The tasks of a bundle. Raises EndstopError for what is missing or broken, naming file and place."""
    directory = Path(directory)
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise EndstopError("reading core.yaml needs PyYAML: pip install pyyaml.") from error
    for name in ("core.yaml", "eval_data", "eval_meta_data.csv"):
        if not (directory / name).exists():
            raise EndstopError(
                f"{directory} is no bundle of in-context tasks: {name} is missing; give the folder that "
                "nanochat's eval_bundle.zip unpacks to, with core.yaml, eval_data/ and eval_meta_data.csv."
            )
    try:
        config = yaml.safe_load((directory / "core.yaml").read_text(encoding="utf-8"))
        entries = list(config["icl_tasks"])
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise EndstopError(f"{directory / 'core.yaml'} has no list `icl_tasks`: {error!r}.") from error
    baselines = _baselines(directory / "eval_meta_data.csv")
    return [_task(directory, entry, baselines) for entry in entries]


def _baselines(path: Path) -> dict[str, float]:
    with path.open(encoding="utf-8", newline="") as file:
        try:
            return {
                row["Eval Task"].strip(): float(row["Random baseline"]) / 100 for row in csv.DictReader(file)
            }
        except (KeyError, TypeError, ValueError, AttributeError, csv.Error) as error:
            raise EndstopError(
                f"{path} must have the columns `Eval Task` and `Random baseline` (a number): {error!r}."
            ) from error


def _task(directory: Path, entry: Any, baselines: dict[str, float]) -> InContextTask:
    where = directory / "core.yaml"
    try:
        label, kind = str(entry["label"]), entry["icl_task_type"]
        path = directory / "eval_data" / str(entry["dataset_uri"])
        shots = entry["num_fewshot"]
        shots = int(shots[0] if isinstance(shots, list) else shots)
        delimiter = str(entry.get("continuation_delimiter", " "))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EndstopError(f"{where}: a task lacks something: {error!r}.") from error
    if kind not in get_args(Kind):
        raise EndstopError(f"{where}: {label} has the type {kind!r}; known are {', '.join(get_args(Kind))}.")
    if label not in baselines:
        raise EndstopError(f"{directory / 'eval_meta_data.csv'} has no random baseline for {label!r}.")
    return InContextTask(label, kind, _items(path, kind), shots, delimiter, baselines[label])


def _items(path: Path, kind: str) -> list[Item]:
    if not path.is_file():
        raise EndstopError(f"{path} is missing; fetch the bundle again.")
    items = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
                missing = [name for name in _FIELDS[kind] if name not in item]
            except (ValueError, TypeError) as error:
                raise EndstopError(f"{path}, line {number} is not valid JSON: {error}.") from None
            if missing:
                raise EndstopError(f"{path}, line {number} lacks {', '.join(missing)}.")
            items.append(item)
    if not items:
        raise EndstopError(f"{path} has no items.")
    return items


def evaluate_tasks(
    model: Decoder,
    encode: Callable[[str], list[int]],
    tasks: Sequence[InContextTask],
    *,
    examples: int | None = None,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[str, int, int], None] | None = None,
) -> CoreReport:
    """The accuracy of a base model in each task, and their mean.

    Args:
        encode: ids of a prompt, BOS in front.
        examples: at most so many items of each task, the same ones every time. Worked examples are drawn from
            all of a task's items, so that an item has the same prompt whatever `examples` is.
        max_length: longest row, by default the model's window; what is longer loses its beginning.
        progress: told the task, the items done and the items there are.
    """
    results = []
    for task in tasks:
        report: Progress | None = None
        if progress is not None:
            report = _for_task(progress, task.label)
        results.append(_accuracy(model, encode, task, examples, max_length, batch_tokens, report))
    if not results:
        raise EndstopError("there is no in-context task to evaluate.")
    return CoreReport(tuple(results), sum(result.centred for result in results) / len(results))


def _for_task(progress: Callable[[str, int, int], None], label: str) -> Progress:
    return lambda done, total: progress(label, done, total)


def _accuracy(
    model: Decoder,
    encode: Callable[[str], list[int]],
    task: InContextTask,
    examples: int | None,
    max_length: int | None,
    batch_tokens: int,
    progress: Progress | None,
) -> TaskAccuracy:
    items = list(task.items)
    Random(_ORDER_SEED).shuffle(items)
    if len(items) <= task.shots:
        raise EndstopError(
            f"{task.label} has {len(items)} items, too few for one with {task.shots} worked examples."
        )
    count = len(items) if examples is None else min(examples, len(items))
    length = max_length or model.config.max_position_embeddings
    correct = cropped = 0
    for begin in range(0, count, _ITEMS_AT_ONCE):
        numbers = range(begin, min(begin + _ITEMS_AT_ONCE, count))
        groups = [spans_of(task, items, number, encode) for number in numbers]
        cropped += sum(span.end > length + 1 for group in groups for span in group)
        spans = [_fitted(span, length) for group in groups for span in group]
        scores = iter(score_spans(model, spans, batch_tokens=batch_tokens))
        for number, group in zip(numbers, groups, strict=True):
            found = [next(scores) for _ in group]
            if task.kind == "language_modeling":
                correct += bool(found[0].greedy.all())
            else:
                means = [float(score.nats.mean()) for score in found]
                correct += means.index(min(means)) == items[number]["gold"]
        if progress is not None:
            progress(numbers.stop, count)
    accuracy = correct / count
    return TaskAccuracy(
        task.label,
        task.kind,
        task.shots,
        count,
        accuracy,
        task.baseline,
        centred(accuracy, task.baseline),
        cropped,
    )


def spans_of(
    task: InContextTask, items: Sequence[Item], number: int, encode: Callable[[str], list[int]]
) -> list[Span]:
    """What is scored to answer item `number`: a span for each choice, or one for the continuation.

    Multiple choice: what differs, up to the end. Schema: what all have in common at the end. Language
    modelling: the continuation.
    """
    others = [at for at in range(len(items)) if at != number]
    shots = [items[at] for at in Random(_SHOTS_SEED + number).sample(others, task.shots)]
    item = items[number]
    if task.kind == "language_modeling":
        before = "".join(f"{_solved(task, shot)}\n\n" for shot in shots)
        context = f"{before}{str(item['context']).strip()}{task.delimiter}"
        without, whole = encode(context.strip()), encode(f"{context}{item['continuation']}")
        start = min(_common(without, whole), len(whole) - 1)
        return [Span(whole, max(1, start), len(whole))]
    before = "".join(f"{_solved(task, shot)}\n\n" for shot in shots)
    if task.kind == "multiple_choice":
        texts = [f"{before}{item['query']}{task.delimiter}{choice}" for choice in item["choices"]]
    else:
        texts = [
            f"{before}{context}{task.delimiter}{item['continuation']}" for context in item["context_options"]
        ]
    rows = [encode(text) for text in texts]
    if task.kind == "multiple_choice":
        start = _common(*rows)
        starts = [min(start, len(row) - 1) for row in rows]
    else:
        suffix = _common(*(row[::-1] for row in rows))
        starts = [len(row) - max(1, suffix) for row in rows]
    return [Span(row, max(1, start), len(row)) for row, start in zip(rows, starts, strict=True)]


def _solved(task: InContextTask, item: Item) -> str:
    """A worked example."""
    if task.kind == "multiple_choice":
        return f"{item['query']}{task.delimiter}{item['choices'][item['gold']]}"
    if task.kind == "schema":
        return f"{item['context_options'][item['gold']]}{task.delimiter}{item['continuation']}"
    return f"{str(item['context']).strip()}{task.delimiter}{item['continuation']}"


def _common(*rows: Sequence[int]) -> int:
    """How many tokens all rows have in common at their beginning."""
    count = 0
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


def _fitted(span: Span, length: int) -> Span:
    """The span in a row of which at most the last `length` tokens are computed."""
    drop = max(0, span.end - 1 - length)
    if not drop:
        return span
    return Span(span.ids[drop : span.end], max(1, span.start - drop), span.end - drop)


def encoder_of(bos_id: int | None, encode_text: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """Prompts as ids with BOS in front; texts of special tokens stay text."""
    before: Iterable[int] = () if bos_id is None else (bos_id,)
    return lambda text: [*before, *encode_text(text)]
