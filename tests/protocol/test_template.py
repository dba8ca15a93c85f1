"""Rendering is byte-equal to transformers, or both refuse."""

# ruff: noqa: E501 (templates on one line)
from __future__ import annotations

import dataclasses
import enum
from datetime import datetime
from typing import Any

import chat_cases
import pytest

from endstop.protocol.errors import BrokenModel, RenderRefused
from endstop.protocol.template import render_template

VARIANTS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"continue_final_message": True},
    {"add_generation_prompt": True, "tools": [chat_cases.WEATHER]},
    {"tools": [chat_cases.WEATHER], "enable_thinking": False},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"add_generation_prompt": True, "builtin_tools": ["get_weather"], "date_string": "1 Jan 2030"},
    {"add_generation_prompt": True, "documents": [{"title": "T", "text": "body"}]},
    {"continue_final_message": "reasoning_content"},
]


class _FixedClock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return chat_cases.NOW


@pytest.fixture(scope="module")
def oracle() -> Any:
    """apply_chat_template of transformers with the clock standing still."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tokenizer = chat_cases.transformers_tokenizer("")
    patch = pytest.MonkeyPatch()
    patch.setattr(utils, "datetime", _FixedClock)

    def render(template: str, messages: Any, **options: Any) -> str | None:
        try:
            text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
        except Exception:
            return None
        assert isinstance(text, str)
        return text

    yield render
    patch.undo()


def ours(template: str, messages: Any, **options: Any) -> str | None:
    try:
        return render_template(
            template, messages, now=chat_cases.NOW, bos_token="<s>", eos_token="<|im_end|>", **options
        )
    except (RenderRefused, BrokenModel):
        return None


@pytest.mark.parametrize("name", chat_cases.TEMPLATES)
def test_renders_are_byte_equal_to_transformers(name: str, oracle: Any) -> None:
    template = chat_cases.TEMPLATES[name]
    rendered = 0
    for title, messages in chat_cases.CONVERSATIONS.items():
        for options in VARIANTS:
            expected = oracle(template, messages, **options)
            assert ours(template, messages, **options) == expected, (title, options)
            rendered += expected is not None
    assert rendered >= 10


def test_there_are_templates_of_more_than_fifteen_families() -> None:
    assert len(chat_cases.FAMILIES) >= 16


SPEECH = [chat_cases.user("hi <b>"), chat_cases.assistant("yo")]

ENVIRONMENT_CASES = [
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n    {{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}",
    "{{ {'a': 'é'} | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "{{ strftime_now('%d %B %Y') }}{{ strftime_now('%H:%M') }}",
    "{{ dict(a=1) | tojson }}{{ dict.fromkeys(['x'], 2) | tojson }}",
    "{% set ns = namespace(n=0, self='me') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns.self }}",
    "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}",
    "{% generation %}{{ messages[1].content }}{% endgeneration %}|{%- generation -%} x {%- endgeneration -%}",
    "{{ bos_token }}{{ pad_token is defined }}{{ unk_token }}{{ nothing }}",
    "{{ messages[0].content is string }}{{ messages[0] is mapping }}{{ tools is none }}{{ documents is none }}",
    "{{ add_generation_prompt }}{{ messages[0].absent.deeper if messages[0].absent is defined else 'none' }}",
    "{{ '%s-%s' % ('a', 'b') }}{{ '{}{x}'.format(1, x=2) }}{{ 'a' ~ 1 ~ none }}{{ ['a', 'b'] | join('-') }}",
    "{{ messages | map(attribute='role') | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages | map(attribute='content') | map('upper') | join(' ') }}{{ 'x' | indent(2, true) }}",
    "{% macro f(a, b='d') %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}{% call f('x') %}in{% endcall %}",
    "{% set text %}<{{ messages[0].content }}>{% endset %}{{ text | length }}{{ text }}",
    "{{ messages[0].content[::-1] }}{{ messages[0].content[1:] }}{{ messages[0].content.split(' ') | last }}",
    "{{ messages[0].items() | list }}{{ messages[0] | dictsort }}{{ range(3) | list }}",
    "{{ '<b>' | escape }}{{ '<b>' | safe }}{{ ('<' | safe) + '<b>' }}",
    "{% if messages[0]['content'] and 'hi' in messages[0]['content'] %}yes{% else %}no{% endif -%}\n x",
    # What both must refuse.
    "{{ raise_exception('no') }}",
    "{{ raise_exception(messages) }}",
    "{% for %}",
    "{{ messages[0].absent.deeper }}",
    "{{ messages[0].content + 1 }}",
    "{{ 1 / 0 }}",
    "{% set ns = namespace(_a=1) %}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ range(10000000) | list | length }}",
    "{% do messages.append(1) %}",
    "{{ messages.append({'role': 'x'}) }}",
    "{{ messages[0].update(x=1) }}",
    "{% include 'x' %}",
    "{{ messages | nosuchfilter }}",
    "{% generation %}open",
]

ATTACKS = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__class__.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(dict) }}",
    "{{ '{a.__class__}'.format_map({'a': dict}) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | attr('__class__') }}",
    "{{ [messages] | map('attr', '__class__') | list }}",
    "{{ (messages | list).__reduce__() }}",
    "{{ ''.__getattribute__('__class__') }}",
    "{{ ()['__class__'] }}",
]


@pytest.mark.parametrize("template", ENVIRONMENT_CASES)
def test_environment_behaves_as_that_of_transformers(template: str, oracle: Any) -> None:
    assert ours(template, SPEECH) == oracle(template, SPEECH)


@pytest.mark.parametrize("template", ATTACKS)
def test_nothing_escapes_from_the_sandbox(template: str) -> None:
    try:
        text = render_template(template, SPEECH, bos_token="<s>")
    except RenderRefused:
        return
    for secret in ("<class", "function", "module", "uid=", "globals", "built-in", "method"):
        assert secret not in text


def test_messages_of_the_caller_are_not_changed() -> None:
    messages = [chat_cases.user("hi"), chat_cases.assistant("yo", reasoning="r")]
    before = [dict(message) for message in messages]
    render_template(chat_cases.FAMILIES["chatml"], messages, continue_final_message=True)
    assert messages == before


class Colour(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass
class Message:
    role: str
    content: Any


def test_rich_objects_become_plain_data(oracle: Any) -> None:
    numpy = pytest.importorskip("numpy")
    template = "{{ messages | tojson }}{{ x }}{{ y }}"
    messages = [Message("user", [{"type": "text", "text": Colour.RED}, {"image": object()}])]
    options = {"x": numpy.float32(0.5), "y": numpy.bool_(False)}
    text = ours(template, messages, **options)
    assert text == oracle(template, messages, **options)
    assert text is not None
    assert '"text": "red"}, {"image": "<object>"}' in text
    assert text.endswith("0.5False")


def test_the_clock_can_stand_still() -> None:
    template = "{{ strftime_now('%Y-%m-%d') }}"
    assert render_template(template, SPEECH, now=datetime(2001, 2, 3)) == "2001-02-03"
    assert render_template(template, SPEECH) == datetime.now().strftime("%Y-%m-%d")


@pytest.mark.parametrize(
    ("template", "messages", "options", "sentence"),
    [
        (
            "{{ raise_exception('Roles must alternate') }}",
            SPEECH,
            {},
            "refuses this conversation: Roles must",
        ),
        ("{% for %}", SPEECH, {}, "not valid Jinja"),
        ("{{ a.b }}", SPEECH, {}, "does not have: 'a' is undefined"),
        ("{{ ''.__class__.x }}", SPEECH, {}, "sandbox forbids"),
        ("x", [], {}, "empty"),
        ("x", "hello", {}, "list of messages, got str"),
        ("x", {"role": "user"}, {}, "list of messages, got dict"),
        ("x", ["hello"], {}, "message 0 must be a mapping"),
        ("x", SPEECH, {"tools": [len]}, "the tool len must be given as a JSON schema"),
        ("x", SPEECH, {"tools": {"a": 1}}, "list of JSON schemas"),
        ("x", SPEECH, {"documents": ["text"]}, "a document is a mapping"),
        ("content", SPEECH, {"continue_final_message": True, "add_generation_prompt": True}, "not both"),
        ("content", SPEECH, {"continue_final_message": True}, "drops the last message"),
        ("x", SPEECH, {"continue_final_message": "reasoning_content"}, "has no 'reasoning_content'"),
        ("x", SPEECH, {"continue_final_message": True}, "does not use 'content'"),
    ],
)
def test_a_refusal_is_one_clear_sentence(
    template: str, messages: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((RenderRefused, BrokenModel), match=sentence) as refusal:
        render_template(template, messages, **options)
    assert "\n" not in str(refusal.value)
