"""transformers' generate, stopped by our rules, on models whose output is known."""

from __future__ import annotations

import json
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from endstop import SamplingParams, StopMachine, StopSet, TokenBytes  # noqa: E402
from endstop.protocol.errors import RequestRefused  # noqa: E402
from endstop.protocol.toolcalls import ToolSyntax  # noqa: E402
from endstop.runtime.transformers_adapter import NO_TOKEN, StopAdapter  # noqa: E402
from endstop.testing import cycle_model  # noqa: E402


@pytest.fixture(scope="module")
def cycle(tmp_path_factory):
    words = [" one", " two", " three", " four", " five"]
    return cycle_model(tmp_path_factory.mktemp("cycle"), words, follow={" four": "<|im_end|>", "Z": " five"})


@pytest.fixture(scope="module")
def model(cycle):
    return transformers.AutoModelForCausalLM.from_pretrained(cycle.path, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(cycle):
    return transformers.AutoTokenizer.from_pretrained(cycle.path)


def pieces_of(cycle):
    return TokenBytes.from_tokenizer_json(json.loads((cycle.path / "tokenizer.json").read_text()))


def adapter_for(cycle, **params):
    return StopAdapter(
        StopSet.of({cycle.id_of("<|im_end|>"): "turn_end"}),
        pieces_of(cycle),
        SamplingParams(**params),
    )


def prompts(cycle, *texts):
    """Left-padded prompts of single-byte tokens and words."""
    rows = [[cycle.id_of(text) for text in row] for row in texts]
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def run(model, cycle, inputs, **params):
    adapter = adapter_for(cycle, **params)
    output = model.generate(**inputs, do_sample=False, **adapter.generate_arguments())
    return adapter.results(output), output


def test_the_stop_set_ends_a_row_and_padding_follows(model, cycle):
    inputs = prompts(cycle, ["A", " three"], [" one"], ["Z"])
    rows, output = run(model, cycle, inputs, max_tokens=8)
    end = cycle.id_of("<|im_end|>")
    assert [row.text for row in rows] == [" four", " two three four", " five one two three four"]
    assert [(row.finish_reason, row.stop_kind, row.stop_reason) for row in rows] == [
        ("stop", "turn_end", end)
    ] * 3
    assert [len(row.generated_token_ids) for row in rows] == [2, 4, 6]
    # A row that ended is padded until the last one has: nothing was computed for it that shows.
    assert output[0, 2:].tolist() == [cycle.id_of(" four"), end, end, end, end, end]
    assert output.shape[1] == 2 + 6


def test_stop_strings_are_exact_for_each_row(model, cycle):
    rows, _ = run(model, cycle, prompts(cycle, [" one"], [" three"]), max_tokens=8, stop=["hree fo"])
    assert rows[0].text == " two t"
    assert (rows[0].finish_reason, rows[0].stop_kind, rows[0].stop_reason) == (
        "stop",
        "stop_string",
        "hree fo",
    )
    assert rows[0].token_ids == [cycle.id_of(" two"), cycle.id_of(" three")]
    assert (rows[1].text, rows[1].stop_kind) == (" four", "turn_end")


def test_a_stop_string_in_the_prompt_does_not_count(model, cycle):
    rows, _ = run(model, cycle, prompts(cycle, [" one", " two"]), max_tokens=8, stop=["two three", " two"])
    assert (rows[0].text, rows[0].stop_kind) == (" three four", "turn_end")


def test_the_last_allowed_token_and_the_limit(model, cycle):
    rows, _ = run(model, cycle, prompts(cycle, [" one"]), max_tokens=4)
    assert (rows[0].finish_reason, rows[0].stop_kind) == ("stop", "turn_end")
    rows, _ = run(model, cycle, prompts(cycle, [" one"]), max_tokens=3)
    assert (rows[0].text, rows[0].finish_reason, rows[0].stop_kind) == (
        " two three four",
        "length",
        "max_tokens",
    )


def test_min_tokens_masks_the_stop_set_and_gates_stop_strings(model, cycle):
    rows, _ = run(model, cycle, prompts(cycle, [" three"]), max_tokens=9, min_tokens=4, stop=["four"])
    assert len(rows[0].generated_token_ids) > 4
    assert cycle.id_of("<|im_end|>") not in rows[0].generated_token_ids[:4]
    assert rows[0].text.startswith(" four")


def test_ignore_eos_goes_on_and_ban_eos_never_samples_it(model, cycle):
    end = cycle.id_of("<|im_end|>")
    rows, _ = run(model, cycle, prompts(cycle, [" three"]), max_tokens=5, ignore_eos=True)
    assert rows[0].generated_token_ids[1] == end
    assert (len(rows[0].generated_token_ids), rows[0].finish_reason) == (5, "length")
    rows, _ = run(model, cycle, prompts(cycle, [" three"]), max_tokens=5, ban_eos=True)
    assert end not in rows[0].generated_token_ids
    assert rows[0].finish_reason == "length"


def test_stop_token_ids_and_include(model, cycle):
    three = cycle.id_of(" three")
    rows, _ = run(model, cycle, prompts(cycle, [" one"]), max_tokens=5, stop_token_ids=[three])
    assert (rows[0].text, rows[0].stop_kind, rows[0].stop_reason) == (" two", "stop_token", three)
    rows, _ = run(
        model, cycle, prompts(cycle, [" one"]), max_tokens=5, stop=["three"], include_stop_str_in_output=True
    )
    assert rows[0].text == " two three"


def test_num_return_sequences_gives_each_prompt_its_rows(model, cycle):
    adapter = adapter_for(cycle, max_tokens=6)
    torch.manual_seed(0)
    output = model.generate(
        **prompts(cycle, [" three"], [" one"]),
        do_sample=True,
        num_return_sequences=2,
        **adapter.generate_arguments(),
    )
    rows = adapter.results(output)
    assert [row.text for row in rows] == [" four", " four", " two three four", " two three four"]


def test_the_window_ends_rows_by_their_own_length(model, cycle):
    adapter = StopAdapter(StopSet.of({}), pieces_of(cycle), context_len=6, prompt_len=[1, 3])
    inputs = prompts(cycle, [" one"], [" one", " two", " three"])
    rows = adapter.results(model.generate(**inputs, do_sample=False, **adapter.generate_arguments()))
    assert [(len(row.token_ids), row.stop_kind) for row in rows] == [(5, "context"), (3, "context")]


def test_the_stream_concatenates_to_the_results(model, cycle):
    for params in (
        {"stop": ["hree fo"]},
        {"stop": ["fourX"]},
        {"max_tokens": 2},
        {"stop": ["three foX"], "max_tokens": 3},
    ):
        adapter = adapter_for(cycle, **{"max_tokens": 8, **params})
        arguments = adapter.generate_arguments(stream=True)
        inputs = prompts(cycle, [" one"], ["Z"])
        thread = threading.Thread(target=lambda: model.generate(**inputs, do_sample=False, **arguments))  # noqa: B023
        thread.start()
        texts = ["", ""]
        finished = []
        for row, step in adapter.streamer:
            texts[row] += step.text
            if step.finished:
                finished.append(row)
        thread.join()
        assert texts == [row.text for row in adapter.results()]
        assert sorted(finished) == [0, 1]


def test_the_streamer_alone_follows_too(model, cycle):
    adapter = adapter_for(cycle, max_tokens=3)
    model.generate(**prompts(cycle, [" one"]), do_sample=False, max_new_tokens=3, streamer=adapter.streamer)
    assert adapter.results()[0].text == " two three four"


def test_cancel_ends_all_rows_with_what_they_have(model, cycle):
    adapter = adapter_for(cycle, max_tokens=50, ignore_eos=True)
    adapter.on_step = lambda row, step: (
        adapter.cancel() if len(adapter.machines[row].token_ids) == 3 else None
    )
    output = model.generate(**prompts(cycle, [" one"]), do_sample=False, **adapter.generate_arguments())
    row = adapter.results(output)[0]
    assert (row.finish_reason, row.stop_kind, len(row.token_ids)) == ("abort", "cancelled", 3)


def test_a_deadline_ends_the_rows(model, cycle):
    ticks = iter(range(1000))
    adapter = StopAdapter(
        StopSet.of({}),
        pieces_of(cycle),
        SamplingParams(max_tokens=50, max_time=4),
        clock=lambda: next(ticks),
    )
    output = model.generate(**prompts(cycle, [" one"]), do_sample=False, **adapter.generate_arguments())
    row = adapter.results(output)[0]
    assert (row.finish_reason, row.stop_kind, len(row.token_ids)) == ("length", "deadline", 4)


def test_generates_own_end_test_is_off_without_a_warning(model, cycle, caplog):
    assert model.generation_config.eos_token_id is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows, _ = run(model, cycle, prompts(cycle, [" one"], [" two"]), max_tokens=6, ignore_eos=True)
    assert [len(row.token_ids) for row in rows] == [6, 6]
    assert "eos_token_id" not in caplog.text
    assert NO_TOKEN not in rows[0].generated_token_ids


def test_it_agrees_with_the_machine_alone(model, cycle, tokenizer):
    params = SamplingParams(max_tokens=7, stop=["ve o"])
    stops = StopSet.of({cycle.id_of("<|im_end|>"): "turn_end"})
    adapter = StopAdapter(stops, tokenizer, params)
    output = model.generate(**prompts(cycle, ["Z"]), do_sample=False, **adapter.generate_arguments())
    machine = StopMachine(stops, params, pieces_of(cycle))
    for token in cycle.continuation(cycle.id_of("Z"), 7):
        if machine.push(token).finished:
            break
    row = adapter.results(output)[0]
    assert (row.text, row.token_ids) == (machine.text, machine.token_ids) == (" fi", [cycle.id_of(" five")])


def test_the_message_is_taken_apart(tmp_path):
    call = '<tool_call>{"name": "f"}</tool_call>'
    cycle = cycle_model(tmp_path, [call, " x"], follow={call: "<|im_end|>"})
    model = transformers.AutoModelForCausalLM.from_pretrained(cycle.path)
    stops = StopSet.of({cycle.id_of("<|im_end|>"): "turn_end"})
    adapter = StopAdapter(stops, pieces_of(cycle), SamplingParams(max_tokens=5), tools=ToolSyntax("hermes"))
    output = model.generate(**prompts(cycle, ["A"]), do_sample=False, **adapter.generate_arguments())
    row = adapter.results(output)[0]
    assert (row.finish_reason, row.content, [c.name for c in row.tool_calls]) == ("tool_calls", "", ["f"])


def test_a_random_model_gives_what_a_hand_written_loop_gives():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    pieces = TokenBytes([bytes([97 + i % 26]) for i in range(40)])
    stops = StopSet.of({3: "eos", 5: "eos"})
    prompt = torch.randint(0, 40, (4, 6))
    params = SamplingParams(max_tokens=30, min_tokens=2, stop=["ab", "k", "zz"])
    adapter = StopAdapter(stops, pieces, params)
    rows = adapter.results(model.generate(prompt, do_sample=False, **adapter.generate_arguments()))
    for row, ids in zip(rows, prompt.tolist(), strict=True):
        machine = StopMachine(stops, params, pieces)
        while not machine.finished:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            logits[list(machine.banned_ids())] = -torch.inf
            ids.append(int(logits.argmax()))
            machine.push(ids[-1])
        assert (row.generated_token_ids, row.text) == (machine.generated_token_ids, machine.text)
        assert (row.stop_kind, row.stop_reason) == (machine.stop_kind, machine.stop_reason)


def test_what_cannot_be_promised_is_refused(model, cycle, tokenizer):
    with pytest.raises(RequestRefused, match=r"temperature=0\.5"):
        adapter_for(cycle, temperature=0.5)
    with pytest.raises(RequestRefused, match="logprobs=1"):
        adapter_for(cycle, logprobs=1)
    with pytest.raises(ValueError, match="max_tokens or context_len"):
        adapter_for(cycle).generate_arguments()
    with pytest.raises(ValueError, match="fast tokenizer"):
        StopAdapter(StopSet.of({}), object())
    adapter = adapter_for(cycle, max_tokens=4)
    inputs = prompts(cycle, [" one"])
    adapter.results(model.generate(**inputs, do_sample=False, **adapter.generate_arguments()))
    with pytest.raises(RequestRefused, match="one call of generate"):
        model.generate(**prompts(cycle, ["A"], ["B"]), do_sample=False, **adapter.generate_arguments())


def test_an_adapter_that_has_ended_is_not_taken_for_another_call(model, cycle):
    inputs = prompts(cycle, [" one"])
    adapter = adapter_for(cycle, max_tokens=2)
    model.generate(**inputs, do_sample=False, **adapter.generate_arguments())
    with pytest.raises(RequestRefused, match="these rows have ended"):
        model.generate(**inputs, do_sample=False, **adapter.generate_arguments())


def test_beam_search_is_refused():
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    adapter = StopAdapter(StopSet.of({}), TokenBytes([b"x"] * 20), SamplingParams(max_tokens=20))
    with pytest.raises(RequestRefused, match="beam search"):
        model.generate(
            torch.tensor([[1, 2, 3]]), do_sample=False, num_beams=4, **adapter.generate_arguments()
        )
