"""Rollouts: what the model that is being trained answers, as its own engine generates it.

The engine is the one that serves: continuous batching, stop set, the calculator in the stream. A rollout
holds
the raw truth of a choice: every token with its mask, 1 where the model sampled it and 0 where the runtime
put it there (a tool's answer), and the terminator is among the sampled ones. Tokens are drawn at temperature
1 from the whole distribution, so that the policy that is improved is the one that was sampled from.

Every draw is fixed by (seed, step, question, sample), so that a run that goes on from a checkpoint draws
what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from endstop.outcomes import FinishReason, StopKind
from endstop.protocol.errors import EndstopError
from endstop.protocol.params import SamplingParams
from endstop.train.rewards import Judgement, RewardSettings

if TYPE_CHECKING:
    from endstop.runtime.engine import Engine
    from endstop.runtime.results import CompletionOutput


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how its answers are judged.

    Attributes:
        prompt_ids: up to and with the header of the assistant's turn.
        gold_ids: a right answer as the model would write it, terminator included; empty where none is known.
        gold_mask: 1 where the model would sample the token, 0 where the runtime forces it.
        right: whether the visible text of an answer (special tokens hidden, a tool's answers shown) is right.
        gave_up: whether it says that it is none.
        task: the name under which results are counted.
    """

    prompt_ids: list[int]
    gold_ids: list[int]
    gold_mask: list[int]
    right: Callable[[str], bool]
    gave_up: Callable[[str], bool]
    task: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer.

    Attributes:
        question: which of the step's questions it answers.
        prompt_ids: the question's. ids: all generated tokens, the terminator included where one was sampled.
        mask: 1 for a sampled token, 0 for one that the runtime forced.
        logprobs: the engine's natural-log probability of each token, 0.0 for forced ones.
        text: the visible text.
        judgement, reward: see endstop.train.rewards. counts: it is in the loss and in its group's mean.
    """

    question: int
    prompt_ids: list[int]
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stop_kind: StopKind
    text: str
    judgement: Judgement
    reward: float
    counts: bool = True


def draw_seed(seed: int, step: int, question: int) -> int:
    """The seed of one question's samples, 64 bits: hashed, so that neighbouring steps share nothing."""
    digest = hashlib.blake2b(f"{seed}/{step}/{question}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def rollout_engine(directory: str | Path, *, max_rows: int = 256, device: str = "cpu") -> Engine:
    """The engine of a model directory in float32, with the calculator where the vocabulary has its tags.

    Float32, so that the trainer's log-probabilities are the engine's. Errors as for `load_engine`.
    """
    from endstop.runtime.llm import load_engine

    # Steps of many tokens: at the beginning of a step all the prompts are computed at once.
    return load_engine(
        directory, dtype="float32", device=device, max_rows=max_rows, max_batch_tokens=max(8192, 4 * max_rows)
    )


def roll_out(
    engine: Engine,
    questions: Sequence[Question],
    rewards: RewardSettings,
    *,
    samples: int = 16,
    max_tokens: int = 256,
    seed: int = 0,
    step: int = 0,
    numbers: Sequence[int] | None = None,
    state_dict: Mapping[str, Any] | None = None,
    greedy: bool = False,
) -> list[Rollout]:
    """`samples` answers to each question, in the order of the questions.

    Args:
        max_tokens: limit of one answer; a question whose prompt leaves less room gets what is left.
        numbers: of the questions, by default 0, 1, 2, ...; a process that has a share of a step's questions
            gives those of the whole step.
        state_dict: weights to be swapped in before (which empties the prefix cache), by their Hugging Face
            names.
        greedy: take the most likely token instead of drawing.

    Raises EndstopError where a row fails (weights that are no numbers, say).
    """
    if state_dict is not None:
        engine.load_weights(state_dict)
    if numbers is None:
        numbers = range(len(questions))
    params = [
        SamplingParams(
            n=samples,
            temperature=0.0 if greedy else 1.0,
            max_tokens=max_tokens,
            seed=draw_seed(seed, step, number),
            logprobs=0,
        )
        for number in numbers
    ]
    results = engine.generate([question.prompt_ids for question in questions], params)
    return [
        _rollout(number, question, output, rewards)
        for number, question, result in zip(numbers, questions, results, strict=True)
        for output in result.outputs
    ]


def _rollout(number: int, question: Question, output: CompletionOutput, rewards: RewardSettings) -> Rollout:
    if output.stop_kind == "error":
        raise EndstopError(f"a rollout failed: {output.error or 'the model gave no numbers'}")
    assert output.generated_logprobs is not None
    ids, mask = output.generated_token_ids, output.generated_mask
    logprobs = [
        0.0 if entry is None else entry[token_id].logprob
        for token_id, entry in zip(ids, output.generated_logprobs, strict=True)
    ]
    judgement = Judgement(
        correct=question.right(output.text),
        finished=output.finish_reason == "stop",
        gave_up=question.gave_up(output.text),
    )
    return Rollout(
        question=number,
        prompt_ids=question.prompt_ids,
        ids=list(ids),
        mask=list(mask),
        logprobs=logprobs,
        finish_reason=output.finish_reason,
        stop_kind=output.stop_kind,
        text=output.text,
        judgement=judgement,
        reward=rewards.of(judgement),
        counts=rewards.counts(judgement),
    )
