"""A search of files where there is no ripgrep. Run by its path in an interpreter of its own, in the root of
the files; prints what `rg --null --column` prints: `path NUL line:column:text`.

Only the standard library, and nothing is opened that is not a regular file below the directory it is run in.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator

_LARGEST = 64 << 20  # bytes of a file that is searched


def main() -> int:
    request = json.loads(sys.argv[1])
    text = re.escape(request["pattern"]) if request["literal"] else request["pattern"]
    try:
        pattern = re.compile(text, re.IGNORECASE if request["ignore_case"] else 0)
    except re.error as error:
        print(f"not a regular expression: {error}")
        return 2
    glob = request["glob"]
    wanted = None if glob is None else re.compile(_glob(glob.removeprefix("!")))
    without = glob is not None and glob.startswith("!")
    out = sys.stdout.buffer
    for path in _files(request["path"], frozenset(request["left_out"])):
        if wanted is None or bool(wanted.fullmatch(path.removeprefix("./"))) != without:
            for found in _matches(path, pattern, request["columns"]):
                out.write(found)
    out.flush()
    return 0


def _files(top: str, left_out: frozenset[str]) -> Iterator[str]:
    """Paths below `top` in ripgrep's order: names sorted, files and directories together."""
    if not os.path.isdir(top):
        yield top
        return
    try:
        entries = sorted(os.scandir(top), key=lambda entry: os.fsencode(entry.name))
    except OSError:
        return
    for entry in entries:
        path = os.path.join(top, entry.name)
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in left_out:
                yield from _files(path, left_out)
        elif entry.is_file(follow_symlinks=False):
            yield path


def _matches(path: str, pattern: re.Pattern[str], columns: int) -> Iterator[bytes]:
    data = _read(path).removeprefix(b"\xef\xbb\xbf")
    if b"\0" in data:
        return
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()  # behind the last line end there is no line
    for number, line in enumerate(lines, 1):
        text = line.removesuffix(b"\r").decode("utf-8", "surrogateescape")
        found = pattern.search(text)
        if found is None:
            continue
        column = len(text[: found.start()].encode("utf-8", "surrogateescape")) + 1
        shown = line if len(line) <= columns else line[:columns] + b" [... omitted end of long line]"
        yield b"%s\0%d:%d:%s\n" % (os.fsencode(path), number, column, shown)


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            if stat.S_ISREG(state.st_mode) and state.st_size <= _LARGEST:
                return file.read(_LARGEST)
    return b""


def _glob(pattern: str) -> str:
    """A glob as ripgrep reads it: without a slash it may match at any depth, `**` any directories."""
    anchored = "/" in pattern.rstrip("/")
    made = "" if anchored else "(?:.*/)?"
    made += _glob_part(pattern.removeprefix("/"))
    return made


def _glob_part(pattern: str) -> str:
    made, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if pattern.startswith("**/", at):
            made, at = made + "(?:.*/)?", at + 3
        elif pattern.startswith("**", at):
            made, at = made + ".*", at + 2
        elif char == "*":
            made, at = made + "[^/]*", at + 1
        elif char == "?":
            made, at = made + "[^/]", at + 1
        elif char == "[" and "]" in pattern[at + 2 :]:
            end = pattern.index("]", at + 2)
            inner = pattern[at + 1 : end].replace("\\", "\\\\")
            made += f"[^{inner[1:]}]" if inner[0] in "!^" else f"[{inner}]"
            at = end + 1
        elif char == "{" and "}" in pattern[at:]:
            end = pattern.index("}", at)
            choices = "|".join(_glob_part(choice) for choice in pattern[at + 1 : end].split(","))
            made, at = made + f"(?:{choices})", end + 1
        elif char == "\\" and at + 1 < len(pattern):
            made, at = made + re.escape(pattern[at + 1]), at + 2
        else:
            made, at = made + re.escape(char), at + 1
    return made


if __name__ == "__main__":
    sys.exit(main())
