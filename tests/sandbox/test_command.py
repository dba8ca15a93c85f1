"""What run_command gives back, under bubblewrap and without."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from endstop.protocol.errors import EndstopError
from endstop.sandbox import (
    CommandLimits,
    SandboxSettings,
    describe,
    drops_user,
    give_to_sandbox,
    given_mode,
    modes,
    run_command,
)
from endstop.sandbox.bubblewrap import probe
from endstop.sandbox.interpreters import with_interpreters
from endstop.sandbox.load import load_below
from endstop.sandbox.settings import SandboxMode
from tests.sandbox.conftest import Place

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox is for Linux and macOS")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


@pytest.fixture(params=["bubblewrap", "namespaces", "process"])
def any_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A workspace in each mode that this machine gives."""
    from endstop.sandbox import WorkingCopy

    mode: SandboxMode = request.param
    settings = SandboxSettings(
        mode=mode,
        limits=CommandLimits(seconds=20),
        read_only=(Path(sys.prefix), Path(sys.base_prefix)),
        environment={"GIVEN": "yes"},
    )
    try:
        given_mode(settings)
    except EndstopError as error:
        pytest.skip(str(error))
    workspace, outside = tmp_path / "workspace", tmp_path / "outside"
    workspace.mkdir()
    outside.mkdir()
    (workspace / "file.txt").write_text("mine\n")
    return Place(workspace, outside, WorkingCopy.open(workspace, tmp_path / "state", settings), settings)


def test_a_command_and_its_end(any_place: Place) -> None:
    result = any_place.run("cat file.txt; echo err >&2; exit 3")
    assert (result.exit_code, result.cause, result.output) == (3, "exit", "mine\nerr\n")
    assert (result.omitted_bytes, result.mode, result.net_attempt) == (0, any_place.settings.mode, False)
    assert 0 < result.seconds < 5
    listed = any_place.run(["printf", "%s|", "a b", "$HOME"])
    assert (listed.output, listed.exit_code) == ("a b|$HOME|", 0)
    assert any_place.run("echo new > made").exit_code == 0
    assert any_place.files.read("made") == (b"new\n", 4)


def test_a_program_that_is_not_there(any_place: Place) -> None:
    for command in ("no-such-program", ["no-such-program", "x"]):
        result = any_place.run(command)
        assert (result.exit_code, result.cause) == (127, "exit")
        assert "no-such-program" in result.output
        assert "not found" in result.output or "No such file" in result.output


def test_signals(any_place: Place) -> None:
    result = any_place.run("kill -9 $$")
    assert (result.exit_code, result.cause) == (137, "killed")


def test_time_runs_out(any_place: Place) -> None:
    began = time.monotonic()
    result = any_place.run("echo begun; trap '' TERM; while :; do sleep 1; done", seconds=0.7)
    assert (result.exit_code, result.cause, result.output) == (None, "timeout", "begun\n")
    assert 0.7 <= result.seconds < 5
    assert time.monotonic() - began < 10


@linux
def test_memory(any_place: Place) -> None:
    code = """
import os, time
for _ in range(3):
    if os.fork() == 0: break
x = bytearray(b"1") * (60 << 20)
time.sleep(20)
"""
    limits = replace(any_place.settings.limits, memory_bytes=150 << 20)
    settings = replace(any_place.settings, limits=limits)
    result = run_command([sys.executable, "-c", code], any_place.copy.root, settings)
    assert (result.exit_code, result.cause) == (None, "memory")
    assert result.seconds < 10


def test_output_as_it_comes(any_place: Place) -> None:
    chunks: list[tuple[float, bytes]] = []
    result = any_place.run(
        "echo one; sleep 0.5; echo two", on_output=lambda chunk: chunks.append((time.monotonic(), chunk))
    )
    assert b"".join(chunk for _, chunk in chunks) == b"one\ntwo\n"
    assert chunks[-1][0] - chunks[0][0] > 0.3
    assert result.output == "one\ntwo\n"


def test_what_watches_may_fail(any_place: Place) -> None:
    def fail(_: bytes) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        any_place.run(
            "(while :; do echo x >> beat; sleep 0.01; done) & while :; do echo; sleep 0.05; done",
            on_output=fail,
        )
    with contextlib.suppress(FileNotFoundError):
        size = (any_place.copy.root / "beat").stat().st_size
        time.sleep(0.1)
        assert (any_place.copy.root / "beat").stat().st_size == size


def test_directories(any_place: Place) -> None:
    any_place.files.write("a/b/c.txt", b"deep")
    assert any_place.run("cat c.txt", directory="a/b").output == "deep"
    assert any_place.run("cat c.txt", directory="a/../a/b/").output == "deep"
    for directory in ("..", "a/../..", "/etc", "none", "file.txt"):
        result = any_place.run("pwd", directory=directory)
        assert (result.cause, result.exit_code) == ("start", None)
        assert directory.strip("./") in result.output


