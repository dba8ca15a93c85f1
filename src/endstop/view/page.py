"""The frame of a page that stands alone: no network, one script, a policy that allows no other."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files

from endstop.view.marks import readable


def page_html(title: str, body: str, *, styles: Iterable[str], script: str) -> str:
    """The page around `body`. `styles` and `script` name files beside this one; no text of a model may be in
    them, in `body` it stands escaped."""
    code = asset(script)
    digest = base64.b64encode(hashlib.sha256(code.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title)}</title>\n<style>{''.join(map(asset, styles))}</style>\n</head>\n<body>\n"
        f"{body}<script>{code}</script>\n</body>\n</html>\n"
    )


def facts_html(facts: Iterable[tuple[str, str]]) -> str:
    """Names with their values; those without a value are left out."""
    items = "".join(
        f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd></div>" for name, value in facts if value
    )
    return f'<dl class="facts">{items}</dl>'


@cache
def asset(name: str) -> str:
    return (files("endstop.view") / name).read_text(encoding="utf-8")


def safe(text: str) -> str:
    """Escaped, with controls and marks that turn the reading direction made visible; line ends stay."""
    return escape("".join(char if char in "\n\t" else readable(char) for char in text))
