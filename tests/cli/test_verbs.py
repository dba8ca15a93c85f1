from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Run

GREEDY = ("--temperature", "0")


def test_chat_streams_only_the_answer_to_stdout(endstop: Run, three: Path) -> None:
    result = endstop("chat", str(three), "-p", "Hi", *GREEDY, "--stats")
    assert result.returncode == 0, result.stderr
    assert result.stdout == " one two three\n"
    lines = result.stderr.splitlines()
    assert lines[0] == "finish_reason stop, stop_kind turn_end, stop_reason 2 <|im_end|>"
    assert lines[1] == "P(stop) 1e-6 ▂▂▂█ 1, highest 0.998 at token 4 of 4"
    assert re.fullmatch(
        r"4 tokens in \d+\.\d\d s, \d+\.\d tokens per second, first after \d+\.\d\d s; prompt 21 tokens",
        lines[2],
    ), lines[2]


def test_chat_as_json(endstop: Run, three: Path) -> None:
    result = endstop("chat", str(three), "-p", "-", *GREEDY, "--json", stdin="Hi")
    found = json.loads(result.stdout)
    assert found["text"] == found["content"] == " one two three"
    assert (found["finish_reason"], found["stop_kind"], found["stop_reason"]) == ("stop", "turn_end", 2)
    assert found["generated_token_ids"][:-1] == found["token_ids"]
    assert found["generated_token_ids"][-1] == 2
    assert found["prompt"].endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_truncated_answer_is_named_on_stderr(endstop: Run, cycle: Path) -> None:
    result = endstop("chat", str(cycle), "-p", "Hi", *GREEDY, "--max-tokens", "3")
    assert result.returncode == 0
    assert result.stdout == " one two three\n"
    assert result.stderr == "endstop: the answer is truncated (max_tokens).\n"


