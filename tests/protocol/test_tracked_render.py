"""Rendering with marked strings: the same text, and no character of a message goes unmarked."""

# ruff: noqa: E501 (templates on one line)

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import chat_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_template import ENVIRONMENT_CASES, VARIANTS

from endstop.protocol.errors import BrokenModel, RenderRefused
from endstop.protocol.template import (
    conversation_variables,
    cut_at_continuation,
    open_final_message,
    render_template,
    template_errors,
)
from endstop.protocol.template_environment import fixed_now
from endstop.protocol.tracked_render import render_tracked, track
from endstop.protocol.tracked_text import (
    KEY,
    Mark,
    TrackedText,
    derived,
    joined,
    json_text,
    marks_of,
    percent,
    tracked,
    untracked,
)

SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def render_with_marks(template: str, messages: Any, **options: Any) -> str:
    own = {k: options.pop(k, None) for k in ("tools", "documents")}
    generate = options.pop("add_generation_prompt", False)
    field = options.pop("continue_final_message", False)
    conversation = conversation_variables(messages, add_generation_prompt=generate, variables=options, **own)
    opened = open_final_message(template, conversation, field, generate)
    marked = {name: track(value, (name,)) for name, value in conversation.items()}
    with template_errors(), fixed_now(chat_cases.NOW):
        text = render_tracked(template, {**marked, **SPECIAL})
    return text if opened is None else cut_at_continuation(text, opened)


def shifted(value: Any) -> Any:
    """The same conversation with Georgian letters for the Latin ones outside of <tags>."""
    if isinstance(value, str):
        pieces = re.split(r"(</?\w+>)", value)
        return "".join(
            piece if at % 2 else re.sub("[a-zA-Z]", lambda m: chr(0x10D0 + ord(m[0].lower()) - 97), piece)
            for at, piece in enumerate(pieces)
        )
    if isinstance(value, dict):
        kept = ("role", "type", "id", "tool_call_id")
        return {key: item if key in kept else shifted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shifted(item) for item in value]
    return value


def georgian(character: str) -> bool:
    return "\u10d0" <= character <= "\u10ff" or "\u1c90" <= character <= "\u1cbf"


@pytest.mark.parametrize("name", chat_cases.TEMPLATES)
def test_marked_renders_have_the_same_text_and_mark_every_letter_of_a_message(name: str) -> None:
    template = chat_cases.TEMPLATES[name]
    rendered = 0
    for title, conversation in chat_cases.CONVERSATIONS.items():
        messages = shifted(conversation)
        for options in VARIANTS[:5]:
            if "tools" in options:
                options = {**options, "tools": shifted(options["tools"])}
            try:
                expected = render_template(template, messages, now=chat_cases.NOW, **SPECIAL, **options)
            except (RenderRefused, BrokenModel):
                continue
            text = render_with_marks(template, messages, **options)
            assert text == expected, (title, options)
            marked = {at for mark in marks_of(text) for at in range(mark.start, mark.end)}
            lost = [at for at, c in enumerate(expected) if georgian(c) and at not in marked]
            assert not lost, (title, options, expected[max(0, lost[0] - 20) : lost[0] + 20])
            rendered += 1
    assert rendered >= 10


@pytest.mark.parametrize("template", ENVIRONMENT_CASES)
def test_the_environment_with_marks_behaves_as_the_one_without(template: str) -> None:
    messages = [chat_cases.user("hi <b>"), chat_cases.assistant("yo")]
    results = []
    for render in (render_with_marks, render_template):
        options = {} if render is render_with_marks else {"now": chat_cases.NOW, **SPECIAL}
        try:
            results.append(render(template, messages, **options))  # type: ignore[operator]
        except (RenderRefused, BrokenModel) as error:
            results.append(type(error))
    assert results[0] == results[1]


