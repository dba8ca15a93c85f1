"""Taking a generated message apart, byte by byte: answer, reasoning, tool calls.

The parser is fed the bytes of a message in any pieces. Each of its decisions falls at one byte, the first
that settles it, so the events do not depend on the pieces (only the text of neighbouring content events
may be divided differently). Text is held back exactly as long as it may still be part of a tag.

Rules that are choices (docs/tools.md has them all):

- White space directly behind a tag belongs to the tag; in front of a tag it is content. White space at
  the start of a message is content unless a tag follows it.
- Once the JSON of a tagged call is broken, the first close tag or open tag behind its beginning ends it.
- An untagged JSON object (llama3) is taken for a call from its first key on, if calls begin with that key;
  if it turns out to be none, it is content.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Literal

from endstop.protocol.json_scanner import JsonObjectScanner
from endstop.protocol.message_event import EventKind, MessageEvent, Region
from endstop.protocol.tag_search import common_length, earliest_tag, tag_prefix_length
from endstop.protocol.tool_syntax import (
    Reasoning,
    ToolCall,
    ToolSyntax,
    read_arguments_call,
    read_builtin_call,
    read_json_call,
    read_python_call,
)

# What the parser is inside of. `text`: answer or reasoning. The others are parts of a tool call.
_Mode = Literal["text", "json", "close", "array", "head", "builtin", "plain", "broken"]

_SPACE = b" \t\r\n"
_BETWEEN = b" \t\r\n;,"  # what may stand between two untagged calls
_NAME = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_IDENTIFIER = _NAME - frozenset(b".-")
# Runs of these bytes, found by the regular expression engine: a name may be read again with every token.
_RUNS = {these: re.compile(b"[" + re.escape(bytes(these)) + b"]+") for these in (_SPACE, _NAME, _IDENTIFIER)}
# A JSON object that begins with one of these keys may be an untagged call.
_CALL_KEYS = (b'"name"', b'"parameters"', b'"arguments"', b'"type"', b'"function"')


class MessageParser:
    """Incremental parser of one message.

    `tools` and `reasoning` say which tags there are; None means none of that sort. `region` is where the
    next byte belongs, `calls` the complete calls, `broken_calls` the text between tags that is no call,
    `open_call` the text of a call that has begun and is not complete (after `finish`: was cut off).
    `content` and `reasoning` events concatenate to the message's content and reasoning.
    """

    def __init__(self, tools: ToolSyntax | None, reasoning: Reasoning | None) -> None:
        self.tools = tools
        self.reasoning = reasoning
        self.region: str = "reasoning" if reasoning is not None and reasoning.open else "answer"
        self._open_tag = tools.open_tag.encode() if tools is not None else b""
        self._close_tag = tools.close_tag.encode() if tools is not None else b""
        self._think = reasoning.start.encode() if reasoning is not None else b""
        self._answer = reasoning.end.encode() if reasoning is not None else b""
        self._call_borders = tuple(tag for tag in (self._close_tag, self._open_tag) if tag)
        self._calls: list[ToolCall] = []
        self._broken: list[str] = []
        # Bytes not settled yet, and for each of them whether it is shown (0) or hidden (1).
        self._buffer = bytearray()
        self._hidden = bytearray()
        self._base = 0  # how many bytes of the message lie before the buffer
        self._received = 0  # how many lie before the data of this push
        self._floor = 0  # how many had to be read for what is being settled
        self._cut_character = b""  # incomplete UTF-8 of the current region
        self._space: Literal["", "hold", "drop"] = "drop" if self.region == "reasoning" else "hold"
        self._leading = b""  # white space at the start of the message
        self._llama = tools is not None and tools.name == "llama3"
        self._untagged = self._llama  # may such a call begin here?
        self._mode: _Mode = "text"
        self._tagged = False  # the call was opened by a tag
        self._start = 0  # where the call's text begins in the buffer
        self._object = 0  # where its JSON begins
        self._scan = 0  # where to read on
        self._blank = 0  # up to where the buffer is known to be what may stand before an untagged call
        self._json = JsonObjectScanner()
        self._name = ""  # the name that stands before the arguments (mistral)
        self._depth = 0  # builtin: open brackets
        self._quote = 0  # builtin: the quote of the string that is open
        self._escaped = False  # builtin: the last byte was a backslash in a string
        self._array = ""  # array: what comes next, `first`, `item` or `comma`
        self._cut_head = False
        self._finished = False

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(self._calls)

    @property
    def broken_calls(self) -> tuple[str, ...]:
        return tuple(self._broken)

    @property
    def open_call(self) -> str | None:
        if self._mode == "text" and not self._cut_head:
            return None
        rest = self._buffer[self._start :]
        if self._mode == "array" and not rest.strip(_BETWEEN):
            return None  # only the array is open: every call in it is complete
        return rest.decode("utf-8", "replace")

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag that is searched for, in any region."""
        tags = (self._open_tag, self._close_tag, self._think, self._answer)
        return tuple(tag.decode() for tag in tags if tag)

    def push(self, data: bytes, hidden: bool = False) -> list[MessageEvent]:
        """Read the next bytes of the message.

        `hidden`: they spell a special token that is not shown; they are searched for tags and stand in
        the text of calls, but never in content or reasoning.
        """
        if self._finished:
            raise RuntimeError("the message is finished: nothing can be pushed any more")
        self._buffer += data
        self._hidden += bytes([hidden]) * len(data)
        events: list[MessageEvent] = []
        while _STEPS[self._mode](self, events):
            pass
        self._received += len(data)
        return events

    def push_plain(self, data: bytes, hidden: bool = False) -> list[MessageEvent]:
        """Take bytes that the model did not write (forced tokens): they are never searched for tags.

        They are text of the current region, or of the call they stand in. No tag can begin before them
        and end behind them.
        """
        events: list[MessageEvent] = []
        if self.region == "tool":
            self._buffer += data
            self._hidden += bytes([hidden]) * len(data)
            while self.region == "tool" and _STEPS[self._mode](self, events):
                pass
            if self.region != "tool" and self._buffer:  # they ended the call, or it is none because of them
                self._show(events, len(self._buffer))
                self._untagged = False
            self._received += len(data)
            return events
        self._show(events, len(self._buffer))
        self._received += len(data)
        self._untagged = False
        if hidden:
            self._base += len(data)
            return events
        self._buffer += data
        self._hidden += bytes(len(data))
        self._show(events, len(data))
        return events

    def finish(self) -> list[MessageEvent]:
        """The message is over: deliver the text that was held back. A call that is open stays one."""
        if self._finished:
            return []
        self._finished = True
        events: list[MessageEvent] = []
        if self._mode == "text":
            start = 0
            while start < len(self._buffer) and (self._hidden[start] or self._buffer[start] in _BETWEEN):
                start += 1
            if self._untagged and self.region == "answer" and self._buffer[start : start + 1] == b"{":
                self._cut_head, self._start = True, start
            else:
                self._show(events, len(self._buffer))
            if self._space == "hold" and not self._cut_head:
                events.append(MessageEvent("content", 0, text=self._leading.decode()))
            self._flush_character(events)
        return [event for event in events if event.text]

    def fork(self) -> MessageParser:
        """An independent parser in the same state."""
        other = object.__new__(MessageParser)
        other.__dict__.update(self.__dict__)
        other._calls, other._broken = list(self._calls), list(self._broken)
        other._buffer, other._hidden = bytearray(self._buffer), bytearray(self._hidden)
        other._json = self._json.copy()
        return other

    # Reading text.

    def _read_text(self, events: list[MessageEvent]) -> bool:
        if self._untagged and self.region == "answer":
            begins = self._untagged_call(events)
            if begins is None:
                return False
            if begins:
                return True
            self._untagged = False
        tags = (self._answer,) if self.region == "reasoning" else (self._open_tag, self._think)
        found = earliest_tag(self._buffer, 0, tags)
        if found is None:
            self._show(events, len(self._buffer) - tag_prefix_length(self._buffer, tags))
            return False
        start, tag = found
        self._show(events, start)
        self._settle(len(tag))
        self._drop(len(tag))
        self._leading = b""
        if tag in (self._think, self._answer):
            self._space = "drop"
            self._untagged = self._llama
            self._enter(events, "reasoning" if tag == self._think else "answer")
        else:
            self._open_call(events)
        return True

    def _untagged_call(self, events: list[MessageEvent]) -> bool | None:
        """Whether a JSON object that may be a call begins here; None while that is open."""
        buffer, size = self._buffer, len(self._buffer)
        start = self._blank  # not from 0 for every token: a message may begin with thousands of newlines
        while start < size and (buffer[start] in _BETWEEN or self._hidden[start]):
            self._blank = start
            if self._hidden[start]:
                rest = buffer[start:]
                for tag in (self._open_tag, self._think):
                    if tag and rest.startswith(tag):
                        return False
                    if tag.startswith(rest):
                        return None
            elif buffer[start] in b";," and not self._calls:
                return False
            start += 1
        if start == size:
            return None
        if buffer[start] != 0x7B:
            return False
        key = self._skip(start + 1, _SPACE)
        if key == size:
            return None
        for word in _CALL_KEYS:
            if buffer.startswith(word, key):
                self._start = start
                self._begin_json(start, tagged=False)
                self._settle(key + len(word))
                self._enter(events, "tool")
                return True
        rest = buffer[key:]
        return None if any(word.startswith(rest) for word in _CALL_KEYS) else False

    # Reading calls. Each reader returns whether there is something left to read.

    def _open_call(self, events: list[MessageEvent]) -> None:
        self._start = self._scan = 0
        self._tagged, self._name, self._array = True, "", ""
        if self.tools is not None and self.tools.name == "python":
            self._mode = "plain"
        elif self._close_tag:
            self._begin_json(0, tagged=True)
        else:
            self._mode = "head"
        self._enter(events, "tool")

    def _begin_json(self, position: int, tagged: bool) -> None:
        self._mode, self._tagged = "json", tagged
        self._object = self._scan = position
        self._json = JsonObjectScanner()

    def _read_json(self, events: list[MessageEvent]) -> bool:
        status, self._scan = self._json.scan(self._buffer, self._scan)
        if status == "more":
            return False
        if status == "bad":
            return self._fail(events, self._scan + 1)
        end = self._scan
        if self._close_tag:
            self._mode = "close"
            return True
        written = self._text(self._object, end)
        if self._name:
            call = read_arguments_call(self._name, written, self._text(self._start, end))
        else:
            call = read_json_call(written, arguments_required=not self._tagged)
        if call is None and not self._tagged:
            return self._fail(events, end)
        self._settle(end)
        self._deliver(events, call, written)
        if self._array:
            self._start, self._mode, self._array = end, "array", "comma"
            return True
        return self._end_call(events, end)

    def _read_close(self, events: list[MessageEvent]) -> bool:
        position = self._scan = self._skip(self._scan, _SPACE)
        matched = common_length(self._buffer, position, self._close_tag)
        if matched == len(self._close_tag):
            self._settle(position + matched)
            body = self._text(self._start, position).strip()
            self._deliver(events, read_json_call(body), body)
            return self._end_call(events, position + matched)
        if position + matched == len(self._buffer):
            return False
        return self._fail(events, position + matched + 1)

    def _read_plain(self, events: list[MessageEvent]) -> bool:
        position = self._buffer.find(self._close_tag, self._scan)
        if position < 0:
            self._scan = max(0, len(self._buffer) - len(self._close_tag) + 1)
            return False
        end = position + len(self._close_tag)
        self._settle(end)
        self._deliver(events, read_python_call(self._text(0, position)), "")
        return self._end_call(events, end)

    def _read_array(self, events: list[MessageEvent]) -> bool:
        position = self._scan = self._skip(self._scan, _SPACE)
        if position == len(self._buffer):
            return False
        byte = self._buffer[position]
        if byte == 0x5D and self._array != "item":
            self._settle(position + 1)
            return self._end_call(events, position + 1)
        if byte == 0x2C and self._array == "comma":
            self._array, self._scan = "item", position + 1
            return True
        if byte == 0x7B and self._array != "comma":
            self._begin_json(position, tagged=True)
            return True
        return self._fail(events, position + 1)

    def _read_head(self, events: list[MessageEvent]) -> bool:
        """What stands behind an open tag that has no close tag: an array, an object or a name."""
        position = self._skip(0, _SPACE)
        if position == len(self._buffer):
            return False
        if self._buffer[position] == 0x7B:
            self._begin_json(position, tagged=True)
            return True
        if self._buffer[position] == 0x5B and not self._llama:
            self._mode, self._array = "array", "first"
            self._start = self._scan = position + 1
            return True
        self._start = position
        end = self._skip(position, _IDENTIFIER if self._llama else _NAME)
        if end == position:
            return self._fail(events, position + 1)
        if end == len(self._buffer):
            return False
        return self._read_dotted(events, end) if self._llama else self._read_named(events, position, end)

    def _read_named(self, events: list[MessageEvent], start: int, end: int) -> bool:
        """Mistral's `name[CALL_ID]id[ARGS]{..}`, both marks optional."""
        position = end
        for mark in (b"[CALL_ID]", b"[ARGS]"):
            position = self._skip(position, _SPACE)
            matched = common_length(self._buffer, position, mark)
            if matched == len(mark):
                position = self._skip(position + matched, _SPACE)
                if mark == b"[CALL_ID]":
                    position = self._skip(position, _NAME)
            elif position + matched == len(self._buffer):
                return False
            elif matched > 1:  # behind the bracket only this mark was possible
                return self._fail(events, position + matched + 1)
        position = self._skip(position, _SPACE)
        if position == len(self._buffer):
            return False
        if self._buffer[position] != 0x7B:
            # A lone bracket is settled by the byte behind it, which both marks refused.
            return self._fail(events, position + (2 if self._buffer[position] == 0x5B else 1))
        self._name = self._text(start, end)
        self._begin_json(position, tagged=True)
        return True

    def _read_dotted(self, events: list[MessageEvent], end: int) -> bool:
        """Llama 3's `name.call(`."""
        matched = common_length(self._buffer, end, b".call(")
        if matched == len(b".call("):
            self._mode, self._scan = "builtin", end + matched
            self._depth, self._quote, self._escaped = 1, 0, False
            return True
        if end + matched == len(self._buffer):
            return False
        return self._fail(events, end + matched + 1)

    def _read_builtin(self, events: list[MessageEvent]) -> bool:
        for position in range(self._scan, len(self._buffer)):
            byte = self._buffer[position]
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = byte == 0x5C
                if byte == self._quote:
                    self._quote = 0
            elif byte in b"\"'":
                self._quote = byte
            elif byte in b"([{":
                self._depth += 1
            elif byte in b")]}":
                self._depth -= 1
                if not self._depth:
                    self._settle(position + 1)
                    written = self._text(self._start, position + 1)
                    self._deliver(events, read_builtin_call(written), written)
                    return self._end_call(events, position + 1)
        self._scan = len(self._buffer)
        return False

    def _read_broken(self, events: list[MessageEvent]) -> bool:
        found = earliest_tag(self._buffer, self._scan, self._call_borders)
        if found is None:
            longest = max(len(tag) for tag in self._call_borders)
            self._scan = max(self._scan, len(self._buffer) - longest + 1)
            return False
        position, tag = found
        self._settle(position + len(tag))
        self._deliver(events, None, self._text(self._start, position).strip())
        # An open tag begins the next call, so it is left to be read as text is.
        return self._end_call(events, position + (len(tag) if tag == self._close_tag else 0))

    # What readers share.

    def _deliver(self, events: list[MessageEvent], call: ToolCall | None, written: str) -> None:
        if call is not None:
            self._calls.append(call)
            events.append(MessageEvent("call", self._end(), call=call))
        elif written:
            self._broken.append(written)

    def _end_call(self, events: list[MessageEvent], count: int) -> bool:
        self._drop(count)
        self._mode, self._space = "text", "drop"
        self._untagged = self._llama
        self._enter(events, "answer")
        return True

    def _fail(self, events: list[MessageEvent], count: int) -> bool:
        """What was read up to `count` is no call: with a tag it is a broken one, without it is content."""
        self._settle(count)
        if self._tagged:
            self._mode, self._scan = "broken", self._start
        else:
            self._mode, self._untagged = "text", False
            self._enter(events, "answer")
        return True

    def _enter(self, events: list[MessageEvent], region: Region) -> None:
        self._flush_character(events)
        self.region = region
        events.append(MessageEvent("border", self._end(), region=region))

    def _settle(self, count: int) -> None:
        """What comes next became certain with byte `count` of the buffer (or later, if that is known)."""
        self._floor = max(self._floor, self._base + count)

    def _end(self) -> int:
        return max(0, self._floor - self._received)

    def _drop(self, count: int) -> None:
        del self._buffer[:count]
        del self._hidden[:count]
        self._base += count
        self._blank = 0

    def _show(self, events: list[MessageEvent], count: int) -> None:
        """Deliver the first `count` bytes of the buffer as text of the current region."""
        if count <= 0:
            return
        shown = bytes(self._buffer[:count])
        if self._hidden.find(1, 0, count) >= 0:
            shown = bytes(byte for byte, hidden in zip(shown, self._hidden, strict=False) if not hidden)
        self._drop(count)
        if self._space:
            rest = shown.lstrip(_SPACE)
            if self._space == "hold":
                self._leading += shown[: len(shown) - len(rest)]
            if not rest:
                return
            shown, self._leading, self._space = self._leading + rest, b"", ""
        text, used = codecs.utf_8_decode(self._cut_character + shown, "replace", False)
        self._cut_character = (self._cut_character + shown)[used:]
        if text:
            kind: EventKind = "reasoning" if self.region == "reasoning" else "content"
            events.append(MessageEvent(kind, max(0, self._base - self._received), text=text))

    def _flush_character(self, events: list[MessageEvent]) -> None:
        if self._cut_character:
            kind: EventKind = "reasoning" if self.region == "reasoning" else "content"
            text = self._cut_character.decode("utf-8", "replace")
            self._cut_character = b""
            events.append(MessageEvent(kind, self._end(), text=text))

    def _skip(self, position: int, these: bytes | frozenset[int]) -> int:
        """The first position from `position` on that holds none of these bytes."""
        run = _RUNS[these].match(self._buffer, position)
        return position if run is None else run.end()

    def _text(self, start: int, end: int) -> str:
        return self._buffer[start:end].decode("utf-8", "replace")


_STEPS: dict[_Mode, Callable[[MessageParser, list[MessageEvent]], bool]] = {
    "text": MessageParser._read_text,
    "json": MessageParser._read_json,
    "close": MessageParser._read_close,
    "array": MessageParser._read_array,
    "head": MessageParser._read_head,
    "builtin": MessageParser._read_builtin,
    "plain": MessageParser._read_plain,
    "broken": MessageParser._read_broken,
}
