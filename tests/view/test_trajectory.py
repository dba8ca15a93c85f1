"""A run as text and as a page: everything is there, and nothing of it is obeyed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from typing import Any

import pytest

from endstop.runtime.trace import Trace, TraceStep
from endstop.view.document import TraceDocument
from endstop.view.trajectory import trace_of, trajectory_lines, view_of
from endstop.view.trajectory_html import trajectory_html
from tests.view.conftest import HOSTILE
from tests.view.test_views import Page
from tests.view.trajectories import answer, trajectory


def lines(data: dict[str, Any], **options: Any) -> list[str]:
    return [line.plain for line in trajectory_lines(view_of(data), **options)]


def parsed(data: dict[str, Any]) -> Page:
    page = Page()
    page.feed(trajectory_html(view_of(data)))
    return page


def test_steps_calls_and_decisions() -> None:
    view = view_of(trajectory())
    assert [step.number for step in view.steps] == [0, 1, 2, 3, 4, 5, 6]
    assert [step.kind for step in view.steps] == [
        "said",
        "refused",
        "refused",
        "cut",
        "worked",
        "failed",
        "accepted",
    ]
    assert [[call.name for call in step.calls] for step in view.steps[2:]] == [
        ["submit"],
        [],
        ["bash"],
        ["read_file"],
        ["submit"],
    ]
    assert [call.code for step in view.steps for call in step.calls] == [
        "VERIFY_FAILED",
        "",
        "BAD_CALL",
        "verified",
    ]
    assert (view.outcome, view.tone) == ("verified", "good")
    facts = dict(view.facts())
    assert facts["sandbox"] == "process: no user namespaces"
    assert facts["steps"] == "6"
    assert facts["gate runs"] == "3"
    assert facts["tokens written"] == str(sum(range(11, 17)))
    assert facts["best verified tree"] == "b" * 12


def test_text_is_bounded_and_literal() -> None:
    shown = lines(trajectory())
    assert "ended: verified" in shown
    assert "    VERIFY_FAILED" in shown
    assert any(line.startswith("  > bash ") for line in shown)
    assert "    line 0" in shown
    assert "    line 39" in shown
    assert "    line 20" not in shown
    assert "    ... 28 lines left out, --whole shows them ..." in shown
    assert any(HOSTILE in line for line in shown)
    assert "    line 20" in lines(trajectory(), whole=True)
    hostile = trajectory(messages=[answer(1, "red \x1b[31m \u202e")])
    assert "  red ⟨U+001B⟩[31m ⟨U+202E⟩" in lines(hostile)


def test_the_page_has_everything_as_text() -> None:
    page = parsed(trajectory())
    names = [tag for tag, _ in page.tags]
    assert names.count("article") == 7
    assert names.count("script") == 1
    assert "img" not in names
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert not any("src" in attributes for _, attributes in page.tags)
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == [f"#step-{number}" for number in range(1, 7)]
    html = trajectory_html(view_of(trajectory()))
    assert "\u202e" not in html
    assert "url(" not in html
    assert HOSTILE in page.texts["task"]
    assert "VERIFY_FAILED" in page.texts["code refused"]
    assert page.texts["code accepted"] == "verified"
    assert page.texts["outcome good"] == "verified"
    assert "+    return a + b" in page.texts["ins"]
    assert "sed -i s/-/+/ calc.py\necho done" in page.texts["result"]


def test_the_policy_allows_the_one_script() -> None:
    html = trajectory_html(view_of(trajectory()))
    script = html.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert "Fix add" not in script


def test_p_stop_where_the_model_is_ours(document: TraceDocument) -> None:
    trace = Trace(
        3,
        [2],
        [
            TraceStep(5, "Hi", probability=0.9, p_stop=0.01, best_stop=2, best_stop_rank=2),
            TraceStep(2, "<|im_end|>", probability=0.8, p_stop=0.8, best_stop=2, best_stop_rank=1),
        ],
    )
    for kept in (trace.to_dict(), document.to_dict()):
        data = trajectory(messages=[answer(1, "Hi", trace=kept)])
        page = parsed(data)
        assert [tag for tag, _ in page.tags].count("svg") == 1
        assert any(line.startswith("  P(stop) 1e-") for line in lines(data))
    assert trace_of({}) is None
    found = trace_of({"trace": trace.to_dict(), "stop_kind": "turn_end", "finish_reason": "stop"})
    assert found is not None
    assert found.texts == ["Hi", "<|im_end|>"]
    assert found.ending() == "stop, turn_end"


def test_runs_that_have_not_ended_or_hardly_begun() -> None:
    for data in (
        trajectory(outcome=None),
        trajectory(messages=[]),
        trajectory(outcome=None, gate={}, model={}, sandbox={}, task={}),
    ):
        view = view_of(data)
        assert trajectory_html(view)
        assert lines(data)
    assert "ended: not ended" in lines(trajectory(outcome=None))
    open_call = trajectory()
    del open_call["messages"][-1]
    assert "    no result" in lines(open_call)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "no trajectory"),
        ({"format": "other"}, "no trajectory"),
        (trajectory(version=2), "version 2 of a trajectory is unknown"),
        (trajectory(messages=[{"role": "user", "content": "x"}]), "broken: KeyError('meta')"),
        (trajectory(messages=[{"role": "tool", "meta": {}, "tool_call_id": "c9"}]), "broken: KeyError('c9')"),
    ],
)
def test_other_files_are_refused(data: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        view_of(data)


def test_it_is_read_from_json() -> None:
    assert view_of(json.loads(json.dumps(trajectory()))).task.startswith("Fix add()")


def test_only_lines_of_content_are_marked_in_a_difference() -> None:
    data = trajectory()
    data["outcome"]["diff"] = (
        "diff --git a/x b/x\nindex 1..2 100644\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n--- gone\n+++ come\n"
        " stays\n"
        "diff --git a/y b/y\ndeleted file mode 100644\n--- a/y\n+++ /dev/null\n@@ -1 +0,0 @@\n-y\n"
    )
    html = trajectory_html(view_of(data))
    shown = html[html.index("diff --git a/x") :]
    assert shown[: shown.index("</pre>")].split("\n") == [
        "diff --git a/x b/x",
        "index 1..2 100644",
        "--- a/x",
        "+++ b/x",
        "@@ -1,2 +1,2 @@",
        "<del>--- gone</del>",
        "<ins>+++ come</ins>",
        " stays",
        "diff --git a/y b/y",
        "deleted file mode 100644",
        "--- a/y",
        "+++ /dev/null",
        "@@ -1 +0,0 @@",
        "<del>-y</del>",
    ]


def test_a_long_run_is_shown_in_time() -> None:
    data = trajectory()
    for message in data["messages"]:
        if message["role"] == "tool":
            message["content"] = "a line of output\n" * 100_000
    started = time.monotonic()
    assert len(lines(data, whole=True)) > 400_000
    assert len(trajectory_html(view_of(data))) > 4_000_000
    assert time.monotonic() - started < 30
