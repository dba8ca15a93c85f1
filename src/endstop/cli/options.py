"""The options that verbs share: which model, and how to sample and stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from endstop.cli.output import note
from endstop.cli.settings import MODEL_NAMES, SAMPLING_NAMES, resolve
from endstop.cli.verb import OptionGroup

if TYPE_CHECKING:
    from endstop.protocol.params import SamplingParams

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A directory, a .gguf file, a Hub id, or a name such as smollm2-135m-instruct."
    ),
]


def _option(*names: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def _model(*names: str, text: str) -> Any:
    return _option(*names, text=text, panel="Model")


def _sample(*names: str, text: str, **more: Any) -> Any:
    return _option(*names, text=text, panel="Sampling", **more)


def _end(*names: str, text: str, **more: Any) -> Any:
    return _option(*names, text=text, panel="Stopping", **more)


SOURCE = OptionGroup(
    revision=Annotated[str | None, _model("--revision", text="Commit or tag on the Hub.")],
    offline=Annotated[bool | None, _model("--offline/--online", text="Use only what is on this machine.")],
)

MODEL = OptionGroup(
    **SOURCE.annotations,
    backend=Annotated[
        str | None,
        _model("--backend", text="native, or transformers for any architecture that it knows."),
    ],
    dtype=Annotated[str | None, _model("--dtype", text="auto, float32 or bfloat16.")],
    device=Annotated[str | None, _model("--device", text="auto, cpu, cuda or mps.")],
    max_rows=Annotated[int | None, _model("--max-rows", text="Rows computed at once.")],
)

SAMPLING = OptionGroup(
    preset=Annotated[
        str | None,
        _sample(
            "--preset",
            text="model (default): start from the sampling values of generation_config.json; "
            "plain: from temperature 1 and nothing else.",
        ),
    ],
    temperature=Annotated[float | None, _sample("--temperature", "-t", text="0 is greedy.")],
    top_p=Annotated[float | None, _sample("--top-p", text="Keep the likeliest tokens of this total mass.")],
    top_k=Annotated[int | None, _sample("--top-k", text="Keep this many tokens; 0 is off.")],
    min_p=Annotated[float | None, _sample("--min-p", text="Drop tokens below this share of the likeliest.")],
    seed=Annotated[int | None, _sample("--seed", text="Fixes every draw.")],
    n=Annotated[int | None, _sample("--n", text="Completions for each prompt.")],
    presence_penalty=Annotated[float | None, _sample("--presence-penalty", text="-2 to 2.")],
    frequency_penalty=Annotated[float | None, _sample("--frequency-penalty", text="-2 to 2.")],
    repetition_penalty=Annotated[float | None, _sample("--repetition-penalty", text="Above 0; 1 is off.")],
    logit_bias=Annotated[
        list[str] | None,
        _sample("--logit-bias", text="Add to a token's logit; may be repeated.", metavar="ID=BIAS"),
    ],
    bad_words=Annotated[
        list[str] | None, _sample("--bad-word", text="Never generate this; may be repeated.")
    ],
    logprobs=Annotated[int | None, _sample("--logprobs", text="Alternatives reported for each token.")],
    prompt_logprobs=Annotated[int | None, _sample("--prompt-logprobs", text="The same for the prompt.")],
    max_tokens=Annotated[int | None, _end("--max-tokens", "-n", text="Default: the rest of the window.")],
    min_tokens=Annotated[int | None, _end("--min-tokens", text="No stop before this many tokens.")],
    stop=Annotated[
        list[str] | None, _end("--stop", text="End where this string completes; may be repeated.")
    ],
    stop_token_ids=Annotated[
        list[int] | None, _end("--stop-token-id", text="End at this token id; may be repeated.")
    ],
    stop_scope=Annotated[
        str | None,
        _end("--stop-scope", text="answer (default): not in reasoning and tool calls; all: everywhere."),
    ],
    ignore_eos=Annotated[
        bool | None, _end("--ignore-eos/--no-ignore-eos", text="Go on behind the model's stop tokens.")
    ],
    ban_eos=Annotated[bool | None, _end("--ban-eos/--no-ban-eos", text="Never sample a stop token.")],
    include_stop_str_in_output=Annotated[
        bool | None, _end("--include-stop/--drop-stop", text="Keep what ended the answer in the text.")
    ],
    skip_special_tokens=Annotated[
        bool | None, _end("--skip-special/--show-special", text="Hide special tokens in the text (default).")
    ],
    max_time=Annotated[float | None, _end("--max-time", text="Seconds, queueing included.")],
    repetition_detection=Annotated[
        str | None,
        _end(
            "--repetition-detection",
            text="End when the last tokens are one pattern repeated: longest pattern, shortest, repeats.",
            metavar="MAX[,MIN[,COUNT]]",
        ),
    ],
)


def sampling_params(given: dict[str, Any], model_path: Path, **fixed: Any) -> SamplingParams:
    """SamplingParams from flags, environment and files over the preset. Raises ValueError like it."""
    from endstop.protocol.params import SamplingParams, recommended_sampling

    values = _sampling_values(given)
    start = recommended_sampling(model_path) if values.pop("preset", "model") == "model" else {}
    params = SamplingParams(**{**start, **values, **fixed})
    idle = sorted({"top_p", "top_k", "min_p", "seed"} & values.keys())
    if params.n > 1:
        idle.append("n")
    if params.temperature == 0 and "temperature" not in values and idle:
        note(
            f"endstop: {', '.join(idle)} without effect: this model's preset is greedy; "
            "give --temperature or --preset plain."
        )
    return params


def check_sampling(given: dict[str, Any]) -> None:
    """Refuse what no model could take, before anything is fetched or loaded."""
    from endstop.protocol.params import SamplingParams

    values = _sampling_values(given)
    values.pop("preset", None)
    SamplingParams(**values)


def _sampling_values(given: dict[str, Any]) -> dict[str, Any]:
    values = resolve(given, SAMPLING_NAMES | {"preset"})
    if values.get("preset", "model") not in ("model", "plain"):
        raise ValueError(f"--preset must be model or plain, got {values['preset']!r}")
    if isinstance(values.get("logit_bias"), list):
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    if isinstance(values.get("repetition_detection"), str):
        values["repetition_detection"] = _repetition(values["repetition_detection"])
    return values


def model_options(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a model that are set anywhere."""
    return resolve(given, MODEL_NAMES)


def _logit_bias(entries: list[str]) -> dict[int, float]:
    bias = {}
    for entry in entries:
        token_id, separator, value = entry.partition("=")
        try:
            if not separator:
                raise ValueError(entry)
            bias[int(token_id)] = float(value)
        except ValueError:
            raise ValueError(f"--logit-bias takes ID=BIAS such as 42=-5, got {entry!r}") from None
    return bias


def _repetition(text: str) -> dict[str, int]:
    names = ("max_pattern_size", "min_pattern_size", "min_count")
    parts = text.split(",")
    try:
        return dict(zip(names[: len(parts)], map(int, parts), strict=True))
    except ValueError:
        raise ValueError(
            f"--repetition-detection takes MAX, MAX,MIN or MAX,MIN,COUNT, got {text!r}"
        ) from None
