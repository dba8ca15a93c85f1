"""Texts as people have them: other encodings, byte order marks, odd line ends, closed streams."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from endstop.testing import cycle_model
from tests.cli.conftest import COMMAND, Run, clean_environment, one_sentence

GREEDY = ("--temperature", "0", "--max-tokens", "2")


def with_bytes(home: Path, given: bytes, *arguments: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [*COMMAND, *arguments], input=given, capture_output=True, cwd=home, env=clean_environment(home)
    )
    return subprocess.CompletedProcess(
        arguments, result.returncode, result.stdout.decode(), result.stderr.decode()
    )


@pytest.mark.parametrize("verb", [("generate",), ("tokenize",), ("chat", "-p", "-")])
def test_stdin_that_is_no_utf8(home: Path, three: Path, verb: tuple[str, ...]) -> None:
    result = with_bytes(home, b"one\ncaf\xe9\n", verb[0], str(three), *verb[1:])
    assert "stdin is not UTF-8: " in one_sentence(result)
    assert "line 2" in result.stderr


def test_files_that_are_no_utf8(endstop: Run, three: Path, home: Path) -> None:
    (home / "latin.txt").write_bytes(b"one\ncaf\xe9\n")
    for arguments in (
        ("generate", str(three), "--file", "latin.txt"),
        ("render", str(three), "latin.txt"),
        ("chat", str(three), "-p", "Hi", "--template", "latin.txt"),
        ("trace", "--load", "latin.txt"),
    ):
        assert "latin.txt is not UTF-8: byte 0xe9 in line 2" in one_sentence(endstop(*arguments))


def test_arguments_that_are_no_utf8(home: Path, three: Path) -> None:
    for verb in ("tokenize", "generate"):
        result = subprocess.run(
            [*COMMAND, verb, str(three), b"caf\xe9"],
            capture_output=True,
            cwd=home,
            env=clean_environment(home),
        )
        assert result.returncode == 1
        assert b"half a surrogate pair" in result.stdout + result.stderr


def test_a_byte_order_mark_and_a_line_separator_belong_to_no_prompt(home: Path, three: Path) -> None:
    given = '\ufeff{"prompt": "a\u2028b"}\r\n\r\n"c"\r\n'.encode()
    result = with_bytes(home, given, "generate", str(three), "--jsonl", *GREEDY)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["prompt"] for line in result.stdout.split("\n") if line] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a", "max_tokens": 3}', "line 1 sets max_tokens: parameters hold for all prompts"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "has both prompt and messages"),
        ('{"prompt": 5}', "line 1 must be a text, or an object with a text as `prompt`"),
        ('{"messages": "x"}', "line 1 must be a text, or an object with a text as `prompt`"),
    ],
)
def test_lines_that_say_what_would_not_be_done(endstop: Run, three: Path, line: str, said: str) -> None:
    assert said in one_sentence(endstop("generate", str(three), "--jsonl", stdin=line))


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_streams_that_the_caller_has_closed(home: Path, three: Path, closed: str) -> None:
    command = f'"$@" {closed}'
    result = subprocess.run(
        ["sh", "-c", command, "sh", *COMMAND, "chat", str(three), "-p", "-", "--raw", *GREEDY],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=home,
        env=clean_environment(home),
    )
    assert "Unexpected" not in result.stderr
    assert "Traceback" not in result.stderr
    assert result.returncode == 1  # an empty raw prompt is refused


def test_unknown_ids_are_not_decoded_to_nothing(endstop: Run, three: Path) -> None:
    assert "has no token 99999: its ids are 0 to" in one_sentence(
        endstop("tokenize", str(three), "--decode", "1 99999")
    )


def test_a_word_behind_a_slash_is_no_question(endstop: Run, three: Path) -> None:
    result = endstop("chat", str(three), *GREEDY, stdin="/help\n/exit\n")
    assert (result.returncode, result.stdout) == (0, "")
    assert "There is no command /help; there are /reset and /exit." in result.stderr


def test_sampling_flags_that_a_greedy_preset_makes_idle_are_named(endstop: Run, three: Path) -> None:
    idle = endstop("generate", str(three), "a", "--max-tokens", "2", "--seed", "1", "--top-p", "0.5")
    assert "seed, top_p without effect: this model's preset is greedy" in idle.stderr
    for more in (("--temperature", "1"), ("--temperature", "0"), ("--preset", "plain")):
        assert "without effect" not in endstop("generate", str(three), "a", "--seed", "1", *more).stderr


def test_texts_that_a_model_takes_for_a_finished_turn_are_named(
    endstop: Run, three: Path, tmp_path: Path
) -> None:
    model = cycle_model(tmp_path / "ends", follow={"Z": "<|im_end|>", " three": "<|im_end|>"}).path
    result = endstop("generate", str(model), "aZ", " one", *GREEDY)
    assert result.returncode == 0, result.stderr
    assert "endstop: for 1 prompt the first token is already a terminator" in result.stderr
    assert "terminator" not in endstop("generate", str(three), " one", *GREEDY).stderr


def test_what_is_written_appears_whole_and_special_files_stay(
    endstop: Run, three: Path, home: Path, tmp_path: Path
) -> None:
    real = tmp_path / "real.html"
    real.write_text("before")
    (home / "link.html").symlink_to(real)
    result = endstop("trace", "--teaching", "--html", "link.html")
    assert result.returncode == 0, result.stderr
    assert (home / "link.html").is_symlink()
    assert real.read_text().startswith("<!doctype html>")
    os.mkfifo(home / "pipe")
    reader = subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE, text=True, cwd=home)
    result = endstop("generate", str(three), "a", *GREEDY, "--out", "pipe")
    assert result.returncode == 0, result.stderr
    assert json.loads(reader.communicate(timeout=60)[0])["prompt"] == "a"
    assert (home / "pipe").is_fifo()
    assert sorted(path.name for path in home.iterdir() if path.suffix == ".part") == []
