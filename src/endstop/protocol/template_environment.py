"""The Jinja environment that chat templates are written for, as transformers 5 builds it.

Importing this module imports jinja2; `endstop.protocol.template` does so when it first renders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

_fixed_now: ContextVar[datetime | None] = ContextVar("endstop_template_now", default=None)


@contextmanager
def fixed_now(now: datetime | None) -> Iterator[None]:
    """Within the block `strftime_now` formats `now`; None is the clock."""
    token = _fixed_now.set(now)
    try:
        yield
    finally:
        _fixed_now.reset(token)


def strftime_now(format: str) -> str:
    return (_fixed_now.get() or datetime.now()).strftime(format)


def raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(message)


def tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Python writes it. Jinja's own filter would escape `<`, `>`, `&` and quotes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class TemplateDict:
    """What templates get as `dict`: it makes dictionaries and shows nothing of the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(jinja2.utils.Namespace):
    """`namespace()` of templates, without names that begin with an underscore."""

    # `self` is taken from the positional arguments so that a template may write namespace(self=...).
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            TemplateNamespace._refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        TemplateNamespace._refuse_underscore(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _refuse_underscore(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: the body, handed to `environment.mark_generation`."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body)
        return block.set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        mark: Callable[[str], str] | None = getattr(self.environment, "mark_generation", None)
        body = caller()
        return body if mark is None else mark(body)


def prepare(environment: jinja2.Environment) -> jinja2.Environment:
    """Give `environment` the names that chat templates expect."""
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["dict"] = TemplateDict()
    environment.globals["namespace"] = TemplateNamespace
    return environment


OPTIONS: dict[str, Any] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "extensions": [GenerationTag, jinja2.ext.loopcontrols],
}


@lru_cache(maxsize=128)
def compiled(template: str) -> jinja2.Template:
    """The template, compiled once. Raises jinja2.TemplateSyntaxError."""
    return prepare(ImmutableSandboxedEnvironment(**OPTIONS)).from_string(template)
