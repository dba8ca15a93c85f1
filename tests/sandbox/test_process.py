from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from endstop.sandbox import Limits, run_python

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox is for Linux and macOS")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")

QUICK = Limits(seconds=1.0)


@pytest.fixture(params=[True, False], ids=["namespaces", "subreaper"])
def isolate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With namespaces where the kernel gives them, and as it is where it does not."""
    monkeypatch.setattr("endstop.sandbox.process._ISOLATE", request.param)
    return bool(request.param)


def still_written(file: Path) -> bool:
    """Whether a process goes on writing to the file."""
    size = file.stat().st_size
    assert size > 0
    time.sleep(0.2)
    return file.stat().st_size > size


def test_a_program_that_ends_well(isolate: bool) -> None:
    finished = run_python("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (finished.outcome, finished.exit_code, finished.omitted_bytes) == ("ok", 0, 0)
    assert finished.ok
    assert sorted(finished.output.split()) == ["err", "out"]


def test_an_exception_and_an_exit_code() -> None:
    finished = run_python("raise ValueError('no')")
    assert (finished.outcome, finished.exit_code) == ("failed", 1)
    assert finished.output.rstrip().endswith("ValueError: no")
    assert run_python("raise SystemExit(7)").exit_code == 7
    assert run_python("this is no Python").outcome == "failed"


def test_an_endless_loop_is_ended_in_time(isolate: bool) -> None:
    started = time.monotonic()
    finished = run_python("print('begun', flush=True)\nwhile True: pass", limits=QUICK)
    assert finished.outcome == "timeout"
    assert finished.output == "begun\n"
    assert 1.0 <= finished.seconds < 5.0
    assert time.monotonic() - started < 10.0


def test_signals_that_can_be_ignored_do_not_help() -> None:
    code = "import signal, time\nfor s in (2, 15, 24): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)"
    assert run_python(code, limits=QUICK).outcome == "timeout"


def test_cpu_time_is_limited_apart_from_the_clock(isolate: bool) -> None:
    finished = run_python("while True: pass", limits=Limits(seconds=20, cpu_seconds=1))
    assert finished.outcome == "cpu"


@linux
def test_memory() -> None:
    finished = run_python("x = bytearray(1 << 30)")
    assert finished.outcome == "memory"
    growing = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    assert run_python(growing).outcome == "memory"


def test_size_of_files() -> None:
    code = "with open('big', 'wb') as file:\n    for _ in range(64): file.write(bytes(1 << 20))"
    finished = run_python(code, limits=Limits(file_bytes=1 << 20))
    assert not finished.ok


@linux
@pytest.mark.parametrize("leaving", ["", "os.setsid()", "os.setsid()\n    if os.fork(): os._exit(0)"])
def test_nothing_outlives_the_program(isolate: bool, tmp_path: Path, leaving: str) -> None:
    note = tmp_path / "pid"
    code = f"""
import os, time
if os.fork() == 0:
    {leaving or "pass"}
    while True:
        with open({str(note)!r}, "a") as file: file.write("x")
        time.sleep(0.01)
while not os.path.exists({str(note)!r}): time.sleep(0.01)
"""
    started = time.monotonic()
    finished = run_python(code)
    assert finished.outcome == "ok", finished.output
    assert time.monotonic() - started < 4
    assert not still_written(note)


@linux
def test_children_end_with_a_program_that_runs_out_of_time(isolate: bool, tmp_path: Path) -> None:
    note = tmp_path / "written"
    code = f"""
import os, time
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        while True:
            with open({str(note)!r}, "a") as file: file.write("x")
            time.sleep(0.01)
time.sleep(60)
"""
    assert run_python(code, limits=QUICK).outcome == "timeout"
    assert not still_written(note)


@linux
def test_too_many_processes(isolate: bool) -> None:
    code = """
import os, time
for _ in range(300):
    try:
        if os.fork() == 0: time.sleep(60)
    except OSError:  # the kernel's own limit, for users other than root
        time.sleep(0.01)
time.sleep(60)
"""
    finished = run_python(code, limits=Limits(seconds=3, processes=8))
    assert finished.outcome in ("processes", "timeout")
    if os.getuid() == 0:
        assert finished.outcome == "processes"


def test_output_is_bounded_while_it_is_read() -> None:
    code = "import sys\nprint('first')\nfor _ in range(50): sys.stdout.write('x' * (1 << 20))\nprint('last')"
    finished = run_python(code, limits=Limits(output_bytes=1000))
    assert finished.ok
    assert finished.output.startswith("first\n")
    assert finished.output.endswith("last\n")
    assert len(finished.output) < 1100
    assert finished.omitted_bytes == 6 + 50 * (1 << 20) + 5 - 1000
    assert f"[{finished.omitted_bytes} bytes left out]" in finished.output


def test_output_of_exactly_the_limit_is_whole() -> None:
    finished = run_python("print('y' * 99)", limits=Limits(output_bytes=100))
    assert (finished.output, finished.omitted_bytes) == ("y" * 99 + "\n", 0)


def test_environment_stdin_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = "import os, sys\nprint(sorted(os.environ))\nprint(repr(sys.stdin.read()))\nprint(os.listdir())"
    variables, stdin, listing = run_python(code).output.splitlines()
    assert variables == "['HOME', 'LC_ALL', 'OMP_NUM_THREADS', 'PATH', 'TMPDIR']"
    assert (stdin, listing) == ("''", "[]")


def test_the_place_is_gone_afterwards() -> None:
    finished = run_python("import os\nopen('file', 'w').close()\nprint(os.getcwd())")
    assert not Path(finished.output.strip()).exists()


def test_a_program_that_kills_what_watches_it_gains_no_time(isolate: bool, tmp_path: Path) -> None:
    note = tmp_path / "written"
    code = f"""
import os, signal, time
with open({str(note)!r}, "a") as file: file.write("x")
if os.getppid(): os.kill(os.getppid(), signal.SIGKILL)
while True:
    with open({str(note)!r}, "a") as file: file.write("x")
    time.sleep(0.01)
"""
    started = time.monotonic()
    finished = run_python(code, limits=QUICK)
    assert finished.outcome in ("killed", "timeout")
    assert time.monotonic() - started < 4
    assert not still_written(note)


def test_the_network_is_closed_where_namespaces_are_to_be_had() -> None:
    code = """
import os, socket
if os.getpid() != 1: raise SystemExit(3)
try:
    socket.create_connection(("127.0.0.1", 9), timeout=2)
except OSError as error:
    print(error.errno)
"""
    finished = run_python(code)
    if finished.exit_code == 3:
        pytest.skip("no namespaces here")
    assert finished.output == "101\n"  # ENETUNREACH: not even the loopback is up


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="seconds must be above 0"):
        Limits(seconds=0)
