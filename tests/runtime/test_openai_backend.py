"""The openai backend against a real HTTP server with scripted answers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop import SamplingParams
from endstop.protocol.errors import EndstopError, RequestRefused
from endstop.protocol.params import RepetitionDetection
from endstop.protocol.toolcalls import Reasoning, ToolSyntax
from endstop.runtime.generator import Generator
from endstop.runtime.openai_backend import OpenAIBackend
from endstop.runtime.openai_wire import server_sent_events
from tests.runtime.loopback import DONE, Loopback, chunk, events

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


def backend_for(server, **options):
    return OpenAIBackend(server.url, "m", **{"backoff": 0.01, "timeout": 10, **options})


def chat(*replies, params=None, options=None, **arguments):
    """One answer: (stream of deltas, output), each from a request of its own."""
    with Loopback(*replies) as server, backend_for(server, **(options or {})) as backend:
        deltas = list(backend.stream_chat(HI, params, **arguments))
    with Loopback(*replies) as server, backend_for(server, **(options or {})) as backend:
        output = backend.chat(HI, params, **arguments)[0]
    for choice in output.outputs:
        mine = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.text for delta in mine) == choice.text
        assert "".join(delta.content for delta in mine) == choice.content
        assert "".join(delta.reasoning for delta in mine) == choice.reasoning
        assert [delta.finished for delta in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].output == choice
    return deltas, output


def test_a_stream_becomes_deltas_and_a_result():
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    with Loopback(
        events(
            chunk(role="assistant"),
            chunk("Hel"),
            chunk("lo"),
            chunk("", "stop"),
            {"choices": [], "usage": usage},
        )
    ) as server:
        backend = backend_for(server, api_key="secret")
        assert isinstance(backend, Generator)
        params = SamplingParams(max_tokens=9, temperature=0.5, seed=3, stop=["END"], logit_bias={5: -1.0})
        output = backend.chat(HI, params)[0]
        path, body = server.requests[0]
        assert server.headers[0]["Authorization"] == "Bearer secret"
    answer = output.outputs[0]
    assert (answer.text, answer.content, answer.finish_reason, answer.stop_kind) == (
        "Hello",
        "Hello",
        "stop",
        "eos",
    )
    assert (output.usage.prompt_tokens, output.usage.completion_tokens, output.usage.cached_tokens) == (
        7,
        3,
        4,
    )
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "m",
        "messages": HI,
        "temperature": 0.5,
        "top_p": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
        "logit_bias": {"5": -1.0},
        "max_tokens": 9,
        "stop": ["END"],
    }


def test_completions_take_texts_and_token_ids():
    reply = events({"choices": [{"index": 0, "text": " you", "finish_reason": "length"}]})
    with Loopback(reply) as server, backend_for(server) as backend:
        outputs = backend.generate(["thank", [1, 2]], SamplingParams(max_tokens=1))
        assert [request[1]["prompt"] for request in server.requests] == ["thank", [1, 2]]
        assert server.requests[0][0] == "/v1/completions"
    assert [o.outputs[0].text for o in outputs] == [" you", " you"]
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].stop_kind) == ("length", "max_tokens")
    assert (outputs[0].prompt, outputs[1].prompt_token_ids) == ("thank", [1, 2])


B71 = ["Action: search", "\nAction Input: x", "\nObser", "vation: fake", "\nFinal Answer: y"]


def test_B71_a_backend_that_ignores_stop_is_cut_here_all_the_same():
    pieces = [chunk(piece) for piece in B71]
    _, output = chat(events(*pieces, chunk("", "stop")), params=SamplingParams(stop=["\nObservation:"]))
    answer = output.outputs[0]
    assert answer.text == "Action: search\nAction Input: x"
    assert (answer.finish_reason, answer.stop_kind, answer.stop_reason) == (
        "stop",
        "stop_string",
        "\nObservation:",
    )


def test_B71_the_connection_is_dropped_at_the_cut():
    pieces = [chunk(piece) for piece in B71]
    endless = [item for _ in range(1000) for item in (0.01, chunk("z" * 1000))]
    with Loopback((200, {}, [*pieces, *endless])) as server, backend_for(server) as backend:
        started = time.monotonic()
        answer = backend.chat(HI, SamplingParams(stop=["\nObservation:"]))[0].outputs[0]
        assert answer.text == "Action: search\nAction Input: x"
        assert time.monotonic() - started < 5
        assert server.dropped.wait(3)


def test_B71_a_backend_that_honours_stop_gives_the_same():
    pieces = [chunk(piece) for piece in B71[:2]]
    for end in ({"stop_reason": "\nObservation:"}, {"matched_stop": "\nObservation:"}):
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", **end}]}
        _, output = chat(events(*pieces, last), params=SamplingParams(stop=["\nObservation:"]))
        answer = output.outputs[0]
        assert (answer.text, answer.stop_kind) == ("Action: search\nAction Input: x", "stop_string")
        assert answer.stop_reason == "\nObservation:"


def test_held_text_is_released_at_every_end():
    params = SamplingParams(stop=["END"])
    for reason, kind in (("stop", "eos"), ("length", "max_tokens")):
        _, output = chat(events(chunk("a E"), chunk("N"), chunk("", reason)), params=params)
        assert (output.outputs[0].text, output.outputs[0].stop_kind) == ("a EN", kind)


def test_client_stop_sends_none_and_has_no_limits():
    params = SamplingParams(stop=["a1", "b1", "c1", "d1", "e1"], include_stop_str_in_output=True)
    reply = events(chunk("xx c"), chunk("1yy"), chunk("", "stop"))
    _, output = chat(reply, params=params, options={"stop": "client"})
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("xx c1", "c1")
    with Loopback(reply) as server, backend_for(server, stop="client") as backend:
        backend.chat(HI, params)
        assert "stop" not in server.requests[0][1]


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"min_tokens": 3}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"include_stop_str_in_output": True, "stop": ["x"]}, "include_stop_str_in_output"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"stop": list("abcde")}, "5 stop strings, but this server takes 4"),
        ({"stop": ["x"], "stop_scope": "all"}, "stop_scope"),
        ({"ban_eos": True}, "ban_eos"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"trace": True}, "trace"),
        ({"repetition_detection": RepetitionDetection(2)}, "repetition_detection"),
    ],
)
def test_what_cannot_be_promised_is_refused_before_anything_is_sent(params, name):
    with Loopback(events()) as server, backend_for(server) as backend:
        with pytest.raises(RequestRefused, match=name):
            backend.chat(HI, SamplingParams(**params))
        with pytest.raises(RequestRefused, match=name):
            backend.stream_chat(HI, SamplingParams(**params))
        assert server.requests == []


def test_what_the_server_is_said_to_honour_is_sent():
    accepts = {"min_tokens", "stop_token_ids", "ignore_eos", "continue_final_message", "chat_template_kwargs"}
    with (
        Loopback(events(chunk("x", "stop"))) as server,
        backend_for(server, accepts=accepts, max_stop=9) as backend,
    ):
        params = SamplingParams(min_tokens=2, stop_token_ids=[7], ignore_eos=True, stop=list("abcdef"))
        backend.chat(HI, params, continue_final_message=True, template_variables={"enable_thinking": False})
        body = server.requests[0][1]
    assert (body["min_tokens"], body["stop_token_ids"], body["ignore_eos"]) == (2, [7], True)
    assert body["stop"] == list("abcdef")
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(ValueError, match="top_q"):
        OpenAIBackend("http://x", "m", accepts={"top_q"})
    with Loopback(events()) as server, backend_for(server) as backend:
        with pytest.raises(RequestRefused, match="continue_final_message"):
            backend.chat(HI, continue_final_message=True)
        with pytest.raises(RequestRefused, match="beams"):
            backend.chat(HI, beams=3)


def call_chunks(*arguments, name="search"):
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": name, "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": piece}} for piece in arguments]
    return [chunk(tool_calls=[piece]) for piece in (first, *rest)]


def test_B54_length_is_never_tool_calls_and_a_cut_call_is_open():
    _, output = chat(events(*call_chunks('{"q": ', '"ab'), chunk("", "length")), tools=TOOLS)
    answer = output.outputs[0]
    assert (answer.finish_reason, answer.tool_calls, answer.open_call) == ("length", (), '{"q": "ab')
    _, output = chat(events(*call_chunks(), chunk("", "length")), tools=TOOLS)
    assert (output.outputs[0].tool_calls, output.outputs[0].open_call) == ((), "")
    _, output = chat(events(*call_chunks('{"q": 1}'), chunk("", "length")), tools=TOOLS)
    assert output.outputs[0].finish_reason == "length"
    assert [c.arguments for c in output.outputs[0].tool_calls] == ['{"q": 1}']


@pytest.mark.parametrize("reason", ["stop", "tool_calls"])
def test_B55_complete_calls_decide_between_stop_and_tool_calls(reason):
    _, output = chat(events(*call_chunks('{"q": ', '"a"}'), chunk("", reason)), tools=TOOLS)
    answer = output.outputs[0]
    assert (answer.finish_reason, answer.stop_kind) == ("tool_calls", "tool_end")
    assert [(c.name, c.arguments) for c in answer.tool_calls] == [("search", '{"q": "a"}')]
    _, output = chat(events(chunk("Hi"), chunk("", reason)), tools=TOOLS)
    assert output.outputs[0].finish_reason == "stop"
    _, output = chat(events(*call_chunks("{broken"), chunk("", reason)), tools=TOOLS)
    assert (output.outputs[0].finish_reason, output.outputs[0].open_call) == ("stop", "{broken")


def test_B56_a_stream_without_a_finish_reason_is_incomplete():
    for reply in (
        events(chunk("Hi"), chunk("")),
        (200, {}, [chunk("Hi")]),
        (200, {}, [chunk("Hi"), "data: {"]),
    ):
        _, output = chat(reply)
        answer = output.outputs[0]
        assert (answer.text, answer.finish_reason, answer.stop_kind) == ("Hi", "error", "error")
        assert "without a finish_reason" in answer.error


def test_B56_a_last_chunk_with_an_empty_delta_is_complete():
    _, output = chat(events(chunk("Hi"), chunk(reason="stop")))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("Hi", "stop")
    # The finish_reason is what counts, not the end mark.
    _, output = chat((200, {}, [chunk("Hi", "stop")]))
    assert output.outputs[0].finish_reason == "stop"


def test_reasons_of_servers():
    table = {
        "content_filter": ("error", "error"),
        "abort": ("abort", "cancelled"),
        "repetition": ("length", "repetition"),
        "error": ("error", "error"),
        "eos_token": ("stop", "eos"),
    }
    for reason, ending in table.items():
        _, output = chat(events(chunk("x", reason)))
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_kind) == ending
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": 128009}]}
    _, output = chat(events(chunk("x"), last))
    assert (output.outputs[0].stop_kind, output.outputs[0].stop_reason) == ("stop_token", 128009)


def test_reasoning_of_the_server_is_kept_apart():
    _, output = chat(
        events(chunk(reasoning_content="hm END"), chunk("Yes"), chunk("", "stop")),
        params=SamplingParams(stop=["END"]),
    )
    assert (output.outputs[0].reasoning, output.outputs[0].content) == ("hm END", "Yes")
    assert output.outputs[0].stop_kind == "eos"


def test_a_server_that_leaves_tags_in_the_content_is_split_here():
    pieces = [
        "<thi",
        "nk>a END</think>",
        "Yes <tool_call>",
        '{"name": "f", "arguments": {"x": "END"}}</tool',
        "_call>",
    ]
    options = {"tool_syntax": ToolSyntax("hermes"), "reasoning": Reasoning()}
    reply = events(*[chunk(piece) for piece in pieces], chunk("", "stop"))
    _, output = chat(reply, options=options, tools=TOOLS, params=SamplingParams(stop=["END"]))
    answer = output.outputs[0]
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("a END", "Yes ", "tool_calls")
    assert [(c.name, c.arguments) for c in answer.tool_calls] == [("f", '{"x": "END"}')]
    twice = events(*[chunk(piece) for piece in pieces * 2], chunk("", "stop"))
    _, output = chat(twice, options=options, tools=TOOLS, parallel_tool_calls=False)
    assert len(output.outputs[0].tool_calls) == 1
    _, output = chat(
        events(*[chunk(piece) for piece in pieces[:4]], chunk("", "length")), options=options, tools=TOOLS
    )
    answer = output.outputs[0]
    assert (answer.finish_reason, answer.tool_calls, answer.content) == ("length", (), "Yes ")
    assert answer.open_call.startswith('{"name": "f"')


def test_several_choices_end_each_in_its_own_way():
    reply = events(
        chunk("a", index=0),
        chunk("bEND", index=1),
        chunk("c", index=0),
        chunk("d", "length", index=0),
        chunk("x", index=1),
    )
    _, output = chat(reply, params=SamplingParams(n=2, stop=["END"]))
    assert [(o.text, o.stop_kind) for o in output.outputs] == [("acd", "max_tokens"), ("b", "stop_string")]


def test_whole_answers_without_streaming():
    message = {"role": "assistant", "content": "Hi END there", "tool_calls": None}
    whole = {
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    with Loopback((200, {}, whole)) as server, backend_for(server, streaming=False) as backend:
        output = backend.chat(HI, SamplingParams(stop=["END"]))[0]
        assert server.requests[0][1]["stream"] is False
        assert "stream_options" not in server.requests[0][1]
    assert (output.outputs[0].text, output.outputs[0].stop_kind) == ("Hi ", "stop_string")
    assert output.usage.completion_tokens == 2


def test_refusals_of_the_server_are_one_sentence():
    for status, body, kind, text in (
        (
            400,
            {"error": {"message": "stop is too long", "type": "x"}},
            RequestRefused,
            "400: stop is too long",
        ),
        (404, {"detail": "no model m"}, RequestRefused, "404: .*no model m"),
        (401, {"error": "bad key"}, EndstopError, "401: bad key"),
        (500, b"<html>oops</html>", EndstopError, "500: <html>oops"),
    ):
        with Loopback((status, {}, body)) as server, backend_for(server, retries=0) as backend:
            with pytest.raises(kind, match=text):
                backend.chat(HI)
            with pytest.raises(kind, match=text):
                list(backend.stream("x"))


def test_busy_servers_are_asked_again_and_what_has_begun_is_not():
    good = events(chunk("Hi", "stop"))
    with (
        Loopback((503, {}, {}), (429, {"Retry-After": "0"}, {}), good) as server,
        backend_for(server) as backend,
    ):
        assert backend.chat(HI)[0].outputs[0].text == "Hi"
        assert len(server.requests) == 3
    with Loopback((503, {}, {"error": "busy"})) as server, backend_for(server, retries=1) as backend:
        with pytest.raises(EndstopError, match="503: busy"):
            backend.chat(HI)
        assert len(server.requests) == 2
    with Loopback((200, {}, [chunk("Hi")]), good) as server, backend_for(server) as backend:
        assert backend.chat(HI)[0].outputs[0].finish_reason == "error"
        assert len(server.requests) == 1


def test_an_unreachable_server_is_named():
    with Loopback(events()) as server:
        url = server.url
    backend = OpenAIBackend(url, "m", retries=1, backoff=0.01)
    with backend, pytest.raises(EndstopError, match=r"127\.0\.0\.1.* cannot be reached"):
        backend.chat(HI)


def test_errors_inside_a_stream_end_the_answer_with_the_text_so_far():
    for item, match in (
        ({"error": {"message": "out of memory"}}, "out of memory"),
        ("data: nonsense\n\n", "not JSON"),
    ):
        _, output = chat((200, {}, [chunk("Hi"), item, chunk("no"), DONE]))
        answer = output.outputs[0]
        assert (answer.text, answer.finish_reason) == ("Hi", "error")
        assert match in answer.error


def test_a_silent_server_times_out():
    with Loopback((200, {}, [chunk("Hi"), 2.0])) as server, backend_for(server, timeout=0.2) as backend:
        answer = backend.chat(HI)[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("Hi", "error")
    assert "nothing for too long" in answer.error


def test_a_deadline_cuts_a_slow_answer():
    slow = [item for _ in range(100) for item in (chunk("x"), 0.1)]
    with Loopback((200, {}, slow)) as server, backend_for(server) as backend:
        started = time.monotonic()
        answer = backend.chat(HI, SamplingParams(max_time=0.35))[0].outputs[0]
        assert time.monotonic() - started < 5
        assert (answer.finish_reason, answer.stop_kind) == ("length", "deadline")
        assert 1 <= len(answer.text) <= 5
        assert server.dropped.wait(3)


def test_closing_the_iterator_drops_the_connection():
    slow = [item for _ in range(300) for item in (chunk("x" * 2000), 0.01)]
    with Loopback((200, {}, slow)) as server, backend_for(server) as backend:
        stream = backend.stream_chat(HI)
        next(stream)
        stream.close()
        assert server.dropped.wait(3)


def test_abort_delivers_one_terminal_result_with_the_partial_text():
    slow = [{"choices": [{"index": 0, "text": "x"}]}, 30.0]
    with Loopback((200, {}, slow)) as server, backend_for(server, timeout=60) as backend:
        deltas, outputs = [], []
        seen, over = threading.Event(), threading.Event()
        request = backend.add(
            "p",
            on_delta=lambda delta: (deltas.append(delta), seen.set()),
            on_output=lambda output: (outputs.append(output), over.set()),
        )
        assert seen.wait(3)
        assert not backend.abort("another")
        started = time.monotonic()
        assert backend.abort(request)
        assert over.wait(3)
        assert time.monotonic() - started < 5
        assert not backend.abort(request)
    answer = outputs[0].outputs[0]
    assert (len(outputs), answer.text, answer.finish_reason, answer.stop_kind) == (
        1,
        "x",
        "abort",
        "cancelled",
    )
    assert deltas[-1].finish_reason == "abort"


def test_add_delivers_a_result_for_a_request_that_fails():
    with Loopback((400, {}, {"error": "no"})) as server, backend_for(server) as backend:
        outputs, over = [], threading.Event()
        backend.add("p", request_id="mine", on_output=lambda output: (outputs.append(output), over.set()))
        assert over.wait(3)
    assert outputs[0].request_id == "mine"
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].error) == (
        "error",
        "the server answered 400: no",
    )


def test_it_needs_no_torch():
    code = (
        "import endstop.runtime.openai_backend, sys; sys.exit(bool({'torch', 'jinja2'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}, check=False).returncode == 0
    )


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=6), max_size=5
    ),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(1, 7), max_size=30),
)
@settings(max_examples=300, deadline=None)
def test_events_do_not_depend_on_how_the_bytes_arrive(texts, line, sizes):
    data = "".join(f": note{line}event: x{line}data: {text}{line}{line}" for text in texts).encode()
    pieces, place = [], 0
    for size in [*sizes, len(data)]:
        pieces.append(data[place : place + size])
        place += size
    assert list(server_sent_events(pieces)) == texts
    assert list(server_sent_events([b"data: a\ndata: b\n\ndata: cut"])) == ["a\nb"]
