"""Task files that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from endstop.agent.task import load_task
from endstop.protocol.errors import EndstopError


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no task"),
        ("- a", "holds no task"),
        ("task: [a]", "task: Input should be a valid string"),
        ("task: x\nfoo: 1", "unknown key foo; the nearest is allow."),
        ("task: x\nverify: {timeout: .inf}", "verify.timeout: Input should be"),
        ("task: x\nverify: {timeout: .nan}", "verify.timeout: Input should be"),
        ("task: x\nbounds: {seconds: .inf}", "bounds.seconds: Input should be"),
        ("task: x\nverify: {report: /tmp/r.xml}", "verify.report: '/tmp/r.xml' must be a path inside"),
        ("task: x\nverify: {report: ../r.xml}", "verify.report: '../r.xml' must be a path inside"),
        ("task: x\nverify: {report: ''}", "verify.report: '' must be a path inside"),
        ("task: x\ndependencies: [a/../../b]", "dependencies.0: 'a/../../b' must be a path inside"),
        ("task: x\ndependencies: [.]", "dependencies.0: '.' must be a path inside"),
        ("task: x\nevidence_file: /tmp/e.json", "evidence_file: '/tmp/e.json' must be a path inside"),
    ],
)
def test_a_sentence_for_each(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(text)
    with pytest.raises(EndstopError) as error:
        load_task(path)
    assert why in str(error.value)
