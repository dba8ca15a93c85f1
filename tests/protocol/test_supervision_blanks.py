"""Control tokens that take the blanks beside them along, as those of Phi-3 do: what is supervised then."""

from __future__ import annotations

from typing import Any

import pytest

from endstop.protocol.labels import IGNORE, marker_row
from endstop.protocol.render import ChatRenderer
from endstop.protocol.tokenizer import Tokenizer
from tests.protocol.chat_cases import assistant, user
from tests.protocol.model_dirs import added, tokenizer_json

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)


def phi_tokenizer(**flags: bool) -> Tokenizer:
    names = ("<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>")
    tokens = [added(index, name, **flags) for index, name in enumerate(names)]
    return Tokenizer(
        tokenizer_json(tokens), special={"eos_token": "<|endoftext|>"}, templates={"default": TEMPLATE}
    )


def supervised(tokenizer: Tokenizer, messages: list[Any], stops: Any = None) -> list[str]:
    """Runs of supervised tokens, as text."""
    rendered = ChatRenderer(tokenizer, stops=stops).render(messages)
    assert rendered.refusal is None
    assert rendered.mask is not None
    runs: list[list[int]] = []
    before = 0
    for token_id, bit in zip(rendered.ids, rendered.mask, strict=True):
        if bit and not before:
            runs.append([])
        if bit:
            runs[-1].append(token_id)
        before = bit
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize("stops", [None, {0, 1, 2}], ids=["probed", "with the header among the stops"])
def test_a_header_that_takes_blanks_of_the_answer_is_not_supervised(stops: Any) -> None:
    tokenizer = phi_tokenizer(rstrip=True)
    messages = [user("hi"), assistant("  yo"), user(" b"), assistant("\n c ")]
    # The tokenizer gives the blanks before an answer to the header: they are no tokens of their own.
    assert supervised(tokenizer, messages, stops) == ["yo<|end|>", "c <|end|>"]
    assert supervised(tokenizer, [user("hi"), assistant(" ")], stops) == ["<|end|>"]


def test_a_terminator_that_takes_blanks_of_the_answer_is_supervised() -> None:
    tokenizer = phi_tokenizer(lstrip=True)
    assert supervised(tokenizer, [user("hi "), assistant("yo  \n")]) == ["yo<|end|>"]
    both = phi_tokenizer(lstrip=True, rstrip=True)
    assert supervised(both, [user("hi "), assistant("  yo  "), user("a"), assistant("b ")]) == [
        "yo<|end|>",
        "b<|end|>",
    ]


def test_a_marker_that_takes_blanks_of_the_response_is_not_supervised() -> None:
    text = "<|user|>\nq<|assistant|>\n  a"
    row = marker_row(phi_tokenizer(rstrip=True), text, "<|assistant|>\n", terminator=2)
    assert row.ids[-3:] == [1, 1000 + ord("a"), 2]
    assert row.labels == [IGNORE] * (len(row.ids) - 2) + row.ids[-2:]
