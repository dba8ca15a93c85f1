"""What a request asks for: sampling and stopping, checked when the object is made.

Names and meanings are vLLM's unless said otherwise; the rules of stopping are in docs/stopping.md.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

StopScope = Literal["answer", "all"]


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """End a row whose last tokens are one pattern, repeated.

    A pattern of `min_pattern_size` to `max_pattern_size` tokens that fills the end of the output
    `min_count` times ends the row with stop kind `repetition` (vLLM's three parameters).
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            object.__setattr__(self, name, _integer(f"repetition_detection.{name}", getattr(self, name)))
        if self.min_pattern_size < 1 or self.max_pattern_size < self.min_pattern_size:
            raise ValueError(
                "repetition_detection needs 1 <= min_pattern_size <= max_pattern_size, "
                f"got {self.min_pattern_size} and {self.max_pattern_size}"
            )
        if self.min_count < 2:
            raise ValueError(f"repetition_detection.min_count must be at least 2, got {self.min_count}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request.

    Everything is off by default: temperature 1.0, the whole distribution, no limit but the context
    window. Raises ValueError with one sentence for a value that is out of range or contradictory.

    Attributes:
        n: completions for each prompt, each its own row.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: nucleus mass in (0, 1]. top_k: 0 or -1 is off. min_p: in [0, 1], relative to the best token.
        presence_penalty, frequency_penalty: in [-2, 2], over generated tokens; never on the stop set.
        repetition_penalty: > 0, over prompt and generated tokens; never on the stop set.
        seed: with the choice and the token's index it fixes every draw; None draws a fresh seed.
        stop: strings that end generation where they complete, matched on bytes of the generated text.
        stop_token_ids: ids that end generation, besides the model's stop set.
        bad_words: strings that may not be generated.
        logit_bias: id -> bias added to the logit; may touch the stop set.
        max_tokens: None is the rest of the window. min_tokens: nothing ends by a stop before that many.
        ignore_eos: the stop set may be sampled and is kept, generation goes on; `stop` and
            `stop_token_ids` stay active. ban_eos: the stop set cannot be sampled.
        include_stop_str_in_output: keep what ended the row (string or token) in the output.
        skip_special_tokens: special tokens are not shown in the text (they still can be matched).
        stop_scope: `answer` searches stop strings outside reasoning and tool calls, `all` everywhere.
        max_time: seconds on a monotonic clock, queueing included.
        repetition_detection: off by default.
        logprobs: number of alternatives reported for each token, 0 for the chosen one only, None for none.
        prompt_logprobs: the same for the prompt; such a request reads no cached prefix.
        trace: record for every step what `endstop trace` shows.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    ban_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop_scope: StopScope = "answer"
    max_time: float | None = None
    repetition_detection: RepetitionDetection | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "stop", _strings("stop", self.stop))
        put(self, "bad_words", _strings("bad_words", self.bad_words))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put(self, "logit_bias", _bias(self.logit_bias))
        for name in ("ignore_eos", "ban_eos", "include_stop_str_in_output", "skip_special_tokens", "trace"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("n", "top_k", "min_tokens"):
            put(self, name, _integer(name, getattr(self, name)))
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(self, name, _integer(name, getattr(self, name)))
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.top_k == -1:
            put(self, "top_k", 0)
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be 0 or more, got {self.min_tokens}")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} is below min_tokens {self.min_tokens}")
        if self.max_time is not None:
            _number("max_time", self.max_time, 0.0, math.inf)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.stop_scope not in ("answer", "all"):
            raise ValueError(f"stop_scope must be 'answer' or 'all', got {self.stop_scope!r}")
        put(self, "repetition_detection", _repetition(self.repetition_detection))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    @classmethod
    def from_pretrained(cls, path: str | Path, **overrides: Any) -> SamplingParams:
        """The sampling values that the model's generation_config.json recommends, then `overrides`.

        Takes temperature, top_k, top_p, min_p and repetition_penalty; `do_sample: false` is greedy.
        Limits and stop ids in that file are not sampling values and are not taken.
        A directory without generation_config.json gives the defaults.
        """
        from endstop.protocol.resolve import resolve_model

        model = resolve_model(path, weights=False)
        return cls(**{**recommended_sampling(model.path), **overrides})


def recommended_sampling(directory: Path) -> dict[str, Any]:
    """Sampling values of `directory`/generation_config.json as keywords of SamplingParams.

    A GGUF file holds none. Raises BrokenModel for a file that is no JSON object.
    """
    from endstop.protocol.model_files import read_object

    config = read_object(directory, "generation_config.json") if directory.is_dir() else None
    if config is None:
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: config[name] for name in names if config.get(name) is not None}
    # transformers samples only where do_sample is true, and greedily otherwise.
    if config.get("do_sample") is not True:
        values = {name: values[name] for name in ("repetition_penalty",) if name in values}
        values["temperature"] = 0.0
    return values


FIELD_NAMES: frozenset[str] = frozenset(f.name for f in fields(SamplingParams))


def _repetition(value: Any) -> RepetitionDetection | None:
    if value is None or isinstance(value, RepetitionDetection):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"repetition_detection must be a mapping, got {value!r}")
    try:
        return RepetitionDetection(**value)
    except TypeError as error:
        raise ValueError(
            "repetition_detection takes max_pattern_size, min_pattern_size and min_count, "
            f"got {sorted(map(str, value))}"
        ) from error


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    if not good or value < low or value > high or (open_low and value == low):
        left = "(" if open_low else "["
        right = "inf)" if high == math.inf else f"{high:g}]"
        raise ValueError(f"{name} must be a number in {left}{low:g}, {right}, got {value!r}")


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else tuple(_iterable(name, value))
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"{name} must hold strings, got {item!r}")
        if not item:
            raise ValueError(f"{name} must not hold an empty string")
        try:
            item.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"{name} must hold valid Unicode, got {item!r}") from None
    return tuple(dict.fromkeys(items))


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes):
        raise ValueError(f"{name} must be a list of integers, got {value!r}")
    ids = tuple(_integer(name, item) for item in _iterable(name, value))
    for item in ids:
        if item < 0:
            raise ValueError(f"{name} must hold ids of 0 or more, got {item}")
    return tuple(dict.fromkeys(ids))


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {value!r}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        # JSON objects have string keys, so OpenAI clients send "1234".
        digits = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        token_id = _integer("logit_bias", digits)
        if token_id < 0:
            raise ValueError(f"logit_bias must hold ids of 0 or more, got {token_id}")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"logit_bias must map ids to numbers, got {number!r} for {token_id}")
        try:
            bias[token_id] = float(number)
        except OverflowError:
            raise ValueError(f"logit_bias holds a number for id {token_id} that is too large") from None
        if math.isnan(bias[token_id]):
            raise ValueError(f"logit_bias must map ids to numbers, got nan for {token_id}")
    return bias


def _iterable(name: str, value: Any) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        raise ValueError(f"{name} must be a list, got {value!r}") from None
