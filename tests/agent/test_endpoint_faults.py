"""Endpoints that are broken: whatever they send, a run ends with a sentence, in time, and without the key."""

from __future__ import annotations

import json
import time

import pytest
from loopback import Loopback, chunk, events

from endstop.agent.models import ModelFailed, api_key, open_model
from endstop.agent.run import run_agent
from endstop.agent.settings import ModelSettings, make_settings
from endstop.agent.tool import check_call, tool
from endstop.agent.workplace import secret_values
from endstop.protocol.errors import EndstopError
from endstop.protocol.toolcalls import ToolCall

KEY = "sk-hunter2secretkey"
HI = [{"role": "user", "content": "Hi"}]
CALL = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at": "a"}'}}


def answer(message, reason="stop", **more):
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason}], **more}


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)

    def ask(*replies, **settings):
        with Loopback(*replies) as server:
            given = {"name": "m", "base_url": server.url, "api_key_env": "A_KEY", "timeout": 0.5, **settings}
            model = open_model(ModelSettings(**given))
            try:
                return model.ask(HI, [], max_tokens=50, max_time=None, clock=time.monotonic)
            finally:
                model.generator.close()

    return ask


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"choices": {"a": 1}}, "choices"),
        ({"choices": "abc"}, "choices"),
        ({"choices": [None]}, "choices"),
        (answer("hello"), "message"),
        (answer({"tool_calls": {"a": 1}}), "message.tool_calls"),
        (answer({"tool_calls": [None]}), "message.tool_calls"),
        (answer({"tool_calls": [{"function": "look"}]}), "message.tool_calls"),
    ],
)
def test_an_answer_of_another_form_is_named(asked, body, part):
    with pytest.raises(ModelFailed, match=rf"not of the form of OpenAI's API, by its {part}: "):
        asked((200, {}, body))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"", "not JSON: ''"),
        (b"<html>502</html>", "not JSON: '<html>502</html>'"),
        (b"[1]", "not a JSON object"),
        (b'{"choices": []}', "without a finish_reason"),
    ],
)
def test_what_is_no_answer_is_said(asked, body, said):
    with pytest.raises(ModelFailed, match=said):
        asked((200, {}, body))


def test_a_redirect_is_a_refusal(asked):
    with pytest.raises(ModelFailed, match="the server answered 302: Found"):
        asked((302, {"Location": "http://127.0.0.1:1/"}, b""))


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": "many", "completion_tokens": None}, (0, 0, 0)),
        ({"prompt_tokens": -(10**9), "completion_tokens": 3}, (0, 3, 0)),
        ({"prompt_tokens": 5.0, "completion_tokens": 3, "prompt_tokens_details": [1]}, (5, 3, 0)),
        ({"prompt_tokens": float("inf"), "completion_tokens": float("nan")}, (0, 0, 0)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, (9, 0, 4)),
    ],
)
def test_a_usage_that_cannot_be_true_counts_nothing(asked, usage, counted):
    turn = asked((200, {}, answer({"content": "x"}, usage=usage)))
    assert (turn.usage.prompt_tokens, turn.usage.completion_tokens, turn.usage.cached_tokens) == counted
    assert turn.cost == 0.0


def test_arguments_that_are_an_object_are_taken(asked):
    call = {"function": {"name": "look", "arguments": {"at": "a"}}}
    turn = asked((200, {}, answer({"tool_calls": [call]}, "tool_calls")))
    assert [(made.name, json.loads(made.arguments)) for made in turn.calls] == [("look", {"at": "a"})]


@pytest.mark.parametrize(
    "stream", [[": open\n\n", 0.2] * 20, ["x", 0.2] * 20, [chunk("hel"), *([": open\n\n", 0.2] * 20)]]
)
def test_bytes_that_keep_a_connection_open_are_no_answer(asked, stream):
    started = time.monotonic()
    with pytest.raises(ModelFailed, match="has sent nothing of an answer for too long"):
        asked((200, {}, stream))
    assert time.monotonic() - started < 3.0


