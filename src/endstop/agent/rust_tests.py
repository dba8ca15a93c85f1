"""Tests of Rust that stand inside of the code that they test: what a change of such a file does to them."""

from __future__ import annotations

import re

# Strings, comments and characters, in which a brace is none.
_TOKEN = re.compile(
    r'b?r(#*)".*?"\1|"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/|\'(?:\\[^\']*|[^\'\\])\'|[{}]', re.DOTALL
)
_ATTRIBUTE = re.compile(r"#\[(?:\w+::)*(?:test|rstest|test_case)\b")
_FUNCTION = re.compile(r"\bfn\s+(\w+)")
# What formatting changes.
_FREE = re.compile(r"[\s,]+")


def changed_tests(before: bytes, after: bytes) -> list[str]:
    """Names of tests that were there before and say something else now, by their text without comments."""
    old, new = _tests(before.decode("utf-8", "replace")), _tests(after.decode("utf-8", "replace"))
    return sorted(name for name, bodies in old.items() if name in new and not new[name] >= bodies)


def _tests(text: str) -> dict[str, set[str]]:
    """The bodies of the tests by name; modules of one file may each have one of the same name."""
    found: dict[str, set[str]] = {}
    for attribute in _ATTRIBUTE.finditer(text):
        function = _FUNCTION.search(text, attribute.end())
        if function is not None:
            found.setdefault(function.group(1), set()).add(_body(text, function.end()))
    return found


def _body(text: str, start: int) -> str:
    """From the arguments to the brace that closes the function."""
    kept, depth, place = [], 0, start
    for token in _TOKEN.finditer(text, start):
        kept.append(_FREE.sub("", text[place : token.start()]))
        place = token.end()
        word = token.group()
        if not word.startswith(("//", "/*")):
            kept.append(word)
        depth += {"{": 1, "}": -1}.get(word, 0)
        if word == "}" and depth <= 0:
            break
    return "".join(kept)