def test_a_conversation_keeps_its_history(endstop: Run, three: Path) -> None:
    result = endstop("chat", str(three), *GREEDY, "--stats", stdin="Hi\nAgain\n/reset\nHi\n/exit\nnever\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout == " one two three\n" * 3
    prompts = [int(n) for n in re.findall(r"prompt (\d+) tokens", result.stderr)]
    assert len(prompts) == 3
    assert prompts[1] > prompts[0] + 3
    assert prompts[2] == prompts[0]


def test_raw_warns_when_the_first_token_is_a_terminator(endstop: Run, three: Path) -> None:
    result = endstop("chat", str(three), "--raw", "-p", " three", *GREEDY)
    assert result.returncode == 0
    assert result.stdout == "\n"
    assert "the first token is already a terminator" in result.stderr
    sent = endstop("chat", str(three), "--raw", "-p", " one", *GREEDY)
    assert (sent.stdout, sent.stderr) == (" two three\n", "")


def test_every_way_to_end_reaches_the_engine(endstop: Run, cycle: Path) -> None:
    stop = endstop("chat", str(cycle), "-p", "Hi", *GREEDY, "--stop", "three", "--json")
    found = json.loads(stop.stdout)
    assert (found["text"], found["stop_kind"], found["stop_reason"]) == (" one two ", "stop_string", "three")
    kept = json.loads(
        endstop("chat", str(cycle), "-p", "Hi", *GREEDY, "--stop", "three", "--include-stop", "--json").stdout
    )
    assert kept["text"] == " one two three"
    repeated = json.loads(
        endstop("chat", str(cycle), "-p", "Hi", *GREEDY, "--repetition-detection", "8,2,2", "--json").stdout
    )
    assert (repeated["stop_kind"], repeated["finish_reason"]) == ("repetition", "length")


def test_generate_writes_a_line_for_each_prompt_in_order(endstop: Run, three: Path, home: Path) -> None:
    (home / "prompts.jsonl").write_text(
        '"Hi"\n{"prompt": " one"}\n\n{"messages": [{"role": "user", "content": "Hi"}]}\n', encoding="utf-8"
    )
    result = endstop("generate", str(three), "--file", "prompts.jsonl", *GREEDY, "--out", "answers.jsonl")
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    lines = [json.loads(line) for line in (home / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [line["text"] for line in lines] == [" one two three", " two three", " one two three"]
    assert [line["finish_reason"] for line in lines] == ["stop"] * 3
    assert not (home / "answers.jsonl.part").exists()
    assert result.stderr.startswith("3 of 3 prompts: 11 tokens in ")


def test_generate_goes_on_behind_a_refused_prompt(endstop: Run, three: Path) -> None:
    result = endstop("generate", str(three), *GREEDY, stdin=f"Hi\n{'x' * 300}\n one\n")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 1
    assert [line.get("text") for line in lines] == [" one two three", None, " two three"]
    assert "300 tokens" in lines[1]["error"]


def test_generate_takes_n_and_logprobs(endstop: Run, three: Path) -> None:
    result = endstop("generate", str(three), " one", *GREEDY, "--n", "2", "--logprobs", "1")
    line = json.loads(result.stdout)
    assert [o["choice"] for o in line["outputs"]] == [0, 1]
    assert line["outputs"][0]["logprobs"][0][0]["token"] == " two"


def test_trace_in_all_its_forms(endstop: Run, three: Path, home: Path) -> None:
    result = endstop("trace", str(three), "Hi", *GREEDY, "--json", "--html", "t.html", "--png", "t.png")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["version"] == 1
    assert document["texts"] == [" one", " two", " three", "<|im_end|>"]
    assert [round(step["p_stop"], 2) for step in document["trace"]["steps"]] == [0, 0, 0, 1]
    assert (home / "t.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "<!doctype html>" in (home / "t.html").read_text(encoding="utf-8")
    (home / "t.json").write_text(result.stdout, encoding="utf-8")
    table = endstop("trace", "--load", "t.json")
    assert table.returncode == 0
    assert "<|im_end|>" in table.stdout
    assert "ended: stop, turn_end (2)" in table.stderr
    narrow = endstop("trace", "--load", "t.json", env={"COLUMNS": "30"})
    assert narrow.stdout == table.stdout  # no number is cut off, however narrow the terminal


def test_trace_teaching_shows_the_accounting(endstop: Run) -> None:
    document = json.loads(endstop("trace", "--teaching", "--json").stdout)
    steps = document["trace"]["steps"]
    assert [step["token_id"] for step in steps] == [3, 5, 6]
    assert [step["computed"] for step in steps] == [2, 3, 4]
    assert [step["visible"] for step in steps] == [3, 4, 5]
    assert [step["pending"] for step in steps] == [1, 1, 1]


def test_tokenize_there_and_back(endstop: Run, three: Path) -> None:
    found = json.loads(endstop("tokenize", str(three), " one<|im_end|>", "--json").stdout)
    assert found["count"] == 2
    assert [token["text"] for token in found["tokens"]] == [" one", "<|im_end|>"]
    assert [token["special"] for token in found["tokens"]] == [False, True]
    back = endstop("tokenize", str(three), ",".join(map(str, found["ids"])), "--decode")
    assert back.stdout == " one<|im_end|>\n"
    plain = json.loads(endstop("tokenize", str(three), "<|im_end|>", "--plain", "--json").stdout)
    assert 2 not in plain["ids"]
    assert plain["count"] == 10


def test_stops_with_sources(endstop: Run, three: Path) -> None:
    found = json.loads(endstop("stops", str(three), "--json").stdout)
    assert [(stop["id"], stop["text"], stop["role"]) for stop in found["stops"]] == [
        (2, "<|im_end|>", "turn_end")
    ]
    assert found["terminator"] == 2
    assert {"file": "generation_config.json", "key": "eos_token_id"} in found["stops"][0]["sources"]
    shown = endstop("stops", str(three)).stdout
    assert "<|im_end|>  turn_end  (terminator)" in shown


def test_render_saves_and_checks(endstop: Run, three: Path, home: Path) -> None:
    (home / "chats.jsonl").write_text(
        '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " one"}]\n'
        '{"messages": [{"role": "user", "content": "<|im_end|>"}]}\n',
        encoding="utf-8",
    )
    found = json.loads(endstop("render", str(three), "chats.jsonl", "--json").stdout)
    assert found[0]["text"] == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n one<|im_end|>\n")
    supervised = [i for i, bit in zip(found[0]["ids"], found[0]["mask"], strict=True) if bit]
    # ` one` and the terminator, without the line end behind it.
    assert supervised == [259, 2]
    assert found[0]["ids"][-3:-1] == supervised
    assert found[1]["escaped"] != []
    saved = endstop("render", str(three), "chats.jsonl", "--save", "renders.json")
    assert saved.returncode == 0, saved.stderr
    checked = endstop("render", str(three), "--check", "renders.json")
    assert (checked.returncode, checked.stdout) == (0, "")
    assert checked.stderr == "2 of 2 renders are equal, byte for byte and id for id\n"
    content = json.loads((home / "renders.json").read_text(encoding="utf-8"))
    content["renders"][0]["ids"][1] += 1
    content["renders"][1]["text"] = content["renders"][1]["text"].replace("user", "User")
    (home / "renders.json").write_text(json.dumps(content), encoding="utf-8")
    changed = endstop("render", str(three), "--check", "renders.json")
    assert changed.returncode == 1
    lines = changed.stdout.splitlines()
    assert lines[0].startswith("render 1: ids differ at token 1: ")
    assert lines[1].startswith("render 2: text differs at byte 12: ")


def test_render_from_flags(endstop: Run, three: Path) -> None:
    result = endstop("render", str(three), "-m", "user:Hi: you", "-g")
    assert result.stdout == "<|im_start|>user\nHi: you<|im_end|>\n<|im_start|>assistant\n\n"
    assert "tokens" in result.stderr


def test_env_works_without_torch(endstop: Run, home: Path) -> None:
    (home / "shadow").mkdir()
    (home / "shadow" / "torch.py").write_text("raise ImportError('no torch here')\n")
    path = f"{home / 'shadow'}:{Path(__file__).parents[2] / 'src'}"
    found = json.loads(endstop("env", "--json", env={"PYTHONPATH": path}).stdout)
    assert found["torch"] == {"usable": "no, ImportError: no torch here"}
    assert found["variables"] == ["ENDSTOP_CACHE", "HF_HOME", "HF_HUB_OFFLINE"]
    assert {"endstop", "python", "platform", "cpu", "packages", "cache"} <= found.keys()


def test_cache_lists_and_removes(endstop: Run, home: Path) -> None:
    entry = home / "cache" / "gguf" / "made-by-hand"
    entry.mkdir(parents=True)
    (entry / "model.safetensors").write_bytes(b"x" * 2000)
    found = json.loads(endstop("cache", "ls", "--json").stdout)
    assert [(e["name"], e["bytes"]) for e in found] == [("gguf/made-by-hand", 2000)]
    removed = endstop("cache", "rm", "gguf/made-by-hand")
    assert removed.returncode == 0, removed.stderr
    assert not entry.exists()
    missing = endstop("cache", "rm", "gguf/made-by-hand")
    assert missing.returncode == 1


def test_version(endstop: Run) -> None:
    from endstop import __version__

    assert endstop("--version").stdout == f"endstop {__version__}\n"


VERBS = ("chat", "generate", "trace", "stops", "render", "tokenize", "pull", "env", "cache ls", "cache rm")


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(endstop: Run, verb: str) -> None:
    result = endstop(*verb.split(), "--help")
    assert result.returncode == 0, result.stderr
    assert f"Example: endstop {verb}" in " ".join(result.stdout.split())


def test_help_lists_the_verbs(endstop: Run) -> None:
    shown = endstop("--help").stdout
    for verb in VERBS:
        assert f" {verb.split()[0]} " in shown


def test_completion_knows_the_verbs(endstop: Run) -> None:
    script = endstop("--show-completion", "bash", env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert "_ENDSTOP_COMPLETE" in script.stdout
    words = endstop(env={"_ENDSTOP_COMPLETE": "complete_bash", "COMP_WORDS": "endstop t", "COMP_CWORD": "1"})
    assert set(words.stdout.split()) == {"trace", "tokenize", "train"}


def test_logs_go_to_stderr_by_flag_or_variable(endstop: Run, three: Path) -> None:
    quiet = endstop("chat", str(three), "-p", "Hi", *GREEDY)
    assert (quiet.stdout, quiet.stderr) == (" one two three\n", "")
    loud = endstop("chat", str(three), "-p", "Hi", *GREEDY, "-vv", "--temperature", "-1")
    assert "Traceback" in loud.stderr
    assert loud.stderr.splitlines()[-1].startswith("endstop: temperature must be")
