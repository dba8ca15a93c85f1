"""In-stream tools: the model writes a call between two tags, the runtime injects the answer behind it.

    <|python_start|>12 * 3<|python_end|>   written by the model
    <|output_start|>36<|output_end|>       forced: injected, computed as one chunk, never trained on

An `InStreamTool` is the tool itself (four tags, and `run`); `Calculator` is the one that comes with endstop.
`in_stream_tool(tool, ...)` resolves the tags to token ids of a model and gives back a factory: the engine
calls it once for each row and has a `StreamTool` that it shows every sampled token:

    make_tool = in_stream_tool(Calculator(), token_ids=..., pieces=..., encode_text=...)
    tool = make_tool()                # one row's
    job = tool.push(token_id)         # None, or what to run beside the steps when a call is complete
    job()                             # the ids to force, [] if there is no answer
    tool.close()                      # the row has ended: a running job is cancelled and gives []

What a tool cannot answer (a broken expression, a division by zero, an exception, a deadline that passed)
is answered by nothing: no token is forced and the model goes on by itself. It never fails the row, because
the text between the tags is the model's and may be anything. Exceptions are logged at level warning.

A job waits for the tool in a thread of its own, so that a tool that hangs costs one sleeping daemon thread
and nothing else. Python cannot end a thread; `run` is given an event that a well-behaved tool looks at.
"""

from __future__ import annotations

import ast
import logging
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

LONGEST_CALL = 4096
"""Bytes between the tags; a longer call is not run."""

LONGEST_EXPRESSION = 1000
LONGEST_RESULT = 100
MAX_DEPTH = 200


class InStreamTool(Protocol):
    """A tool whose calls and answers stand in the token stream between tags (each one token)."""

    start_token: str
    end_token: str
    output_start: str
    output_end: str

    def run(self, text: str, cancelled: threading.Event) -> str | None:
        """Answer the call that `text` spells, or None for no answer. Called in a thread of its own."""
        ...


class Calculator:
    """endstop's own tool: arithmetic and letter counting, with nanochat's tags and meaning.

    The time of a calculation is bounded by what is allowed: there are no powers, no shifts, no string
    repetition, no names, and LONGEST_EXPRESSION characters.
    """

    start_token = "<|python_start|>"
    end_token = "<|python_end|>"
    output_start = "<|output_start|>"
    output_end = "<|output_end|>"

    def run(self, text: str, cancelled: threading.Event) -> str | None:
        return calculate(text)


_STRING = re.compile(r"'[^'\\]*'|\"[^\"\\]*\"")
# What may stand in an expression once its strings are replaced by empty ones.
_SKELETON = re.compile(r'(?:[-+*/(). 0-9]|""|\.count\()*')


def calculate(expression: str) -> str | None:
    """The value of `expression` as Python would print it, or None where it has none.

    Numbers, `+ - * / //`, brackets, and `"text".count("part")`. Commas in numbers are dropped (`1,000`),
    those in strings are not. None for everything else: syntax errors, other operations, division by zero,
    values that are not finite, and results of more than LONGEST_RESULT characters.
    """
    text = expression.strip()
    if len(text) > LONGEST_EXPRESSION:
        return None
    strings = _STRING.findall(text)
    skeleton = _STRING.sub('""', text).replace(",", "")
    if _SKELETON.fullmatch(skeleton) is None:
        return None
    parts = skeleton.split('""')
    if len(parts) != len(strings) + 1:
        return None
    rebuilt = parts[0] + "".join(string + part for string, part in zip(strings, parts[1:], strict=True))
    try:
        value = _value(ast.parse(rebuilt, mode="eval").body, MAX_DEPTH)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    result = str(value)
    return result if len(result) <= LONGEST_RESULT else None