def test_the_environment(any_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "sk-host-secret")
    lines = any_place.run("env", environment={"MORE": "a=b\nc", "GIVEN": "other"}).output
    assert "sk-host" not in lines
    assert "MORE=a=b\nc\n" in lines
    assert "GIVEN=other\n" in lines
    assert (
        any_place.run('test -w "$HOME" -a -w "$TMPDIR" && echo $PATH').output
        == "/usr/local/bin:/usr/bin:/bin\n"
    )
    path = replace(any_place.settings, path_entries=("/first",))
    assert run_command("echo $PATH", any_place.copy.root, path).output.startswith("/first:/usr/local/bin:")


def test_what_cannot_be_a_command(any_place: Place) -> None:
    result = any_place.run("echo " + "x" * 200_000)
    assert (result.cause, result.exit_code) == ("start", None)
    assert (
        result.output == "the command has 200005 bytes, 131071 are possible; put it into a file and run that"
    )
    assert any_place.run("echo a\0b").cause == "start"
    long = any_place.run("echo " + "x" * 100_000 + " | wc -c")
    assert long.output.strip() == "100001"


def test_dependencies_are_seen_and_leave_nothing(any_place: Place) -> None:
    (any_place.outside / "lib").mkdir()
    (any_place.outside / "lib" / "code.js").write_text("code")
    any_place.outside.chmod(0o755)
    bind = {
        "node_modules": any_place.outside / "lib",
        "deep/er/file.js": any_place.outside / "lib" / "code.js",
    }
    result = any_place.run("cat node_modules/code.js deep/er/file.js; echo x > node_modules/new", bind=bind)
    assert result.output.startswith("codecode")
    assert sorted(os.listdir(any_place.copy.root)) == ["file.txt"]
    if any_place.settings.mode == "bubblewrap":
        assert result.exit_code == 1
        assert os.listdir(any_place.outside / "lib") == ["code.js"]
    any_place.files.write("node_modules/own", b"")
    any_place.run("true", bind=bind)
    assert os.listdir(any_place.copy.root / "node_modules") == ["own"]


@pytest.mark.parametrize("absolute", [True, False])
def test_dependencies_that_are_links_already(any_place: Place, absolute: bool) -> None:
    (any_place.outside / "lib").mkdir(mode=0o755)
    (any_place.outside / "lib" / "code.js").write_text("code")
    target = any_place.outside / "lib"
    link = any_place.copy.root / "node_modules"
    link.symlink_to(target if absolute else os.path.relpath(target, any_place.copy.root))
    result = any_place.run("cat node_modules/code.js", bind={"node_modules": link})
    assert (result.output, result.exit_code) == ("code", 0)
    assert link.is_symlink()


def test_last_words_about_memory(any_place: Place) -> None:
    """Only they count, not what a test prints somewhere."""
    assert any_place.run("echo MemoryError; echo; echo 1 failed; echo a; echo b; exit 1").cause == "exit"
    assert any_place.run("echo MemoryError; exit 1").cause == "memory"
    assert any_place.run("echo MemoryError").cause == "exit"


def test_a_place_for_reports(any_place: Place) -> None:
    report = any_place.outside / "reports"
    report.mkdir()
    give_to_sandbox(report, any_place.settings)
    result = any_place.run(f"echo '<testsuite/>' > {report}/junit.xml", writable=[report])
    assert (result.exit_code, result.output) == (0, "")
    assert (report / "junit.xml").read_text() == "<testsuite/>\n"


def test_places_behind_links(any_place: Place) -> None:
    (any_place.outside / "real").mkdir(mode=0o755)
    (any_place.outside / "real" / "file").write_text("seen")
    link = any_place.workspace.parent / "link"
    link.symlink_to(any_place.outside / "real")
    settings = replace(any_place.settings, read_only=(link,))
    assert run_command(f"cat {link}/file", any_place.copy.root, settings).output == "seen"
    give_to_sandbox(any_place.outside / "real", any_place.settings)
    assert any_place.run(f"echo x > {link}/new", writable=[link]).exit_code == 0
    assert (any_place.outside / "real" / "new").read_text() == "x\n"


def test_the_interpreter_that_runs_this(any_place: Place) -> None:
    result = any_place.run([sys.executable, "-c", "import sys, pytest, ctypes; print(sys.prefix)"])
    assert result.output == sys.prefix + "\n"


def test_a_virtualenv_of_a_virtualenv(any_place: Place, tmp_path: Path) -> None:
    """Its interpreter is a link to a link to an installation that nobody has named."""
    import venv

    venv.create(tmp_path / "venv", symlinks=True)
    real = Path(os.path.realpath(sys.executable)).parent.parent
    wanted = {tmp_path / "venv"} | ({real} if not real.is_relative_to("/usr") else set())
    assert wanted <= set(with_interpreters([tmp_path / "venv"]))
    settings = replace(
        any_place.settings, read_only=(tmp_path / "venv",), path_entries=(str(tmp_path / "venv" / "bin"),)
    )
    result = run_command("python -c 'import json, sys; print(sys.prefix)'", any_place.copy.root, settings)
    assert result.output == f"{tmp_path / 'venv'}\n"


