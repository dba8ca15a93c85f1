"""Commands that try to get out of bubblewrap, as the user who runs the tests. test_users.py runs them again
as an ordinary one."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from endstop.sandbox import PathRefused
from endstop.sandbox.load import load_below
from endstop.sandbox.seccomp import filter_program
from tests.sandbox.conftest import Place

# A command line that nothing else on the machine has.
MARK = f"31536000.{os.getpid()}"


def marked() -> list[int]:
    """Processes whose command line has the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if MARK.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def limited(place: Place, **limits: float) -> Place:
    return replace(place, settings=replace(place.settings, limits=replace(place.settings.limits, **limits)))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert marked() == []


# --- network -------------------------------------------------------------------------------------------


def test_no_network(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0endstop-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        code = f"""
import socket
def attempt(family, address, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(2); s.connect(address); s.send(b"x")
        print("CONNECTED", address)
    except OSError as error:
        print(type(error).__name__, error)
attempt(socket.AF_INET, ("1.1.1.1", 53))
attempt(socket.AF_INET, ("1.1.1.1", 53), socket.SOCK_DGRAM)
attempt(socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]}))
attempt(socket.AF_UNIX, {name!r})
try: socket.getaddrinfo("example.com", 80)
except OSError as error: print(error)
"""
        result = place.python(code)
    assert result.exit_code == 0
    assert "CONNECTED" not in result.output
    assert result.output.count("Network is unreachable") == 2
    assert result.output.count("ConnectionRefusedError") == 2
    assert "name resolution" in result.output
    assert result.net_attempt


def test_a_loopback_of_its_own(place: Place) -> None:
    code = """
import socket
with socket.create_server(("localhost", 0)) as server, socket.create_connection(server.getsockname()):
    print("talks to itself")
"""
    result = place.python(code)
    assert (result.output, result.net_attempt) == ("talks to itself\n", False)


# --- what a command sees ---------------------------------------------------------------------------------


def test_no_environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "sk-host-secret")
    result = place.run(
        "env; cat /proc/*/environ | tr '\\0' '\\n'; cat /proc/*/cmdline", environment={"GIVEN": "yes"}
    )
    assert "sk-host-secret" not in result.output
    assert "GIVEN=yes" in result.output.splitlines()
    names = {line.partition("=")[0] for line in place.run("env").output.splitlines()}
    fixed = {"HOME", "LANG", "LOGNAME", "PATH", "TERM", "TMPDIR", "USER"}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == fixed


def test_what_is_given_stands_on_no_command_line(place: Place) -> None:
    lines: list[bytes] = []

    def look(_: bytes) -> None:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                lines.append((entry / "cmdline").read_bytes())

    result = place.run("echo here; sleep 0.2", environment={"TOKEN": "t0k3n-value"}, on_output=look)
    assert result.exit_code == 0
    assert len(lines) > 2
    assert not any(b"t0k3n-value" in line for line in lines)


def test_no_processes(place: Place) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        pids = place.run(f"ls /proc | grep -c '^[0-9]'; kill -0 {bystander.pid}; echo $?").output.splitlines()
        assert int(pids[0]) < 8
        assert pids[-1] == "1"
        result = place.run(
            f"kill -9 {bystander.pid} {os.getpid()}; kill -9 -1; kill -9 1; sleep 0.1; echo alive"
        )
        assert result.exit_code in (0, 137)
        assert bystander.poll() is None
        bystander.kill()


def test_no_files(place: Place) -> None:
    secret = place.outside / "secret"
    result = place.run(
        f"cat /etc/shadow {secret} ../outside/secret /proc/1/root{secret} /proc/self/cwd/../outside/secret; "
        "ls /root /home /mnt /var /opt /srv /run /sys /boot; find / -xdev -name secret 2>/dev/null"
    )
    assert "SECRET" not in result.output
    assert "root:x" not in result.output
    assert "root:*" not in result.output
    assert result.output.count("No such file") >= 10
    assert place.run("ls / | tr '\\n' ' '").output.split() == sorted(
        {"dev", "etc", "home", "proc", "tmp", "usr", "workspace"}
        | {name for name in ("bin", "lib", "lib32", "lib64", "libx32", "sbin") if Path("/", name).exists()}
        | {path.parts[1] for path in (Path(sys.prefix), Path(sys.base_prefix)) if path.parts[1] != "usr"}
    )


def test_who_it_is(place: Place) -> None:
    result = place.run("id -u; whoami; hostname; grep -E '^(Cap|NoNewPrivs)' /proc/self/status")
    lines = result.output.split("\n")
    assert lines[:3] == ["1000", "sandbox", "sandbox"]
    rights = dict(line.split(":\t") for line in lines[3:-1])
    assert rights.pop("NoNewPrivs") == "1"
    assert {int(value, 16) for name, value in rights.items() if name != "CapBnd"} == {0}


