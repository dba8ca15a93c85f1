"""Runs whose surroundings fail: edited records, two runs at once, full and read-only disks, a kill."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from endstop.agent.replay import replay
from endstop.agent.run import resume_agent, run_agent
from endstop.agent.settings import make_settings
from endstop.agent.trajectory import Trajectory
from endstop.protocol.errors import EndstopError

from . import small_repository as small

SOURCE = Path(__file__).parents[2] / "src"
LOOK = {"calls": [{"bash": {"command": "cat a.txt"}}]}
WRITE = {"calls": [{"bash": {"command": "echo b > b.txt"}}]}
QUICK = {"command": "test -e b.txt", "verifier": "command"}


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "a.txt").write_text("a\n")

    def make(turns, task=None, **more):
        task = {"task": "Make b.txt.", "verify": QUICK, **(task or {})}
        model = {"name": small.script(tmp_path / "script.json", turns)}
        return make_settings({"task": task, "model": model, "state": str(tmp_path / "state"), **more})

    return make


@pytest.fixture
def stopped(settings, tmp_path):
    """The state of a run that a limit has ended before its last turn."""
    run_agent(settings([LOOK, WRITE, small.submit()], {"bounds": {"steps": 2}}), tmp_path / "project")
    return tmp_path / "state"


MORE = {"task": {"bounds": {"steps": 9}}}


def put(data, value, *keys):
    for key in keys[:-1]:
        data = data[key]
    data[keys[-1]] = value


@pytest.mark.parametrize(
    ("value", "keys", "says"),
    [
        (5, ["messages"], "messages is of type int"),
        ([], ["messages"], "it has no messages"),
        ([None], ["messages"], "message 0: it is no object"),
        (None, ["messages", 3, "meta"], "message 3: its meta has no step"),
        ("somebody", ["messages", 3, "role"], "message 3: it has no role that is known, or no text"),
        (None, ["messages", 3, "content"], "message 3: it has no role that is known, or no text"),
        (None, ["messages", 3, "tool_call_id"], "message 3: it answers no call"),
        ("x", ["messages", 2, "tool_calls"], "message 2: a call in it has no id, name or arguments"),
        (None, ["messages", 2, "meta", "usage"], "message 2: its meta has no usage"),
        (5, ["messages", 5, "meta", "decision"], "message 5: its decision is none"),
        ("x", ["outcome"], "outcome is of type str"),
        ("x", ["seconds"], "seconds is of type str"),
        (None, ["settings"], "settings is missing"),
    ],
)
def test_a_record_that_was_edited_is_refused_with_the_place(stopped, value, keys, says):
    path = stopped / "trajectory.json"
    data = json.loads(path.read_text())
    put(data, value, *keys)
    path.write_text(json.dumps(data))
    for use in (lambda: resume_agent(stopped, changes=MORE), lambda: replay(stopped)):
        with pytest.raises(EndstopError) as error:
            use()
        assert str(error.value) == f"{path} is a broken trajectory, perhaps edited by hand: {says}."
    done = subprocess.run(
        [sys.executable, "-m", "endstop.cli", "agent", "show", str(path)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    assert "Unexpected" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("value", "keys", "says"),
    [
        ({"refusals": "x"}, ["gate"], "the saved state of the gate is damaged: refusals: "),
        ({"findings": {"t": 5}}, ["gate"], "the saved state of the gate is damaged: findings.t: "),
        ({"a": 1}, ["verification"], "what was saved of the baseline is damaged: baseline_tree: "),
        ({"nope": 1}, ["settings"], "the settings of the resumed run: unknown key nope"),
        ("/no/such/place", ["workspace"], "the workspace /no/such/place cannot be opened: No such file"),
        ("/etc/passwd", ["workspace"], "the workspace /etc/passwd cannot be opened: Not a directory"),
    ],
)
def test_a_record_with_states_that_are_none(stopped, value, keys, says):
    path = stopped / "trajectory.json"
    data = json.loads(path.read_text())
    put(data, value, *keys)
    path.write_text(json.dumps(data))
    with pytest.raises(EndstopError) as error:
        resume_agent(stopped, changes=MORE)
    assert str(error.value).startswith(says)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": "endstop.trajectory"', "\x00"])
def test_a_record_that_is_no_json(stopped, text):
    (stopped / "trajectory.json").write_text(text)
    with pytest.raises(EndstopError, match="cannot be read as a trajectory: "):
        resume_agent(stopped)


def test_a_record_without_turns_is_replayed_to_the_end_of_its_turns(stopped):
    path = stopped / "trajectory.json"
    data = json.loads(path.read_text())
    data["messages"] = data["messages"][:2]
    path.write_text(json.dumps(data))
    again = replay(stopped)
    assert (again.recorded, again.replayed, again.result.outcome) == ((), (), "error")


def test_one_run_at_a_time_works_in_a_workspace(stopped, tmp_path):
    settings_of_it = make_settings(Trajectory.load(stopped).settings | {"task": {"task": "x"}})
    other = settings_of_it.model_copy(update={"state": tmp_path / "other"})
    descriptor = os.open(tmp_path / "project", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        for use in (
            lambda: run_agent(other, tmp_path / "project"),
            lambda: resume_agent(stopped, changes=MORE),
        ):
            with pytest.raises(EndstopError, match=r"another run works in .*/project; wait for its end"):
                use()
    finally:
        os.close(descriptor)
    assert resume_agent(stopped, changes=MORE).outcome == "verified"


def test_resume_takes_no_task_and_no_workspace(stopped):
    for more in (["another task"], ["--workspace", "."]):
        done = subprocess.run(
            [sys.executable, "-m", "endstop.cli", "agent", "run", "--resume", str(stopped), *more],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert "--resume has the task, workspace and settings of its run" in done.stderr


def test_what_a_killed_run_of_the_check_left_is_removed_at_the_next(stopped):
    left = stopped / "runs" / "0123456789ab" / "export"
    left.mkdir(parents=True)
    (left / "a.txt").write_text("a")
    assert resume_agent(stopped, changes=MORE).outcome == "verified"
    assert list((stopped / "runs").iterdir()) == []


def test_the_calls_of_the_oracle_are_counted_over_resumptions(settings, tmp_path):
    ask = {"calls": [{"oracle": {"question": "Is it done?"}}]}
    oracle = small.script(tmp_path / "oracle.json", ["First.", "Second.", "Third."])
    made = settings(
        [ask, LOOK, ask, ask, ask, WRITE, small.submit()],
        {"bounds": {"steps": 2}},
        tools={"oracle": {"name": oracle}, "oracle_calls": 3},
    )
    run_agent(made, tmp_path / "project")
    state = tmp_path / "state"
    # The second call was under way when the run was killed: it may have been asked.
    resume_agent(state, changes={"task": {"bounds": {"steps": 3}}})
    data = json.loads((state / "trajectory.json").read_text())
    killed = copy.deepcopy(data)
    killed["messages"] = killed["messages"][:-1]
    killed["outcome"] = None
    (state / "trajectory.json").write_text(json.dumps(killed))
    assert resume_agent(state, changes=MORE).outcome == "verified"
    answers = [m["content"] for m in Trajectory.load(state).messages if m.get("name") == "oracle"]
    assert ["First." in answers[0], answers[1].startswith("INTERRUPTED"), "Third." in answers[2]] == [
        True
    ] * 3
    assert answers[3] == "The oracle was asked 3 times, and no more is allowed."


def test_what_no_check_has_seen_is_named(settings, tmp_path):
    with (tmp_path / "project" / "huge.bin").open("wb") as file:
        file.truncate(600 << 20)
    deep = tmp_path / "project" / "/".join(["d"] * 110)
    deep.mkdir(parents=True)
    result = run_agent(settings([WRITE, small.submit()]), tmp_path / "project")
    assert result.outcome == "verified"
    (note,) = [note for note in result.notes if note.startswith("not looked at, neither by the check")]
    assert "huge.bin (larger than 512 MiB)" in note
    assert "d (more than 100 directories deep)" in note


@contextlib.contextmanager
def disk(place: Path, size: str):
    """A small disk of its own, where this user may mount one."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("this user can mount nothing")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_under_the_state_is_said_and_the_run_goes_on_when_there_is_room(settings, tmp_path):
    big = {"calls": [{"bash": {"command": "head -c 3000000 /dev/urandom > big.bin"}}]}
    with disk(tmp_path / "disk", "1m") as small_disk:
        state = small_disk / "state"
        made = settings([LOOK, big, WRITE, small.submit()], context={"output_bytes": 1000})
        made = made.model_copy(update={"state": state})
        with pytest.raises(EndstopError, match=r"No space left on device|the disk is full"):
            run_agent(made, tmp_path / "project")
        assert json.loads((state / "trajectory.json").read_text())["messages"]
        subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
        assert resume_agent(state).outcome in ("verified", "error")
        assert (tmp_path / "project" / "b.txt").exists()


def test_a_workspace_that_cannot_be_written_is_said_with_its_path(settings, tmp_path):
    with disk(tmp_path / "disk", "1m") as read_only:
        (read_only / "a.txt").write_text("a\n")
        subprocess.run(["mount", "-o", "remount,ro", str(read_only)], check=True)
        made = settings([LOOK, WRITE, small.submit()])
        result = run_agent(made, read_only)
        # The gate accepted the copy; what the person has is something else.
        assert (result.codes[-1], result.outcome, result.exit_code) == ("END verified", "error", 1)
        assert result.message == (
            f"b.txt cannot be brought back to the workspace {read_only}: Read-only file system"
        )
        assert Trajectory.load(tmp_path / "state").outcome["outcome"] == "error"
