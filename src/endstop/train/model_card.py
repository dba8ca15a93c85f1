"""The model card of a trained model: what it is, how it stops, what it was trained on, how to use it.

Everything in it is read from the model's directory and from the run that it lies in; nothing is made up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from endstop.models.config import DecoderConfig
from endstop.train.run_results import StageResults, run_of
from endstop.train.tables import markdown_table, number, percent, short

_EXAMPLE = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
)


def model_card(directory: str | Path, repository: str, *, licence: str | None = None) -> str:
    """The README.md of a model directory, for a repository of that name."""
    from endstop.models.load import read_config
    from endstop.train.model_shapes import parameter_counts

    directory = Path(directory)
    config = read_config(directory)
    counts = parameter_counts(config)
    run, stage = run_of(directory)
    trained = [] if run is None else run.until(stage)
    parts = [
        _front_matter(config, licence),
        f"# {repository.rpartition('/')[2]}\n",
        _what(config, counts, stage, trained),
        _stopping(directory),
        _results(trained),
        _data(trained, licence),
        _training(trained),
        _usage(repository),
        _limits(counts["total"], trained),
    ]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _front_matter(config: DecoderConfig, licence: str | None) -> str:
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if licence:
        lines.append(f"license: {json.dumps(licence)}")
    lines += ["tags:", "- endstop", f"- {config.model_type}", "---", ""]
    return "\n".join(lines)


def _what(
    config: DecoderConfig, counts: Mapping[str, int], stage: str | None, trained: Iterable[StageResults]
) -> str:
    names = [found.name for found in trained]
    how = f", trained with endstop ({' -> '.join(names)})" if names else ""
    return (
        f"A {config.model_type} model of {short(counts['total'])} parameters "
        f"({short(counts['embedding'])} embedding, {short(counts['layers'])} layers, "
        f"{short(counts['head'])} head): {config.num_hidden_layers} layers, width {config.hidden_size}, "
        f"{config.num_attention_heads} heads, vocabulary {config.vocab_size}, context "
        f"{config.max_position_embeddings} tokens{how}.\n"
    )


def _stopping(directory: Path) -> str:
    from endstop.protocol.errors import EndstopError
    from endstop.protocol.render import ChatRenderer
    from endstop.protocol.stopset import StopSet
    from endstop.protocol.tokenizer import Tokenizer

    stops = StopSet.from_pretrained(directory)
    rows = [
        [
            str(token_id),
            f"`{stops.texts.get(token_id, '')}`",
            stops.roles[token_id] + (" (terminator)" if token_id == stops.terminator else ""),
            "; ".join(map(str, stops.sources.get(token_id, ()))),
        ]
        for token_id in sorted(stops.ids)
    ]
    said = "## How it stops\n\nIt ends an answer with one of these tokens; a runtime must stop at each.\n\n"
    said += markdown_table(["id", "token", "role", "declared in"], rows)
    try:
        rendered = ChatRenderer(Tokenizer.from_pretrained(directory)).render(list(_EXAMPLE))
    except (EndstopError, ValueError):
        return said
    return f"{said}\nA conversation, as its template writes it:\n\n    {json.dumps(rendered.text)[1:-1]}\n"


def _results(trained: list[StageResults]) -> str:
    rows = [
        [found.name, *(found.figure(key, kind) for _, key, kind in _FIGURES)]
        for found in trained
        if found.metrics
    ]
    evaluated = [
        [found.name, task.name, str(task.count), *(percent(getattr(task, name)) for name in _TASK_FIGURES)]
        for found in trained[-1:]
        for task in found.tasks
    ]
    if not rows and not evaluated:
        return ""
    said = "## Results\n\n"
    if rows:
        said += "On held-out data of each stage:\n\n"
        said += markdown_table(["stage", *(name for name, _, _ in _FIGURES)], rows) + "\n"
    if evaluated:
        said += "Answers to questions of each task:\n\n"
        said += markdown_table(_TASK_HEADER, evaluated)
        said += (
            "\nExact is right and ended by the model itself; early and late are stops before and behind the "
            "end of the only right answer.\n"
        )
    return said


_FIGURES = (
    ("bits per byte", "validation_bits_per_byte", "number"),
    ("loss", "validation_loss", "number"),
    ("P(turn end) at the end", "validation_p_turn_end_at_end", "number"),
    ("before it", "validation_p_turn_end_before", "number"),
    ("natural stop", "validation_natural_stop_rate", "percent"),
)
_TASK_HEADER = ("stage", "task", "n", "correct", "exact", "natural stop", "early", "late", "false stop")
_TASK_FIGURES = ("correct", "exact", "natural_stop", "premature", "late", "false_stop")


def _data(trained: list[StageResults], licence: str | None) -> str:
    rows = [[found.name, *row] for found in trained for row in found.grouped_sources()]
    if not rows:
        return ""
    said = "## Training data\n\n"
    said += markdown_table(["stage", "source (documents) x weight", "licence", "origin"], rows)
    if not licence:
        said += "\nNo licence is stated for the weights; look at those of the data before you use them.\n"
    return said


def _training(trained: list[StageResults]) -> str:
    rows = [
        [
            found.name,
            number(found.steps),
            number(found.tokens),
            f"{found.flops:.2e}" if found.flops else "",
            f"{found.seconds / 60:,.1f}" if found.seconds else "",
        ]
        for found in trained
        if found.steps
    ]
    if not rows:
        return ""
    table = markdown_table(["stage", "steps", "tokens", "FLOPs", "minutes"], rows)
    return f"## Training\n\n{table}"


def _usage(repository: str) -> str:
    return f"""## Use

    endstop chat {repository}

or with transformers:

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("{repository}")
    model = AutoModelForCausalLM.from_pretrained("{repository}")
    messages = [{{"role": "user", "content": "Hi"}}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))

`generation_config.json` lists every token that ends an answer. The template writes `<|bos|>` itself: do not
add another one.
"""


def _limits(parameters: int, trained: list[StageResults]) -> str:
    said = ["## Limits", ""]
    if parameters < 20e6:
        said.append(
            "A very small model for studying how stopping is learned. It answers the tasks it was trained on "
            "and knows nothing else."
        )
    else:
        said.append(
            "A small model: it makes things up, and nothing was done to keep it from harmful answers."
        )
    if trained and trained[-1].name == "base":
        said.append("It is a base model: it continues documents and was never shown a conversation.")
    return "\n".join(said) + "\n"
