"""A slow reading of a whole message at once, the reference that the incremental parser is held against."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from endstop.protocol.toolcalls import (
    read_arguments_call,
    read_builtin_call,
    read_json_call,
    read_python_call,
)

SPACE = " \t\r\n"
MISTRAL_HEAD = (
    r"([A-Za-z0-9_.\-]+)[ \t\r\n]*(\[CALL_ID\][ \t\r\n]*[A-Za-z0-9_.\-]*[ \t\r\n]*)?"
    r"(\[ARGS\][ \t\r\n]*)?"
)


class Cut(Exception):
    """The text ended inside the value."""


class Bad(Exception):
    """No JSON value can have the character at `position`."""

    def __init__(self, position):
        super().__init__(position)
        self.position = position


def value_end(text, i, top=True):
    """The index behind the JSON value at `i` by recursive descent (white space before it allowed)."""

    def at(i):
        if i >= len(text):
            raise Cut
        return text[i]

    def space(i):
        while i < len(text) and text[i] in SPACE:
            i += 1
        return i

    def string(i):
        if at(i) != '"':
            raise Bad(i)
        i += 1
        while at(i) != '"':
            if text[i] < " ":
                raise Bad(i)
            if text[i] == "\\":
                i += 1
                if at(i) == "u":
                    for _ in range(4):
                        i += 1
                        if at(i) not in "0123456789abcdefABCDEF":
                            raise Bad(i)
                elif text[i] not in '"\\/bfnrt':
                    raise Bad(i)
            i += 1
        return i + 1

    def number(i):
        longest = None
        for end in range(i, len(text) + 1):
            part = text[i:end]
            if re.fullmatch(r"-?(0|[1-9]\d*)?(?<![-])(\.\d*)?([eE][+-]?\d*)?|-", part, re.A) is None:
                break
            longest = end
        end = longest
        while re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", text[i:end], re.A) is None:
            if end == len(text):
                raise Cut
            raise Bad(end)
        if end == len(text):
            raise Cut
        return end

    i = space(i)
    c = at(i)
    if top and c != "{":
        raise Bad(i)
    if c == "{":
        i = space(i + 1)
        if at(i) == "}":
            return i + 1
        while True:
            i = space(string(space(i)))
            if at(i) != ":":
                raise Bad(i)
            i = space(value_end(text, i + 1, top=False))
            if at(i) == "}":
                return i + 1
            if text[i] != ",":
                raise Bad(i)
            i = space(i + 1)
            at(i)
    if c == "[":
        i = space(i + 1)
        if at(i) == "]":
            return i + 1
        while True:
            i = space(value_end(text, i, top=False))
            if at(i) == "]":
                return i + 1
            if text[i] != ",":
                raise Bad(i)
            i = space(i + 1)
    if c == '"':
        return string(i)
    for word in ("true", "false", "null"):
        if c == word[0]:
            for k in range(len(word)):
                if at(i + k) != word[k]:
                    raise Bad(i + k)
            return i + len(word)
    if c in "-0123456789":
        return number(i)
    raise Bad(i)


@dataclass
class Message:
    content: str = ""
    reasoning: str = ""
    calls: list = field(default_factory=list)
    broken: list = field(default_factory=list)
    open_call: str | None = None


def read(text, syntax, reasoning):
    """Take `text` apart. Every choice is made with the whole text in view."""
    m = Message()
    open_tag = syntax.open_tag if syntax else None
    llama = syntax is not None and syntax.name == "llama3"
    region = "reasoning" if reasoning and reasoning.open else "answer"
    i, behind_tag, untagged = 0, region == "reasoning", llama
    while True:
        if region == "reasoning":
            end = text.find(reasoning.end, i)
            piece = text[i:] if end < 0 else text[i:end]
            m.reasoning += piece.lstrip(SPACE) if behind_tag else piece
            if end < 0:
                return m
            i, region, behind_tag, untagged = end + len(reasoning.end), "answer", True, llama
            continue
        if untagged:
            lead = re.match(r"[ \t\r\n;,]*" if m.calls else r"[ \t\r\n]*", text[i:]).end() + i
            head = re.match(r'\{[ \t\r\n]*"(name|parameters|arguments|type|function)"', text[lead:])
            if head is None and re.fullmatch(r'\{[ \t\r\n]*("[a-z]*)?', text[lead:]):
                part = text[lead:].split('"', 1)[1] if '"' in text[lead:] else ""
                if any(w.startswith(part) for w in ("name", "parameters", "arguments", "type", "function")):
                    m.open_call = text[lead:]
                    return m
            if head is not None:
                try:
                    end = value_end(text, lead)
                    call = read_json_call(text[lead:end], arguments_required=True)
                except Cut:
                    m.open_call = text[lead:]
                    return m
                except Bad:
                    call = None
                if call is not None:
                    m.calls.append(call)
                    i, behind_tag = end, True
                    continue
        untagged = False
        found = [
            (text.find(t, i) + len(t), t)
            for t in (open_tag, reasoning and reasoning.start)
            if t and text.find(t, i) >= 0
        ]
        if not found:
            piece = text[i:]
            m.content += piece.lstrip(SPACE) if behind_tag else piece
            return m
        end, tag = min(found)
        piece = text[i : end - len(tag)]
        if behind_tag or not (m.content or piece.strip(SPACE)):
            piece = piece.lstrip(SPACE)
        m.content += piece
        i, behind_tag = end, True
        if tag != open_tag:
            region = "reasoning"
            continue
        i, untagged = call_end(text, i, syntax, m), llama
        if i is None:
            return m


def call_end(text, i, syntax, m):
    """Read the call behind the open tag that ends at `i`; the index behind it, None where it is cut."""
    start = i
    close = syntax.close_tag
    try:
        if syntax.name == "python":
            end = text.find(close, i)
            if end < 0:
                raise Cut
            m.calls.append(read_python_call(text[i:end]))
            return end + len(close)
        if syntax.name == "hermes":
            end = value_end(text, i)
            while end < len(text) and text[end] in SPACE:
                end += 1
            if text.startswith(close, end):
                add(m, read_json_call(text[i:end].strip()), text[i:end].strip())
                return end + len(close)
            if close.startswith(text[end:]):
                raise Cut
            raise Bad(end)
        i = len(text) - len(text[i:].lstrip(SPACE))
        if i == len(text):
            raise Cut
        if text[i] == "{":
            end = value_end(text, i)
            add(m, read_json_call(text[i:end]), text[i:end])
            return end
        if syntax.name == "mistral" and text[i] == "[":
            i = start = i + 1
            while True:
                i = len(text) - len(text[i:].lstrip(SPACE))
                if i == len(text):
                    raise Cut
                if text[i] == "]" and not text[start:i].strip(SPACE):
                    return i + 1
                if (
                    text[i] == ","
                    and start != 0
                    and text[start - 1] == "}"
                    and not text[start:i].strip(SPACE)
                ):
                    i += 1
                elif text[start - 1] == "}":
                    raise Bad(i)
                end = value_end(text, i)
                j = end - len(text[i:end].lstrip(SPACE))
                add(m, read_json_call(text[j:end]), text[j:end])
                i = start = end
        if syntax.name == "mistral":
            start = i
            head = re.match(MISTRAL_HEAD + r"(?=\{)", text[i:])
            if head is None:
                for k in range(1, 40):  # may it still become one? try the ways to go on
                    for rest in ("x[CALL_ID]a[ARGS]{"[-k:], "[ARGS]{"[-k:], "x{"[-k:]):
                        if re.match(MISTRAL_HEAD + r"\{$", text[i:] + rest):
                            raise Cut
                raise Bad(i)
            i += head.end()
            end = value_end(text, i)
            add(m, read_arguments_call(head[1], text[i:end], text[start:end]), text[start:end])
            return end
        start = i
        head = re.match(r"[A-Za-z0-9_]+\.call\(", text[i:])
        if head is None:
            if re.fullmatch(r"[A-Za-z0-9_]+(\.(c(a(l(l)?)?)?)?)?", text[i:]):
                raise Cut
            raise Bad(i)
        i += head.end()
        depth, quote = 1, ""
        while i < len(text):
            c = text[i]
            if quote:
                if c == "\\":
                    i += 1
                elif c == quote:
                    quote = ""
            elif c in "\"'":
                quote = c
            else:
                depth += (c in "([{") - (c in ")]}")
            i += 1
            if not depth:
                add(m, read_builtin_call(text[start:i]), text[start:i])
                return i
        raise Cut
    except Cut:
        if not (
            syntax.name == "mistral"
            and text[start - 1 : start] in "[}"
            and not text[start:].strip(" \t\r\n,;")
        ):
            m.open_call = text[start:]
        return None
    except Bad:
        found = [
            (text.find(t, start) + len(t), t)
            for t in (close, syntax.open_tag)
            if t and text.find(t, start) >= 0
        ]
        if not found:
            m.open_call = text[start:]
            return None
        end, tag = min(found)
        add(m, None, text[start : end - len(tag)].strip())
        return end if tag == close else end - len(tag)


def add(m, call, written):
    if call is not None:
        m.calls.append(call)
    elif written:
        m.broken.append(written)
