"""read_file, list_files and edit_file: none of them can leave the workspace."""

from __future__ import annotations

import difflib
import posixpath
import re
from collections import deque
from typing import Annotated

from pydantic import Field

from endstop.agent.tool import Tool, ToolResult, tool
from endstop.agent.tools.context import LEFT_OUT, ToolContext, readable_size
from endstop.agent.tools.lines import LineReader, Shown
from endstop.agent.tools.replace import Ambiguous, NotFound, Replacement, replace_once
from endstop.sandbox.files import Entry, PathMissing, PathRefused

_MOST_ENTRIES = 500
# Directories that a recursive list opens, however little they hold.
_MOST_DIRECTORIES = 5000
# edit_file holds the whole file in memory.
_LARGEST_EDIT = 32 << 20

_NUMBERED = re.compile(r" *\d+\t")

Line = Annotated[int, Field(ge=1)]


def file_tools(context: ToolContext) -> list[Tool]:
    """read_file, list_files and edit_file."""

    @tool(output_bytes=context.output_bytes + 1024)
    def read_file(
        path: str,
        first_line: Annotated[Line | None, "From 1; the beginning of the file if not given."] = None,
        last_line: Annotated[Line | None, "Included; the end of the file if not given."] = None,
        line_numbers: Annotated[bool, "Number the lines. The numbers are no part of the file."] = False,
    ) -> ToolResult:
        """Read a text file, or some of its lines. If it is too long to be shown at once, a last line in
        brackets says how to read on."""
        if first_line is not None and last_line is not None and last_line < first_line:
            return ToolResult(f"last_line {last_line} is before first_line {first_line}.", ok=False)
        try:
            shown = LineReader(context.files, path, context.output_bytes, line_numbers).read(
                first_line or 1, last_line
            )
        except PathRefused as error:
            return _refused(context, path, error)
        return _described(path, shown)

    @tool(output_bytes=context.output_bytes + 1024)
    def list_files(
        path: Annotated[str, "A directory; the workspace if not given."] = ".",
        recursive: Annotated[bool, "With everything below."] = False,
    ) -> ToolResult:
        """List a directory: its files, and its directories with a / behind their names. A recursive list does
        not open directories of fetched or generated files (.git, node_modules, .venv, caches)."""
        try:
            return _list(context, path, recursive)
        except PathRefused as error:
            return _refused(context, path, error)

    @tool(output_bytes=context.output_bytes)
    def edit_file(
        path: str,
        old: Annotated[str, "Exact text that stands once in the file; empty to create the file."],
        new: Annotated[str, "What stands there instead; empty to delete it."],
    ) -> ToolResult:
        """Replace one exact piece of a file, or create a file. Take enough lines around the change into `old`
        that it stands only once. Blanks count; line ends become those of the file."""
        try:
            return _edit(context, path, old, new)
        except PathRefused as error:
            return _refused(context, path, error)

    return [read_file, list_files, edit_file]


def _described(path: str, shown: Shown) -> ToolResult:
    if shown.problem:
        return ToolResult(shown.problem, ok=False)
    return ToolResult(shown.text + "".join(f"\n[{path}: {note}]" for note in shown.notes))


def _list(context: ToolContext, path: str, recursive: bool) -> ToolResult:
    """Breadth first, so that a cut list still has everything that is near."""
    files = context.files
    top = files.relative(path)
    base = "" if top == "." else top.rstrip("/") + "/"
    queue = deque([""])
    found: list[str] = []
    opened = 0
    while queue and len(found) <= _MOST_ENTRIES and opened < _MOST_DIRECTORIES:
        inner = queue.popleft()
        opened += 1
        try:
            entries = files.list(base + inner or ".")
        except PathRefused as error:
            if not inner:
                raise
            found.append(f"{inner} [{error}]")
            continue
        for entry in entries:
            name = inner + entry.name
            closed = recursive and entry.kind == "directory" and entry.name in LEFT_OUT
            found.append(_entry(name, entry, closed))
            if recursive and entry.kind == "directory" and not closed:
                queue.append(name + "/")
    if not found:
        return ToolResult(f"[{path} is empty]")
    cut = len(found) > _MOST_ENTRIES or bool(queue)
    lines: list[str] = []
    room = context.output_bytes
    for line in found[:_MOST_ENTRIES]:
        room -= len(line.encode("utf-8", "replace")) + 1
        if room < 0:
            cut = True
            break
        lines.append(line)
    count = len(lines)
    lines.sort()
    if cut:
        lines.append(f"[the {count} nearest entries are shown, there are more; list a directory below]")
    return ToolResult("\n".join(lines))


