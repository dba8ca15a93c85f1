"""A trajectory with everything in it that a view must show, written by hand."""

from __future__ import annotations

from typing import Any

from tests.view.conftest import HOSTILE


def call(step: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"c{step:05d}000", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(step: int, content: str, *calls: dict[str, Any], **meta: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 100 * step, "completion_tokens": 10 + step, "cached_tokens": 0}
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        made["tool_calls"] = list(calls)
    defaults = {
        "step": step,
        "finish_reason": "tool_calls" if calls else "stop",
        "stop_kind": "turn_end",
        "stop_reason": None,
        "usage": usage,
        "seconds": 0.5,
    }
    return {**made, "meta": {**defaults, **meta}}


def result(step: int, name: str, content: str, ok: bool = True, **meta: Any) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"c{step:05d}000",
        "name": name,
        "content": content,
        "meta": {"step": step, "ok": ok, **meta},
    }


def decision(code: str, kind: str = "refusal") -> dict[str, Any]:
    return {"type": kind, "code": code, "message": f"Not accepted: {code}", "details": []}


def trajectory(**more: Any) -> dict[str, Any]:
    """A claim in text, a refused submit, a cut turn, an edit, an accepted submit."""
    messages = [
        {"role": "system", "content": "You are an agent.", "meta": {"kind": "system", "step": 0}},
        {"role": "user", "content": "Fix add().", "meta": {"kind": "task", "step": 0}},
        answer(1, f"All tests pass. {HOSTILE}"),
        {
            "role": "user",
            "content": "NO_SUBMIT (reminder 1 of 2)",
            "meta": {"kind": "notice", "step": 1, "decision": decision("NO_SUBMIT")},
        },
        answer(2, "", call(2, "submit", '{"summary": "Done\\u202e", "evidence": {}}')),
        result(
            2,
            "submit",
            f"Not accepted (1 of 5): VERIFY_FAILED. {HOSTILE}",
            False,
            tree="a" * 40,
            decision=decision("VERIFY_FAILED"),
        ),
        answer(
            3,
            "I will",
            finish_reason="length",
            stop_kind="max_tokens",
            cut="the answer was cut off",
            open_call='{"name": "bash',
        ),
        {
            "role": "user",
            "content": "TRUNCATED (1 of 3 in a row)",
            "meta": {"kind": "notice", "step": 3, "decision": decision("TRUNCATED")},
        },
        answer(4, "", call(4, "bash", '{"command": "sed -i s/-/+/ calc.py\\necho done"}')),
        result(4, "bash", "\n".join(f"line {n}" for n in range(40)), seconds=0.25, tree="b" * 40),
        answer(5, "", call(5, "read_file", '{"path": "missing.py"')),
        result(5, "read_file", "there is no missing.py", False, code="BAD_CALL"),
        answer(6, "", call(6, "submit", '{"summary": "Fixed", "evidence": {"add": "test_add"}}')),
        result(6, "submit", "Verified.", tree="b" * 40, decision=decision("verified", "end")),
    ]
    return {
        "format": "endstop.trajectory",
        "version": 1,
        "id": "run-1",
        "workspace": "/tmp/project",
        "created": "2026-01-02T03:04:05+00:00",
        "task": {
            "task": f"Fix add(). {HOSTILE}",
            "verify": {"command": "pytest -q"},
            "bounds": {"steps": 100},
        },
        "model": {"name": "scripted", "kind": "scripted"},
        "sandbox": {"mode": "process", "description": "no user namespaces"},
        "tools": [],
        "settings": {},
        "baseline": "0" * 40,
        "verification": None,
        "gate": {"refusals": 1, "gate_runs": 3, "gate_seconds": 90.0, "best_verified_tree": "b" * 40},
        "messages": messages,
        "seconds": 100.0,
        "cost": 0.25,
        "resumed": [],
        "outcome": {
            "outcome": "verified",
            "message": "The project's check passed.",
            "diff": "--- a/calc.py\n+++ b/calc.py\n-    return a - b\n+    return a + b\n",
        },
        **more,
    }
