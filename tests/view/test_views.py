from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from endstop.protocol.params import SamplingParams
from endstop.runtime.trace import Trace, TraceStep
from endstop.view.document import TraceDocument, completed_texts, set_params
from endstop.view.html import trace_html
from endstop.view.marks import readable, visible
from endstop.view.scale import log_floor, log_height, percent, strength
from endstop.view.sparkline import captioned_sparkline, sparkline
from tests.view.conftest import HOSTILE, P_STOPS, TOKENS


class Page(HTMLParser):
    """What a browser would see: tags with attributes, and the text of every element with a class."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in ("meta", "input", "line", "circle", "polyline"):
            self._open.append(str(found.get("class") or tag))

    def handle_endtag(self, tag: str) -> None:
        if self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for name in self._open:
            self.texts[name] = self.texts.get(name, "") + data


def parsed(document: TraceDocument) -> Page:
    page = Page()
    page.feed(trace_html(document))
    return page


def test_model_text_never_becomes_markup(document: TraceDocument) -> None:
    page = parsed(document)
    names = [tag for tag, _ in page.tags]
    assert names.count("script") == 1
    assert "img" not in names
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert HOSTILE in page.texts["answer"]
    assert HOSTILE in page.texts["pre"]
    assert "innerHTML" not in trace_html(document)


def test_the_script_holds_no_model_text_and_the_policy_allows_only_it(document: TraceDocument) -> None:
    html = trace_html(document)
    script = html.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = parsed(document)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "Thank" not in script


def test_the_page_needs_no_network(document: TraceDocument) -> None:
    for tag, attributes in parsed(document).tags:
        assert tag not in ("link", "iframe", "object")
        assert "src" not in attributes
        assert "href" not in attributes
    assert "url(" not in trace_html(document)


def test_every_token_is_in_text_charts_and_table(document: TraceDocument) -> None:
    page = parsed(document)
    spans = [a for tag, a in page.tags if tag == "span" and "data-step" in a]
    rows = [a for tag, a in page.tags if tag == "tr" and "data-step" in a]
    dots = [a for tag, a in page.tags if tag == "circle"]
    assert len(spans) == len(rows) == len(TOKENS)
    assert len(dots) == 2 * (len(TOKENS) - 1)  # two scales; the forced token has no point
    assert [a["class"] for a in spans if "class" in a] == ["forced", "hidden-token"]
    strengths = [float(str(a["style"]).partition(":")[2]) for a in spans]
    assert strengths == [round(strength(p) * 0.85, 3) for p in P_STOPS]
    scales = [(a["data-scale"], "hidden" in a) for tag, a in page.tags if tag == "svg"]
    assert scales == [("log", False), ("linear", True)]


def test_controls_are_shown_not_obeyed(document: TraceDocument) -> None:
    html = trace_html(document)
    assert "\u202e" not in html
    assert "\x1b" not in html
    assert "⟨U+202E⟩" in html
    assert "👩‍🚀" in html


def test_an_empty_trace_is_still_a_page() -> None:
    page = parsed(TraceDocument(Trace(3, []), []))
    assert [tag for tag, _ in page.tags].count("svg") == 2


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:])
    return width, height


@pytest.mark.parametrize("linear", [False, True])
def test_png_takes_any_text(document: TraceDocument, tmp_path: Path, linear: bool) -> None:
    pytest.importorskip("matplotlib")
    from endstop.view.picture import save_png

    path = tmp_path / "t.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_png(document, path, linear=linear)
    width, height = png_size(path)
    assert width >= 1000
    assert height >= 500


def test_png_of_a_long_and_of_an_empty_answer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from endstop.view.picture import save_png

    steps = [TraceStep(1, "a", probability=0.5, entropy=0.1, p_stop=10.0**-i, best_stop=2) for i in range(9)]
    long = TraceDocument(Trace(1, [2], steps * 100), ["a"] * 900)
    save_png(long, tmp_path / "long.png")
    assert png_size(tmp_path / "long.png")[0] > 4000
    save_png(TraceDocument(Trace(1, []), []), tmp_path / "empty.png")
    assert png_size(tmp_path / "empty.png")[0] > 1000


def test_table_in_a_narrow_terminal(document: TraceDocument) -> None:
    from io import StringIO

    from rich.cells import cell_len
    from rich.console import Console

    from endstop.view.table import trace_table

    out = StringIO()
    Console(file=out, width=80, force_terminal=True, color_system=None).print(trace_table(document))
    text = out.getvalue()
    assert "␣you" in text
    assert "forced" in text
    assert "30/29/1" in text
    assert "\x1b[31m" not in text
    assert max(cell_len(line) for line in text.splitlines()) <= 80


def test_sparkline() -> None:
    assert sparkline([1e-9, 1e-5, None, 0.5, 1.0]) == "▁▄ ██"
    assert sparkline([1.0, 0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-30]) == "██▇▆▅▄▃▂▁▁"
    # Squeezed, a column shows its highest value: no peak is lost.
    assert sparkline([1e-8] * 50 + [1.0] + [1e-8] * 49, width=10) == "▁▁▁▁▁█▁▁▁▁"
    assert sparkline([]) == ""
    assert (
        captioned_sparkline([1e-8, 0.98], encoding="ascii")
        == "P(stop) 1e-8 _# 1, highest 0.98 at token 2 of 2"
    )
    assert captioned_sparkline([None]) == "P(stop): no token was sampled"


def test_scale() -> None:
    assert [log_floor(values) for values in ([0.5], [1e-7], [0.0], [1e-30], [None, 3e-3])] == [
        -1,
        -7,
        -1,
        -12,
        -3,
    ]
    assert [log_height(value, -4) for value in (1.0, 0.01, 1e-4, 1e-9, 0.0)] == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert [strength(value) for value in (None, 1e-5, 1e-2, 1.0)] == [0.0, 0.0, 0.5, 1.0]
    shown = [percent(value) for value in (None, 0.0, 1.0, 0.0344, 2.14e-7, 1e-12)]
    assert shown == ["–", "0", "1", "0.034", "2.1e-7", "1e-12"]


def test_marks() -> None:
    assert visible(" a\n\tb\x1b\u202e") == "␣a↵⇥b⟨U+001B⟩⟨U+202E⟩"
    assert visible("谢👩‍🚀") == "谢👩‍🚀"
    assert readable("\ud800") == "⟨U+D800⟩"


def test_texts_wait_for_whole_characters() -> None:
    pieces = [b"a", "谢".encode()[:2], "谢".encode()[2:], b"\xff", "é".encode()[:1]]
    assert completed_texts([1, 2, 3, 4, 5], pieces) == ["a", "", "谢", "\ufffd", "\ufffd"]
    assert completed_texts([], []) == []


def test_documents_come_back_from_json(document: TraceDocument) -> None:
    again = TraceDocument.from_dict(json.loads(document.to_json()))
    assert again == document
    assert document.ending() == "stop, turn_end (2)"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2 of a trace document is unknown"),
        ({"trace": {"version": 9}}, "trace version 9 is unknown"),
        ({"texts": []}, "one text for each step"),
        ({"params": None}, "not a trace document of version 1"),
    ],
)
def test_foreign_documents_are_refused(document: TraceDocument, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TraceDocument.from_dict({**document.to_dict(), **change})
    with pytest.raises(ValueError, match="no field `trace`"):
        TraceDocument.from_dict({"version": 1})


def test_set_params_leaves_defaults_out() -> None:
    params = SamplingParams(temperature=0.0, stop=("END",), trace=True)
    assert set_params(params) == {"temperature": 0.0, "stop": ["END"]}
