"""The page of a run in a real browser, where one is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from endstop.view.trajectory import view_of
from endstop.view.trajectory_html import trajectory_html
from tests.view.test_page_in_browser import CHROMIUM, loaded
from tests.view.trajectories import trajectory

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

# Appended as a script of its own: shows decisions only, unfolds everything, goes two steps down and one up.
PRESS = """<script>
document.querySelector("[data-do=decisions]").click();
document.querySelector("[data-do=unfold]").click();
for (const key of ["j", "j", "k"]) {
  document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
}
document.body.dataset.focused = document.activeElement.id;
</script>"""


def test_the_policy_lets_the_page_work(tmp_path: Path) -> None:
    dom, messages = loaded(trajectory_html(view_of(trajectory())), tmp_path)
    assert dom.count("<article") == 7
    assert "Content Security Policy" not in messages
    assert "Uncaught" not in messages


def test_keys_and_buttons(tmp_path: Path) -> None:
    html = trajectory_html(view_of(trajectory()))
    html = re.sub(r"<meta http-equiv[^>]*>", "", html).replace("</body>", f"{PRESS}</body>")
    dom, messages = loaded(html, tmp_path)
    assert "Uncaught" not in messages
    steps = {step: "hidden" in tag for tag, step in re.findall(r'(<article id="step-(\d)"[^>]*>)', dom)}
    assert steps == {"0": True, "1": False, "2": False, "3": False, "4": True, "5": True, "6": False}
    assert 'data-focused="step-1"' in dom
    folds = re.findall(r"<details[^>]*>", dom)
    assert folds
    assert all("open" in fold for fold in folds)