def test_a_slow_answer_that_goes_on_is_waited_for(asked):
    turn = asked(events(*[item for word in "abcde" for item in (chunk(word), 0.2)], chunk(reason="stop")))
    assert turn.content == "abcde"


def test_an_event_of_many_megabytes_is_read_in_time(asked):
    started = time.monotonic()
    assert len(asked(events(chunk("x" * 20_000_000), chunk(reason="stop")), timeout=60).content) == 20_000_000
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize(
    "reply",
    [
        (401, {}, b"y" * 190 + KEY.encode()),
        (200, {}, b"y" * 70 + KEY.encode()),
        (200, {}, json.dumps({"choices": [KEY * 4]}).encode()),
        events(f"data: {'z' * 70} {KEY}\n\n"),
    ],
)
def test_half_of_a_key_is_in_no_error(asked, reply):
    with pytest.raises(ModelFailed) as caught:
        asked(reply)
    assert KEY[:6] not in str(caught.value)


def test_a_key_is_one_word_of_printable_ascii(monkeypatch):
    monkeypatch.setenv("A_KEY", f" {KEY}\r\n")
    assert api_key("A_KEY") == KEY
    settings = {"task": {"task": "t"}, "model": {"api_key_env": "A_KEY"}}
    assert secret_values(make_settings(settings)) == (KEY,)
    for value in (f"{KEY}\n{KEY}", f"{KEY}é"):
        monkeypatch.setenv("A_KEY", value)
        with pytest.raises(EndstopError, match="the key in A_KEY holds characters") as caught:
            api_key("A_KEY")
        assert KEY not in str(caught.value)
    with pytest.raises(EndstopError, match="takes the name of a variable, not the key") as caught:
        api_key(KEY)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("url", ["", "localhost:8000/v1", "ftp://host/v1", "http://[::1", "http:///v1"])
def test_an_address_that_is_none_is_refused_at_the_start(url):
    with pytest.raises(EndstopError, match="an address such as http://localhost"):
        make_settings({"task": {"task": "t"}, "model": {"base_url": url, "name": "m"}})


def test_a_server_that_names_its_window_is_asked_for_less(tmp_path, monkeypatch):
    """Prompt and answer together were too long: the answer gets less, and the run goes on."""
    (tmp_path / "project").mkdir()
    told = (
        "This model's maximum context length is 4096 tokens. However, you requested 5600 tokens "
        "(1504 in the messages, 4096 in the completion)."
    )
    submit = {"function": {"name": "submit", "arguments": '{"summary": "done"}'}}
    done = (200, {}, answer({"tool_calls": [submit]}, "tool_calls"))
    with Loopback((400, {}, {"error": {"message": told}}), done) as server:
        model = {"name": "m", "base_url": server.url}
        settings = {"task": {"task": "t"}, "model": model, "state": str(tmp_path / "state")}
        result = run_agent(make_settings(settings), tmp_path / "project")
    assert result.outcome == "unverified"
    asked_for = [body["max_tokens"] for _, body in server.requests]
    assert asked_for[0] == 4096
    assert 2000 < asked_for[1] <= 4096 - 1504


def test_arguments_with_very_many_names_are_answered_at_once():
    @tool
    def look(at: str) -> str:
        """Look."""
        return at

    names = ",".join(f'"a{number}": 1' for number in range(200_000))
    started = time.monotonic()
    twice = check_call([look], ToolCall("look", f'{{{names}, "a199999": 2}}', ""))
    unknown = check_call([look], ToolCall("look", f"{{{names}}}", ""))
    nobody = check_call([look], ToolCall("n" * 100_000, "{}", ""))
    assert time.monotonic() - started < 5.0
    assert "a199999 is given twice" in twice.text
    assert [len(result.text) < 4100 for result in (twice, unknown, nobody)] == [True] * 3
