"""Whatever is wrong: one sentence, a non-zero exit code, no half file, and the next run works."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Run, clean_environment, one_sentence
from tests.cli.fake_hub import FakeHub, served

ASK = ("-p", "Hi", "--temperature", "0", "--max-tokens", "4")


@pytest.fixture
def copy(three: Path, tmp_path: Path) -> Path:
    """A copy of the model that may be damaged."""
    place = tmp_path / "model"
    shutil.copytree(three, place)
    return place


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    for name, value in changes.items():
        if value is None:
            content.pop(name, None)
        else:
            content[name] = value
    path.write_text(json.dumps(content), encoding="utf-8")


def test_unknown_model(endstop: Run) -> None:
    assert "there is no model 'smollm2-135m-instrukt': did you mean smollm2-135m-instruct" in one_sentence(
        endstop("stops", "smollm2-135m-instrukt")
    )
    assert "no such file or directory" in one_sentence(endstop("chat", "./nowhere", *ASK))
    for arguments in (("pull", "."), ("stops", "."), ("chat", ".", *ASK)):
        assert "is no model directory: config.json, " in one_sentence(endstop(*arguments))
    assert "nothing is fetched offline" in one_sentence(endstop("pull", "nobody/nothing"))


@pytest.mark.parametrize(
    ("file", "verb"),
    [
        ("config.json", "chat"),
        ("tokenizer.json", "stops"),
        ("tokenizer_config.json", "render"),
        ("generation_config.json", "stops"),
    ],
)
def test_broken_json(endstop: Run, copy: Path, file: str, verb: str) -> None:
    path = copy / file
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    arguments = {"chat": ASK, "render": ("-m", "user:Hi"), "stops": ()}[verb]
    said = one_sentence(endstop(verb, str(copy), *arguments))
    assert str(path) in said
    assert "is not valid JSON" in said
    path.write_text(text, encoding="utf-8")
    assert endstop(verb, str(copy), *arguments).returncode == 0


def test_missing_tokenizer(endstop: Run, copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    for verb, arguments in (("chat", ASK), ("tokenize", ("Hi",))):
        assert "has no tokenizer: tokenizer.json was looked for" in one_sentence(
            endstop(verb, str(copy), *arguments)
        )


def test_missing_template(endstop: Run, copy: Path, home: Path) -> None:
    template = json.loads((copy / "tokenizer_config.json").read_text())["chat_template"]
    edit(copy / "tokenizer_config.json", chat_template=None)
    assert "--template" in one_sentence(endstop("chat", str(copy), *ASK))
    assert "--template" in one_sentence(endstop("render", str(copy), "-m", "user:Hi"))
    (home / "chat.jinja").write_text(template)
    with_template = endstop("chat", str(copy), *ASK, "--template", "chat.jinja")
    assert with_template.stdout == " one two three\n"
    assert endstop("chat", str(copy), *ASK, "--raw").returncode == 0
    assert "nothere.jinja" in one_sentence(endstop("chat", str(copy), *ASK, "--template", "nothere.jinja"))


def test_unsupported_architecture(endstop: Run, copy: Path) -> None:
    edit(copy / "config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"])
    said = one_sentence(endstop("chat", str(copy), *ASK))
    assert "gpt2" in said
    assert "--backend transformers" in said


def test_truncated_safetensors(endstop: Run, copy: Path) -> None:
    path = copy / "model.safetensors"
    content = path.read_bytes()
    for length in (len(content) // 2, 4, 0):
        path.write_bytes(content[:length])
        assert str(path) in one_sentence(endstop("chat", str(copy), *ASK))
    path.write_bytes(content)
    assert endstop("chat", str(copy), *ASK).stdout == " one two three\n"


def test_truncated_gguf(endstop: Run, home: Path) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    key = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    whole = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + key + key
    path = home / "model.gguf"
    for length in (0, 3, 20, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:length])
        for verb, arguments in (("stops", ()), ("chat", ASK)):
            assert str(path.name) in one_sentence(endstop(verb, "model.gguf", *arguments))
    assert not list((home / "cache").rglob("*.safetensors"))


def test_prompt_longer_than_the_window(endstop: Run, three: Path) -> None:
    said = one_sentence(endstop("chat", str(three), "-p", "x" * 300, "--temperature", "0"))
    assert "the window holds 256" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--temperature", "-1"), "temperature must be a number in [0, inf)"),
        (("--top-p", "2"), "top_p must be a number in (0, 1]"),
        (("--max-tokens", "0"), "max_tokens must be at least 1"),
        (("--min-tokens", "5", "--max-tokens", "3"), "max_tokens 3 is below min_tokens 5"),
        (("--stop", ""), "stop must not hold an empty string"),
        (("--stop-scope", "some"), "stop_scope must be 'answer' or 'all'"),
        (("--max-time", "-3"), "max_time must be a number in [0, inf)"),
        (("--repetition-detection", "2,3"), "1 <= min_pattern_size <= max_pattern_size"),
        (("--preset", "best"), "--preset must be model or plain"),
    ],
)
def test_parameters_out_of_range(endstop: Run, flags: tuple[str, ...], said: str) -> None:
    # They are refused before the model is looked for.
    assert said in one_sentence(endstop("chat", "./nowhere", "-p", "Hi", *flags))


def test_stop_ids_outside_the_vocabulary(endstop: Run, three: Path) -> None:
    assert "99999" in one_sentence(endstop("chat", str(three), *ASK, "--stop-token-id", "99999"))


def test_usage_errors_have_their_own_code(endstop: Run, three: Path) -> None:
    for arguments in (
        ("chat",),
        ("chat", str(three), "--max-tokens", "many"),
        ("chat", str(three), "--json"),
        ("nosuchverb",),
        ("trace",),
    ):
        result = endstop(*arguments)
        assert (result.returncode, result.stdout) == (2, ""), result.stderr


def test_broken_input_files(endstop: Run, three: Path, home: Path) -> None:
    (home / "broken.jsonl").write_text('"one"\n{"prompt": \n')
    assert "broken.jsonl, line 2 is not valid JSON" in one_sentence(
        endstop("generate", str(three), "--file", "broken.jsonl")
    )
    (home / "chat.json").write_text('{"role": "user"}')
    assert "must hold a list of messages" in one_sentence(endstop("render", str(three), "chat.json"))
    (home / "trace.json").write_text('{"version": 99, "trace": {}}')
    assert "trace.json" in one_sentence(endstop("trace", "--load", "trace.json"))
    assert "there is no prompt" in one_sentence(endstop("generate", str(three), stdin="\n"))


def test_places_to_write_are_checked_before_the_model_runs(endstop: Run) -> None:
    for arguments in (
        ("trace", "./nomodel", "Hi", "--html", "no/t.html"),
        ("generate", "./nomodel", "Hi", "-o", "no/o"),
    ):
        assert "there is no folder no" in one_sentence(endstop(*arguments))


@pytest.fixture
def hub(cycle: Path) -> Iterator[FakeHub]:
    with served(FakeHub("tiny/cycle", cycle)) as running:
        yield running


def start(home: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        cwd=home,
        env=clean_environment(home, **env),
    )


def files_below(home: Path) -> list[str]:
    """What a pull left, without locks and the Hub client's own notes."""
    return sorted(
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.is_file() and path.suffix not in (".lock", ".TAG") and path.name != "CACHEDIR.TAG"
    )


