"""Pushing to a Hub on the loopback interface: what arrives, what is refused, what is said when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from endstop.cli.app import app
from endstop.protocol.errors import BrokenModel, EndstopError, UnsupportedModel
from endstop.train.model_card import model_card
from endstop.train.push import pushable
from tests.train.fake_hub import UploadHub, upload_hub
from tests.train.finished_run import write_run

TOKEN = "hf_secret"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("push") / "run")


@pytest.fixture
def hub() -> Iterator[UploadHub]:
    with upload_hub() as running:
        yield running


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def endstop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs the verb in this process, where huggingface_hub is loaded already."""
    from huggingface_hub import constants

    def run(hub: UploadHub | None, *arguments: str, token: str = TOKEN) -> Done:
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setenv("HF_ENDPOINT", hub.address if hub is not None else "")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
        done = CliRunner().invoke(app, ["push", *arguments])
        return Done(done.exit_code, done.stdout, done.stderr)

    return run


def test_every_file_arrives_byte_for_byte_in_one_commit(run: Path, hub: UploadHub, endstop: Any) -> None:
    model = run / "sft" / "model"
    (model / "notes.txt").write_text("mine")
    done = endstop(hub, str(model), "someone/tiny", "--private", "--message", "First words")
    (model / "notes.txt").unlink()
    assert done.returncode == 0, done.stderr
    assert hub.repositories == {"someone/tiny": True}
    assert hub.commits == [("someone/tiny", "First words")]
    sent = {name: content for (_, name), content in hub.files.items()}
    own = {path.name: path.read_bytes() for path in model.iterdir()}
    card = sent.pop("README.md")
    assert sent == own
    assert set(sent) >= {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    assert card.decode() == model_card(model, "someone/tiny")
    assert done.stdout.splitlines()[-1] == f"{hub.address}/someone/tiny/commit/{'a' * 40}"
    assert "notes.txt stays here" in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    # Large files go as LFS objects, past the commit.
    assert [path for method, path in hub.requests if method == "PUT"]


def test_again_is_a_commit_to_the_same_repository(run: Path, hub: UploadHub, endstop: Any) -> None:
    for _ in range(2):
        assert endstop(hub, str(run / "base" / "model"), "someone/tiny").returncode == 0
    assert [repository for repository, _ in hub.commits] == ["someone/tiny"] * 2


def test_a_dry_run_sends_nothing(run: Path, hub: UploadHub, endstop: Any) -> None:
    model = run / "sft" / "model"
    done = endstop(hub, str(model), "someone/tiny", "--dry-run", token="")
    assert done.returncode == 0, done.stderr
    assert hub.requests == []
    for path in model.iterdir():
        assert f"{path.stat().st_size:,}  {path.name}" in done.stdout
    assert "## How it stops" in done.stdout
    found = json.loads(endstop(hub, str(model), "someone/tiny", "--dry-run", "--json").stdout)
    assert found["size"] == sum(file["size"] for file in found["files"])
    assert found["card"] == model_card(model, "someone/tiny")


def test_the_card_says_what_the_run_says(run: Path) -> None:
    card = model_card(run / "sft" / "model", "someone/tiny", licence="apache-2.0")
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert 'license: "apache-2.0"' in card
    for words in (
        "base -> mid -> sft",
        "`<\\|assistant_end\\|>` | turn_end (terminator)",
        "`<\\|bos\\|>` | eos",
        "<|bos|><|user_start|>Hi<|user_end|><|assistant_start|>Hello!<|assistant_end|>",
        "| sft | echo | 100 | 99.0 % | 98.5 % | 100.0 % | 0.0 % | 1.0 % |  |",
        "| base | corpus-base (1,200) | public domain | https://example.org/corpus |",
        "| sft | 10 | 40,960 | 3.50e+10 | 5.0 |",
        'AutoModelForCausalLM.from_pretrained("someone/tiny")',
        "endstop chat someone/tiny",
    ):
        assert words in card, words
    assert "No licence is stated" not in card
    # A model of the middle of the run knows nothing of what came after it.
    base = model_card(run / "base" / "model", "someone/tiny")
    assert "corpus-sft" not in base
    assert "It is a base model" in base
    assert "No licence is stated for the weights" in base


def test_a_readme_that_is_there_is_the_card(run: Path, tmp_path: Path) -> None:
    model = write_run(tmp_path / "run", ["base"]) / "base" / "model"
    (model / "README.md").write_text("# Mine\n")
    found = pushable(model, "someone/tiny")
    assert found.card == "# Mine\n"
    assert [file.name for file in found.files].count("README.md") == 1
    # A directory of no run has a card as well.
    (model / "README.md").write_bytes("# Café".encode("latin-1"))
    with pytest.raises(EndstopError, match=r"README.md, which would be the model card, cannot be read"):
        pushable(model, "me/tiny")
    (model / "README.md").unlink()
    moved = model.rename(tmp_path / "alone")
    assert "## How it stops" in pushable(moved, "someone/tiny").card


def test_what_may_not_leave_or_is_not_whole_is_refused(tmp_path: Path) -> None:
    model = write_run(tmp_path / "run", ["sft"]) / "sft" / "model"

    def refused(kind: type[EndstopError], match: str, repository: str = "someone/tiny") -> None:
        with pytest.raises(kind, match=match) as caught:
            pushable(model, repository)
        assert "\n" not in str(caught.value)

    refused(EndstopError, "is no name for a repository", "some one/ti ny")
    refused(EndstopError, "lacks an owner", "tiny")
    (model / "training").mkdir()
    refused(EndstopError, "is nothing for the Hub")
    (model / "training").rmdir()
    for name in ("optimizer.pt", "training_args.bin"):
        (model / name).write_bytes(b"")
        refused(UnsupportedModel, "may be a pickle")
        (model / name).unlink()
    for name, kind in (("generation_config.json", BrokenModel), ("model.safetensors", BrokenModel)):
        kept = (model / name).read_bytes()
        (model / name).unlink()
        refused(kind, name)
        (model / name).write_bytes(kept)
    (model / "model.safetensors").write_bytes(kept[:-8])
    refused(BrokenModel, "truncated")
    model = tmp_path / "nothing"
    refused(EndstopError, "is no directory")


@pytest.mark.parametrize(
    ("fail", "token", "words"),
    [
        ({}, "hf_wrong", "does not let this token write"),
        ({"/commit/": 403}, TOKEN, "does not let this token write"),
        ({"/preupload/": 400}, TOKEN, "refused someone/tiny (status 400)"),
        ({"create": 400}, TOKEN, "refused someone/tiny (status 400)"),
    ],
)
def test_a_refusal_of_the_hub_is_one_sentence_without_the_token(
    fail: dict[str, int], token: str, words: str, run: Path, hub: UploadHub, endstop: Any
) -> None:
    hub.fail = fail
    done = endstop(hub, str(run / "sft" / "model"), "someone/tiny", token=token)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("endstop: ")
    assert words in line
    assert token not in done.stdout + done.stderr
    assert hub.commits == []


def test_without_a_token_or_a_network_it_says_so(run: Path, endstop: Any) -> None:
    model = str(run / "sft" / "model")
    done = endstop(None, model, "someone/tiny", token="")
    assert "there is no token for the Hub" in done.stderr
    nobody = UploadHub(address="http://127.0.0.1:9")
    done = endstop(nobody, model, "someone/tiny")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "the Hub cannot be reached" in line
    assert TOKEN not in line
