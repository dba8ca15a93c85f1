"""Models of an agent: scripts, endpoints over a real HTTP server, and what is known of how they end."""

from __future__ import annotations

import json
import time

import pytest
from loopback import Loopback

from endstop.agent.models import ModelFailed, WindowFull, open_model
from endstop.agent.scripts import read_script, reply_of
from endstop.agent.settings import ModelSettings
from endstop.protocol.errors import EndstopError
from endstop.testing import Reply

TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
]
HI = [{"role": "user", "content": "Hi"}]


def ask(model, prompt=HI, max_tokens=50):
    return model.ask(prompt, TOOLS, max_tokens=max_tokens, max_time=30.0, clock=time.monotonic)


def whole(message, reason="stop", completion=7, prompt=11):
    """A reply of a server that sends its answer whole."""
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage}
    return (200, {}, body)


def wire_call(arguments='{"at": "a"}'):
    return {"id": "x", "type": "function", "function": {"name": "look", "arguments": arguments}}


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("A_KEY", "sk-hunter2")
    servers = []

    def open_endpoint(*replies, **settings):
        server = Loopback(*replies)
        servers.append(server)
        given = {"name": "m", "base_url": server.url, "api_key_env": "A_KEY", **settings}
        return open_model(ModelSettings(**given)), server

    yield open_endpoint
    for server in servers:
        server.__exit__()


def test_a_call_of_an_endpoint(endpoint):
    model, server = endpoint(whole({"content": None, "tool_calls": [wire_call()]}, "tool_calls"))
    turn = ask(model)
    assert [(call.name, call.arguments) for call in turn.calls] == [("look", '{"at": "a"}')]
    assert (turn.cut, turn.bad) == ("", "")
    assert server.requests[0][1]["tools"] == TOOLS
    assert server.headers[0]["Authorization"] == "Bearer sk-hunter2"
    assert (turn.usage.prompt_tokens, turn.usage.completion_tokens) == (11, 7)
    assert model.secrets == ("sk-hunter2",)


@pytest.mark.parametrize(
    ("reason", "completion", "cut"),
    [
        ("length", 50, "cut off at its limit"),
        ("tool_calls", 50, "used all 50 tokens"),
        ("stop", 50, "used all 50 tokens"),
        ("content_filter", 7, "did not end by itself (content_filter)"),
        ("something_new", 7, "did not end by itself (something_new)"),
        ("tool_calls", 49, ""),
    ],
)
def test_only_natural_ends_of_an_endpoint_are_ends(endpoint, reason, completion, cut):
    model, _ = endpoint(whole({"content": "x", "tool_calls": [wire_call()]}, reason, completion))
    turn = ask(model)
    assert cut in turn.cut
    assert bool(turn.cut) == bool(cut)


def test_an_endpoint_that_is_known_to_report_cuts_is_believed(endpoint):
    model, _ = endpoint(whole({"content": "x"}, "stop", 50), reports_cuts=True)
    assert ask(model).cut == ""


def test_broken_arguments_are_a_bad_call(endpoint):
    model, _ = endpoint(whole({"content": "", "tool_calls": [wire_call('{"at": ')]}, "tool_calls"))
    turn = ask(model)
    assert turn.calls == ()
    assert "not closed" in turn.bad


def test_an_error_is_tried_once_more(endpoint):
    cut_stream = (200, {}, [{"choices": [{"index": 0, "delta": {"content": "Hel"}}]}])
    model, server = endpoint(cut_stream, whole({"content": "Hello"}))
    assert ask(model).content == "Hello"
    assert len(server.requests) == 2
    model, server = endpoint(cut_stream)
    with pytest.raises(ModelFailed, match="failed twice"):
        ask(model)
    assert len(server.requests) == 2


def test_a_prompt_that_is_too_long_is_told_apart(endpoint):
    says = {"error": {"message": "This model's maximum context length is 100 tokens."}}
    model, _ = endpoint((400, {}, says))
    with pytest.raises(WindowFull):
        ask(model)
    model, _ = endpoint((400, {}, {"error": {"message": "no such model"}}))
    with pytest.raises(ModelFailed, match="no such model"):
        ask(model)