def _entry(name: str, entry: Entry, closed: bool) -> str:
    # A line end in a name would look like two names.
    name = name.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")
    if entry.kind == "directory":
        return f"{name}/ [not opened]" if closed else f"{name}/"
    return name if entry.kind == "file" else f"{name} [{entry.kind if entry.kind == 'link' else 'no file'}]"


def _edit(context: ToolContext, path: str, old: str, new: str) -> ToolResult:
    files = context.files
    if context.is_bound(files.relative(path)):
        return ToolResult(f"{path} belongs to a dependency, which is only read.", ok=False)
    if old == new and old:
        return ToolResult("old and new are the same, so nothing would change.", ok=False)
    try:
        data, size = files.read(path, _LARGEST_EDIT)
    except PathMissing:
        if old or files.kind(path) is not None:
            raise
        return _written(context, path, new.encode(), f"Created {path}")
    if size > len(data):
        return ToolResult(f"{path} has {readable_size(size)}, too many for edit_file; use bash.", ok=False)
    if not old:
        if data:
            return ToolResult(
                f"{path} exists already ({readable_size(size)}). Give the text to be replaced as old.",
                ok=False,
            )
        return _written(context, path, new.encode(), f"Wrote {path}, which was empty")
    if b"\0" in data:
        return ToolResult(f"{path} is a binary file; edit_file changes text.", ok=False)
    made = replace_once(data, old, new)
    if isinstance(made, Ambiguous):
        lines = ", ".join(map(str, made.lines)) + (" and more" if made.more else "")
        return ToolResult(
            f"Nothing was changed: old stands {len(made.lines)}{' or more' if made.more else ''} times in "
            f"{path}, at the lines {lines}. Take lines around the right one into old and new.",
            ok=False,
        )
    if isinstance(made, NotFound):
        return ToolResult(_not_found(path, old, made), ok=False)
    files.write(path, made.data)
    return ToolResult(_changed(path, made) + context.bring_back())


def _written(context: ToolContext, path: str, data: bytes, what: str) -> ToolResult:
    context.files.write(path, data)
    return ToolResult(f"{what} ({readable_size(len(data))}).{context.bring_back()}")


def _changed(path: str, made: Replacement) -> str:
    was, now = _span(made.old_lines), _span(made.new_lines)
    return f"Edited {path}: {was}." if was == now else f"Edited {path}: {was} became {now}."


def _span(lines: tuple[int, int]) -> str:
    first, last = lines
    return f"line {first}" if first == last else f"lines {first} to {last}"


def _not_found(path: str, old: str, found: NotFound) -> str:
    text = f"Nothing was changed: old does not stand in {path}."
    if _NUMBERED.match(old):
        return f"{text} It begins with a line number, which is no part of the file."
    if found.line_ends:
        return f"{text} Only its line ends differ: write them in old and new without \\r."
    if not found.nearest:
        return f"{text} No lines in it are like old; read the file."
    if found.nearest[0].blanks_only:
        text += " White space differs: copy it as it is."
    for candidate in found.nearest:
        first = candidate.first_line
        text += f"\nNearest, {_span((first, first + len(candidate.lines) - 1))}:\n"
        text += "\n".join(f"{number:>6}\t{line}" for number, line in enumerate(candidate.lines, first))
    return text


def _refused(context: ToolContext, path: str, error: PathRefused) -> ToolResult:
    """Why not, with names that are like the one that does not exist."""
    text = str(error).rstrip(".") + "."
    if isinstance(error, PathMissing) and context.is_bound(context.files.relative(path)):
        text = f"{path} belongs to a dependency, which only commands see: use bash or code_search."
    elif isinstance(error, PathMissing):
        above, name = posixpath.split(path.rstrip("/"))
        try:
            names = [entry.name for entry in context.files.list(above or ".")]
        except PathRefused:
            names = []
        near = difflib.get_close_matches(name, names, n=3)
        if near:
            text += f" Near by: {', '.join(posixpath.join(above, one) for one in near)}."
    elif "is a directory" in text:
        text += " Use list_files."
    return ToolResult(text, ok=False)