@linux
def test_nothing_outlives_it_in_any_mode(any_place: Place) -> None:
    stays = "(trap '' HUP TERM; while :; do echo x >> beat; sleep 0.01; done)"
    result = any_place.run(
        f'setsid bash -c "{stays}" >/dev/null 2>&1 & while [ ! -s beat ]; do sleep 0.01; done'
    )
    assert result.exit_code == 0
    size = (any_place.copy.root / "beat").stat().st_size
    time.sleep(0.1)
    assert (any_place.copy.root / "beat").stat().st_size == size


@linux
def test_the_network_in_any_mode(any_place: Place) -> None:
    """Closed where namespaces are to be had; open when the settings say so."""
    links = "import socket; print(len(socket.if_nameindex()))"
    here = len(socket.if_nameindex())
    closed = any_place.run([sys.executable, "-c", links]).output
    assert closed == (f"{here}\n" if any_place.settings.mode == "process" else "1\n")
    opened = replace(any_place.settings, network=True)
    assert run_command([sys.executable, "-c", links], any_place.copy.root, opened).output == f"{here}\n"


def test_weaker_modes_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def without(script: str | None) -> SandboxSettings:
        """As where bwrap is missing, or is refused what it needs."""
        for tool in ("prlimit", "setpriv", "unshare", "mount"):
            if not (tmp_path / tool).exists():
                (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
        if script is not None:
            (tmp_path / "bwrap").write_text(script)
            (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        probe.cache_clear()
        return SandboxSettings()

    try:
        tmp_path.chmod(0o755)
        weak = without(None)
        mode, why = given_mode(weak)
        assert (mode, why) in (
            ("namespaces", "bwrap is not installed"),
            ("process", "bwrap is not installed, and the kernel gives this user no namespaces"),
        )
        assert describe(weak).startswith(f"{mode} (weak")
        assert "bwrap is not installed" in describe(weak)
        assert "all files of this user are open" in describe(weak)
        assert not drops_user(weak)
        with pytest.raises(
            EndstopError, match=r"bubblewrap cannot be had on this machine: bwrap is not installed; inst"
        ):
            given_mode(replace(weak, mode="bubblewrap"))

        if not sys.platform.startswith("linux"):
            return
        denied = without("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
        assert given_mode(denied)[1].startswith("bubblewrap does not work here: ")
        with pytest.raises(
            EndstopError, match="cannot be had on this machine: bubblewrap does not work here"
        ):
            run_command("true", tmp_path, replace(denied, mode="bubblewrap"))

        monkeypatch.setattr(modes, "_namespaces", lambda: False)
        mode, why = given_mode(denied)
        assert (mode, why.endswith("and the kernel gives this user no namespaces")) == ("process", True)
        assert describe(denied).startswith("process (weakest, ")
        assert "the network and all files of this user are open" in describe(denied)
        assert run_command("echo runs", tmp_path, denied).output == "runs\n"
        with pytest.raises(EndstopError, match="the sandbox mode namespaces cannot be had"):
            given_mode(replace(denied, mode="namespaces"))
    finally:
        monkeypatch.undo()
        probe.cache_clear()


def test_the_strongest_mode_is_described(place: Place) -> None:
    said = describe(replace(place.settings, mode="auto"))
    assert said.startswith("bubblewrap: no network, no files or processes of the host, limits")
    assert said.endswith(", as user 61234") == (os.geteuid() == 0)
    assert "the host's network" in describe(replace(place.settings, network=True))


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="memory_bytes must be above 0, got 0"):
        CommandLimits(memory_bytes=0)


@linux
def test_the_load_of_processes() -> None:
    load = load_below(os.getpid())
    assert load.processes >= 1
    assert load.resident_bytes > 1 << 20
    assert load_below(1 << 29).processes == 0


def test_other_names_of_the_workspace(place: Place) -> None:
    home = place.workspace
    tool = home / "tools"
    tool.mkdir()
    (tool / "version").write_text("1\n")
    settings = replace(place.settings, also_at=(home,), read_only=(*place.settings.read_only, tool))

    def run(command: str, **more: object) -> tuple[int | None, str]:
        result = run_command(command, place.copy.root, replace(settings, **more))  # type: ignore[arg-type]
        return result.exit_code, result.output.strip()

    assert run(f"cat {home}/file.txt; readlink {home}") == (0, "mine\n/workspace")
    # What is seen in it stands at both names, and is written at neither.
    assert run(f"cat {tool}/version tools/version") == (0, "1\n1")
    assert run(f"echo 2 > {tool}/version")[0] == run("echo 2 > tools/version")[0] == 1
    # A copy of the workspace that did not have it is left without it.
    assert (place.copy.root / "tools").exists() == (place.copy.root == home)
    assert run(f"echo more >> {home}/file.txt; cat file.txt") == (0, "mine\nmore")
    # No names that hide what is there, or that something else has.
    taken = (Path("/"), Path("/tmp"), Path("/usr/local"), Path("/etc"), home / "inside", place.outside)
    other = {"also_at": (*taken, home), "read_only": (*settings.read_only, place.outside)}
    assert run(f"cat {home}/file.txt {place.outside}/secret; ls -d /usr/bin /etc/passwd /tmp", **other) == (
        0,
        "mine\nmore\nSECRET/etc/passwd\n/tmp\n/usr/bin",
    )