def _value(node: ast.expr, depth: int) -> int | float:
    """Walk the syntax tree. Raises ValueError for a node that is not arithmetic."""
    if not depth:
        raise ValueError("nested too deeply")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, depth - 1)
        return -value if isinstance(node.op, ast.USub) else +value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, depth - 1), _value(node.right, depth - 1)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case ast.FloorDiv():
                return left // right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
        texts = [node.func.value, node.args[0]]
        values = [text.value for text in texts if isinstance(text, ast.Constant)]
        if len(values) == 2 and isinstance(values[0], str) and isinstance(values[1], str):
            return values[0].count(values[1])
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def in_stream_tool(
    tool: InStreamTool,
    *,
    token_ids: Mapping[str, int],
    pieces: Callable[[int], bytes],
    encode_text: Callable[[str], Sequence[int]],
    deadline: float = 5.0,
) -> Callable[[], TokenStreamTool]:
    """Bind a tool to a model's vocabulary.

    Args:
        token_ids: the id of every added token by its content.
        pieces: the bytes of a token id.
        encode_text: ids of plain text: nothing special is added, and tags in it are text.
        deadline: seconds that a call may take.

    Returns a factory of one row's tool. Raises ValueError if the vocabulary lacks one of the tool's tags.
    """
    tags = (tool.start_token, tool.end_token, tool.output_start, tool.output_end)
    missing = [tag for tag in tags if tag not in token_ids]
    if missing:
        raise ValueError(f"the model's vocabulary has no token {', '.join(missing)}, which the tool needs")
    start, end, output_start, output_end = (token_ids[tag] for tag in tags)

    def answer(text: str) -> list[int]:
        return [output_start, *encode_text(text), output_end]

    return lambda: TokenStreamTool(tool, start, end, pieces, answer, deadline)


class TokenStreamTool:
    """One row's view of an in-stream tool: watches the tokens, makes a job of every complete call."""

    def __init__(
        self,
        tool: InStreamTool,
        start: int,
        end: int,
        pieces: Callable[[int], bytes],
        answer: Callable[[str], list[int]],
        deadline: float,
    ) -> None:
        self._tool = tool
        self._start = start
        self._end = end
        self._pieces = pieces
        self._answer = answer
        self._deadline = deadline
        self._call: bytearray | None = None
        self._running: _Call | None = None
        self._closed = False

    def push(self, token_id: int) -> Callable[[], list[int]] | None:
        """Take a sampled token; a job if it completes a call. A start tag inside a call begins it anew."""
        if token_id == self._start:
            self._call = bytearray()
        elif self._call is not None and token_id != self._end:
            self._call += self._pieces(token_id)
        elif self._call is not None:
            call, self._call = self._call, None
            if len(call) <= LONGEST_CALL and not self._closed:
                text = call.decode("utf-8", "replace")
                return lambda: self._run(text)
        return None

    def close(self) -> None:
        """The row has ended: its running call ends and no new one begins. May come from any thread."""
        self._closed = True
        if self._running is not None:
            self._running.end()

    def _run(self, text: str) -> list[int]:
        """Wait for the tool: until it has an answer, the deadline has passed or the row has ended."""
        call = self._running = _Call(self._tool, text)
        if self._closed:  # tested behind the line above, so that one of the two sees the other
            return []
        threading.Thread(target=call.work, name="endstop-tool-call", daemon=True).start()
        if not call.over.wait(self._deadline):
            logger.warning("the tool %s took more than %g s", type(self._tool).__name__, self._deadline)
        # Taken once: what a late tool answers is not seen any more.
        result = call.result
        call.end()
        return [] if result is None or self._closed else self._answer(result)


class _Call:
    """One call of a tool in its thread."""

    def __init__(self, tool: InStreamTool, text: str) -> None:
        self.tool = tool
        self.text = text
        self.result: str | None = None
        self.cancelled = threading.Event()
        self.over = threading.Event()

    def work(self) -> None:
        try:
            self.result = self.tool.run(self.text, self.cancelled)
        except Exception:
            logger.warning("the tool %s failed", type(self.tool).__name__, exc_info=True)
        finally:
            self.over.set()

    def end(self) -> None:
        self.cancelled.set()
        self.over.set()
