"""code_search: ripgrep in the sandbox; where this machine has none, a search of our own with the same output.

Neither follows .gitignore: it is a file of the project that anybody may change, and a search that leaves out
what such a file names misleads. The same few directories are left out everywhere (`LEFT_OUT`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from endstop.agent.tool import Tool, ToolResult, tool
from endstop.agent.tools.context import LEFT_OUT, ToolContext
from endstop.sandbox.bounded import BoundedOutput
from endstop.sandbox.command import run_command

_FALLBACK = Path(__file__).with_name("search_fallback.py")
_SECONDS = 30.0
# What is read of a search, and of each line; what is shown of each.
_READ_BYTES = 4 << 20
_COLUMNS = 1000
_SHOWN_COLUMNS = 300
_MOST_RESULTS = 200


@dataclass(frozen=True, slots=True)
class Search:
    """One search. `path` is relative to the root and was checked to be inside."""

    pattern: str
    path: str
    glob: str | None
    literal: bool
    ignore_case: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What a search printed: lines `path NUL line:column:text`. `cut`: there was more, or time ran out."""

    output: str
    cut: bool
    problem: str = ""


def code_search_tool(context: ToolContext, ripgrep: str | None = None) -> Tool:
    """`ripgrep` is the path of rg; None: the one in PATH, `""`: none."""
    program = shutil.which("rg") if ripgrep is None else ripgrep or None

    @tool(output_bytes=context.output_bytes)
    def code_search(
        pattern: Annotated[str, Field(min_length=1, description="A regular expression.")],
        path: Annotated[str, "A directory or a file; the workspace if not given."] = ".",
        glob: Annotated[str | None, "Only files whose path matches, such as *.py or src/**/*.ts."] = None,
        literal: Annotated[bool, "The pattern is plain text."] = False,
        ignore_case: Annotated[bool, "Upper and lower case are the same."] = False,
    ) -> ToolResult:
        """Search the text of files, as path:line:text. Directories of fetched or generated files (.git,
        node_modules, .venv, caches) are left out, unless path names one; binary files too."""
        if "\0" in pattern or "\0" in (glob or ""):
            return ToolResult("A pattern cannot hold a NUL character.", ok=False)
        place = context.files.relative(path)
        if context.leads_to(place) is None and not context.is_bound(place):
            return ToolResult(f"There is no file or directory {path!r} to search.", ok=False)
        search = Search(pattern, place, glob, literal, ignore_case)
        found = _fallback(context, search) if program is None else _ripgrep(context, search, program)
        note = (
            ""
            if program is not None
            else "ripgrep (rg) is not installed; searched by Python, its regular expressions, more slowly"
        )
        if found.problem:
            return ToolResult(_noted(found.problem, note), ok=False)
        return ToolResult(_noted(_listed(found, context.output_bytes - 600), note))

    return code_search


def _ripgrep(context: ToolContext, search: Search, program: str) -> Found:
    command = [program, "--no-config", "--no-ignore", "--hidden", "--no-messages", "--sort=path"]
    command += ["--no-heading", "--with-filename", "--line-number", "--column", "--null", "--color=never"]
    command += [f"--max-columns={_COLUMNS}", "--max-columns-preview", "--crlf"]
    command += ["--fixed-strings"] if search.literal else []
    command += ["--ignore-case"] if search.ignore_case else ["--case-sensitive"]
    command += [f"--glob={search.glob}"] if search.glob is not None else []
    command += [f"--glob=!**/{name}/**" for name in sorted(LEFT_OUT) if name not in search.path.split("/")]
    command += ["--regexp", search.pattern, "--", search.path]
    # rg itself may stand outside /usr.
    sandbox = replace(context.sandbox, read_only=(*context.sandbox.read_only, Path(program).resolve()))
    result = run_command(
        command, context.root, sandbox, bind=context.bind, seconds=_SECONDS, output_bytes=_READ_BYTES
    )
    late = result.cause == "timeout"
    if result.exit_code not in (0, 1) and not late and not _lines(result.output):
        return Found("", False, f"The search failed: {result.output.strip() or result.cause}")
    return Found(result.output, late or result.omitted_bytes > 0)


def _fallback(context: ToolContext, search: Search) -> Found:
    """In a process of its own: a regular expression can take for ever, and only a process can be ended."""
    request = {
        "pattern": search.pattern,
        "path": search.path,
        "glob": search.glob,
        "literal": search.literal,
        "ignore_case": search.ignore_case,
        "left_out": sorted(name for name in LEFT_OUT if name not in search.path.split("/")),
        "columns": _COLUMNS,
    }
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_FALLBACK), json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=context.root,
        env={},
    ) as process:
        output, late = _read(process)
    text, omitted = output.text()
    if process.returncode == 2:
        return Found("", False, f"The search failed: {text.strip()}")
    return Found(text, late or omitted > 0)


def _read(process: subprocess.Popen[bytes]) -> tuple[BoundedOutput, bool]:
    """What a search prints, until it ends or is ended; whether it was ended."""
    import threading

    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    assert process.stdout is not None
    output = BoundedOutput(_READ_BYTES)
    timer = threading.Timer(_SECONDS, end)
    timer.start()
    try:
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            output.add(chunk)
        process.wait()
    finally:
        timer.cancel()
        timer.join()
    return output, late.is_set()


def _lines(output: str) -> list[str]:
    """The results: `path:line:text`."""
    found = []
    for line in output.split("\n"):
        path, separator, rest = line.partition("\0")
        number, first, rest = rest.partition(":")
        column, second, text = rest.partition(":")
        if not (separator and first and second and number.isdigit() and column.isdigit()):
            continue  # the place where the middle of the output was left out
        text = text.removesuffix("\r")
        if len(text) > _SHOWN_COLUMNS:
            behind = f", match at byte {column}" if int(column) > _SHOWN_COLUMNS else ""
            text = f"{text[:_SHOWN_COLUMNS]} [long line{behind}]"
        found.append(f"{path.removeprefix('./')}:{number}:{text}")
    return found


def _listed(found: Found, limit: int) -> str:
    lines = _lines(found.output)
    if not lines:
        return "[the search took too long; narrow it]" if found.cut else "No matches."
    shown: list[str] = []
    for line in lines[:_MOST_RESULTS]:
        limit -= len(line.encode("utf-8", "replace")) + 1
        if limit < 0:
            break
        shown.append(line)
    more = "at least " if found.cut else ""
    if len(shown) < len(lines):
        shown.append(f"[{len(shown)} of {more}{len(lines)} lines shown; narrow the pattern, path or glob]")
    elif found.cut:
        shown.append("[there is more: the search was cut; narrow the pattern, path or glob]")
    return "\n".join(shown)


def _noted(text: str, note: str) -> str:
    return f"{text}\n[{note}]" if note else text
