"""The page in a real browser, where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from endstop.view.document import TraceDocument
from endstop.view.html import trace_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

# Appended as a script of its own: presses End, ArrowLeft, and takes the linear scale.
PRESS = """<script>
const chart = document.querySelector(".chart");
for (const key of ["End", "ArrowLeft", "ArrowLeft"]) {
  chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
}
const linear = document.querySelector("input[value=linear]");
linear.checked = true;
linear.dispatchEvent(new Event("change"));
</script>"""


def loaded(html: str, place: Path) -> tuple[str, str]:
    """(the page's DOM after its scripts ran, the browser's messages)."""
    page = place / "page.html"
    page.write_text(html, encoding="utf-8")
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={place / 'profile'}",
    ]
    result = subprocess.run(
        [*command, "--enable-logging=stderr", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    return result.stdout, result.stderr


def test_the_policy_lets_the_page_work(document: TraceDocument, tmp_path: Path) -> None:
    dom, messages = loaded(trace_html(document), tmp_path)
    assert dom.count("<tr data-step") == 10
    assert "Content Security Policy" not in messages
    assert "Uncaught" not in messages


def test_keys_and_scales(document: TraceDocument, tmp_path: Path) -> None:
    html = re.sub(r"<meta http-equiv[^>]*>", "", trace_html(document)).replace("</body>", f"{PRESS}</body>")
    dom, messages = loaded(html, tmp_path)
    assert "Uncaught" not in messages
    selected = set(re.findall(r'class="[^"]*\bon\b[^"]*"[^>]*data-step="(\d+)"', dom))
    selected |= set(re.findall(r'data-step="(\d+)"[^>]*class="[^"]*\bon\b', dom))
    assert selected == {"7"}
    readout = re.search(r'<p class="readout"[^>]*>([^<]*)</p>', dom)
    assert readout is not None
    assert readout[1].startswith("# 8 ")
    assert "P(stop) 1e-20" in readout[1]
    scales = {scale: "hidden" in tag for tag, scale in re.findall(r'(<svg data-scale="(\w+)"[^>]*>)', dom)}
    assert scales == {"log": True, "linear": False}
