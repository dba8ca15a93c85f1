"""The hook formats of other agents: what is read from stdin, what is written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from endstop.agent.hooks import Answer, HookEvent, HookFormat, bounded, read_event, write_answer
from endstop.outcomes import EXIT_CODES
from endstop.protocol.errors import EndstopError

CLAUDE = {
    "session_id": "abc",
    "transcript_path": "/home/me/.claude/projects/x/abc.jsonl",
    "cwd": "/work/project/src",
    "permission_mode": "acceptEdits",
    "hook_event_name": "Stop",
    "stop_hook_active": True,
    "last_assistant_message": "All tests pass. Done!",
}
CODEX = {
    "session_id": "0199",
    "turn_id": "7",
    "transcript_path": None,
    "cwd": "/work/project",
    "hook_event_name": "Stop",
    "model": "m",
    "permission_mode": "default",
    "stop_hook_active": False,
    "last_assistant_message": None,
}
CURSOR = {
    "conversation_id": "c-1",
    "generation_id": "g-1",
    "hook_event_name": "stop",
    "workspace_roots": ["/work/project"],
    "status": "completed",
    "loop_count": 1,
}
STOP = HookEvent("stop", "Stop", "abc")


def read(form: HookFormat, data: Any, **environment: str) -> HookEvent:
    return read_event(form, json.dumps(data), environment)


def test_stops_of_the_three_harnesses() -> None:
    assert read("claude-code", CLAUDE) == HookEvent("stop", "Stop", "abc", Path("/work/project/src"))
    assert read("codex", CODEX) == HookEvent("stop", "Stop", "0199", Path("/work/project"))
    assert read("cursor", CURSOR) == HookEvent("stop", "stop", "c-1", Path("/work/project"))


def test_the_project_directory_of_the_environment_holds_over_where_the_agent_has_gone() -> None:
    event = read("claude-code", CLAUDE, CLAUDE_PROJECT_DIR="/work/project")
    assert event.workspace == Path("/work/project")
    event = read("cursor", CURSOR, CURSOR_PROJECT_DIR="/other", CLAUDE_PROJECT_DIR="/no")
    assert event.workspace == Path("/other")


@pytest.mark.parametrize(
    ("form", "change", "kind"),
    [
        ("claude-code", {"hook_event_name": "SessionStart", "source": "startup"}, "start"),
        ("claude-code", {"hook_event_name": "UserPromptSubmit", "prompt": "go on"}, "prompt"),
        ("claude-code", {"hook_event_name": "SubagentStop"}, "other"),
        ("codex", {"hook_event_name": "SessionStart"}, "start"),
        ("cursor", {"hook_event_name": "sessionStart"}, "start"),
        ("cursor", {"hook_event_name": "beforeSubmitPrompt"}, "prompt"),
        ("cursor", {"hook_event_name": "subagentStop"}, "other"),
    ],
)
def test_other_events(form: HookFormat, change: dict[str, str], kind: str) -> None:
    data = {"claude-code": CLAUDE, "codex": CODEX, "cursor": CURSOR}[form]  # type: ignore[index]
    assert read(form, {**data, **change}).kind == kind


def test_a_start_after_a_compaction_is_known_as_one() -> None:
    data = {**CLAUDE, "hook_event_name": "SessionStart"}
    assert [read("claude-code", {**data, "source": s}).compacted for s in ("compact", "resume")] == [
        True,
        False,
    ]


def test_cursors_start_may_name_its_session_another_way() -> None:
    data = {"session_id": "s-1", "hook_event_name": "sessionStart", "workspace_roots": []}
    assert read("cursor", data) == HookEvent("start", "sessionStart", "s-1", None)


@pytest.mark.parametrize(
    ("form", "change", "why"),
    [
        ("cursor", {"status": "aborted"}, "the turn was aborted"),
        ("cursor", {"status": "error"}, "the turn was error"),
        ("claude-code", {"permission_mode": "plan"}, "the agent is planning and may not edit"),
    ],
)
def test_stops_that_claim_no_end_are_not_judged(form: HookFormat, change: dict[str, str], why: str) -> None:
    data = CURSOR if form == "cursor" else CLAUDE
    assert read(form, {**data, **change}).not_judged == why
    assert read(form, data).not_judged == ""


def test_a_byte_order_mark_before_the_json() -> None:
    assert read_event("cursor", "\ufeff" + json.dumps(CURSOR), {}).session == "c-1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "stdin is no JSON of a codex hook"),
        ("{", "stdin is no JSON of a codex hook"),
        ("[]", "stdin is no JSON object of a codex hook"),
        ("{}", "hook_event_name or session_id is missing"),
        ('{"session_id": 1, "hook_event_name": "Stop"}', "session_id is missing"),
    ],
)
def test_what_is_no_event_is_one_sentence(text: str, why: str) -> None:
    with pytest.raises(EndstopError, match=why):
        read_event("codex", text, {})


@pytest.mark.parametrize("form", ["claude-code", "codex"])
def test_claude_code_and_codex_read_a_block_with_its_reason(form: HookFormat) -> None:
    output = write_answer(form, STOP, Answer("go_on", "Not accepted (1 of 5): VERIFY_FAILED."))
    assert json.loads(output.stdout) == {
        "decision": "block",
        "reason": "Not accepted (1 of 5): VERIFY_FAILED.",
    }
    assert (output.stderr, output.exit_code) == ("", 0)
    output = write_answer(form, STOP, Answer("stop", "endstop gate: refusal_budget.", "refusal_budget"))
    assert json.loads(output.stdout) == {"systemMessage": "endstop gate: refusal_budget."}
    assert output.exit_code == 0
    assert write_answer(form, STOP, Answer("silent")).stdout == ""


def test_cursor_reads_a_followup_message_and_nothing_else() -> None:
    event = read("cursor", CURSOR)
    assert json.loads(write_answer("cursor", event, Answer("go_on", "Not yet.")).stdout) == {
        "followup_message": "Not yet."
    }
    output = write_answer("cursor", event, Answer("stop", "endstop gate: blocked.", "blocked"))
    assert (output.stdout, output.stderr, output.exit_code) == ("{}", "endstop gate: blocked.\n", 0)


def test_plain_speaks_in_exit_codes() -> None:
    output = write_answer("plain", STOP, Answer("go_on", "Not yet."))
    assert (output.stdout, output.stderr, output.exit_code) == ("", "Not yet.\n", 2)
    for outcome, code in EXIT_CODES.items():
        output = write_answer("plain", STOP, Answer("stop", "Ended.", outcome))
        assert (output.stdout, output.stderr, output.exit_code) == ("Ended.\n", "", code)
        assert code != 2


def test_the_introduction_at_a_start() -> None:
    start = HookEvent("start", "SessionStart", "abc")
    told = {"hookSpecificOutput": {"hookEventName": "SessionStart", "additionalContext": "Hello."}}
    for form in ("claude-code", "codex"):
        assert json.loads(write_answer(form, start, Answer("silent", "Hello.")).stdout) == told  # type: ignore[arg-type]
    cursor = HookEvent("start", "sessionStart", "c-1")
    assert json.loads(write_answer("cursor", cursor, Answer("silent", "Hello.")).stdout) == {
        "additional_context": "Hello."
    }
    prompt = HookEvent("prompt", "UserPromptSubmit", "abc")
    assert write_answer("claude-code", prompt, Answer("silent")).stdout == ""
    prompt = HookEvent("prompt", "beforeSubmitPrompt", "c-1")
    assert json.loads(write_answer("cursor", prompt, Answer("silent", "Hello.")).stdout) == {"continue": True}


def test_a_long_message_keeps_its_ends() -> None:
    text = "a" * 9000
    assert bounded(text) == text
    cut = bounded("begin" + "x" * 20_000 + "end")
    assert len(cut) <= 9000
    assert cut.startswith("begin")
    assert cut.endswith("end")
    assert "characters left out" in cut
