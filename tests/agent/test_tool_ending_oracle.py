"""The ending tools' definitions, and the oracle with a scripted second model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from endstop.agent.tool import CheckedCall, ToolResult, call_tool, check_call
from endstop.agent.tools import ToolContext, standard_tools
from endstop.agent.tools.ending import ending_tools
from endstop.agent.tools.oracle import Situation, oracle_tool
from endstop.protocol.errors import RequestRefused
from endstop.protocol.toolcalls import ToolCall
from endstop.runtime.results import Usage
from endstop.sandbox import WorkspaceFiles
from endstop.testing import Reply, ScriptedChat


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments), "")


def arguments_of(name: str, **arguments: Any) -> dict[str, Any]:
    checked = check_call(ending_tools(), call(name, **arguments))
    assert isinstance(checked, CheckedCall), checked
    return dict(checked.arguments)


def test_standard_tools(tmp_path: Path) -> None:
    tools = standard_tools(ToolContext(tmp_path, WorkspaceFiles(tmp_path)))
    assert [tool.name for tool in tools] == [
        "read_file", "list_files", "edit_file", "bash", "code_search", "submit", "give_up", "ask_user",
        "checkpoint",
    ]  # fmt: skip
    assert [tool.name for tool in tools if tool.ends] == ["submit", "give_up", "ask_user", "checkpoint"]
    for tool in tools:
        assert tool.definition["function"]["parameters"]["type"] == "object"
        assert "title" not in json.dumps(tool.definition)


def test_ending_tools_ask_for_more_than_they_insist_on() -> None:
    required = {tool.name: tool.parameters["required"] for tool in ending_tools()}
    assert required == {
        "submit": ["summary"],
        "give_up": ["reason", "evidence"],
        "ask_user": ["question"],
        "checkpoint": ["note"],
    }
    # What is missing here is refused by the gate, with its own code.
    assert arguments_of("give_up") == {"reason": "", "evidence": "", "hard": False}
    assert arguments_of("submit", summary="s") == {"summary": "s", "evidence": {}, "assumptions": []}
    assert arguments_of("submit", evidence={"add": "test_add"})["evidence"] == {"add": "test_add"}
    wrong = check_call(ending_tools(), call("submit", evidence=["test_add"], summary="s"))
    assert isinstance(wrong, ToolResult)
    assert "evidence: input should be a valid dictionary" in wrong.text


def oracle_of(tmp_path: Path, answers: list[Any], **options: Any) -> tuple[Any, ScriptedChat]:
    model = ScriptedChat(answers)
    context = ToolContext(tmp_path, WorkspaceFiles(tmp_path), output_bytes=4000)
    now = Situation("fix add", "-a - b\n+a + b", "- [ ] add", "VERIFY_FAILED exit 1")
    tool = oracle_tool(model, lambda: now, context, **options)
    return (lambda **arguments: call_tool([tool], call("oracle", **arguments))), model


def test_the_oracle_sees_the_run_and_its_words_are_marked(tmp_path: Path) -> None:
    (tmp_path / "calc.py").write_text("def add(a, b): ...\n")
    (tmp_path / "secret").symlink_to("/etc/passwd")
    used: list[Usage] = []
    ask, model = oracle_of(tmp_path, [Reply("Looks complete.", tokens=7)], on_usage=used.append)
    result = ask(question="Is it right?", files=["calc.py", "secret", "none"])
    mark = "[The oracle's opinion. It is no evidence: only what the gate runs itself counts.]"
    assert result.text == f"{mark}\nLooks complete.\n{mark}\n[2 more calls allowed.]"
    prompt = model.calls[0].messages[1]["content"]
    for part in (
        "fix add",
        "+a + b",
        "- [ ] add",
        "VERIFY_FAILED exit 1",
        "def add(a, b): ...",
        "Is it right?",
    ):
        assert part in prompt
    assert "root:" not in prompt
    assert "none does not exist" in prompt
    assert model.calls[0].tools == ()
    assert [usage.completion_tokens for usage in used] == [7]
    assert result.details["completion_tokens"] == 7
    assert result.details["prompt_tokens"] == used[0].prompt_tokens > 0


def test_calls_of_the_oracle_are_capped(tmp_path: Path) -> None:
    ask, model = oracle_of(tmp_path, ["one", "two"], max_calls=2)
    assert ask(question="q").text.endswith("[1 more call allowed.]")
    assert ask(question="q").text.endswith("[0 more calls allowed.]")
    assert ask(question="q") == ToolResult("The oracle was asked 2 times, and no more is allowed.", ok=False)
    assert len(model.calls) == 2
    assert not ask(question="q", files=["f"] * 9).ok


def test_a_long_or_cut_answer_stays_marked(tmp_path: Path) -> None:
    ask, _ = oracle_of(tmp_path, [Reply("yes " * 5000, stop_kind="max_tokens")])
    text = ask(question="q").text
    assert len(text) < 4000
    assert text.startswith("[The oracle's opinion.")
    assert "[The answer was cut: length.]" in text
    assert "counts.]\n[2 more calls allowed.]" in text


def test_an_oracle_that_cannot_answer(tmp_path: Path) -> None:
    def refuse(messages: Any) -> str:
        raise RequestRefused("the prompt is too long")

    ask, _ = oracle_of(tmp_path, [refuse])
    assert ask(question="q") == ToolResult(
        "The oracle cannot answer: the prompt is too long", ok=False, details={"oracle_call": 1}
    )
