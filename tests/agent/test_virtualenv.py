"""A virtualenv in the workspace, with the project installed as editable: how most projects are set up."""

from __future__ import annotations

import json
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from endstop.agent.guard import Guard
from endstop.agent.hooks import HookEvent
from endstop.agent.replay import replay
from endstop.agent.run import run_agent
from endstop.agent.settings import AgentSettings, make_settings
from endstop.agent.suite import read_suite, run_suite
from endstop.agent.task import Task
from endstop.agent.virtualenv import at_home, dependencies_of, find_virtualenv, with_virtualenv
from endstop.protocol.errors import EndstopError
from endstop.sandbox.bubblewrap import probe
from endstop.sandbox.settings import SandboxSettings

from . import small_repository as small

bubblewrap = pytest.mark.skipif(not probe().available, reason="needs bubblewrap")
INSTALLED = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
SANDBOX = {
    "read_only": [sys.prefix, sys.base_prefix],
    "environment": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # they take longer than the tests
}
TASK = {"task": "Make the tests pass.", "verify": {"command": small.VERIFY}}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Its code is found only because the virtualenv names the place that it was installed from."""
    place = small.make(tmp_path / "shelf")
    (place / "pyproject.toml").write_text('[project]\nname = "shelf"\n')
    venv.create(place / ".venv", symlinks=True)
    installed = place / ".venv" / INSTALLED
    (installed / "shelf.pth").write_text(f"{place / 'src'}\n")
    # The pytest of these tests.
    (installed / "tools.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (installed / "installed.py").write_text("VALUE = 1\n")
    return place


def settings_of(project: Path, turns: list[object]) -> AgentSettings:
    return make_settings(
        {
            "task": TASK,
            "model": {"name": small.script(project.parent / "script.json", turns)},
            "sandbox": {"virtualenv": str(project / ".venv"), **SANDBOX},
            "state": str(project.parent / "state"),
        }
    )


def results(state: Path) -> list[str]:
    messages = json.loads((state / "trajectory.json").read_text())["messages"]
    return [message["content"] for message in messages if message["role"] == "tool"]


@bubblewrap
def test_the_check_sees_the_code_that_it_judges(project):
    # In the sandbox the place of the installation leads to the files that are judged, not to the host's.
    told = "import shelf, os; print(os.path.realpath(shelf.__file__))"
    turns = [{"calls": [{"bash": {"command": f"python -c '{told}'"}}]}, small.submit()]
    turns += [{"calls": [small.FIX]}, small.submit()]
    result = run_agent(settings_of(project, turns), project)
    assert result.outcome == "verified"
    assert result.unprotected == (".venv",)
    assert result.changed == ("src/shelf/stock.py",)
    told, refused, edited, _ = results(project.parent / "state")
    assert told == "/workspace/src/shelf/__init__.py\n[exit code 0]"
    assert "2 of 6 tests failed" in refused
    assert edited.startswith("Edited src/shelf/stock.py")
    # A copy of the workspace is seen at the same place.
    again = replay(project.parent / "state")
    assert (again.same, again.result.outcome) == (True, "verified")


@bubblewrap
def test_one_that_a_link_leads_to(project):
    place = project.parent / "elsewhere"
    (project / ".venv").rename(place)
    (project / ".venv").symlink_to(place)
    tool = place / "bin" / "has-sum"
    tool.write_text(
        f"#!{place}/bin/python\nimport sys, shelf\nsys.exit('sum' not in open(shelf.stock.__file__).read())\n"
    )
    tool.chmod(0o755)
    settings = settings_of(project, [{"calls": [small.FIX]}, small.submit()])
    verify = settings.task.verify.model_copy(update={"command": "has-sum", "verifier": "command"})
    task = settings.task.model_copy(update={"verify": verify})
    result = run_agent(settings.model_copy(update={"task": task}), project)
    assert (result.outcome, result.changed) == ("verified", ("src/shelf/stock.py",))
    assert (project / ".venv").readlink() == place


@bubblewrap
def test_nothing_in_it_can_be_changed(project):
    module = project / ".venv" / INSTALLED / "installed.py"
    quick = {"command": "true", "verifier": "command"}
    inside = f".venv/{INSTALLED}/installed.py"
    commands = (
        f"echo VALUE = 2 > {inside}",
        f"echo VALUE = 2 > {module}",
        "rm -rf .venv",
        "mv .venv away",
        "touch .venv/new",
    )
    turns: list[object] = [{"calls": [{"bash": {"command": command}}]} for command in commands]
    for path in (inside, f"./{inside}", f"/workspace/{inside}", ".venv/new"):
        turns.append({"calls": [{"edit_file": {"path": path, "old": "", "new": "VALUE = 2\n"}}]})
    turns.append({"calls": [{"give_up": {"reason": "r", "evidence": "e", "hard": True}}]})
    before = sorted((project / ".venv").rglob("*"))
    settings = settings_of(project, turns)
    verify = settings.task.verify.model_copy(update=quick)
    task = settings.task.model_copy(update={"verify": verify})
    run_agent(settings.model_copy(update={"task": task}), project)
    told = results(project.parent / "state")
    assert not any(text.endswith("[exit code 0]") for text in told[: len(commands)])
    assert [
        text.endswith("belongs to a dependency, which is only read.") for text in told[len(commands) : -1]
    ] == [True] * 4
    assert module.read_text() == "VALUE = 1\n"
    assert sorted((project / ".venv").rglob("*")) == before


def test_dependencies_that_are_named_cannot_be_edited_either(project):
    (project / "vendor").mkdir()
    edit = {"edit_file": {"path": "vendor/new.py", "old": "", "new": "x = 1\n"}}
    settings = settings_of(project, [{"calls": [edit]}])
    named = settings.task.model_copy(update={"dependencies": ("vendor",)})
    run_agent(settings.model_copy(update={"task": named, "unverified": True}), project)
    assert results(project.parent / "state")[0].startswith("vendor/new.py belongs to a dependency")
    assert list((project / "vendor").iterdir()) == []


@bubblewrap
def test_a_suite_names_it_relative_to_itself(project, monkeypatch):
    """Its runs work on copies, and the code of the copy is what is judged."""
    small.script(project.parent / "script.json", [{"calls": [small.FIX]}, small.submit()])
    suite = project.parent / "suite.json"
    task = {"id": "total", "workspace": "shelf", "task": TASK}
    sandbox = {"virtualenv": "shelf/.venv", **SANDBOX}
    settings = {"model": {"name": "scripted:script.json"}, "sandbox": sandbox}
    suite.write_text(json.dumps({"tasks": [task], "settings": settings}))
    (project.parent / "elsewhere").mkdir()
    monkeypatch.chdir(project.parent / "elsewhere")
    report = run_suite(read_suite(suite), project.parent / "out")
    assert [run.problem for run in report.runs] == [""]
    assert [facts.outcome for facts in report.facts] == ["verified"]
    assert "len(self.items)" in (project / "src/shelf/stock.py").read_text()


def test_a_suite_with_a_wrong_setting_is_refused_at_once(project):
    suite = project.parent / "suite.json"
    task = {"id": "total", "workspace": "shelf", "task": TASK}
    suite.write_text(json.dumps({"tasks": [{**task, "settings": {"sandbox": {"virtualenv": "none?"}}}]}))
    with pytest.raises(EndstopError, match=r"none\? is no virtualenv"):
        read_suite(suite)
    suite.write_text(json.dumps({"tasks": [task], "settings": {"sandbox": {"virtualenf": "x"}}}))
    with pytest.raises(
        EndstopError, match=r"settings: unknown key sandbox.virtualenf; .* sandbox.virtualenv"
    ):
        read_suite(suite)


@bubblewrap
def test_as_a_hook(project):
    sandbox = with_virtualenv(
        SandboxSettings(
            read_only=(Path(sys.prefix), Path(sys.base_prefix)), environment=SANDBOX["environment"]
        ),
        project / ".venv",
    )
    guard = Guard(project, project.parent / "state", sandbox)
    task = Task.model_validate(TASK)
    event = HookEvent("stop")
    guard.start(HookEvent("start"), lambda: (task, "task.yaml"))
    first = guard.check(event, lambda: (task, "task.yaml"))
    assert (first.kind, "VERIFY_FAILED" in first.message) == ("go_on", True)
    assert "test_total_counts_pieces" in first.message
    stock = project / "src/shelf/stock.py"
    stock.write_text(stock.read_text().replace("len(self.items)", "sum(self.items.values())"))
    # A new file of the virtualenv is no part of the files that are judged.
    (project / ".venv" / INSTALLED / "test_other.py").write_text("def test():\n    assert False\n")
    assert guard.check(event, lambda: (task, "task.yaml")).outcome == "verified"
    assert guard.sessions()[0].dependencies == [".venv"]


def test_where_it_is_found(tmp_path, monkeypatch):
    made = tmp_path / "env"
    (made / "bin").mkdir(parents=True)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setenv("CONDA_PREFIX", str(made))
    assert find_virtualenv("auto", tmp_path) == made
    monkeypatch.delenv("CONDA_PREFIX")
    assert find_virtualenv("auto", tmp_path) is None
    monkeypatch.setenv("VIRTUAL_ENV", str(made))
    assert find_virtualenv("auto", tmp_path) == made
    assert find_virtualenv("none", tmp_path) is None
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    assert find_virtualenv("auto", tmp_path) is None
    assert find_virtualenv("env", tmp_path) == made
    with pytest.raises(EndstopError, match=r"other is no virtualenv: it has no bin"):
        find_virtualenv("other", tmp_path)


def test_what_of_it_lies_in_the_workspace(tmp_path):
    workspace = tmp_path / "project"
    (workspace / ".venv").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (workspace / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "other_name").symlink_to(workspace)
    sandbox = SandboxSettings(
        read_only=(
            tmp_path / "other_name" / ".venv",
            workspace / "linked",
            tmp_path / "elsewhere",
            workspace,
            workspace / "missing",
        )
    )
    assert dependencies_of(("data",), sandbox, workspace) == ("data", ".venv", "linked")
    assert at_home(sandbox, workspace).also_at == (workspace, tmp_path / "other_name")