LOSSY = [
    "{{ m.content }}",
    "{{ m.content | trim }}|{{ m.content.strip() }}|{{ m.content.lstrip() }}|{{ m.content.rstrip('b') }}",
    "{{ '<' ~ m.content ~ '>' }}{{ '<' + m.content + '>' }}{{ m.content ~ m.content }}",
    "{{ '[%s]' % m.content }}{{ '%s=%d %s' % (m.content, 3, m.name) }}{{ '%(x)s' % {'x': m.content} }}",
    "{{ '[{}]'.format(m.content) }}{{ '{a}{0}'.format(1, a=m.content) }}{{ '{x}'.format_map({'x': m.content}) }}",
    "{{ ', '.join([m.content, 'x', m.name]) }}{{ [m.content, m.name] | join('-') }}",
    "{{ messages | map(attribute='content') | join(' ') }}{{ messages | join(', ', attribute='name') }}",
    "{{ m | tojson }}{{ m | tojson(indent=2) }}{{ [m.content, 1, none, true, 2.5] | tojson }}",
    "{{ m | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",
    "{{ m.content.split(' ')[0] }}{{ m.content.split() | join('+') }}{{ m.content.rsplit(' ', 1)[-1] }}",
    "{{ m.content.splitlines() | join('+') }}{{ m.content.partition(' ')[2] }}{{ m.content.rpartition(' ')[0] }}",
    "{{ m.content.replace(' ', '_') }}{{ 'a b'.replace('b', m.content) }}{{ m.content | replace('a', 'bb') }}",
    "{{ m.content[1:] }}{{ m.content[:-1] }}{{ m.content[::-1] }}{{ m.content[0] }}{{ m.content[::2] }}",
    "{% for c in m.content %}{{ c }}.{% endfor %}{{ m.content | list | join }}{{ m.content | first }}",
    "{{ m.content | upper }}{{ m.content.lower() }}{{ m.content | capitalize }}{{ m.content.title() }}",
    "{{ m }}{{ messages }}{{ [m.content] | string }}{{ m.items() | list }}",
    "{{ m.items() }}{{ m.values() }}{{ m.keys() }}{{ '%s' % [m.content] }}{{ '%s %s' % (m, 1) }}{{ '%s' % m }}",
    "{{ '{}'.format([m.content]) }}{{ ((m.content, 1), 2) }}{{ m.content.format() }}{{ 'x%%' % () }}",
    "{% set x %}[{{ m.content }}]{% endset %}{{ x }}{% set ns = namespace(y=m.content) %}{{ ns.y }}",
    "{% macro f(a) %}({{ a }}){% endmacro %}{{ f(m.content) }}{% call f('z') %}{{ m.content }}{% endcall %}",
    "{% filter upper %}{{ m.content }}{% endfilter %}{% filter trim %} {{ m.content }} {% endfilter %}",
    "{% generation %}{{ m.content }}{% endgeneration %}{{ m.content | center(30) }}",
    "{{ m.content | indent(2) }}{{ m.content | indent('> ', first=true, blank=true) }}{{ '' | indent }}",
    "{{ m.content * 2 }}{{ m.content | default('x') }}{{ m.absent | default(m.content) }}{{ m.content | safe }}",
    "{{ m.content.removeprefix('a') }}{{ m.content.removesuffix('b') }}{{ m.content.zfill(9) }}",
    "{{ m.content | truncate(5) }}{{ m.content | wordwrap(3) }}{{ m.content | urlencode }}{{ m.content | e }}",
    "{{ {'user': '<|user|>'}.get(m.role) }}{{ {m.content: 1} | tojson }}{{ dict(a=m.content) | tojson }}",
    "{{ '%10s' % m.content }}{{ '{:>10}'.format(m.content) }}{{ '{0!r}'.format(m.content) }}",
    "{{ m.content | format }}{{ '%s' | format(m.content) }}{{ m.content.center(20, '*') }}",
    "{{ (messages | first).content }}{{ messages | sort(attribute='content') | map(attribute='content') | join }}",
    "{{ messages | groupby('content') | map(first) | list | length }}{{ strftime_now(m.content) }}",
    "{{ m.content.expandtabs() }}{{ m.content.swapcase() }}{{ m.content.casefold() }}{{ m.content.ljust(9) }}",
]  # fmt: skip


@pytest.mark.parametrize("body", LOSSY)
@pytest.mark.parametrize("content", ["აბგ დე", ' აბ\nგ "დ" ', "ა", "აბaაბ ბ"])
def test_no_operation_of_a_template_loses_where_text_comes_from(body: str, content: str) -> None:
    template = "{% for m in messages %}" + body + "{% endfor %}"
    messages = [{"role": "user", "content": content, "name": "ვინმე"}]
    try:
        expected = render_template(template, messages, **SPECIAL)
    except RenderRefused:
        with pytest.raises(RenderRefused):
            render_with_marks(template, messages)
        return
    text = render_with_marks(template, messages)
    if "| e }" not in body and "| safe" not in body:
        assert text == expected
    marked = {at for mark in marks_of(text) for at in range(mark.start, mark.end)}
    assert all(at in marked for at, c in enumerate(untracked(text)) if georgian(c))
    for mark in marks_of(text):
        if mark.copied and mark.path == ("messages", 0, "content"):
            source = content[mark.source_start : mark.source_end].lower()
            assert untracked(text)[mark.start : mark.end].lower() == source