def test_no_descriptors_but_three(place: Place) -> None:
    assert place.run("for f in /proc/self/fd/*; do readlink $f; done").output.count("\n") <= 4
    assert (
        place.python("import os; print(len(os.listdir('/proc/self/fd')), repr(os.read(0, 9)))").output
        == "4 b''\n"
    )


# --- writing ---------------------------------------------------------------------------------------------


def test_writing_outside(place: Place) -> None:
    for target in (
        "/x",
        "/usr/x",
        "/etc/x",
        "/etc/passwd",
        "/dev/x",
        "/proc/x",
        "/home/x",
        "/bin/sh",
        sys.prefix + "/x",
    ):
        result = place.run(f"echo x >> {target}")
        assert result.exit_code != 0, target
        assert not Path("/x").exists()
    assert place.run("mount -o remount,rw /usr; mount --bind /tmp /usr; umount /usr; chroot /").exit_code != 0
    assert place.run("touch /usr/x /x").exit_code != 0


def test_removing_everything(place: Place) -> None:
    bare = replace(place, settings=replace(place.settings, read_only=()))
    result = bare.run("rm -rf --no-preserve-root / 2>/dev/null; echo gone; ls /usr/bin/env")
    assert result.output == "gone\n/usr/bin/env\n"
    assert Path("/usr/bin/env").exists()
    assert (place.outside / "secret").read_text() == "SECRET"
    assert os.listdir(place.copy.root) == []


def test_a_read_only_place_in_the_workspace(place: Place) -> None:
    place.files.write("tests/test_a.py", b"assert False")
    place.files.write("conftest.py", b"")
    result = place.run(
        "echo x > tests/test_a.py; rm -f tests/test_a.py; rm -rf tests; mv tests other; touch tests/new; "
        "mv conftest.py x; rm -f conftest.py; echo x > conftest.py; echo ok > free; ls -R",
        read_only_inside=["tests", "conftest.py", "missing"],
    )
    assert result.output.endswith(".:\nconftest.py\nfile.txt\nfree\ntests\n\n./tests:\ntest_a.py\n")
    assert place.files.read("tests/test_a.py")[0] == b"assert False"
    assert place.files.read("conftest.py")[0] == b""


def test_a_read_only_place_that_became_a_link(place: Place) -> None:
    place.run(f"ln -s {place.outside} tests; mkdir deep; ln -s {place.outside} deep/link")
    dependencies = place.outside.parent / "dependencies"
    dependencies.mkdir()
    for path in ("tests", "tests/secret", "deep/link"):
        for options in ({"read_only_inside": [path]}, {"bind": {path: dependencies}}):
            result = place.run(f"cat {path} {path}/secret", **options)
            assert (result.cause, result.exit_code) == ("start", None)
            assert "must not be a link" in result.output
            assert "SECRET" not in result.output


def test_links_out_of_the_workspace(place: Place) -> None:
    secret = place.outside / "secret"
    links = (
        f"ln -s {secret} soft; cat soft; ln -s /etc/shadow shadow; ln /etc/passwd hard; ln /usr/bin/env env"
    )
    result = place.run(links + "; ls")
    assert "SECRET" not in result.output
    assert result.output.endswith("file.txt\nshadow\nsoft\n")  # no hard link came to be
    for path in ("soft", "shadow"):
        with pytest.raises(PathRefused, match="leads out"):
            place.files.read(path)
    assert "soft" in place.copy.sync_back() or place.copy.root == place.workspace
    assert (place.workspace / "soft").is_symlink()
    assert secret.read_text() == "SECRET"


# --- rights ----------------------------------------------------------------------------------------------


def test_no_user_namespaces_in_it(place: Place) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x10000000 | 0x20000000, 0x00020000, 0x20000000, 0x40000000):
    print(libc.unshare(flags))
