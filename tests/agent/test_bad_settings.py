"""Settings that cannot work are refused before anything runs, in one sentence that says what and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from endstop.agent.prompts import render
from endstop.agent.reading import read_mapping, read_yaml
from endstop.agent.run import run_agent
from endstop.agent.settings import make_settings, merged
from endstop.agent.task import Task, load_task
from endstop.cli.agent_run import read_checklist
from endstop.protocol.errors import EndstopError
from endstop.sandbox import SandboxSettings, WorkingCopy

from . import small_repository as small


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("task: x\nverifyy: {}", "unknown key verifyy; the nearest is verify."),
        ("task: x\nverify: {comand: a}", "unknown key verify.comand; the nearest is verify.command."),
        ("task: x\nchecklist: [{id: a, txt: b}]", "checklist.0.txt; the nearest is checklist.text."),
        ("task: x\nchecklist: [{id: a}, {id: b}, {id: a}]", "checklist: two items have the id a, and each"),
        ("task: ' '", "task: it says nothing"),
        ("task: x\nverify: {command: ' '}", "verify.command: it says nothing"),
        ('task: x\nverify: {command: "a\\0b"}', "verify.command: it holds a NUL character"),
        ("task: x\nverify: pytest", "verify: Input should be a mapping, got 'pytest'."),
        ("task: x\nallow: tests", "allow: Input should be a list, got 'tests'."),
        ("task: x\nbounds: {cost: .inf}", "bounds.cost: Input should be a finite number"),
        (
            "task: x\nbounds: {seconds: 1e300}",
            "bounds.seconds: Input should be less than or equal to 2000000",
        ),
        ("task: x\ntask: y", "task is given twice in the mapping that begins in line 1."),
        ("task: x\nverify:\n  command: a\n  command: b", "command is given twice in the mapping that begins"),
        ("task: " + "[" * 5000, "it is nested too deeply."),
        ("task: x\nallow: &a [*a]", "allow.0: Input should be a valid string, got [[[[[[[...]]]]]]]."),
        ("task: x\nallow: [[" + "a, " * 100_000 + "]]", "got ['a', 'a', 'a', 'a', 'a', 'a', ...]."),
    ],
)
def test_a_task_file(text, why, tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text(text)
    with pytest.raises(EndstopError) as error:
        load_task(path)
    assert str(error.value).startswith(f"{path}")
    assert why in str(error.value)
    assert len(str(error.value)) < 500


def test_files_that_cannot_be_read_are_named_once(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"task: x\nallow: [\xff]\n")
    none = tmp_path / "none.yaml"
    for read in (read_mapping, lambda path: render("task", path, task="", checklist=[])):
        with pytest.raises(EndstopError) as error:
            read(none)
        assert str(error.value).endswith(f"{none} cannot be read: No such file or directory.")
        with pytest.raises(EndstopError, match="Is a directory"):
            read(tmp_path)
        with pytest.raises(EndstopError, match=r"latin.yaml cannot be read: line 2 is not UTF-8\."):
            read(tmp_path / "latin.yaml")


def test_yaml_may_use_merge_keys_and_a_key_in_two_mappings():
    assert read_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: {x: 3}") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": {"x": 3},
    }


def test_what_is_in_the_place_of_a_mapping_is_not_lost():
    with pytest.raises(EndstopError, match="task must be a mapping, got 5"):
        merged({"task": 5}, {"task": {"task": "x"}})
    assert merged({"task": None}, {"task": {"task": "x"}}) == {"task": {"task": "x"}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero."),
        ("{{ task + 1 }}", "TypeError: "),
        ("{{ checklist[5].id }}", "list object has no element 5"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError: Range too big."),
        ("{% if %}", "Expected an expression"),
        ("{# nothing #}", "says nothing."),
    ],
)
def test_a_template_that_cannot_be_filled_in(tmp_path, text, said):
    path = tmp_path / "own.jinja"
    path.write_text(text)
    with pytest.raises(EndstopError) as error:
        render("task", path, task="x", checklist=[])
    assert str(error.value).startswith(f"the prompt template {path}")
    assert said in str(error.value)


def test_ids_of_checklists_that_are_made_of_words_differ_where_the_texts_do(tmp_path):
    path = tmp_path / "list.md"
    long = "the same words over and over again, more than sixty letters of them: "
    path.write_text(f"- [ ] Do it!\n- [ ] do it?\n- [ ] {long}a\n- [ ] {long}b\n")
    assert [item["id"] for item in read_checklist(path)] == [
        "do-it",
        "do-it-2",
        "the-same-words-over-and-over-again-more-than-sixty-letters-o",
        "the-same-words-over-and-over-again-more-than-sixty-letters-o-2",
    ]
    path.write_text("- do it\n- do it\n")
    with pytest.raises(ValueError, match="two items have the id do-it"):
        Task(task="x", checklist=read_checklist(path))


@pytest.fixture
def start(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "a.txt").write_text("a\n")

    def run(place=tmp_path / "project", **more):
        model = {"name": small.script(tmp_path / "script.json", [small.submit()])}
        given = {"task": {"task": "x"}, "model": model, "state": str(tmp_path / "state"), **more}
        return run_agent(make_settings(given), place)

    return run


@pytest.mark.parametrize(
    "sandbox",
    [
        {"read_only": ["/no-such-place"]},
        {"read_only": ["/"]},
        {"environment": {"A=B": "x"}},
        {"environment": {"PATH": "/no-such-place"}},
        {"tmp_bytes": 10**30},
    ],
)
def test_a_sandbox_in_which_no_command_can_run(start, sandbox, tmp_path):
    with pytest.raises(EndstopError, match=r"no command can be run in the sandbox as the settings"):
        start(sandbox=sandbox)
    assert not (tmp_path / "state" / "trajectory.json").exists()


def test_a_compaction_template_is_tried_at_the_start(start, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ nothing }}")
    with pytest.raises(EndstopError, match="'nothing' is undefined; it may use done, state"):
        start(prompts={"compaction": str(tmp_path / "own.jinja")})


def test_no_directory_of_the_persons_becomes_a_runs(start, tmp_path):
    """As root a run puts its copy of the workspace at `workspace` in the state, and removes what is there."""
    precious = tmp_path / "home" / "workspace" / "precious.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("x")
    with pytest.raises(EndstopError, match="must not lie in the state directory"):
        start(place=precious.parent, state=str(tmp_path / "home"))
    with pytest.raises(EndstopError, match="holds other files; name a new or an empty one"):
        start(state=str(tmp_path / "home"))
    with pytest.raises(EndstopError, match="lies in the state") if _copies() else _nothing():
        WorkingCopy.open(precious.parent, tmp_path / "home", SandboxSettings())
    assert precious.read_text() == "x"
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["workspace"]


def test_a_project_without_a_check_is_not_said_to_have_passed_one(start):
    from endstop.cli.agent_view import _warning

    result = start()
    assert (result.outcome, _warning(result)) == ("unverified", "nothing was changed")


def test_a_runner_that_is_not_there_comes_with_what_to_do(start, tmp_path):
    missing = {"task": {"task": "x", "verify": {"command": "no-such-runner -q", "verifier": "pytest"}}}
    with pytest.raises(EndstopError, match=r"activate the project's, or name it"):
        start(**missing)
    weak = {"task": {"task": "x", "verify": {"command": "no-such-runner", "verifier": "command"}}}
    result = start(**weak, state=str(tmp_path / "other"))
    assert result.outcome == "error"  # the script has no second turn
    assert any("before any change the command is not found" in note for note in result.notes)


def _copies() -> bool:
    from endstop.sandbox.modes import drops_user

    return drops_user(SandboxSettings())


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def test_a_relative_path_of_the_workspace(start, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert start(place=Path("project")).outcome == "unverified"
