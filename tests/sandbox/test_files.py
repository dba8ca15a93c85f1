from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop.sandbox import Entry, PathMissing, PathRefused, WorkspaceFiles, beneath

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox is for Linux and macOS")


@pytest.fixture(params=["kernel", "steps"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's own bounded lookup, and as it is without."""
    if request.param == "steps":
        monkeypatch.setattr(beneath, "_kernel_does_it", lambda: False)
    elif not beneath._kernel_does_it():
        pytest.skip("this kernel has no openat2")
    return str(request.param)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    root = tmp_path / "workspace"
    (root / "src").mkdir(parents=True)
    (root / "src" / "calc.py").write_text("def add(a, b): return a - b\n")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("SECRET")
    return root


@pytest.fixture
def files(workspace: Path) -> WorkspaceFiles:
    return WorkspaceFiles(workspace)


def test_reading(files: WorkspaceFiles, workspace: Path) -> None:
    whole = b"def add(a, b): return a - b\n"
    assert files.read("src/calc.py") == (whole, 28)
    assert files.read("./src/../src//calc.py") == (whole, 28)
    assert files.read("/workspace/src/calc.py") == (whole, 28)
    assert files.read(str(workspace / "src" / "calc.py")) == (whole, 28)
    assert files.read("src/calc.py", 3) == (b"def", 28)
    assert files.read("src/calc.py", 0) == (b"", 28)


def test_links_that_stay_inside_are_read_and_not_written(files: WorkspaceFiles, workspace: Path) -> None:
    (workspace / "link.py").symlink_to("src/calc.py")
    (workspace / "lib").symlink_to("src")
    assert files.read("link.py")[1] == files.read("lib/calc.py")[1] == 28
    assert (files.kind("link.py"), files.kind("lib"), files.exists("lib/calc.py")) == ("link", "link", True)
    with pytest.raises(PathRefused, match=r"^link.py is a link to src/calc.py; write to the file"):
        files.write("link.py", b"")
    with pytest.raises(PathRefused, match=r"^lib/new.py goes through the link lib; name the directory"):
        files.write("lib/new.py", b"")


@pytest.mark.parametrize(
    "path", ["../outside/secret", "/etc/shadow", "src/../../outside/secret", "/workspace/../etc/shadow"]
)
def test_paths_that_lead_out(files: WorkspaceFiles, path: str) -> None:
    with pytest.raises(PathRefused, match=r"out(side)? of the workspace"):
        files.read(path)
    with pytest.raises(PathRefused):
        files.write(path, b"")
    assert not files.exists(path)


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path(files: WorkspaceFiles, path: str) -> None:
    with pytest.raises(PathRefused, match="is no path"):
        files.read(path)
    with pytest.raises(PathRefused, match="is no path"):
        files.write(path, b"")


@pytest.mark.parametrize("absolute", [True, False])
def test_links_that_lead_out(files: WorkspaceFiles, workspace: Path, absolute: bool) -> None:
    outside = workspace.parent / "outside"
    (workspace / "file").symlink_to(outside / "secret" if absolute else "../outside/secret")
    (workspace / "directory").symlink_to(outside if absolute else "../outside")
    (workspace / "src" / "second").symlink_to("../file")
    for path in ("file", "directory/secret", "src/second"):
        with pytest.raises(PathRefused, match=f"^{path} leads out of the workspace$"):
            files.read(path)
        with pytest.raises(PathRefused):
            files.write(path, b"overwritten")
        assert not files.exists(path)
    with pytest.raises(PathRefused, match="leads out"):
        files.list("directory")
    assert files.kind("directory") == "link"
    assert (outside / "secret").read_text() == "SECRET"
    assert os.listdir(outside) == ["secret"]


def test_a_loop_of_links_and_links_of_the_kernel(files: WorkspaceFiles, workspace: Path) -> None:
    (workspace / "loop").symlink_to("loop")
    with pytest.raises(PathRefused, match=r"^loop is a loop of links$"):
        files.read("loop")
    (workspace / "magic").symlink_to("/proc/self/root/etc/passwd")
    with pytest.raises(PathRefused, match="leads out"):
        files.read("magic")


def test_hard_links(files: WorkspaceFiles, workspace: Path) -> None:
    os.link(workspace / "src" / "calc.py", workspace / "src" / "second.py")
    assert files.read("src/second.py")[1] == 28
    os.link(workspace.parent / "outside" / "secret", workspace / "hard")
    with pytest.raises(PathRefused, match=r"^hard has another name \(a hard link\) outside"):
        files.read("hard")
    files.write("hard", b"mine")
    assert files.read("hard") == (b"mine", 4)
    assert (workspace.parent / "outside" / "secret").read_text() == "SECRET"


def test_pipes_devices_and_directories(files: WorkspaceFiles, workspace: Path) -> None:
    os.mkfifo(workspace / "pipe")
    started = time.monotonic()
    with pytest.raises(PathRefused, match="is no regular file"):
        files.read("pipe")
    with pytest.raises(PathRefused, match="is no regular file"):
        files.write("pipe", b"")
    assert time.monotonic() - started < 5
    for path in ("src", "src/.", ".", "/workspace"):
        with pytest.raises(PathRefused, match="is a directory"):
            files.read(path)
    with pytest.raises(PathRefused, match="is a directory"):
        files.write("src", b"")
    if os.geteuid() == 0:
        os.mknod(workspace / "null", 0o20666, os.makedev(1, 3))
        with pytest.raises(PathRefused, match="is no regular file"):
            files.read("null")
    assert files.kind("pipe") == "other"


def test_what_is_missing(files: WorkspaceFiles) -> None:
    with pytest.raises(PathMissing, match=r"^no/such does not exist in the workspace$"):
        files.read("no/such")
    with pytest.raises(PathMissing):
        files.list("nowhere")
    with pytest.raises(PathRefused, match="no directory"):
        files.read("src/calc.py/x")
    assert files.kind("no") is None
    assert files.kind("no/such") is None
    assert files.kind("src") == "directory"
    assert files.kind(".") == "directory"


def test_writing(files: WorkspaceFiles, workspace: Path) -> None:
    files.write("new/deep/file.txt", b"one")
    assert (workspace / "new" / "deep" / "file.txt").read_bytes() == b"one"
    script = workspace / "src" / "run.sh"
    script.write_text("old")
    script.chmod(0o751)
    files.write("src/run.sh", b"new")
    assert (script.read_bytes(), script.stat().st_mode & 0o7777) == (b"new", 0o751)
    script.chmod(0o6755)
    files.write("src/run.sh", b"again")
    assert script.stat().st_mode & 0o7777 == 0o755
    assert sorted(os.listdir(workspace / "src")) == ["calc.py", "run.sh"]
    with pytest.raises(PathRefused, match="no directory"):
        files.write("src/calc.py/inner", b"")


def test_what_does_not_fit_leaves_the_old_file(files: WorkspaceFiles, workspace: Path) -> None:
    import resource
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(PathRefused, match=r"src/calc.py cannot be written: it is too large"):
            files.write("src/calc.py", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert files.read("src/calc.py")[1] == 28
    assert os.listdir(workspace / "src") == ["calc.py"]


def test_listing(files: WorkspaceFiles, workspace: Path) -> None:
    (workspace / "link").symlink_to("/etc")
    assert files.list() == (Entry("link", "link", 4), Entry("src", "directory", files.list()[1].size))
    assert files.list("src") == (Entry("calc.py", "file", 28),)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_roots_files_belong_to_the_owner_of_the_directory(files: WorkspaceFiles, workspace: Path) -> None:
    os.chown(workspace, 12345, 12345)
    files.write("a/b.txt", b"")
    for path in ("a", "a/b.txt"):
        assert (workspace / path).stat().st_uid == 12345
    files.write("src/calc.py", b"")
    assert (workspace / "src" / "calc.py").stat().st_uid == 0


@given(
    parts=st.lists(
        st.sampled_from(["a", "b", "..", ".", "", "in", "out", "up", "file", "workspace", "secret"]),
        min_size=1,
        max_size=6,
    ),
    absolute=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_path_leads_out(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], absolute: bool
) -> None:
    base = tmp_path_factory.mktemp("any")
    root = base / "workspace"
    (root / "a" / "b").mkdir(parents=True)
    (root / "file").write_text("inside")
    (root / "in").symlink_to("a")
    (root / "a" / "out").symlink_to(base)
    (root / "a" / "b" / "up").symlink_to("../../..")
    for place in (base, base / "a"):
        place.mkdir(exist_ok=True)
        for name in ("secret", "file"):
            (place / name).write_text("SECRET")
    files = WorkspaceFiles(root)
    path = ("/" if absolute else "") + "/".join(parts)
    try:
        content, _ = files.read(path)
    except PathRefused:
        pass
    else:
        assert content == b"inside"
    try:
        files.write(path, b"written")
    except PathRefused:
        pass
    else:
        assert files.read(path)[0] == b"written"
    for place in (base, base / "a"):
        assert (place / "secret").read_text() == (place / "file").read_text() == "SECRET"
    assert sorted(os.listdir(base)) == ["a", "file", "secret", "workspace"]


FLIP = """
import os, shutil, sys
root = sys.argv[1]
os.chdir(root)
os.symlink("../outside", "link")
print("ready", flush=True)
def put(name):
    while True:
        try:
            return os.rename(name, "d")
        except OSError:
            # There was no d for a moment, and a write has made it anew.
            shutil.rmtree("d", ignore_errors=True)
while True:
    # d is by turns a directory of the workspace and a link out of it.
    os.rename("d", "kept"); put("link")
    os.rename("d", "link"); put("kept")
"""


@pytest.fixture
def flipping(workspace: Path) -> Iterator[Path]:
    (workspace / "d").mkdir()
    (workspace / "d" / "secret").write_text("inside")
    flipper = subprocess.Popen([sys.executable, "-c", FLIP, str(workspace)], stdout=subprocess.PIPE)
    assert flipper.stdout is not None
    assert flipper.stdout.readline() == b"ready\n"
    yield workspace
    flipper.kill()
    flipper.wait()
    flipper.stdout.close()


def test_races_do_not_lead_out(flipping: Path, way: str) -> None:
    """While a directory becomes a link to the outside and back, as fast as it can."""
    files = WorkspaceFiles(flipping)
    outside = flipping.parent / "outside"
    read, refused, written = 0, 0, 0
    until = time.monotonic() + 1.5
    while time.monotonic() < until or not (read and refused and written):
        assert time.monotonic() < until + 20, (read, refused, written)
        try:
            assert files.read("d/secret")[0] in (b"inside", b"new")
            read += 1
        except PathRefused:
            refused += 1
        try:
            files.write("d/secret", b"new")
            written += 1
        except PathRefused:
            refused += 1
        try:
            assert "only outside" not in [entry.name for entry in files.list("d")]
        except PathRefused:
            refused += 1
        assert os.listdir(outside) == ["secret"]
        assert (outside / "secret").read_text() == "SECRET"