def test_tools_as_text_for_a_server_that_has_none(endpoint):
    content = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'
    model, server = endpoint(whole({"content": content}), tool_calls="text")
    turn = ask(model)
    assert (turn.content, [call.name for call in turn.calls]) == ("I look.", ["look"])
    assert "tools" not in server.requests[0][1]
    # Where the server has tools, what only looks like a call in its text is text.
    model, _ = endpoint(whole({"content": content}))
    assert ask(model).calls == ()


def test_reasoning_goes_back_only_where_it_is_wanted(endpoint):
    prompt = [*HI, {"role": "assistant", "content": "a", "reasoning_content": "hm"}, *HI]
    for keep in (None, True):
        model, server = endpoint(whole({"content": "x"}), keep_reasoning=keep)
        ask(model, prompt)
        assert ("reasoning_content" in server.requests[0][1]["messages"][1]) is bool(keep)


def test_the_estimate_learns_what_the_server_counts(endpoint):
    model, _ = endpoint(whole({"content": "x"}, prompt=60))
    prompt = [{"role": "user", "content": "word " * 20}]
    assert model.count(prompt, TOOLS) > 70
    ask(model, prompt)
    assert model.count(prompt, TOOLS) in (60, 61)


def test_a_missing_key_and_a_missing_model_are_one_sentence(monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(EndstopError, match="variable NO_KEY"):
        open_model(ModelSettings(name="m", base_url="http://localhost:1/v1", api_key_env="NO_KEY"))
    with pytest.raises(EndstopError, match="no model is named"):
        open_model(ModelSettings())
    with pytest.raises(EndstopError, match="--model"):
        open_model(ModelSettings(base_url="http://localhost:1/v1"))


# Scripts.


def script(tmp_path, data):
    path = tmp_path / "script.json"
    path.write_text(json.dumps(data))
    return path


def test_a_script_gives_its_turns_and_goes_on_where_it_stopped(tmp_path):
    path = script(tmp_path, {"turns": ["one", {"calls": [{"look": {"at": "a"}}]}, "three"]})
    settings = ModelSettings(name=f"scripted:{path}")
    model = open_model(settings)
    assert [ask(model).content, ask(model).calls[0].arguments] == ["one", '{"at": "a"}']
    later = open_model(settings, answered=2)
    assert ask(later).content == "three"
    with pytest.raises(ModelFailed, match="has 3 turns"):
        ask(later)


def test_a_script_may_repeat_its_last_turn(tmp_path):
    path = script(tmp_path, {"turns": ["one", "two"], "then": "repeat"})
    model = open_model(ModelSettings(name=f"scripted:{path}"), answered=1)
    assert [ask(model).content for _ in range(4)] == ["two"] * 4
    model = open_model(ModelSettings(name=f"scripted:{path}"), answered=50)
    assert ask(model).content == "two"


def test_turns_of_a_script():
    reply = reply_of(
        {"text": "x", "stop_kind": "max_tokens", "open_call": '{"a', "tokens": 9, "reasoning": "r"}
    )
    assert reply == Reply("x", (), "r", "max_tokens", None, '{"a', 9)
    # Arguments may be written as they are, broken ones too.
    assert reply_of({"calls": [{"look": '{"at":  "a"}'}]}).tool_calls[0].arguments == '{"at":  "a"}'


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"turns": "one"}, "a script is a mapping"),
        ({"turns": [], "then": "again"}, "a script is a mapping"),
        ({"turn": []}, "a script is a mapping"),
        ({"turns": ["one", 2]}, "turn 2 is neither a text nor a mapping"),
        ({"turns": [{"txt": "a"}]}, "turn 1: unknown key 'txt'"),
        ({"turns": [{"calls": [{"a": {}, "b": {}}]}]}, "turn 1: a call is one mapping"),
        ({"turns": [{"stop_kind": "tired"}]}, "turn 1: stop_kind 'tired' is none of"),
    ],
)
def test_a_broken_script_is_one_sentence(tmp_path, data, says):
    with pytest.raises(EndstopError, match=says):
        read_script(script(tmp_path, data))