child = os.fork()
if child == 0:
    os._exit(0 if libc.unshare(0x10000000) == 0 else 7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert place.python(code).output.split() == ["-1"] * 5 + ["7"]
    assert (
        place.run("unshare --user true; echo $?; bwrap --ro-bind / / true; echo $?").output.split()[-1] != "0"
    )


def test_no_way_to_other_rights(place: Place) -> None:
    code = """
import os, ctypes
def attempt(function, *arguments):
    try: function(*arguments); print("DONE", function.__name__, arguments)
    except OSError as error: pass
attempt(os.setuid, 0)
attempt(os.setgid, 0)
attempt(os.setgroups, [0])
attempt(os.mknod, "device", 0o60666, os.makedev(8, 0))
attempt(os.mknod, "memory", 0o20666, os.makedev(1, 1))
attempt(os.chown, "file.txt", 0, 0)
attempt(os.chroot, "/")
attempt(os.nice, -5)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches"):
    attempt(open, path, "w")
libc = ctypes.CDLL(None, use_errno=True)
if libc.sethostname(b"x", 1) == 0: print("DONE sethostname")
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0: print("DONE mount")
"""
    assert place.python(code).output == ""
    for program in ("su -c id", "sudo -n id", "passwd -S"):
        assert "uid=0" not in place.run(f"{program} </dev/null").output


@pytest.mark.skipif(not filter_program(), reason="the system calls of this machine are not known")
def test_the_first_process_cannot_be_traced(place: Place) -> None:
    """It would outlive the harness if a command could change it. A command's own processes can be traced."""
    code = """
import ctypes, os, stat, struct, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
for request in (16, 0x4206):  # attach, seize
    print(libc.ptrace(request, 1, 0, 0), ctypes.get_errno())
buffer = ctypes.create_string_buffer(8)
vector = struct.pack("QQ", ctypes.addressof(buffer), 8)
print(libc.process_vm_writev(1, vector, 1, vector, 1, 0), ctypes.get_errno())
for memory in ("/proc/1/mem", "/proc/1/task/1/mem"):
    print(stat.S_ISCHR(os.stat(memory).st_mode))
    try: os.remove(memory)
    except OSError as error: print(error.errno in (1, 13, 16))
child = os.fork()
if child == 0: time.sleep(9)
print(libc.ptrace(0x4206, child, 0, 0))
os.kill(child, 9)
"""
    assert place.python(code).output.split() == [*["-1", "1"] * 3, *["True"] * 4, "0"]


# --- what outlives a command ------------------------------------------------------------------------------

STAYS = "(trap '' HUP TERM INT; while :; do echo x >> beat; sleep 0.01; done)"


@pytest.mark.parametrize(
    "start",
    [
        f"sleep {MARK} & {STAYS} &",
        f'setsid sleep {MARK} & setsid bash -c "{STAYS}" &',
        f'nohup setsid bash -c "{STAYS}" >/dev/null 2>&1 & (setsid sleep {MARK} >/dev/null 2>&1 &)',
    ],
    ids=["background", "setsid", "closed"],
)
@pytest.mark.parametrize(
    "end", ["while [ ! -s beat ]; do sleep 0.01; done; echo done", "sleep 60"], ids=["exit", "timeout"]
)
def test_nothing_outlives_it(place: Place, start: str, end: str) -> None:
    began = time.monotonic()
    result = place.run(f"{start}\n{end}", seconds=1.0)
    took = time.monotonic() - began
    assert marked() == []
    size = (place.copy.root / "beat").stat().st_size
    assert size > 0
    time.sleep(0.1)
    assert (place.copy.root / "beat").stat().st_size == size
    if end == "sleep 60":
        assert (result.cause, result.exit_code) == ("timeout", None)
        assert 1.0 <= took < 4.0
    else:
        assert (result.cause, result.output) == ("exit", "done\n")


HARNESS = f"""
import sys
from pathlib import Path
from endstop.sandbox import SandboxSettings, WorkingCopy, run_command
settings = SandboxSettings(mode="bubblewrap")
copy = WorkingCopy.open(Path(sys.argv[1]), Path(sys.argv[2]), settings)
while True:
    print("next", flush=True)
    line = "echo x >> made; setsid sleep {MARK} & for i in 1 2 3; do echo $i > new$i; done; sleep 0.05"
    run_command(line, copy.root, settings)
    copy.sync_back()
"""


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.3])
def test_kill_9_of_the_harness(place: Place, tmp_path: Path, delay: float) -> None:
    source = Path(__file__).parents[2] / "src"
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(place.workspace), str(tmp_path / "other")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    assert harness.stdout is not None
    assert harness.stdout.readline() == b"next\n"
    if delay > 0.01:
        assert harness.stdout.readline() == b"next\n"
    time.sleep(delay)
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    harness.stdout.close()
    until = time.monotonic() + 2.0
    quiet = 0
    while quiet < 20 and time.monotonic() < until:
        # For a moment, while it goes from one program to the next, a process has no command line.
        quiet = 0 if marked() else quiet + 1
        time.sleep(0.01)
    assert marked() == []
    for path in [place.workspace, *place.workspace.rglob("*")]:
        assert path.lstat().st_uid == os.getuid()
    # And the next run begins with the workspace as it is.
    from endstop.sandbox import WorkingCopy

    with WorkingCopy.open(place.workspace, tmp_path / "other", place.settings) as again:
        names = sorted(path.name for path in again.root.iterdir())
        assert names == sorted(path.name for path in place.workspace.iterdir())