@pytest.mark.parametrize(
    "body", ["{{ m.content.encode() }}", "{% set ns = namespace(x=m.content) %}{{ ns }}{{ [ns] }}"]
)
def test_what_would_hide_where_text_comes_from_is_refused(body: str) -> None:
    template = "{% for m in messages %}" + body + "{% endfor %}"
    with pytest.raises(RenderRefused):
        render_with_marks(template, [chat_cases.user("x")])


def test_marks_follow_the_text() -> None:
    text = tracked("hello you", ("m",))
    assert isinstance(text, TrackedText)
    assert marks_of(text[6:]) == (Mark(0, 3, ("m",), 6, 9),)
    assert marks_of(("<" + text + ">").strip("<h")) == (Mark(0, 8, ("m",), 1, 9),)
    assert [marks_of(piece) for piece in text.split("l")] == [
        (Mark(0, 2, ("m",), 0, 2),),
        (),
        (Mark(0, 5, ("m",), 4, 9),),
    ]
    assert marks_of(text.replace("l", "L")) == (
        Mark(0, 2, ("m",), 0, 2),
        Mark(4, 9, ("m",), 4, 9),
    )
    assert marks_of(percent("a%sb", text)) == (Mark(1, 10, ("m",), 0, 9),)
    assert marks_of(json_text({"k": text}))[0] == Mark(7, 16, ("m",), 0, 9)
    assert marks_of(json_text(tracked('a"b', ("q",)))) == (Mark(1, 5, ("q",), 0, 3, False),)


def test_what_cannot_be_told_apart_is_marked_as_mixed() -> None:
    both = joined(("<|x|>", tracked("me", ("m",))))
    assert marks_of(derived("anything", both)) == (Mark(0, 8, ("m",), 0, 2, False, True),)
    assert marks_of(derived("anything", tracked("me", ("m",)))) == (Mark(0, 8, ("m",), 0, 2, False, False),)
    assert KEY == "<key>"


OPERATIONS: list[Any] = [
    lambda s: s.strip(),
    lambda s: s.lstrip("ab"),
    lambda s: s.rstrip(),
    lambda s: s.split(),
    lambda s: s.split(" "),
    lambda s: s.split("a", 1),
    lambda s: s.split(None, 1),
    lambda s: s.rsplit(None, 1),
    lambda s: s.rsplit("a", 1),
    lambda s: s.splitlines(),
    lambda s: s.splitlines(True),
    lambda s: list(s.partition("a")),
    lambda s: list(s.rpartition("a")),
    lambda s: s.replace("a", "xy"),
    lambda s: s.replace("a", "", 1),
    lambda s: s.replace("", "-"),
    lambda s: s.removeprefix("a"),
    lambda s: s.removesuffix("a"),
    lambda s: s[1:],
    lambda s: s[:-1],
    lambda s: s[::-1],
    lambda s: list(s),
    lambda s: s + "t",
    lambda s: "t" + s,
    lambda s: s * 2,
    lambda s: s.upper(),
    lambda s: s.casefold(),
    lambda s: s.join(["p", "q", "r"]),
    lambda s: s.center(7, "."),
    lambda s: s.expandtabs(),
]


def _flat(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        yield from value
    else:
        yield value


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab \n\t\r\u00df\u2028x", max_size=12), st.sampled_from(OPERATIONS))
def test_operations_give_what_they_give_on_plain_text_and_marks_name_the_right_characters(
    text: str, operation: Any
) -> None:
    source = tracked(text, ("m",))
    for expected, got in zip(_flat(operation(text)), _flat(operation(source)), strict=True):
        assert got == expected
        for mark in marks_of(got):
            assert 0 <= mark.start < mark.end <= len(expected)
            if mark.copied:
                original = text[mark.source_start : mark.source_end]
                assert expected[mark.start : mark.end].casefold() == original.casefold()
