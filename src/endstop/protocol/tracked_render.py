"""Rendering a chat template so that every character of the result knows its source.

The same template, the same environment, with marked strings (`TrackedText`) in place of plain ones. The
result is compared with the ordinary render by the caller, so a template on which the two differ is
noticed, not trusted. Importing this module imports jinja2.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from endstop.protocol.template_environment import OPTIONS, TemplateNamespace, prepare, strftime_now
from endstop.protocol.tracked_text import (
    KEY,
    Mark,
    Path,
    Slots,
    TrackedText,
    bare,
    derived,
    joined,
    json_text,
    keeping_marks,
    leaves,
    marks_of,
    percent,
    text_of,
    tracked,
    untracked,
)

GENERATION: Path = ("generation",)


def track(value: Any, path: Path) -> Any:
    """Plain data with every string in it marked by its path, a mapping's keys as (..., key, KEY)."""
    if isinstance(value, str):
        return tracked(value, path)
    if isinstance(value, Mapping):
        return {
            track(key, (*path, str(key), KEY)): track(item, (*path, str(key))) for key, item in value.items()
        }
    if isinstance(value, list):
        return [track(item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(track(item, (*path, index)) for index, item in enumerate(value))
    return value


def render_tracked(template: str, conversation: Mapping[str, Any]) -> str:
    """The rendered text with its marks; regions of `{% generation %}` are marked with GENERATION."""
    return _compiled(template).render(**conversation)


class _Generator(CodeGenerator):
    """Writes `a ~ b` as a call that keeps marks."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(environment.finalize, (")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write(")))")


class _Formatter(SandboxedFormatter):
    def __init__(self, environment: jinja2.Environment, slots: Slots) -> None:
        super().__init__(environment)
        self._slots = slots

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return value if conversion is None else derived(super().convert_field(value, conversion), value)

    def format_field(self, value: Any, format_spec: str) -> Any:
        if isinstance(value, str) and not format_spec:
            return self._slots.put(value)
        return self._slots.put(derived(format(value, format_spec), value))


class _TrackingEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset({"%"})

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        return joined(pieces)

    def mark_generation(self, body: str) -> str:
        if not body:
            return body
        return TrackedText(body, (*marks_of(body), Mark(0, len(body), GENERATION, 0, len(body))))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            return percent(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Methods of strings that stand in the template itself, such as ', '.join(names).
        if (
            isinstance(__obj, types.BuiltinMethodType)
            and isinstance(__obj.__self__, str)
            and any(marks_of(leaf) for leaf in leaves((args, kwargs)))
        ):
            __obj = getattr(TrackedText(__obj.__self__), __obj.__name__)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        plain = super().wrap_str_format(value)
        if plain is None:
            return None
        form: str = value.__self__

        def wrapper(*args: Any, **kwargs: Any) -> str:
            if marks_of(form):
                text = plain(*args, **kwargs)
                return derived(untracked(text), form, args, kwargs)
            if value.__name__ == "format_map":
                return self._filled(form, (), dict(args[0]))
            return self._filled(form, args, kwargs)

        return wrapper

    def _filled(self, form: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        slots = Slots()
        return slots.fill(_Formatter(self, slots).vformat(form, args, kwargs))


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return TrackedText(text_of(d), marks_of(text_of(d))).join(text_of(item) for item in value)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    step = width if isinstance(width, str) else " " * width
    lines = joined((text_of(s), "\n")).splitlines()
    # Lines without text get no blanks before them, unless asked for; the first one never does by itself.
    indented = [
        line if at == 0 or not (line or blank) else joined((step, line)) for at, line in enumerate(lines)
    ]
    pieces = [piece for line in indented for piece in ("\n", line)][1:]
    return joined((step, *pieces)) if first else joined(pieces)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise jinja2.exceptions.FilterArgumentError("format takes positional or keyword arguments, not both")
    return percent(text_of(value), kwargs or args)


def _urlencode(value: Any) -> str:
    return derived(jinja2.filters.do_urlencode(bare(value)), value)


def _safe(value: Any) -> Any:
    # Nothing is escaped in these templates, so a text that is safe is just a text.
    return (
        text_of(value)
        if any(marks_of(leaf) for leaf in leaves(value))
        else jinja2.filters.do_mark_safe(value)
    )


class _Namespace(TemplateNamespace):
    def __repr__(self) -> str:
        # Printed as a whole it would show its texts without their marks.
        raise TypeError("a namespace cannot be printed here")


@lru_cache(maxsize=128)
def _compiled(template: str) -> jinja2.Template:
    environment = prepare(_TrackingEnvironment(**OPTIONS, finalize=text_of))
    for name, function in list(environment.filters.items()):
        environment.filters[name] = keeping_marks(function)
    environment.filters.update(
        tojson=json_text, join=_join, indent=_indent, format=_format, safe=_safe, urlencode=_urlencode
    )
    environment.globals["strftime_now"] = keeping_marks(strftime_now)
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)