# --- limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bomb", [":(){ :|:& };:", "f(){ f & f; }; f"])
def test_a_fork_bomb(place: Place, bomb: str) -> None:
    most = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal most
        while not ended.wait(0.05):
            most = max(most, load_below(os.getpid()).processes)

    before = load_below(os.getpid()).processes
    watcher = threading.Thread(target=count)
    watcher.start()
    result = limited(place, processes=64).run(f"{bomb}\nsleep 30", seconds=2.0)
    ended.set()
    watcher.join()
    assert result.cause in ("timeout", "processes", "exit")
    assert result.seconds < 5
    assert "Resource temporarily unavailable" in result.output
    assert before + 30 < most < before + 80


def test_threads_count_too(place: Place) -> None:
    code = """
import threading, time
for i in range(200):
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
"""
    result = limited(place, processes=32).python(code)
    assert (result.cause, result.exit_code) == ("processes", 1)
    assert "can't start new thread" in result.output


def test_much_output_in_little_memory(place: Place) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = place.run("echo first; head -c 50000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert result.exit_code == 0
    assert result.output.startswith("first\nxxx")
    assert result.output.endswith("xxx\nlast\n")
    assert result.omitted_bytes == 50_000_012 - (64 << 10)
    assert len(result.output) < (64 << 10) + 100
    endless = place.run("yes", seconds=1.0)
    assert endless.cause == "timeout"
    assert endless.omitted_bytes > 10_000_000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 20_000  # KiB


def test_output_in_the_middle_of_a_character(place: Place) -> None:
    result = place.run("printf '\\xff\\xfe'; yes é | head -c 100000", output_bytes=101)
    assert result.output.startswith("��é\n")
    assert result.omitted_bytes == 100_002 - 101


def test_full_disks(place: Place) -> None:
    small = limited(place, file_bytes=8 << 20, tmp_bytes=4 << 20, home_bytes=6 << 20)
    result = small.run(
        "for d in /tmp ~ /dev/shm .; do head -c 20M /dev/zero > $d/big; stat -c %s $d/big; done"
    )
    # By the size of the tmpfs, and in the workspace by RLIMIT_FSIZE.
    assert [int(n) for n in result.output.split() if n.isdigit() and len(n) > 5] == [
        4 << 20,
        6 << 20,
        4 << 20,
        8 << 20,
    ]
    assert "No space left on device" in result.output
    # Not one large file but many.
    result = small.run("for i in $(seq 100); do head -c 1M /dev/zero > /tmp/$i || exit 9; done")
    assert result.exit_code == 9


def test_the_disk_of_the_workspace(place: Place) -> None:
    state = os.statvfs(place.copy.root)
    reserve = state.f_bavail * state.f_frsize - (64 << 20)
    full = limited(place, free_bytes=reserve)
    result = full.run("for i in $(seq 600); do head -c 1M /dev/zero > $i; sync $i; sleep 0.02; done; sleep 5")
    assert (result.cause, result.exit_code) == ("disk", None)


def test_memory_of_one_and_of_all(place: Place) -> None:
    one = limited(place, address_bytes=512 << 20).python("x = bytearray(1 << 30)")
    assert (one.cause, one.exit_code) == ("memory", 1)
    code = """
import os, time
for _ in range(4):
    if os.fork() == 0: break
x = bytearray(b"1") * (160 << 20)
time.sleep(20)
"""
    every = limited(place, memory_bytes=512 << 20).python(code)
    assert (every.cause, every.exit_code) == ("memory", None)
    assert every.seconds < 10


def test_time_of_the_processor(place: Place) -> None:
    result = limited(place, cpu_seconds=1).run("while :; do :; done", seconds=15.0)
    assert (result.cause, result.exit_code) == ("cpu", 128 + signal.SIGXCPU)


def test_it_costs_little(place: Place) -> None:
    """30 ms on an idle machine, a dozen times what a shell costs: measured against one, since a busy machine
    slows both."""

    def quickest(run: Callable[[], object]) -> float:
        times = []
        for _ in range(9):
            began = time.monotonic()
            run()
            times.append(time.monotonic() - began)
        return sorted(times)[2]

    shell = quickest(lambda: subprocess.run(["/bin/bash", "-c", "true"], check=True))
    assert quickest(lambda: place.run("true")) < 50 * shell