def test_ctrl_c_that_an_import_swallows_is_not_lost(home: Path) -> None:
    program = (
        "import contextlib, signal\n"
        "from endstop.cli.exits import check_interrupted, remember_interrupts\n"
        "remember_interrupts()\n"
        "check_interrupted()\n"
        "with contextlib.suppress(KeyboardInterrupt):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "print('swallowed', flush=True)\n"
        "check_interrupted()\n"
        "print('lost')\n"
    )
    result = subprocess.run(
        [COMMAND[0], "-c", program], capture_output=True, text=True, env=clean_environment(home)
    )
    assert result.stdout == "swallowed\n"
    assert result.stderr.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_while_pulling(home: Path, hub: FakeHub) -> None:
    hub.seconds_per_chunk = 1.0
    online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    process = start(home, "pull", "tiny/cycle", **online)
    assert hub.started.wait(60)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert stderr == "endstop: Interrupted; nothing half-made is left, and the next pull starts over.\n"
    assert [name for name in files_below(home) if "safetensors" in name or "incomplete" in name] == []
    hub.seconds_per_chunk = 0.0
    again = start(home, "pull", "tiny/cycle", "--json", **online)
    stdout, stderr = again.communicate(timeout=60)
    assert again.returncode == 0, stderr
    found = json.loads(stdout)
    assert found["licence"] == "apache-2.0"
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_full_disk_while_pulling(home: Path, hub: FakeHub) -> None:
    """A limit on the size of files is met like a full disk, and needs no disk to be filled."""
    online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    result = subprocess.run(
        [*COMMAND, "pull", "tiny/cycle"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=home,
        env=clean_environment(home, **online),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        timeout=60,
    )
    assert "there is no room to write" in one_sentence(result)
    assert [name for name in files_below(home) if "safetensors" in name or "incomplete" in name] == []
    again = start(home, "pull", "tiny/cycle", **online)
    assert again.wait(60) == 0


def test_ctrl_c_while_streaming(home: Path, cycle: Path) -> None:
    process = start(home, "chat", str(cycle), "-p", "Hi", "--temperature", "0", "--stop", "never", "--stats")
    assert process.stdout is not None
    assert process.stderr is not None
    begun = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    # `communicate` would lose what the stream has already taken in beyond those characters.
    rest, stderr = process.stdout.read(), process.stderr.read()
    assert process.wait(60) == 130, stderr
    text = begun + rest
    assert text.endswith("\n")
    words = text.split()
    assert words == (["one", "two", "three", "four", "five"] * (len(words) // 5 + 1))[: len(words)]
    assert "finish_reason abort, stop_kind cancelled, stop_reason none" in stderr
    assert "Traceback" not in stderr


def test_ctrl_c_while_generating_keeps_what_is_there(home: Path, cycle: Path) -> None:
    process = start(home, "generate", str(cycle), "Hi", "Ho", "--temperature", "0", "--max-rows", "1")
    assert process.stdout is not None
    assert process.stderr is not None
    first = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)  # the second prompt has thousands of tokens before it
    stdout, stderr = process.stdout.read(), process.stderr.read()
    assert process.wait(60) == 130, stderr
    second = json.loads(stdout)
    assert [(line["index"], line["finish_reason"]) for line in (first, second)] == [
        (0, "length"),
        (1, "abort"),
    ]
    assert "Traceback" not in stderr


def test_a_reader_that_leaves_is_no_error(home: Path, cycle: Path) -> None:
    process = start(home, "chat", str(cycle), "-p", "Hi", "--temperature", "0")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == ""
